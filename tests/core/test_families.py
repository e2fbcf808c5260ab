"""Model families, unmodified: the compiled step equals an independent eager one bit for bit, under every mask class.

Random models of one or two layers with hidden sizes 320, 576 and 2880 (`tests.core.small_models.FAMILIES`); the
reference shares no code with the compiler (`tests.core.eager_reference`).
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

import jetgraph
from jetgraph.lowering.masks import UnknownMask
from jetgraph.scope import UnsupportedModel, check_supported
from tests.core.eager_reference import make_reference
from tests.core.small_models import FAMILIES, one_step, random_family, random_ids

TWO_KINDS_OF_LAYER = {"gemma2", "gemma3", "olmo3", "smollm3"}


def assert_same_step(model, reference, ids, **inputs):
    logits, gradients = one_step(model, ids, **inputs)
    expected_logits, expected = one_step(reference, ids, **inputs)
    assert torch.equal(logits, expected_logits)
    assert gradients.keys() == expected.keys() == {n for n, _ in model.named_parameters()}
    assert [name for name in expected if not torch.equal(gradients[name], expected[name])] == []
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_and_every_gradient_equal_the_reference(kind):
    kinds_of_layer = 2 if kind in TWO_KINDS_OF_LAYER else 1
    model = random_family(kind, layers=kinds_of_layer)
    reference = make_reference(copy.deepcopy(model))
    jetgraph.compile(model, "jet")
    ids = random_ids(model, 2, 21)
    logits = assert_same_step(model, reference, ids)
    model.jetgraph.coverage().require()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, logits)
    assert_same_step(model, reference, random_ids(model, 3, 9))
    assert model.jetgraph.num_compiles == 2 * kinds_of_layer  # train and no_grad


PACKED = torch.tensor([[*range(5), *range(11), 0, *range(7)]])
STARTS = [0, 5, 16, 17, 24]
LEFT = torch.tensor([[0] * 7 + [1] * 17, [1] * 24])
BOTH_ENDS = torch.tensor([[0] * 7 + [1] * 14 + [0] * 3, [1] * 20 + [0] * 4])
RIGHT = torch.tensor([[1] * 15 + [0] * 9, [1] * 24])


def positions_of(mask):
    """Position ids as `generate` makes them."""
    return (mask.cumsum(1) - 1).clamp_min(0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_every_mask_class_equals_the_reference(kind):
    kinds_of_layer = 2 if kind in TWO_KINDS_OF_LAYER else 1
    model = random_family(kind, layers=kinds_of_layer)
    reference = make_reference(copy.deepcopy(model))
    jetgraph.compile(model, "jet")
    ids = random_ids(model, 2, 24)
    assert_same_step(model, reference, ids, attention_mask=LEFT, position_ids=positions_of(LEFT), real=LEFT.bool())
    assert_same_step(model, reference, ids, position_ids=PACKED.repeat(2, 1))
    assert model.jetgraph.num_compiles == kinds_of_layer  # one variant serves all masks that have a first key

    packed = assert_same_step(model, reference, ids[:1], position_ids=PACKED)
    boundaries = {"cu_seq_lens_q": torch.tensor(STARTS), "cu_seq_lens_k": torch.tensor(STARTS)}
    assert torch.equal(one_step(model, ids[:1], position_ids=PACKED, **boundaries)[0], packed)
    for start, stop in zip(STARTS, STARTS[1:], strict=False):
        alone = model(input_ids=ids[:1, start:stop], use_cache=False).logits
        assert torch.equal(packed[:, start:stop], alone)  # bit for bit the sequence on its own

    for mask in (LEFT, BOTH_ENDS, RIGHT):
        real = mask.bool()
        options = {"attention_mask": mask, "position_ids": positions_of(mask)}
        logits, gradients = one_step(model, ids, real, **options)
        assert torch.equal(logits[real], one_step(reference, ids, real, **options)[0][real])
        other = torch.where(real, ids, (ids + 1) % 512)
        assert torch.equal(one_step(model, other, real, **options)[0][real], logits[real])
        row = real[0]
        alone = model(input_ids=ids[:1, row], use_cache=False).logits
        assert torch.equal(logits[:1][:, row], alone)  # padding changes no bit of a real token
        assert all(g.isfinite().all() for g in gradients.values())


@pytest.mark.slow
def test_calls_whose_mask_is_unknown_raise():
    model = random_family("qwen3", layers=1)
    jetgraph.compile(model, "jet")
    ids = random_ids(model, 1, 24)
    causal = torch.ones(24, 24, dtype=torch.bool).tril()[None, None]
    for options, message in [
        ({"attention_mask": causal}, r"attention_mask has shape \[1, 1, 24, 24\]"),
        ({"attention_mask": (torch.arange(24) != 7)[None]}, "padding between real tokens"),
        ({"attention_mask": torch.ones(1, 24), "position_ids": PACKED}, "position_ids restart among real tokens"),
        ({"cu_seq_lens_q": torch.tensor(STARTS)}, "cu_seq_lens_q without position_ids"),
    ]:
        with pytest.raises(UnknownMask, match=f"UNKNOWN mask class: .*{message}"):
            model(input_ids=ids, use_cache=False, **options)
    model.config.is_causal = False
    with pytest.raises(UnknownMask, match="bidirectional_mask_function"):
        model(input_ids=ids, use_cache=False)


@pytest.mark.slow
def test_options_of_attention_that_change_under_a_compiled_model_raise():
    model = random_family("mistral", layers=1, hidden_size=320)
    jetgraph.compile(model, "jet")
    ids = random_ids(model, 1, 9)
    attention = model.model.layers[0].self_attn
    attention.attention_dropout = 0.1
    with pytest.raises(Exception, match=r"MistralAttention has dropout=0.1; expected 0"):
        model(input_ids=ids, use_cache=False)
    attention.attention_dropout = 0.0
    attention.config = copy.copy(model.config)
    attention.config.sliding_window = 3
    with pytest.raises(Exception, match="MistralAttention has sliding_window=3, its mask 7"):
        model(input_ids=ids, use_cache=False)
    attention.config = model.config
    with pytest.raises(Exception, match="MistralAttention passes s_aux: no such reference attention"):
        model(input_ids=ids, use_cache=False, s_aux=torch.zeros(3))


# --------------------------------------------------------------------------------------------------------- refused

TINY = {
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4}


def tiny(name, **options):
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**TINY | options))


@pytest.mark.parametrize(
    ("name", "options", "messages"),
    [
        ("Qwen3Moe", EXPERTS, [r"model.layers.0.mlp: Qwen3MoeSparseMoeBlock routes tokens to experts"]),
        ("Mixtral", EXPERTS, [r"model.layers.1.mlp: MixtralSparseMoeBlock routes tokens to experts"]),
        ("GptOss", EXPERTS, [r"layers.0.mlp: GptOssMLP routes", r"layers.0.self_attn.sinks: attention sinks"]),
        ("Llama4Text", EXPERTS, [r"config.layer_types\[0\]: chunked_attention; expected full_attention or"]),
        ("DeepseekV3", {"first_k_dense_replace": 2}, [r"config.kv_lora_rank: multi-head latent attention"]),
        (
            "GPT2",
            {},
            [r"transformer.h.0.attn.c_attn: Conv1D stores", r"transformer.drop: dropout of 0.1"],
        ),
        ("OPT", {"ffn_dim": 64}, [r"model.decoder.layers.1: dropout of 0.1; expected 0"]),
        ("Llama", {"attention_dropout": 0.25}, [r"model.layers.0.self_attn: attention_dropout of 0.25; expected 0"]),
        ("GPTNeoX", {"hidden_dropout": 0.5}, [r"gpt_neox.layers.0.post_attention_dropout: dropout of 0.5"]),
        ("Bloom", {}, [r"model: BloomForCausalLM does not look its attention up in transformers' registry"]),
        ("Mamba", {}, [r"backbone.layers.0.mixer.A_log: a weight \[64, 16\] of MambaMixer", r"mixer.conv1d.weight"]),
        ("Llama", {"is_causal": False}, [r"config.is_causal: False; expected causal attention"]),
        ("Gemma3Text", {"use_bidirectional_attention": True}, [r"config.use_bidirectional_attention: True; expected"]),
    ],
)
def test_unsupported_models_are_refused_with_name_and_reason(name, options, messages):
    """[K1, A6, A7, A15] are bugs of experts: a mixture is refused whole, so no group meets a wrong or an empty one."""
    with pytest.raises(UnsupportedModel) as error:
        check_supported(tiny(name, **options))
    for message in messages:
        error.match(message)


def test_unsupported_linears_and_composites_are_refused():
    model = tiny("Llama")
    check_supported(model)
    first, second = model.model.layers
    torch.nn.utils.parametrizations.weight_norm(first.mlp.up_proj)
    second.mlp.up_proj.forward = second.mlp.up_proj.forward
    with pytest.raises(UnsupportedModel) as error:
        check_supported(model)
    assert "model.layers.0.mlp.up_proj: its weight is parametrized" in str(error.value)
    assert "model.layers.1.mlp.up_proj: its forward is replaced on the instance" in str(error.value)


def test_without_the_reference_attention_its_limits_do_not_count():
    check_supported(tiny("Bloom", hidden_dropout=0.0, attention_dropout=0.0), reference_attention=False)

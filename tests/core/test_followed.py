"""`compile(engine=…)`: the policy that an engine's kernels compute, the formulas that training takes over, refusals.

That the graph is then contained in what a stock vLLM really ran is tested in tests/engine/test_stock_vllm.py.
"""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import jetgraph
from jetgraph import followed
from jetgraph.errors import CompileError
from jetgraph.export import export_checkpoint
from jetgraph.followed import ENGINES, follow, get_followed
from jetgraph.pair import verify_model
from jetgraph.policy import BLOCK_LINEARS, FP8Recipe, Policy, PolicyError, Rule, get_policy
from jetgraph.precision import Division, ScaleRule
from tests.core.small_models import one_step, random_ids, random_model

STOCK = ENGINES["vllm-stock"]


def of_recipe(recipe: FP8Recipe) -> Policy:
    return Policy("mine", "for a test", (Rule("lm_head", None, optional=True), Rule(BLOCK_LINEARS, recipe)))


# --------------------------------------------------------------------------------------------------------- the policy


def test_every_recipe_gets_the_engines_scale_rule_and_the_policy_another_name():
    policy = STOCK.policy(get_policy("jet"))
    assert policy.name == "jet@vllm-stock"
    assert policy.rollout == policy.train
    precision = policy.linear("model.layers.0.mlp.up_proj")
    for operand in (precision.activation, precision.weight, precision.gradient, precision.wgrad):
        assert operand.scale is not None
        assert operand.scale.rule == ScaleRule(448.0, 1e-10, Division.DIVIDE, power_of_two=False)  # F4
    assert not policy.linear("lm_head").quantized
    assert Policy.from_json(policy.to_json()) == policy


def test_a_policy_that_the_engine_computes_as_it_is_stays_itself():
    assert STOCK.policy(get_policy("bf16")) is get_policy("bf16")
    followed = STOCK.policy(get_policy("jet"))
    assert STOCK.policy(followed) is followed


def test_a_negative_control_keeps_its_two_sides():
    policy = STOCK.policy(get_policy("bf16_train_fp8_rollout"))
    assert policy.train == get_policy("bf16").train
    assert policy.rollout == STOCK.policy(get_policy("jet")).rollout


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (get_policy("jet_ue8m0"), "powers of two; with them it quantises every weight again at load"),
        (get_policy("fp8_tensorwise"), "groups of the whole tensor; its kernels know 128"),
        (of_recipe(FP8Recipe(group=64)), "groups of 64; its kernels know 128"),
        (of_recipe(FP8Recipe(rule=ScaleRule(qmax=240.0))), "qmax 240; its kernels have 448"),
    ],
)
def test_a_recipe_that_no_setting_of_the_engine_computes_is_refused(policy: Policy, why: str):
    with pytest.raises(PolicyError, match=why):
        STOCK.policy(policy)


def test_an_engine_of_which_nothing_is_known_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"engine 'sglang' cannot be followed; choose one of vllm-stock"):
        get_followed("sglang")


# ------------------------------------------------------------------------------------------------------- the formulas


def test_norms_round_once():
    """r(w · (x · rsqrt(mean(x²) + eps))), as `_C.rms_norm` does (F1), where Hugging Face rounds x̂ first."""
    model = random_model("qwen3", layers=1)
    x = torch.randn(64, 320, generator=torch.Generator().manual_seed(1)).bfloat16()
    norm = model.model.layers[0].input_layernorm
    twice = norm(x)
    follow(model)
    wide = x.float()
    inverse = (wide.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    assert torch.equal(norm(x), (norm.weight.float() * (wide * inverse)).bfloat16())
    assert not torch.equal(norm(x), twice)


def test_cos_and_sin_come_as_the_numbers_that_they_were_in_a_format_that_rounds_nothing():
    model = random_model("qwen3", layers=1)
    rotary, positions = model.model.rotary_emb, torch.arange(40)[None]
    x = torch.zeros(1, 40, 320, dtype=torch.bfloat16)
    exponent = torch.arange(0, 64, 2, dtype=torch.int64).float() / 64
    follow(model)
    cos, sin = rotary(x, positions)
    assert cos.dtype is sin.dtype is torch.float32
    angle = positions[0][:, None] * (1.0 / (model.config.rope_parameters["rope_theta"] ** exponent))
    assert torch.equal(cos[0], angle.cos().bfloat16().float().repeat(1, 2))
    assert torch.equal(sin[0], angle.sin().bfloat16().float().repeat(1, 2))


def test_frequencies_are_evaluated_again_where_they_lie():
    """A loader leaves those of the CPU; and a model cast to BF16 whole has rounded ones (F10)."""
    model = random_model("qwen3", layers=1)
    rotary = model.model.rotary_emb
    want, _ = rotary.compute_default_rope_parameters(model.config, "cpu")
    rotary.inv_freq = torch.full_like(want, 0.5)
    follow(model)
    assert torch.equal(rotary.inv_freq, want)
    assert "inv_freq" not in model.state_dict()


def test_frequencies_are_evaluated_on_the_device_that_is_named(monkeypatch):
    """transformers 5.17 evaluates on the default device and moves the result, which would be the CPU's `pow` (F10)."""
    model = random_model("qwen3", layers=1)
    rotary = model.model.rotary_emb
    evaluate = type(rotary).compute_default_rope_parameters

    def as_in_5_17(config, device=None):
        frequencies = 1.0 / (1e4 ** (torch.arange(0, 32, 2, dtype=torch.float) / 32))
        evaluated_on.append(frequencies.device)
        return evaluate(config, device)

    evaluated_on: list[torch.device] = []
    monkeypatch.setattr(type(rotary), "compute_default_rope_parameters", staticmethod(as_in_5_17))
    with torch.device("meta"):
        followed._evaluate_frequencies(rotary, torch.device("cpu"))
    assert evaluated_on == [torch.device("cpu")]


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("gemma3", r"q_norm: Gemma3RMSNorm; expected w · x"),
        ("gpt_neox", r"hidden_act: 'gelu'; of activations only silu"),
        ("llama3", r"model.rotary_emb: rope_type 'llama3'"),
    ],
)
def test_other_formulas_are_refused_by_name_and_nothing_is_changed(family: str, named: str):
    model = random_model(family, layers=2)
    before = random_ids(model, 1, 9)
    logits = model(input_ids=before, use_cache=False).logits
    with pytest.raises(CompileError, match=named):
        jetgraph.compile(model, "jet", engine="vllm-stock")
    assert torch.equal(model(input_ids=before, use_cache=False).logits, logits)
    assert not hasattr(model, "jetgraph")


@pytest.mark.slow
def test_an_exported_program_holds_nothing_that_could_follow():
    model = random_model("qwen3", layers=2)
    ids = random_ids(model, 1, 9)
    program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
    with pytest.raises(CompileError, match="as in an exported program; compile the model itself"):
        jetgraph.compile(program, "bf16", engine="vllm-stock")


def test_kernels_of_torch_cannot_follow():
    with pytest.raises(ValueError, match="its rounding needs provider 'reference'"):
        jetgraph.compile(random_model(layers=1), "jet", engine="vllm-stock", provider="stock")


def test_a_followed_engine_is_judged_as_it_is_already(tmp_path: Path):
    with pytest.raises(ValueError, match="training follows it: leave --stock out"):
        verify_model(tmp_path, "jet", "vllm-stock", tmp_path, stock=True)


# ---------------------------------------------------------------------------------------------------------- the export


def test_the_exported_folder_says_no_word_of_us_and_holds_trainings_codes(tmp_path: Path):
    random_model("qwen3", layers=1).save_pretrained(tmp_path / "bf16")
    out = export_checkpoint(tmp_path / "bf16", tmp_path / "out", "jet", engine="vllm-stock")
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantization == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    }
    ours = export_checkpoint(tmp_path / "bf16", tmp_path / "ours", STOCK.policy(get_policy("jet")))
    got, want = (load_file(folder / "model.safetensors") for folder in (out, ours))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[n].view(torch.uint8), want[n].view(torch.uint8)) for n in want)


def test_a_folder_without_fp8_is_a_plain_one(tmp_path: Path):
    random_model("qwen3", layers=1).save_pretrained(tmp_path / "bf16")
    out = export_checkpoint(tmp_path / "bf16", tmp_path / "out", "bf16", engine="vllm-stock")
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


# ------------------------------------------------------------------------------------------------------------- a step


@pytest.mark.slow
def test_a_followed_model_trains_and_its_copies_follow_too():
    model = jetgraph.compile(random_model("qwen3", layers=1), "jet", engine="vllm-stock")
    ids = random_ids(model, 1, 40)
    logits, gradients = one_step(model, ids)
    model.jetgraph.coverage().require()
    assert all(torch.isfinite(g).all() for g in gradients.values())
    assert torch.equal(one_step(copy.deepcopy(model), ids)[0], logits)
    loaded = pickle.loads(pickle.dumps(model))
    assert (loaded.jetgraph.engine, loaded.jetgraph.policy.name) == ("vllm-stock", "jet@vllm-stock")
    with pytest.raises(CompileError, match="compiled already"):
        jetgraph.compile(loaded, "jet")
    jetgraph.compile(loaded, "jet", engine="vllm-stock")
    assert torch.equal(one_step(loaded, ids)[0], logits)

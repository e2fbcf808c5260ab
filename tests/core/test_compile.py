"""The compiled model equals an independent eager reference bit for bit: logits and every gradient."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import jetgraph
from jetgraph.compiler import CompileError
from jetgraph.graph import Role
from jetgraph.policy import WgradSource, get_policy
from tests.core.eager_reference import make_reference
from tests.core.small_models import one_step, random_ids, random_model

pytestmark = pytest.mark.slow


def assert_same_step(model, reference, ids) -> None:
    logits, gradients = one_step(model, ids)
    expected_logits, expected = one_step(reference, ids)
    assert torch.equal(logits, expected_logits)
    assert gradients.keys() == expected.keys()
    wrong = [name for name in expected if not torch.equal(gradients[name], expected[name])]
    assert wrong == []


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize("source", list(WgradSource))
def test_logits_and_every_gradient_equal_the_reference(kind, source):
    model = random_model(kind, tied=kind == "llama")
    reference = make_reference(copy.deepcopy(model), requantize=source is WgradSource.REQUANTIZE)
    policy = dataclasses.replace(get_policy("jet"), wgrad_source=source)
    jetgraph.compile(model, policy)
    assert_same_step(model, reference, random_ids(model, 1, 150))
    assert_same_step(model, reference, random_ids(model, 2, 37))


def test_the_two_wgrad_sources_differ():
    """The option does something: a double quantisation changes weight gradients and nothing else."""
    ids = random_ids(random_model(), 1, 150)
    steps = []
    for source in WgradSource:
        model = random_model()
        jetgraph.compile(model, dataclasses.replace(get_policy("jet"), wgrad_source=source))
        steps.append(one_step(model, ids))
    (logits, grads), (other_logits, other_grads) = steps
    assert torch.equal(logits, other_logits)
    differing = {n for n in grads if not torch.equal(grads[n], other_grads[n])}
    assert differing == {n for n in grads if n.endswith("_proj.weight")}


def test_no_grad_equals_the_training_forward():
    model = random_model()
    jetgraph.compile(model, "jet")
    ids = random_ids(model, 1, 61)
    logits, _ = one_step(model, ids)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, logits)
    with torch.inference_mode():
        assert torch.equal(model.eval()(input_ids=ids, use_cache=False).logits, logits)


def test_policies_differ_where_they_should():
    ids = random_ids(random_model(), 1, 40)
    logits = {}
    for name in ("jet", "bf16", "bf16_train_fp8_rollout"):
        model = random_model()
        jetgraph.compile(model, name)
        logits[name], _ = one_step(model, ids)
    assert torch.equal(logits["bf16"], logits["bf16_train_fp8_rollout"])
    assert not torch.equal(logits["bf16"], logits["jet"])


def test_bf16_policy_equals_the_reference():
    model = random_model()
    reference = make_reference(copy.deepcopy(model), quantize=False)
    jetgraph.compile(model, "bf16")
    ids = random_ids(model, 1, 40)
    logits, _ = one_step(model, ids)
    assert torch.equal(logits, one_step(reference, ids)[0])


def test_every_linear_in_scope_is_lowered_in_all_three_roles():
    model = random_model()
    jetgraph.compile(model, "jet")
    one_step(model, random_ids(model, 1, 40))
    (backend,) = set(model.jetgraph.regions.values())
    (compiled,) = backend.compiled
    found = {(g.fqn, g.role) for g in compiled.lowered}
    names = {n.removeprefix("model.layers.0.") for n in model.jetgraph.linears() if n.startswith("model.layers.0.")}
    assert found == {(n, r) for n in names for r in (Role.FPROP, Role.DGRAD, Role.WGRAD)}
    assert len(names) == 7


def test_equal_layers_compile_once_for_all_lengths():
    model = random_model(layers=4)
    jetgraph.compile(model, "jet")
    for length in (20, 33, 150, 7):
        one_step(model, random_ids(model, 1, length))
    assert model.jetgraph.num_compiles == 1


def test_q_k_v_share_one_quantised_input_and_so_do_gate_and_up():
    model = random_model()
    jetgraph.compile(model, "jet")
    one_step(model, random_ids(model, 1, 40))
    (backend,) = set(model.jetgraph.regions.values())
    forward = backend.compiled[0].forward
    rows = [
        n for n in forward.graph.nodes if n.target is torch.ops.jetgraph.quantize.default and n.args[1:3] == (1, 128)
    ]
    assert len(rows) == 4  # qkv, o, gate/up, down


def test_saved_for_backward_is_fp8_for_linears_and_the_rest_is_named():
    model = random_model()
    jetgraph.compile(model, "jet")
    one_step(model, random_ids(model, 1, 40))
    saved = model.jetgraph.saved()
    codes = [t for t in saved if t.quantized]
    assert [t.made_by for t in codes] == ["input_layernorm", "self_attn", "post_attention_layernorm", "mlp"]
    assert all("fp8_gemm" in c for t in codes for c in t.consumers)
    wide = [t for t in saved if t.dtype == "bfloat16"]
    assert wide
    for tensor in wide:
        assert tensor.consumers
        assert not any("quantize" in c or "fp8_gemm" in c for c in tensor.consumers), tensor


def test_state_dict_and_parameters_keep_their_names():
    model, plain = random_model(), random_model()
    jetgraph.compile(model, "jet")
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]


def test_clear_errors():
    with pytest.raises(ValueError, match="policy 'jett' does not exist; choose one of bf16, .*jet"):
        jetgraph.compile(random_model(), "jett")
    with pytest.raises(ValueError, match="provider 'cuda' does not exist"):
        jetgraph.compile(random_model(), "jet", provider="cuda")
    model = jetgraph.compile(random_model(), "bf16")
    with pytest.raises(CompileError, match="compiled already"):
        jetgraph.compile(model, "jet")
    with pytest.raises(CompileError, match="no list of equal decoder blocks"):
        jetgraph.compile(torch.nn.Linear(4, 4), "bf16", provider="stock")
    left_padded = torch.tensor([[0, 0, 1, 1]])
    with pytest.raises(ValueError, match="a token follows padding"):
        model(input_ids=torch.ones_like(left_padded), attention_mask=left_padded)

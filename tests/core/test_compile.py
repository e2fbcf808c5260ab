"""The compiled model equals an independent eager reference bit for bit: logits and every gradient."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch

import jetgraph
from jetgraph import compiler
from jetgraph.compiler import CompileError
from jetgraph.graph import Role
from jetgraph.lowering import registry
from jetgraph.policy import FP8Recipe, Policy, Rule, WgradSource, get_policy
from jetgraph.precision import ScaleRule
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


def test_a_deep_copy_runs_the_same_flow_on_its_own_weights():
    model = jetgraph.compile(random_model(), "jet")
    ids = random_ids(model, 1, 40)
    logits, gradients = one_step(model, ids)
    twin = copy.deepcopy(model)
    assert twin.jetgraph is not model.jetgraph
    twin_logits, twin_gradients = one_step(twin, ids)
    assert torch.equal(logits, twin_logits)
    assert all(torch.equal(gradients[n], twin_gradients[n]) for n in gradients)
    with torch.no_grad():
        twin.model.norm.weight.mul_(2)
    assert torch.equal(one_step(model, ids)[0], logits)
    assert not torch.equal(one_step(twin, ids)[0], logits)


def test_many_models_sizes_and_modes_in_one_process():
    """Dynamo counts variants per code object, which all models of a family share; its own limit is 8."""
    for seed in range(9):
        model = jetgraph.compile(random_model(layers=1, seed=seed), "jet" if seed % 2 else "bf16")
        one_step(model, random_ids(model, 1, 9))
    for batch, length in ((1, 9), (2, 9), (4, 12), (3, 33), (1, 2)):
        one_step(model, random_ids(model, batch, length))
    with torch.no_grad():
        model(input_ids=random_ids(model, 1, 9))


def test_two_recipes_in_one_block_keep_their_own_operands():
    other = FP8Recipe(rule=ScaleRule(power_of_two=True))
    rules = (Rule(r"re:.*k_proj", other), *get_policy("jet").train)
    model = jetgraph.compile(random_model(), Policy("mixed", "", rules, rules))
    one_step(model, random_ids(model, 1, 40))
    (backend,) = set(model.jetgraph.regions.values())
    compiled = backend.compiled[0]
    quantised = [
        n for g in (compiled.forward, compiled.backward) for n in g.graph.nodes if "quantize_tokens" in str(n.target)
    ]
    assert {n.args[-1] for n in quantised} == {True, False}


def test_a_linear_outside_the_blocks_may_be_fp8():
    """The head, by a policy of one rule for all: it runs its precision eagerly, on a tied or an untied weight."""
    for tied in (False, True):
        model = jetgraph.compile(random_model(layers=1, tied=tied), Policy("all", "", (Rule("*", FP8Recipe()),)))
        one_step(model, random_ids(model, 1, 20))
        head = next(row for row in model.jetgraph.coverage().require().rows if row.fqn == "lm_head")
        assert (head.declared, head.ran) == ("f8e4m3[128x128]", "eager x1")


def test_another_model_made_from_the_same_config_is_untouched():
    model = random_model()
    other = type(model)(model.config)
    jetgraph.compile(model, "jet")
    assert model.config._attn_implementation == "jetgraph"
    assert other.config._attn_implementation == "sdpa"


def test_where_a_model_will_run_decides_not_where_it_is_now(monkeypatch):
    """VeRL builds on the CPU and FSDP2 moves; there the final norm's sums, too, must not be ATen's."""
    asked = []
    monkeypatch.setattr(compiler, "check_kernels", lambda model, policy, kernels, device: asked.append(device))
    monkeypatch.setattr(registry, "probe", lambda name, device: asked.append(device) or SimpleNamespace(ok=False))
    here = jetgraph.compile(random_model("llama", layers=1))
    assert (here.jetgraph.codegen, here.model.norm._compiled_call_impl) == ("fx", None)
    assert set(asked) == {torch.device("cpu")}
    asked.clear()
    there = jetgraph.compile(random_model("llama", layers=1), device="cuda:1")
    assert there.jetgraph.codegen == "inductor"
    assert set(asked) == {torch.device("cuda:1")}
    for model in (there, copy.deepcopy(there)):
        assert model.model.norm._compiled_call_impl is not None


def test_clear_errors():
    with pytest.raises(ValueError, match="policy 'jett' does not exist; choose one of bf16, .*jet"):
        jetgraph.compile(random_model(), "jett")
    with pytest.raises(ValueError, match="provider 'cuda' does not exist"):
        jetgraph.compile(random_model(), "jet", provider="cuda")
    model = jetgraph.compile(random_model(), "bf16")
    with pytest.raises(CompileError, match="compiled already"):
        jetgraph.compile(model, "jet")
    with pytest.raises(ValueError, match="codegen 'triton' does not exist; choose one of auto, fx, inductor"):
        jetgraph.compile(random_model(), "jet", codegen="triton")
    with pytest.raises(CompileError, match=r"is torch.float16; expected torch.bfloat16 or torch.float32 masters"):
        jetgraph.compile(random_model().half(), "jet")
    gone = Policy("gone", "", (Rule("model.layers.0.mlp.gate", FP8Recipe()), Rule("*", None)))
    with pytest.raises(ValueError, match=r"'model.layers.0.mlp.gate' .*model.layers.0.mlp.gate_proj"):
        jetgraph.compile(random_model(), gone)
    with pytest.raises(CompileError, match="no list of equal decoder blocks"):
        jetgraph.compile(torch.nn.Linear(4, 4), "bf16", provider="stock")
    with_a_hole = torch.tensor([[1, 0, 1, 1]])
    with pytest.raises(ValueError, match="padding between real tokens"):
        model(input_ids=torch.ones_like(with_a_hole), attention_mask=with_a_hole)

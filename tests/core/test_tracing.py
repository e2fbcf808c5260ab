"""Linears under every tracer, and graphs after everything that people do to them (rows T of the public bugs).

T1 (families) and T2's version range have tests of their own; here are the operators, the graphs and the calls.
"""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch.fx import Transformer
from torch.fx.experimental.proxy_tensor import make_fx

import jetgraph
from jetgraph.errors import CompileError
from jetgraph.linear import Linear, convert
from jetgraph.passes.quantize_linears import quantize_linears
from jetgraph.policy import get_policy
from tests.core.small_models import one_step, random_ids, random_model

FP8 = torch.ops.jetgraph.fp8_gemm.default
LINEAR = torch.ops.jetgraph.linear.default
NAMES = ["jet", "jet_ue8m0", "fp8_tensorwise"]


def lowered_linear(policy: str = "jet", seed: int = 0) -> Linear:
    torch.manual_seed(seed)
    linear = torch.nn.Linear(192, 136, dtype=torch.bfloat16)
    convert(linear, "up", get_policy(policy).linear("model.layers.0.mlp.up_proj"))
    return linear  # type: ignore[return-value]


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 192, generator=torch.Generator().manual_seed(seed)).bfloat16()


def step(function, linear: Linear, x: torch.Tensor) -> list[torch.Tensor]:
    """y, dx, dW and db of Σ w·y with non-uniform w."""
    x = x.clone().requires_grad_()
    linear.zero_grad(set_to_none=True)
    y = function(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return [y.detach(), x.grad, linear.weight.grad, linear.bias.grad]


@pytest.mark.slow
@pytest.mark.parametrize("policy", NAMES)
def test_a_lowered_linear_compiles_without_a_break_and_keeps_every_bit(policy):  # [T12]
    linear = lowered_linear(policy)
    compiled = torch.compile(linear, fullgraph=True, backend="aot_eager", dynamic=True)
    for count in (0, 1, 2, 17):
        expected, got = step(linear, linear, tokens(count)), step(compiled, linear, tokens(count))
        assert [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if not torch.equal(a, b)] == []


@pytest.mark.slow
def test_trace_export_and_compile_take_the_same_branch(tmp_path):  # [T13]
    """One operator and the same bits in all three; no branch of `Linear.forward` depends on who traces."""
    linear, x, seen = lowered_linear(), tokens(17), {}

    def keep(module, inputs):
        seen["compile"] = module
        return module.forward

    expected = linear(x)
    assert torch.equal(torch.compile(linear, fullgraph=True, backend=keep)(x), expected)
    seen["trace"] = make_fx(lambda t: linear(t))(x)
    seen["export"] = torch.export.export(linear, (x,)).module()
    for name, module in seen.items():
        calls = [n for n in module.graph.nodes if "jetgraph" in str(n.target)]
        assert [str(n.target).removesuffix(".default") for n in calls] == ["jetgraph.linear"], name
        assert calls[0].args[3] == linear.precision_text
    assert torch.equal(seen["trace"](x), expected)
    assert torch.equal(seen["export"](x), expected)


def through_pickle(module):
    return pickle.loads(pickle.dumps(module))


@pytest.mark.parametrize("treatment", [copy.deepcopy, lambda m: Transformer(m).transform(), through_pickle],
                         ids=["deepcopy", "Transformer", "pickle"])  # fmt: skip
def test_the_annotation_survives_what_loses_metadata(treatment):  # [T5, T8]
    """Transformer and pickle drop ``node.meta``; the precision is an argument of the operator, so it stays."""
    linear = lowered_linear()
    operands = tokens(17), linear.weight.detach(), linear.bias.detach()
    text = linear.precision_text
    module = make_fx(lambda x, w, b: torch.ops.jetgraph.linear(x, w, b, text), tracing_mode="fake")(*operands)
    expected = module(*operands)
    treated = treatment(module)
    assert [n.args[3] for n in treated.graph.nodes if n.target is LINEAR] == [text]
    assert torch.equal(treated(*operands), expected)
    again = pickle.loads(pickle.dumps(copy.deepcopy(treated)))  # [T8: a copy could not be unpickled]
    assert torch.equal(again(*operands), expected)
    if treatment is not copy.deepcopy:  # the pass needs shapes; without them it stops, and makes nothing else of it
        with pytest.raises(KeyError, match="val"):
            quantize_linears(treated)
        return
    assert [gemm.role.value for gemm in quantize_linears(treated)] == ["FPROP"]
    assert sum(n.target is FP8 for n in treated.graph.nodes) == 1
    assert not any(n.target is LINEAR for n in treated.graph.nodes)
    assert torch.equal(treated(*operands), expected)


def test_importing_needs_no_fx_module_of_transformers():  # [T2]
    code = "import jetgraph, sys\nassert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert jetgraph.compile.__module__ == "jetgraph.compiler"  # imported, with all that it needs
    assert "transformers.utils.fx" not in sys.modules


# ------------------------------------------------------------------------------------------------------- whole models


@pytest.fixture(scope="module")
def model():
    return jetgraph.compile(random_model(), "jet")


@torch.no_grad()
def logits(model, **inputs) -> torch.Tensor:
    return model(use_cache=False, **inputs).logits


@pytest.mark.slow
def test_every_way_to_call_the_model_is_the_same_function(model):  # [T3]
    """One compiled model called with ids, embeddings, no mask, a mask of ones and padding, in any order."""
    ids = random_ids(model, 2, 24)
    expected = logits(model, input_ids=ids)
    for _ in range(2):
        assert torch.equal(logits(model, inputs_embeds=model.get_input_embeddings()(ids)), expected)
        assert torch.equal(logits(model, input_ids=ids, attention_mask=torch.ones_like(ids)), expected)
        assert torch.equal(logits(model, input_ids=ids, attention_mask=None), expected)
        right = torch.ones_like(ids)
        right[1, 20:] = 0
        assert torch.equal(logits(model, input_ids=ids, attention_mask=right)[1, :20], expected[1, :20])


@pytest.mark.slow
def test_a_mask_that_matters_is_never_dropped(model):  # [T3]
    ids = random_ids(model, 1, 24)
    expected = logits(model, input_ids=ids)
    padded, mask = torch.nn.functional.pad(ids, (3, 0)), torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    seen = logits(model, input_ids=padded, attention_mask=mask, position_ids=positions)[:, 3:]
    assert torch.equal(seen, expected)
    seen, ignored = (logits(model, input_ids=padded, attention_mask=m)[:, 3:] for m in (mask, None))
    assert not torch.equal(seen, ignored)


def test_dropout_is_refused_by_name_whatever_the_mode():  # [T4]
    """A rollout drops nothing, so no model that may drop is compiled, in training or in evaluation."""
    made = random_model("llama", layers=1)
    made.model.layers[0].mlp = torch.nn.Sequential(made.model.layers[0].mlp, torch.nn.Dropout(0.5))
    for mode in (made.train(), made.eval()):
        with pytest.raises(CompileError, match=r"model.layers.0.mlp.1: dropout of 0.5; expected 0"):
            jetgraph.compile(mode, "jet")
    made = random_model("llama", layers=1)
    made.model.layers[0].self_attn.attention_dropout = 0.5
    with pytest.raises(CompileError, match=r"model.layers.0.self_attn: attention_dropout of 0.5; expected 0"):
        jetgraph.compile(made, "jet")


@pytest.mark.slow
def test_attention_dropout_switched_on_after_compile_is_refused_in_training():  # [T4]
    made = jetgraph.compile(random_model("llama", layers=1), "jet")
    made.model.layers[0].self_attn.attention_dropout = 0.5
    ids = random_ids(made, 1, 24)
    with pytest.raises(Exception, match="LlamaAttention has dropout=0.5; expected 0: set attention_dropout=0"):
        logits(made.train(), input_ids=ids)
    assert torch.equal(logits(made.eval(), input_ids=ids), logits(made.eval(), input_ids=ids))


@pytest.mark.slow
def test_tied_weights_stay_one_parameter_in_bf16():  # [T9]
    made = jetgraph.compile(random_model("llama", layers=1, tied=True), "jet")
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert sum(p is made.lm_head.weight for p in made.parameters()) == 1
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    before = made.lm_head.weight.detach().clone()
    one_step(made, random_ids(made, 1, 24))
    optimizer.step()
    assert made.lm_head.weight.dtype is torch.bfloat16
    assert not torch.equal(made.lm_head.weight, before)
    buffer = io.BytesIO()
    torch.save(made.state_dict(), buffer)
    buffer.seek(0)
    loaded = random_model("llama", layers=1, seed=5, tied=True)
    loaded.load_state_dict(torch.load(buffer))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, made.lm_head.weight)
    jetgraph.compile(loaded, "jet")
    ids = random_ids(made, 1, 9)
    assert torch.equal(logits(loaded, input_ids=ids), logits(made, input_ids=ids))


@pytest.mark.slow
def test_compiled_graphs_can_be_copied_and_pickled(model):  # [T8]
    """A block's forward as executed: the pickle of a copy holds the same calls in the same order."""
    one_step(model, random_ids(model, 1, 24))
    (backend,) = set(model.jetgraph.regions.values())
    module = backend.last_trained.forward
    again = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    targets = [str(n.target) for n in module.graph.nodes if n.op == "call_function"]
    assert [str(n.target) for n in again.graph.nodes if n.op == "call_function"] == targets
    assert sum("fp8_gemm" in target for target in targets) == 7

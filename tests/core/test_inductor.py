"""Inductor's kernels run a forward graph only with the graph's own bits; any other runs operator by operator."""

from __future__ import annotations

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import jetgraph
from jetgraph.codegen import Execution, _is_random_state, inexact_calls, same_bits
from jetgraph.replay import replay_step
from jetgraph.trainer import capture_step
from jetgraph.verify import Verdict, verify
from tests.core.small_models import one_step, random_ids, random_model


def rotated(x, cos, sin):
    """Rotary embedding: two products and a sum, three roundings to BF16."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + turned * sin, x + turned


def traced(function, *inputs):
    return make_fx(function)(*inputs)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.slow
def test_a_forward_of_exact_operators_keeps_every_bit():
    """Without its casts kept, an Inductor kernel rounds once where the graph rounds three times."""
    inputs = [numbers(64, 32, seed=s) for s in range(3)]
    graph = traced(rotated, *inputs)
    execution = Execution(graph, inputs, "forward", "inductor")
    assert (execution.by, execution.reason) == ("inductor", "")
    first = execution.run(list(inputs))
    assert execution.by == "inductor-exact"
    assert all(map(same_bits, first, graph(*inputs)))
    others = [numbers(64, 32, seed=s) * 1e3 for s in range(3, 6)]
    assert all(map(same_bits, execution.run(list(others)), graph(*others)))
    held = list(inputs)
    execution.run(held)
    assert held == []  # activations die when they were read


@pytest.mark.slow
def test_inductors_cache_on_disk_holds_for_the_same_sources_of_our_operators_alone(monkeypatch, tmp_path):
    """An operator whose results come to lie otherwise is the same node to Inductor, whose stored code then raises."""
    from torch._dynamo.utils import counters
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from jetgraph import codegen

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    mode = FakeTensorMode(shape_env=ShapeEnv())  # as under Dynamo: without it nothing is cached
    x = mode.from_tensor(numbers(8, 32))

    def hits() -> int:
        counters.clear()
        with tracing(TracingContext(mode)), mode:
            Execution(traced(lambda x: (x + x,), x), [x], "forward", "inductor")
        return counters["inductor"]["fxgraph_cache_hit"]

    assert [hits(), hits()] == [0, 1]
    monkeypatch.setattr(codegen, "sources", lambda: "others")
    assert [hits(), hits()] == [0, 1]


def test_a_gradient_of_fixed_sizes_is_generated_too():
    """Of a single token no size is a symbol; the gradient of a slice then begins with a constant of zeros."""
    from torch._guards import TracingContext, tracing
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    grad = numbers(1, 1, 32)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(grad, static_shapes=True)

    def gradient(x):
        return (torch.ops.aten.slice_backward(x, [1, 1, 64], 2, 32, 64, 1),)

    with tracing(TracingContext(mode)):
        graph = traced(gradient, fake)
        execution = Execution(graph, [fake], "backward", "inductor")
    assert execution.by == "inductor"
    assert same_bits(execution.run([grad])[0], torch.nn.functional.pad(grad, (32, 0)))


@pytest.mark.parametrize(
    "function", [lambda x: (x.float().mean(-1, keepdim=True),), lambda x: (x.exp(),), lambda x: (x / 3.0,)]
)
def test_sums_exponentials_and_quotients_stay_with_aten(function):
    x = numbers(8, 32)
    graph = traced(function, x)
    execution = Execution(graph, [x], "forward", "inductor")
    assert execution.by == "fx"
    assert "would be computed by Inductor" in execution.reason
    assert str(next(inexact_calls(graph)).target) in execution.reason
    assert same_bits(execution.run([x])[0], graph(x)[0])


@pytest.mark.slow
def test_a_forward_whose_bits_differ_runs_operator_by_operator(monkeypatch):
    inputs = [numbers(64, 32, seed=s) for s in range(3)]
    graph = traced(rotated, *inputs)
    execution = Execution(graph, inputs, "inference", "inductor")
    off = execution._generated
    monkeypatch.setattr(execution, "_generated", lambda args: [off(args)[0].nextafter(torch.tensor(9.0)), None])
    with pytest.warns(UserWarning, match="operator by operator: Inductor's"):
        results = execution.run(list(inputs))
    assert all(map(same_bits, results, graph(*inputs)))
    assert execution.by == "fx"
    assert "differ in bits" in execution.reason
    assert all(map(same_bits, execution.run(list(inputs)), graph(*inputs)))


def test_the_state_of_a_dropout_of_zero_is_no_result():
    """torch's attention on a GPU returns its seeds too, which are others in every call."""
    graph = torch.fx.Graph()
    for target, index, random in (
        (torch.ops.aten._scaled_dot_product_cudnn_attention.default, 0, False),
        (torch.ops.aten._scaled_dot_product_cudnn_attention.default, 1, False),
        (torch.ops.aten._scaled_dot_product_cudnn_attention.default, 6, True),
        (torch.ops.jetgraph.rms_norm_quantize.default, 4, False),
    ):
        node = graph.call_function(operator.getitem, (graph.call_function(target), index))
        assert _is_random_state(node) is random
    assert not _is_random_state(graph.placeholder("x"))


@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([float("nan")]), torch.tensor([-float("nan")]), True),
        (torch.tensor([1.0, float("nan")]), torch.tensor([float("nan"), 1.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), False),
        (torch.ones(2), torch.ones(1), False),
        (torch.tensor([True]), torch.tensor([True]), True),
        (None, None, True),
        (3, 4, False),
    ],
)
def test_same_bits(a, b, equal):
    assert same_bits(a, b) is equal


@pytest.mark.slow
def test_inductor_changes_no_forward_bit_and_its_graph_verifies():
    """On a CPU means are ATen's, so the forward runs operator by operator; backward is Inductor's."""
    model = jetgraph.compile(random_model(layers=1), "jet", codegen="inductor")
    ids = random_ids(model, 1, 53)
    logits, gradients = one_step(model, ids)
    exact, expected = one_step(jetgraph.compile(random_model(layers=1), "jet", codegen="fx"), ids)
    assert torch.equal(logits, exact)
    for name, gradient in expected.items():
        # a last bit that moves flips codes of FP8 whole: noise is of the size of FP8's own (benchmarks/LOG.md)
        assert (gradients[name].double() - gradient.double()).norm() < 0.2 * gradient.double().norm(), name
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, logits)
    model.jetgraph.coverage().require()
    assert "mean" in model.jetgraph.codegens()["model.layers.0 forward"]
    assert model.jetgraph.codegens()["model.layers.0 backward"] == "inductor"
    graph = capture_step(model.jetgraph).graph
    assert graph.meta["compiler"] == "fx"
    result = verify(graph, graph)
    assert "JG092" not in {fault.rule for fault in result.faults}
    assert result.verdict is Verdict.UNKNOWN  # a graph of training is no engine's


@pytest.mark.slow
def test_a_backward_graph_that_is_compiled_while_a_step_is_captured():
    """AOTAutograd compiles some backward graphs when they first run; the recorder must not see their tracing."""
    model = jetgraph.compile(random_model("llama", layers=1), "bf16", provider="stock", codegen="inductor")
    packed = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 0, 1, 2, 3, 4, 5, 6]])
    for shape, positions in (((2, 29), None), ((1, 17), packed)):  # a mask makes a second compile, of symbolic sizes
        step = capture_step(model.jetgraph, random_ids(model, *shape), position_ids=positions)
        replay = replay_step(model, step).meta["replay"]
        assert replay["passed"], (shape, replay["cases"])
    assert model.jetgraph.codegens()["model.layers.0 backward"] == "inductor"


@pytest.mark.slow
def test_one_compile_serves_one_group_of_tokens_and_several():
    """With 32 and 66 tokens the scales of the tokens' groups are one column, with 160 two, with 300 three."""
    model = jetgraph.compile(random_model("qwen3", layers=1), "jet", codegen="inductor", fused=True)
    for length in (16, 33, 80, 150, 64):
        one_step(model, random_ids(model, 2, length))
    assert model.jetgraph.num_compiles == 1

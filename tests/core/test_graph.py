"""The precision graph of a live step: complete, executable bit for bit, printable both ways, with a stable digest."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import jetgraph
from jetgraph.graph import GraphError, Node, Phase, PrecisionGraph, Role
from jetgraph.interpret import InterpretError, interpret
from jetgraph.lift.lifter import Lifter
from jetgraph.normal_form import TermBuilder
from jetgraph.ops import OPS
from jetgraph.precision import BF16
from jetgraph.record import Op, Ref, TensorSpec
from jetgraph.trainer import capture_step
from tests.core.small_models import random_ids, random_model


@pytest.fixture(scope="module")
def captured():
    model = random_model("qwen3", tied=False)
    jetgraph.compile(model, "jet")
    return model, capture_step(model.jetgraph)


def leaves(model, captured):
    return {**captured.inputs, **dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tied", "policy", "provider"), [
    ("llama", True, "jet", "reference"),
    ("qwen3", False, "bf16", "reference"),
    ("llama", True, "bf16", "stock"),
])  # fmt: skip
def test_interpreting_reproduces_the_run_for_other_models_and_policies(kind, tied, policy, provider):
    model = random_model(kind, tied=tied)
    jetgraph.compile(model, policy, provider=provider)
    check_replay(model, capture_step(model.jetgraph, random_ids(model, 1, 131)))


def test_interpreting_reproduces_the_run(captured):
    check_replay(*captured)


@torch.no_grad()
def check_replay(model, step):
    assert step.graph.meta["unknown"] == []
    values = interpret(step.graph, leaves(model, step))
    assert torch.equal(values["logits"], step.logits[0])
    assert torch.equal(values["logprob"][:, 0], step.logprob[0])
    assert {n.removeprefix("grad.") for n in values if n.startswith("grad.")} == set(dict(model.named_parameters()))
    wrong = [n for n, g in step.gradients.items() if not torch.equal(values[f"grad.{n}"].reshape(g.shape), g)]
    assert wrong == []


def test_the_captured_step_is_the_step_that_trains(captured):
    """The recorder changes nothing: the same loss without it has the same logits and gradients."""
    model, step = captured
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=step.inputs["input_ids"], use_cache=False).logits
    logprob = logits.float().log_softmax(-1).gather(-1, step.inputs["targets"][..., None])[..., 0]
    logprob.backward(step.inputs["d_logprob"])
    assert torch.equal(logits, step.logits)
    assert all(torch.equal(p.grad, step.gradients[n]) for n, p in model.named_parameters())


def test_gradients_held_before_a_capture_are_kept():
    model = jetgraph.compile(random_model(), "bf16")
    parameter = model.model.norm.weight
    parameter.grad = torch.ones_like(parameter)
    capture_step(model.jetgraph)
    assert torch.equal(parameter.grad, torch.ones_like(parameter))


def test_text_and_json_are_identities(captured):
    graph = captured[1].graph
    assert PrecisionGraph.from_json(graph.to_json()) == graph
    assert PrecisionGraph.from_text(graph.to_text()) == graph
    assert PrecisionGraph.from_json(graph.to_json()).semantic_digest == graph.semantic_digest


def test_every_edge_has_a_precision_and_every_fp8_gemm_a_reason(captured):
    graph = captured[1].graph
    assert sum(1 for _ in graph.edges()) == graph.num_edges
    gemms = [n for n in graph.nodes if n.op == "gemm" and ".layers." in n.fqn]
    roles = {role: sum(n.role is role for n in gemms) for role in (Role.FPROP, Role.DGRAD, Role.WGRAD)}
    assert roles == {Role.FPROP: 14, Role.DGRAD: 14, Role.WGRAD: 14}
    grids = {"FPROP": ("1x128", "128x128"), "DGRAD": ("1x128", "128x128"), "WGRAD": ("128x1", "128x1")}
    for node in gemms:
        held = tuple(str(graph.nodes[i].type.precision.scale.granularity) for i in node.inputs)
        assert held == grids[node.role.value]
        assert node.reason.startswith("jet: re:")


def test_observables_are_outputs(captured):
    outputs = captured[1].graph.outputs
    assert {"logits", "logprob", "k.0", "v.0", "k.1", "v.1"} <= set(outputs)


def test_the_digest_ignores_where_it_ran_and_sees_what_it_means(captured):
    graph = captured[1].graph
    moved = dataclasses.replace(
        graph,
        nodes=tuple(dataclasses.replace(n, kernel="another", source="x.py:1", fqn="") for n in graph.nodes),
        meta={},
    )
    assert moved.semantic_digest == graph.semantic_digest
    assert moved.execution_digest != graph.execution_digest
    index = next(i for i, n in enumerate(graph.nodes) if n.op == "const" and n.phase is Phase.FORWARD)
    changed = list(graph.nodes)
    changed[index] = dataclasses.replace(changed[index], attrs=(("value", 0.5),))
    assert dataclasses.replace(graph, nodes=tuple(changed)).semantic_digest != graph.semantic_digest


def test_networkx_keeps_both_edges_of_a_square():  # [N13, V8]
    builder = TermBuilder()
    x = builder.parameter("w", (4,))
    square = builder.graph("g", {"out": builder.pointwise("mul", (x, x))}, {}).to_networkx()
    assert [data["port"] for _, _, data in square.edges(data=True)] == [0, 1]


def test_unknown_operators_are_named():
    spec = TensorSpec((1, 7, 4), "bfloat16")
    ops = [
        Op("x", "placeholder", "x", value=spec),
        Op("y", "call", "aten.erfinv.default", (Ref("x"),), {}, spec),
        Op("out", "output", "output", ((Ref("y"),),)),
    ]
    builder = TermBuilder()
    lifter = Lifter(builder, 7)
    env = lifter.run(
        ops, {"x": lifter.layouts.value(builder.intern("input", (), {"name": "x"}, ("T", 4), BF16), (1, 7, 4))}
    )
    (value,) = lifter.outputs(ops, env)
    node: Node = builder.nodes[value.term]
    assert node.op == "unknown"
    assert "aten.erfinv.default" in str(node.attr("name"))
    assert lifter.unknown == ["aten.erfinv.default at y"]
    with pytest.raises(InterpretError, match="aten.erfinv.default"):
        interpret(builder.graph("g", {"out": value.term}, {}), {"x": torch.zeros(7, 4)})


GRAPH = ('{"jetgraph": 2, "name": "g", "outputs": {}, "meta": {}, "terms": [["%s", {}, %s, "bf16"]], "modules": [""], '
         '"origins": [["", "forward", "", "", ""]], "nodes": [[%d, 0, 0%s]]}')  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a jetgraph graph file"),
        ("[]", "not a jetgraph graph file"),
        ('{"jetgraph": 1}', "has version 1"),
        (GRAPH % ("exec", "[]", 0, ""), "op 'exec' is not in the vocabulary"),
        (GRAPH % ("neg", '["T"]', 0, ", 0"), "reads a node that does not come before it"),
        (GRAPH % ("neg", '["S"]', 0, ", 0"), "a size is a whole number or 'T'"),
        (GRAPH % ("neg", "[]", 7, ", 0"), "IndexError"),
        (GRAPH % ("neg", "[]", -1, ", 0"), "a row below 0"),
    ],
)  # fmt: skip
def test_bad_files_are_refused_in_one_sentence(text, message):
    with pytest.raises(GraphError, match=message):
        PrecisionGraph.from_json(text)


def test_a_bad_file_is_named(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[]")
    with pytest.raises(GraphError, match=r"a\.json: not a jetgraph graph file"):
        PrecisionGraph.load(path)


def test_vocabulary_is_documented():
    for spec in OPS.values():
        assert spec.formula
        assert json.dumps(spec.attrs)

"""Hypothesis: every graph contains itself, with any extra consumers; the finder agrees with brute force."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from jetgraph.graph import Node, PrecisionGraph
from jetgraph.normal_form import TermBuilder
from jetgraph.ops import COMMUTATIVE
from jetgraph.precision import Format, Granularity, Scale
from jetgraph.verify.finder import find
from jetgraph.verify.forward import Forward
from tests.verify.toy_transformer import rewrite

UNARY = ("sq", "silu", "rsqrt", "round", "quantize")
BINARY = ("add", "mul", "sub", "gemm")
PLACES = ("", "a.0.x", "a.1.x", "a.1.y")


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int, max_outputs: int = 2) -> PrecisionGraph:
    b = TermBuilder()
    terms = [b.input("x"), b.const(draw(st.sampled_from([0.0, -0.0, 1.5])))]
    for _ in range(draw(st.integers(1, max_nodes - 2))):
        op = draw(st.sampled_from(UNARY + BINARY))
        b.where = b.where.__class__(fqn=draw(st.sampled_from(PLACES)))
        x, y = (draw(st.sampled_from(terms)) for _ in range(2))
        terms.append(make(b, op, x, y))
    outputs = draw(st.lists(st.sampled_from(terms[2:]), min_size=1, max_size=max_outputs))
    return b.graph("random", {f"o.{i}": t for i, t in enumerate(outputs)}, {})


def make(b: TermBuilder, op: str, x: int, y: int) -> int:
    if op == "round":
        return b.round(x, Format.BF16)
    if op == "quantize":
        return b.quantize(x, Scale(Granularity.per_group(128)), "")
    inputs = [x] if op in UNARY else sorted((x, y), key=lambda t: b.digests[t]) if op in COMMUTATIVE else [x, y]
    return (
        b.pointwise(op, inputs)
        if op != "gemm"
        else b.intern("gemm", inputs, {"contraction": "nt"}, ("T", 1), b.precision(x))
    )


def contained(train: PrecisionGraph, infer: PrecisionGraph) -> bool:
    finding = find(Forward(train), Forward(infer))
    assert finding.complete == (not finding.faults), finding.faults
    return finding.complete


def same_symbol(a: Node, b: Node) -> bool:
    return (a.op, repr(a.attrs), a.type) == (b.op, repr(b.attrs), b.type)


def brute_force(train: PrecisionGraph, infer: PrecisionGraph) -> bool:
    """Try every map of nodes: op, attributes and type agree, ports agree (add and mul up to order), outputs by name."""
    choices = [[j for j, other in enumerate(train.nodes) if same_symbol(node, other)] for node in infer.nodes]

    def homomorphism(phi: tuple[int, ...]) -> bool:
        for node, image in zip(infer.nodes, phi, strict=True):
            ports, wanted = [phi[i] for i in node.inputs], list(train.nodes[image].inputs)
            if node.op in COMMUTATIVE:
                ports, wanted = sorted(ports), sorted(wanted)
            if ports != wanted:
                return False
        return all(train.outputs.get(name) == phi[index] for name, index in infer.outputs.items())

    return any(homomorphism(phi) for phi in product(*choices))


def evaluate(graph: PrecisionGraph, index: int) -> str:
    """The term of a node written out: its value under the free interpretation."""
    node = graph.nodes[index]
    inputs = [evaluate(graph, i) for i in node.inputs]
    inputs = sorted(inputs) if node.op in COMMUTATIVE else inputs
    return f"{node.op}{node.attrs}{node.type}({','.join(inputs)})"


def same_terms(train: PrecisionGraph, infer: PrecisionGraph) -> bool:
    return all(
        name in train.outputs and evaluate(train, train.outputs[name]) == evaluate(infer, index)
        for name, index in infer.outputs.items()
    )


@given(graphs(40, 4))
def test_a_graph_contains_itself(graph: PrecisionGraph) -> None:
    assert contained(graph, graph)


@given(graphs(20), graphs(20))
def test_extra_consumers_in_training_change_nothing(graph: PrecisionGraph, other: PrecisionGraph) -> None:
    """The union of two graphs contains the first, if the other's outputs have other names."""
    b = TermBuilder()
    new: dict[int, int] = {}

    def add(source: PrecisionGraph) -> dict[str, int]:
        new.clear()
        for index, node in enumerate(source.nodes):
            inputs = [new[i] for i in node.inputs]
            if node.op in COMMUTATIVE:
                inputs.sort(key=lambda t: b.digests[t])
            new[index] = b.intern(node.op, inputs, dict(node.attrs), node.type.shape, node.type.precision)
        return {k: new[i] for k, i in source.outputs.items()}

    outputs = {f"extra.{k}": i for k, i in add(other).items()} | add(graph)
    assert contained(b.graph("union", outputs, {}), graph)


@settings(max_examples=300)
@given(graphs(7), graphs(7))
def test_agrees_with_brute_force(train: PrecisionGraph, infer: PrecisionGraph) -> None:
    answer = contained(train, infer)
    assert answer == brute_force(train, infer)
    assert answer == same_terms(train, infer)


@settings(max_examples=200)
@given(graphs(25), st.data())
def test_a_single_mutation_is_refuted(graph: PrecisionGraph, data: st.DataObject) -> None:
    """One node made another op: refuted exactly if the observables' terms changed."""
    target = data.draw(st.integers(0, len(graph.nodes) - 1))
    op = data.draw(st.sampled_from(("sq", "silu", "rsqrt", "round")))

    def change(b: TermBuilder, index: int, node: Node, inputs: list[int], new: list[int]) -> int | None:
        if index != target or not inputs:
            return None
        return make(b, op, inputs[0], inputs[0])

    mutated = rewrite(graph, change)
    changed = mutated.semantic_digest != graph.semantic_digest
    finding = find(Forward(graph), Forward(mutated))
    assert finding.complete == (not changed)
    assert bool(finding.faults) == changed


@given(graphs(25), graphs(25))
def test_every_fault_has_words_and_a_remedy(train: PrecisionGraph, infer: PrecisionGraph) -> None:
    for fault in find(Forward(train), Forward(infer)).faults:
        assert fault.expected
        assert fault.got
        assert fault.remedy

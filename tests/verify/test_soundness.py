"""The relation itself: an oracle that shares no code with the finder, every small graph, every kind of single fault."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetgraph.graph import Node, PrecisionGraph, ValueType
from jetgraph.normal_form import TermBuilder
from jetgraph.precision import BF16, F32, Division, Format, Granularity, Scale
from jetgraph.verify import Verdict, verify
from jetgraph.verify.finder import find
from jetgraph.verify.forward import Forward
from jetgraph.verify.reduction import sequential
from tests.verify.mutations import MUTATIONS, Context, apply
from tests.verify.toy_transformer import build, with_meta

# ----------------------------------------------------------------------------------------------------------- the oracle


def as_networkx(graph: PrecisionGraph) -> nx.MultiDiGraph:
    """Nodes labelled with all they mean, the port on every edge: x * x has two edges, and neg(x) one."""
    g = nx.MultiDiGraph()
    for index, node in enumerate(graph.nodes):
        g.add_node(index, label=f"{node.op} {node.attrs!r} {node.type}", swaps=node.op in ("add", "mul"))
        for port, producer in enumerate(node.inputs):
            g.add_edge(producer, index, port=port)
    return g


def homomorphism_exists(infer: PrecisionGraph, train: PrecisionGraph) -> bool:
    """Whether a map of nodes with equal labels gives every node exactly its image's in-edges, port by port, and every
    output the output of its name.  Backtracking over all images, no tables of terms; add and mul have no port order,
    and nodes that no output of the engine needs are left out."""
    small, large = as_networkx(infer), as_networkx(train)
    needed = set(infer.outputs.values())
    small = small.subgraph(needed.union(*(nx.ancestors(small, i) for i in needed)))
    order = list(nx.topological_sort(small))

    def ports(g: nx.MultiDiGraph, index: int, image: Callable[[int], int]) -> list[tuple[int, int]]:
        swaps = g.nodes[index]["swaps"]
        return sorted((0 if swaps else d["port"], image(a)) for a, _, d in g.in_edges(index, data=True))

    def extend(phi: dict[int, int], rest: list[int]) -> bool:
        if not rest:
            return all(name in train.outputs and phi[i] == train.outputs[name] for name, i in infer.outputs.items())
        index = rest[0]
        wanted = ports(small, index, phi.__getitem__)
        for image in large:
            same = large.nodes[image]["label"] == small.nodes[index]["label"]
            if same and ports(large, image, lambda a: a) == wanted and extend({**phi, index: image}, rest[1:]):
                return True
        return False

    return extend({}, order)


def found(train: PrecisionGraph, infer: PrecisionGraph) -> bool:
    finding = find(Forward(train), Forward(infer))
    assert finding.complete == (not finding.faults)
    return finding.complete


# ----------------------------------------------------------------------------------------------------- all small graphs


def every_program(num_ops: int) -> Iterator[tuple[tuple[str, tuple[int, ...]], ...]]:
    """All straight-line programs of so many ops over one input; both orders of each pair of operands."""
    if num_ops == 0:
        yield ()
        return
    for program in every_program(num_ops - 1):
        terms = range(len(program) + 1)
        for op in ("sq", "round"):
            yield from ((*program, (op, (i,))) for i in terms)
        for op in ("add", "sub"):
            yield from ((*program, (op, pair)) for pair in product(terms, repeat=2))


@cache
def written(program: tuple[tuple[str, tuple[int, ...]], ...], output: int = -1) -> PrecisionGraph:
    """The program as it stands: nothing interned, nothing sorted, so equal terms may occur twice."""
    token = ValueType(("T", 1), F32)
    nodes = [Node("input", (), (("name", "x"),), token)]
    for op, inputs in program:
        bf16 = op == "round"
        attrs = (("format", "bf16"),) if bf16 else ()
        nodes.append(Node(op, inputs, attrs, replace(token, precision=BF16 if bf16 else F32)))
    return PrecisionGraph("program", tuple(nodes), {"y": len(nodes) - 1 if output < 0 else output}, {})


@pytest.mark.slow
def test_all_pairs_of_small_graphs() -> None:
    """Every program of two ops against every one, with every choice of the trainer's output."""
    programs, agreed = list(every_program(2)), 0
    for train, infer in product(programs, repeat=2):
        for output in (1, 2):
            large, small = written(train, output), written(infer)
            answer = homomorphism_exists(small, large)
            assert found(large, small) == answer, (train, infer, output)
            agreed += answer
    assert agreed > len(programs)


@pytest.mark.slow
def test_all_graphs_of_four_nodes_against_smaller_ones() -> None:
    small = [written(p) for p in (*every_program(1), *list(every_program(2))[::4])]
    for program in every_program(3):
        large = written(program)
        assert found(large, large)
        for other in small:
            assert found(large, other) == homomorphism_exists(other, large), program
            assert found(other, large) == homomorphism_exists(large, other), program


@st.composite
def programs(draw: st.DrawFn, most: int = 6) -> PrecisionGraph:
    """Up to seven nodes of the vocabulary, not in normal form, with one or two outputs."""
    b, terms = TermBuilder(), []
    terms += [b.input("x"), b.const(draw(st.sampled_from([0.0, -0.0, 2.0])))]
    for _ in range(draw(st.integers(1, most - 1))):
        op = draw(st.sampled_from(("sq", "round", "quantize", "slice", "add", "mul", "sub", "gemm")))
        x, y = draw(st.sampled_from(terms)), draw(st.sampled_from(terms))
        shape = b.nodes[x].type.shape
        if op == "round":
            terms.append(b.intern(op, (x,), {"format": "bf16"}, shape, BF16))
        elif op == "quantize":
            scale = Scale(Granularity.per_group(draw(st.sampled_from([64, 128]))))
            terms.append(b.quantize(x, scale, ""))
        elif op == "slice":
            cut = {"outer": 1, "size": 2, "inner": 1, "start": draw(st.integers(0, 1)), "stop": 2}
            terms.append(b.intern(op, (x,), cut, shape, b.precision(x)))
        elif op == "sq":
            terms.append(b.intern(op, (x,), {}, shape, F32))
        else:
            attrs = {"contraction": "nt"} if op == "gemm" else {}
            terms.append(b.intern(op, (x, y), attrs, shape, F32))
    outputs = draw(st.lists(st.sampled_from(terms[2:]), min_size=1, max_size=2))
    return b.graph("random", {f"y{i}": t for i, t in enumerate(outputs)}, {})


@settings(max_examples=150)
@given(programs(), programs())
def test_agrees_with_the_oracle_on_random_graphs(train: PrecisionGraph, infer: PrecisionGraph) -> None:
    assert found(train, infer) == homomorphism_exists(infer, train)


@settings(max_examples=100)
@given(programs(), st.data())
def test_agrees_with_the_oracle_near_equality(graph: PrecisionGraph, data: st.DataObject) -> None:
    """Pairs that differ in one field of one node: where a wrong yes would hide."""
    index = data.draw(st.integers(0, len(graph.nodes) - 1))
    nodes, node = list(graph.nodes), graph.nodes[index]
    change = data.draw(st.sampled_from(("inputs", "precision", "op", "attrs", "none")))
    if change == "inputs" and node.inputs:
        nodes[index] = replace(node, inputs=node.inputs[::-1])
    elif change == "precision":
        nodes[index] = replace(node, type=replace(node.type, precision=BF16))
    elif change == "op" and node.op in ("add", "mul", "sub"):
        nodes[index] = replace(node, op=data.draw(st.sampled_from(("add", "mul", "sub"))))
    elif change == "attrs" and node.op == "const":
        nodes[index] = replace(node, attrs=(("value", 0.0),))
    other = replace(graph, nodes=tuple(nodes))
    assert found(graph, other) == homomorphism_exists(other, graph)
    assert found(other, graph) == homomorphism_exists(graph, other)


def test_what_weaker_relations_would_accept() -> None:
    """A monomorphism accepts a dropped bias, a DiGraph merges the two edges of x * x: the relation does neither."""
    b = TermBuilder()
    x, bias = b.input("x"), b.input("bias")
    product_ = b.intern("mul", (x, x), {}, ("T", 1), F32)
    biased = b.intern("add", (product_, bias), {}, ("T", 1), F32)
    train = b.graph("train", {"y": biased}, {})
    assert not found(train, b.graph("dropped", {"y": product_}, {}))
    squared = b.intern("sq", (x,), {}, ("T", 1), F32)
    assert not found(train, b.graph("square", {"y": b.intern("add", (squared, bias), {}, ("T", 1), F32)}, {}))


# ---------------------------------------------------------------------------------------- every single fault, by its id


def scaled(**changes: object) -> Callable[[Context], int | None]:
    def edit(c: Context) -> int | None:
        scale = c.node.type.precision.scale
        if c.node.op != "quantize" or scale is None:
            return None
        rule = {k: v for k, v in changes.items() if k not in ("granularity", "format", "dynamic")}
        plain = {k: v for k, v in changes.items() if k not in rule}
        new = replace(scale, rule=replace(scale.rule, **rule), **plain)  # type: ignore[arg-type]
        return c.b.quantize(c.inputs[0], new, c.node.kernel)

    return edit


def attribute(op: str, name: str, value: object) -> Callable[[Context], int | None]:
    def edit(c: Context) -> int | None:
        if c.node.op != op or dict(c.node.attrs)[name] == value:
            return None
        attrs = {**dict(c.node.attrs), name: value}
        return c.b.intern(op, c.inputs, attrs, c.node.type.shape, c.node.type.precision, c.node.kernel)  # type: ignore[arg-type]

    return edit


def exchanged(op: str) -> Callable[[Context], int | None]:
    def edit(c: Context) -> int | None:
        if c.node.op != op:
            return None
        inputs = [*c.inputs[:-2], c.inputs[-1], c.inputs[-2]]
        return c.b.intern(op, inputs, dict(c.node.attrs), c.node.type.shape, c.node.type.precision, c.node.kernel)

    return edit


def replaced(old: str, new: str) -> Callable[[Context], int | None]:
    def edit(c: Context) -> int | None:
        return c.b.intern(new, c.inputs, {}, c.node.type.shape, c.node.type.precision) if c.node.op == old else None

    return edit


def dropped(op: str) -> Callable[[Context], int | None]:
    def edit(c: Context) -> int | None:
        return c.inputs[0] if c.node.op == op else None

    return edit


def rounded(c: Context) -> int | None:
    if c.node.op not in ("rsqrt", "mean", "cos", "silu") or c.node.type.precision != F32:
        return None
    return c.b.round(c.with_inputs(c.inputs), Format.BF16)


def in_bf16(c: Context) -> int | None:
    if c.node.op != "gemm":
        return None
    return c.b.intern("gemm", c.inputs, dict(c.node.attrs), c.node.type.shape, BF16, c.node.kernel)


FAULTS: dict[str, tuple[Callable[[Context], int | None], set[str]]] = {
    "granularity": (scaled(granularity=Granularity.per_group(64)), {"JG002"}),
    "scale format": (scaled(format=Format.E8M0), {"JG003"}),
    "power of two": (scaled(power_of_two=True), {"JG003"}),
    "amax floor": (scaled(amax_floor=1e-10), {"JG005"}),
    "qmax": (scaled(qmax=240.0), {"JG005"}),
    "division": (scaled(division=Division.RECIPROCAL_OF_SCALE), {"JG005"}),
    "static": (scaled(dynamic=False), {"JG005"}),
    "attention scale": (attribute("attention", "scale", 0.2), {"JG011"}),
    "window": (attribute("attention", "window", 128), {"JG011"}),
    "soft cap": (attribute("attention", "softcap", 50.0), {"JG011"}),
    "kv heads": (attribute("attention", "kv_heads", 4), {"JG011"}),
    "constant": (attribute("const", "value", 0.25), {"JG011"}),
    "minus zero for a constant": (attribute("const", "value", -0.0), {"JG011"}),
    "mean size": (attribute("mean", "size", 128), {"JG011"}),
    "slice": (attribute("slice", "start", 1), {"JG011"}),
    "sub's operands": (exchanged("sub"), {"JG012"}),
    "K and V": (exchanged("attention"), {"JG012"}),
    "another function": (replaced("silu", "sq"), {"JG011"}),
    "sin for cos": (replaced("cos", "sin"), {"JG011", "JG012"}),  # the sines exist: they are read in the wrong place
    "a round too few": (dropped("round"), {"JG004"}),
    "a round too many": (rounded, {"JG004"}),
    "not quantised": (dropped("quantize"), {"JG014"}),
    "bf16 from a gemm": (in_bf16, {"JG010"}),
    "gate for up": (MUTATIONS["gate and up swapped"].edit, {"JG012"}),
    "next layer's K": (MUTATIONS["K weight of the next layer"].edit, {"JG013"}),
    "next layer's norm": (MUTATIONS["norm weight of the next layer"].edit, {"JG013"}),
    "uninitialised": (MUTATIONS["output read from empty"].edit, {"JG011"}),
    "stored codes": (MUTATIONS["one bit of one code"].edit, {"JG017"}),
    "fp8 cache": (MUTATIONS["kv cache fp8"].edit, {"JG008"}),
    "quantised twice": (MUTATIONS["weights quantised twice"].edit, {"JG009"}),
}
"""An edit that may apply to many nodes, and the rules by which a single application must be refuted."""


@cache
def toy() -> tuple[PrecisionGraph, PrecisionGraph]:
    return build("train", backward=True), build("infer")


def places(edit: Callable[[Context], int | None]) -> list[int]:
    """The nodes that an edit applies to."""
    hit: list[int] = []
    infer = toy()[1]
    number = {id(node): i for i, node in enumerate(infer.nodes)}

    def note(c: Context) -> int | None:
        if edit(c) is not None:
            hit.append(number[id(c.node)])
        return None

    apply(infer, note)
    return hit


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_at_any_one_node_is_refuted_by_its_id(name: str) -> None:
    """At each node in turn: the rule, and only the rule; beyond the logits every difference is of the chain (JG020)."""
    edit, expected = FAULTS[name]
    train, infer = toy()
    hit = places(edit)
    assert hit
    for target in hit:
        node = infer.nodes[target]
        mutated = apply(infer, lambda c, node=node: edit(c) if c.node is node else None)
        if mutated.semantic_digest == infer.semantic_digest:
            continue
        result = verify(train, mutated)
        rules = {fault.rule for fault in result.faults}
        chain = {"JG020"} if node.fqn in ("lm_head", "logprob") else set()
        assert result.verdict is Verdict.VIOLATED
        assert rules <= expected | chain, (target, node.op, node.fqn, result.text())
        assert rules


def test_a_kernel_alone_is_contained_and_not_bitwise() -> None:
    """At one node of each op: what runs is not what is computed."""
    train, infer = build("train", layers=1), build("infer", layers=1)
    for target in {node.op: i for i, node in enumerate(infer.nodes) if node.inputs}.values():
        nodes = [replace(n, kernel="other") if i == target else n for i, n in enumerate(infer.nodes)]
        result = verify(train, replace(infer, nodes=tuple(nodes)))
        assert (result.verdict, result.bitwise) == (Verdict.CONTAINED, False)
        assert [(f.rule, f.infer) for f in result.faults] == [("JG015", target)]
        assert result.certificate is not None
        assert not result.certificate.bitwise


def test_consumers_that_only_training_has_change_nothing() -> None:
    """Saved activations, a loss, one more GEMM on the same quantised activation (N13)."""
    train, infer = toy()
    b = TermBuilder()
    new: list[int] = []
    for node in train.nodes:
        b.where = replace(b.where, fqn=node.fqn, role=node.role, phase=node.phase, source=node.source)
        inputs = [new[i] for i in node.inputs]
        new.append(b.intern(node.op, inputs, dict(node.attrs), node.type.shape, node.type.precision, node.kernel))
    extra = {f"saved.{i}": b.pointwise("sq", [t]) for i, t in enumerate(new) if b.per_token(t)}
    more = b.graph(train.name, {k: new[i] for k, i in train.outputs.items()} | extra, dict(train.meta))
    assert len(more.nodes) > len(train.nodes) + 50
    result = verify(with_meta(more, rules=train.meta["rules"]), infer)
    assert result.verdict is Verdict.CONTAINED, result.text()
    assert result.bitwise


def test_the_sequential_view_keeps_plain_graphs() -> None:
    forward = Forward(toy()[1])
    assert sequential(forward) is forward

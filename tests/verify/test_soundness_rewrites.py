"""Every rewrite of R keeps every bit: a program on which it fires, one beside it on which it does not, and numbers.

Each program is built twice, by the builder that normalises and by one that only records, and both graphs are run.  They
must agree in every bit, signed zeros included, on inputs with ties, subnormals, infinities and NaN (all NaN are one
value).  For the program beside it, `tempting` is what the rule would have made of it: other bits, so the condition of
the rule is needed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetgraph.interpret import interpret
from jetgraph.layout import Layouts, Value
from jetgraph.lowering import reference
from jetgraph.normal_form import TermBuilder
from jetgraph.precision import F32, Format
from tests.verify.toy_transformer import build

TOKENS, FEATURES = 7, 24
ROOT = Path(__file__).parents[2]


class Recording(TermBuilder):
    """The same constructors without a single rewrite."""

    def round(self, x: int, fmt: Format) -> int:
        precision = replace(F32, format=fmt)
        return self.intern("round", (x,), {"format": str(fmt)}, self.nodes[x].type.shape, precision)

    def neg(self, x: int) -> int:
        return self.intern("neg", (x,), {}, self.nodes[x].type.shape, self.precision(x))

    def pointwise(self, op, inputs, attrs=None, kernel=""):
        widest = max(inputs, key=self.num_features)
        shape = self._shape(any(map(self.per_token, inputs)), self.num_features(widest))
        return self.intern(op, tuple(inputs), attrs or {}, shape, F32, kernel)

    def broadcast(self, x, factors):
        sizes, present = zip(*factors, strict=True)
        size = 1
        for n in sizes:
            size *= n
        attrs = {"sizes": sizes, "present": tuple(map(int, present))}
        return self.intern("broadcast", (x,), attrs, self._shape(self.per_token(x), size), self.precision(x))

    def slice(self, x, outer, size, inner, start, stop):
        attrs = {"outer": outer, "size": size, "inner": inner, "start": start, "stop": stop}
        shape = self._shape(self.per_token(x), outer * (stop - start) * inner)
        return self.intern("slice", (x,), attrs, shape, self.precision(x))

    def cat(self, parts, outer, sizes, inner):
        attrs = {"outer": outer, "sizes": tuple(sizes), "inner": inner}
        shape = self._shape(True, outer * sum(sizes) * inner)
        return self.intern("cat", tuple(parts), attrs, shape, self.precision(parts[0]))


class RecordingLayouts(Layouts):
    def _over_cat(self, op, values, fmt, attrs, kernel):
        return None


Program = Callable[[TermBuilder, int, int], int]
"""(builder, terms x and y of [T, 24] in FP32) → the result's term"""


@dataclass(frozen=True)
class Rewrite:
    fires: Program
    beside: Program
    tempting: Program


def add(b: TermBuilder, x: int, y: int) -> int:
    return b.pointwise("add", [x, y])


def sub(b: TermBuilder, x: int, y: int) -> int:
    return b.pointwise("sub", [x, y])


def mul(b: TermBuilder, x: int, y: int) -> int:
    return b.pointwise("mul", [x, y])


def bf16(b: TermBuilder, x: int) -> int:
    return b.round(x, Format.BF16)


def joined(b: TermBuilder, *terms: int) -> int:
    return b.cat(terms, 1, [b.num_features(t) for t in terms], 1)


def part(b: TermBuilder, x: int, start: int, stop: int) -> int:
    return b.slice(x, 1, b.num_features(x), 1, start, stop)


REWRITES = {
    "round of a value already in that format": Rewrite(
        lambda b, x, y: bf16(b, bf16(b, x)), lambda b, x, y: bf16(b, x), lambda b, x, y: x
    ),
    "widening keeps the number": Rewrite(
        lambda b, x, y: add(b, b.round(bf16(b, x), Format.F32), y),
        lambda b, x, y: add(b, bf16(b, x), y),
        lambda b, x, y: add(b, x, y),
    ),
    "neg out of round": Rewrite(
        lambda b, x, y: bf16(b, b.neg(x)), lambda b, x, y: bf16(b, sub(b, y, x)), lambda b, x, y: b.neg(bf16(b, x))
    ),
    "neg of neg": Rewrite(lambda b, x, y: b.neg(b.neg(x)), lambda b, x, y: b.neg(x), lambda b, x, y: x),
    "mul by 1": Rewrite(
        lambda b, x, y: mul(b, x, b.const(1.0)),
        lambda b, x, y: mul(b, x, b.const(1.0 + 2**-23)),
        lambda b, x, y: x,
    ),
    "neg out of mul": Rewrite(
        lambda b, x, y: mul(b, b.neg(x), y),
        lambda b, x, y: b.pointwise("silu", [b.neg(x)]),
        lambda b, x, y: b.neg(b.pointwise("silu", [x])),
    ),
    "add of neg is sub": Rewrite(
        lambda b, x, y: add(b, x, b.neg(y)), lambda b, x, y: sub(b, x, b.neg(y)), lambda b, x, y: sub(b, x, y)
    ),
    "pow 1": Rewrite(
        lambda b, x, y: b.pointwise("pow", [x], {"exponent": 1.0}),
        lambda b, x, y: b.pointwise("pow", [x], {"exponent": 3.0}),
        lambda b, x, y: x,
    ),
    "commuted operands": Rewrite(
        lambda b, x, y: joined(b, add(b, x, y), mul(b, y, x), add(b, y, x), mul(b, x, y)),
        lambda b, x, y: joined(b, sub(b, x, y), sub(b, y, x)),
        lambda b, x, y: joined(b, sub(b, y, x), sub(b, y, x)),
    ),
    "slice of cat": Rewrite(
        lambda b, x, y: part(b, joined(b, x, y, x), 24, 72),
        lambda b, x, y: part(b, joined(b, x, y), 12, 36),
        lambda b, x, y: part(b, joined(b, x, y), 0, 24),
    ),
    "slice of slice": Rewrite(
        lambda b, x, y: part(b, part(b, x, 4, 20), 2, 9),
        lambda b, x, y: b.slice(b.slice(x, 2, 12, 1, 3, 9), 1, 12, 1, 2, 8),
        lambda b, x, y: b.slice(x, 1, 24, 1, 5, 11),
    ),
    "cat of cat": Rewrite(
        lambda b, x, y: joined(b, joined(b, x, y), y),
        lambda b, x, y: b.cat([b.cat([x, y], 2, [12, 12], 1), y], 1, [48, 24], 1),
        lambda b, x, y: b.cat([x, y, y], 1, [24, 24, 24], 1),
    ),
    "cat of adjacent slices": Rewrite(
        lambda b, x, y: joined(b, part(b, x, 0, 10), part(b, x, 10, 24)),
        lambda b, x, y: joined(b, part(b, x, 10, 24), part(b, x, 0, 10)),
        lambda b, x, y: x,
    ),
}
LAID_OUT = {"pointwise over cat"}
ATEN = {"slice_scatter is cat", "matmul with K = 1 is mul"}
ENGINE = {"merged weight is its linears", "table[position] is its formula"}
"""Fired by the engine's lifter on live tensors: tests/engine, and below for merged FP8 weights."""


def data(seed: int) -> dict[str, Tensor]:
    """[T, 24] FP32: numbers of all sizes, ties of BF16 rounding, and what makes identities fail."""
    g = torch.Generator().manual_seed(seed)
    special = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 3e38, -3e38, float("inf"), float("-inf"), float("nan")]
    special += [1.00390625, 1.01171875, -1.00390625, 448.00003, 2.0**-133, 1.17549435e-38, 65504.0]
    values = {}
    for name in ("x", "y"):
        x = torch.randn(TOKENS, FEATURES, generator=g) * torch.exp2(torch.randint(-9, 9, (TOKENS, 1), generator=g))
        places = torch.randperm(x.numel(), generator=g)[: len(special)]
        x.view(-1)[places] = torch.tensor(special)
        values[name] = x
    return values


def run(program: Program, builder: TermBuilder, values: dict[str, Tensor]) -> Tensor:
    x, y = (builder.intern("input", (), {"name": n}, ("T", FEATURES), F32) for n in ("x", "y"))
    return interpret(builder.graph("g", {"out": program(builder, x, y)}, {}), values)["out"]


def bits(x: Tensor) -> Tensor:
    x = x.float()
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x).view(torch.int32)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rule", REWRITES)
def test_fires_and_keeps_every_bit(rule: str, seed: int) -> None:
    normal, recording = TermBuilder(), Recording()
    values = data(seed)
    got, want = (run(REWRITES[rule].fires, b, values) for b in (normal, recording))
    assert normal.rules[rule], normal.rules
    assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("rule", REWRITES)
def test_does_not_fire_beside_it_where_it_would_change_bits(rule: str) -> None:
    normal, values = TermBuilder(), data(0)
    case = REWRITES[rule]
    got = run(case.beside, normal, values)
    assert not normal.rules[rule]
    assert torch.equal(bits(got), bits(run(case.beside, Recording(), values)))
    assert not torch.equal(bits(got), bits(run(case.tempting, Recording(), values)))


def test_what_is_no_rewrite() -> None:
    """x + 0 turns -0 into +0; addition does not associate; dividing is not multiplying by the reciprocal."""
    values = data(1)
    b = TermBuilder()
    run(lambda b, x, y: add(b, x, b.const(0.0)), b, values)
    assert any(n.op == "add" for n in b.nodes)
    pairs = [
        (lambda b, x, y: add(b, x, b.const(0.0)), lambda b, x, y: x),
        (lambda b, x, y: add(b, add(b, x, y), y), lambda b, x, y: add(b, x, add(b, y, y))),
        (lambda b, x, y: b.pointwise("div", [x, b.const(3.0)]), lambda b, x, y: mul(b, x, b.const(1 / 3))),
    ]
    for left, right in pairs:
        assert not torch.equal(bits(run(left, Recording(), values)), bits(run(right, Recording(), values)))
        kinds = [TermBuilder(), TermBuilder()]
        for program, builder in zip((left, right), kinds, strict=True):
            run(program, builder, values)
        assert kinds[0].digests[-1] != kinds[1].digests[-1]


@pytest.mark.parametrize("program", [
    lambda b, x, y: b.pointwise("pow", [x], {"exponent": 2.0}),
    lambda b, x, y: mul(b, x, b.broadcast(b.neg(part(b, y, 0, 1)), [(4, False), (6, False)])),
    lambda b, x, y: mul(b, x, b.broadcast(part(b, y, 0, 4), [(2, True), (2, True), (6, False), (1, False)])),
    lambda b, x, y: b.neg(b.const(2.5)),
])  # fmt: skip
def test_rewrites_that_are_not_counted(program: Program) -> None:
    values = data(2)
    assert torch.equal(bits(run(program, TermBuilder(), values)), bits(run(program, Recording(), values)))


# ---------------------------------------------------------------------------------------------- random programs, orders


UNARY = ("sq", "silu", "neg", "round", "pow1", "mul1", "slice")
BINARY = ("add", "sub", "mul", "cat")


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    step = st.tuples(st.sampled_from(UNARY + BINARY), st.integers(0, 99), st.integers(0, 99))
    return draw(st.lists(step, min_size=1, max_size=14))


def follow(b: TermBuilder, x: int, y: int, program: list[tuple[str, int, int]]) -> int:
    terms = [x, y]
    for op, i, j in program:
        left, right = terms[i % len(terms)], terms[j % len(terms)]
        width = b.num_features(left)
        if op == "round":
            new = bf16(b, left)
        elif op == "neg":
            new = b.neg(left)
        elif op == "pow1":
            new = b.pointwise("pow", [left], {"exponent": 1.0})
        elif op == "mul1":
            new = mul(b, left, b.const(1.0))
        elif op == "slice":
            start = j % width
            new = part(b, left, start, width) if start else left
        elif op == "cat":
            new = joined(b, b.round(left, Format.F32), b.round(right, Format.F32)) if width < 96 else left
        elif op in BINARY:
            new = b.pointwise(op, [left, right]) if width == b.num_features(right) else left
        else:
            new = b.pointwise(op, [left])
        terms.append(new)
    return terms[-1]


@settings(max_examples=150)
@example([("slice", 0, 1), ("pow1", 2, 0), ("silu", 3, 0)], 0)  # silu of a strided value: other last bits in ATen
@given(steps(), st.integers(0, 5))
def test_random_programs_keep_every_bit(program: list[tuple[str, int, int]], seed: int) -> None:
    values = data(seed)
    got, want = (run(lambda b, x, y: follow(b, x, y, program), b, values) for b in (TermBuilder(), Recording()))
    assert torch.equal(bits(got), bits(want))


@settings(max_examples=100)
@given(steps(), st.randoms(use_true_random=False))
def test_any_order_of_rules_gives_one_normal_form(program: list[tuple[str, int, int]], rng) -> None:
    """Rewriting a recorded graph node by node, in any order of visits and starting from any partial rewriting of it.

    Rules fire in constructors, so their order is the order in which nodes are made and remade: a graph that was
    half normalised, in any half, comes to the same terms as one normalised at once.
    """
    recording, direct = Recording(), TermBuilder()
    outs = []
    for b in (recording, direct):
        x, y = (b.intern("input", (), {"name": n}, ("T", FEATURES), F32) for n in ("x", "y"))
        outs.append(follow(b, x, y, program))
    graph = recording.graph("g", {"out": outs[0]}, {})
    half = remade(graph, TermBuilder(), lambda: rng.random() < 0.5)
    whole = remade(half, TermBuilder(), lambda: True)
    again = remade(whole, TermBuilder(), lambda: True)
    assert whole.semantic_digest == direct.graph("g", {"out": outs[1]}, {}).semantic_digest
    assert again.semantic_digest == whole.semantic_digest


def remade(graph, b: TermBuilder, normalise: Callable[[], bool]):
    """The graph with some nodes made by the normalising constructors and the others only recorded."""
    recording = Recording()
    recording.nodes, recording.digests, recording._index = b.nodes, b.digests, b._index
    new: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        to = b if normalise() else recording
        inputs, attrs = [new[i] for i in node.inputs], dict(node.attrs)
        if node.op in ("input", "const"):
            new[index] = to.intern(node.op, (), attrs, node.type.shape, node.type.precision)
        elif node.op == "round":
            new[index] = to.round(inputs[0], node.type.precision.format)
        elif node.op == "neg":
            new[index] = to.neg(inputs[0])
        elif node.op in ("slice", "cat"):
            new[index] = getattr(to, node.op)(inputs if node.op == "cat" else inputs[0], **attrs)
        else:
            new[index] = to.pointwise(node.op, inputs, attrs)
    return b.graph(graph.name, {k: new[i] for k, i in graph.outputs.items()}, {})


# ------------------------------------------------------------------------------------------------------ rules of layout


def over_cat(layouts: Layouts, x: int, y: int) -> Value:
    """cat of two halves, negated on one side, times y: as rotate-half of a rotary embedding."""
    value, other = layouts.token_matrix(x), layouts.token_matrix(y)
    low, high = layouts.slice(value, 1, 0, 12), layouts.slice(value, 1, 12, 24)
    turned = layouts.cat([layouts.pointwise("neg", [high], Format.F32), low], 1)
    return layouts.pointwise("mul", [turned, other], Format.BF16)


def beside_over_cat(layouts: Layouts, x: int, y: int) -> Value:
    """The cat's axis is one of two factors of the dimension it is read in: the rule must leave it."""
    heads = layouts.view(layouts.token_matrix(x), (TOKENS, 4, 6))
    turned = layouts.cat([layouts.slice(heads, 2, 3, 6), layouts.slice(heads, 2, 0, 3)], 2)
    return layouts.pointwise("mul", [layouts.view(turned, (TOKENS, 24)), layouts.token_matrix(y)], Format.BF16)


@pytest.mark.parametrize(("program", "fires"), [(over_cat, True), (beside_over_cat, False)])
def test_pointwise_over_cat(program, fires: bool) -> None:
    values, results = data(3), []
    for builder, kind in ((TermBuilder(), Layouts), (Recording(), RecordingLayouts)):
        layouts = kind(builder, TOKENS)
        x, y = (builder.intern("input", (), {"name": n}, ("T", FEATURES), F32) for n in ("x", "y"))
        term = layouts.read(program(layouts, x, y))
        results.append(interpret(builder.graph("g", {"out": term}, {}), values)["out"])
        assert bool(builder.rules["pointwise over cat"]) == (fires and kind is Layouts)
    assert torch.equal(bits(results[0]), bits(results[1]))


def test_every_rule_has_its_cases() -> None:
    """A rule that a lifter counts and nobody tests is found here."""
    named: set[str] = set()
    files = [*(ROOT / "jetgraph").rglob("*.py"), *(ROOT / "integrations" / "jetgraph_vllm").glob("*.py")]
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Subscript(ast.Attribute(attr="rules"), ast.Constant(name)):
                    named.add(name)
    assert named == set(REWRITES) | LAID_OUT | ATEN | ENGINE


# -------------------------------------------------------------------------------- merged weights and shards, in numbers


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    return reference.quantize(weight, 128, 128, 448.0, 1e-12, "div", False)


def same_codes(rows: list[int], seed: int = 0) -> bool:
    """Whether a merged weight quantised on one grid holds the codes of its parts quantised on their own."""
    g = torch.Generator().manual_seed(seed)
    parts = [(torch.randn(n, 256, generator=g) * 2**i).bfloat16() for i, n in enumerate(rows)]
    merged, first = quantised(torch.cat(parts)), 0
    for weight in parts:
        codes, scales = quantised(weight)
        mine = merged[0][first : first + len(weight)].float()
        of_row = merged[1][torch.arange(first, first + len(weight)) // 128]
        if not torch.equal(mine, codes.float()) or not torch.equal(of_row, scales[torch.arange(len(weight)) // 128]):
            return False
        first += len(weight)
    return True


@pytest.mark.parametrize(("rows", "same"), [
    ([256, 128, 128], True), ([256, 128, 72], True), ([576, 192, 192], False), ([1216, 1216], False),
])  # fmt: skip
def test_one_grid_for_all_parts_iff_all_but_the_last_are_whole_blocks(rows: list[int], same: bool) -> None:
    assert same_codes(rows) is same


def test_n10_an_outlier_row_reaches_over_the_shards_border() -> None:
    """W[896,128] = 0.02, row 447 = 0.6: over 2 ranks row 448 is quantised with or without the outlier."""
    weight = torch.full((896, 128), 0.02)
    weight[447] = 0.6
    whole, shard = quantised(weight.bfloat16()), quantised(weight[448:].bfloat16())
    assert whole[0][448, 0].float() != shard[0][0, 0].float()
    assert torch.equal(whole[0][512:].float(), shard[0][64:].float())


def test_a_weight_cut_at_whole_blocks_gives_the_same_products() -> None:
    """Column-parallel, N/tp ≡ 0 mod 128: the ranks' results side by side are the whole result, bit for bit."""
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(5, 256, generator=g).bfloat16(), torch.randn(512, 256, generator=g).bfloat16()
    a = reference.quantize(x, 1, 128, 448.0, 1e-12, "div", False)
    whole = reference.fp8_gemm(*a, *quantised(w), 128)
    ranks = [reference.fp8_gemm(*a, *quantised(shard), 128) for shard in w.chunk(4)]
    assert torch.equal(whole, torch.cat(ranks, 1))


# -------------------------------------------------------------------------------------------------- split sums, experts


def gemm_graph(op: str, **attrs):
    b = TermBuilder()
    x, w = b.intern("input", (), {"name": "x"}, ("T", 1024), F32), b.parameter("w", (64, 1024), F32)
    y = b.intern(op, (x, w), {"contraction": "nt", **attrs}, ("T", 64), F32)
    return b.graph("g", {"y": y}, {})


def test_partial_sums_in_bf16_change_most_outputs_in_fp32_only_the_order() -> None:
    g = torch.Generator().manual_seed(2)
    values = {"x": torch.randn(64, 1024, generator=g), "w": torch.randn(64, 1024, generator=g)}
    one, wide, narrow = (
        interpret(graph, values)["y"].bfloat16()
        for graph in (
            gemm_graph("gemm"),
            gemm_graph("row_parallel_gemm", parts=8, wire="f32"),
            gemm_graph("row_parallel_gemm", parts=8, wire="bf16"),
        )
    )
    assert (one != narrow).float().mean() > 0.4
    assert (one != wide).float().mean() < 0.02
    exact = {k: v.sign() for k, v in values.items()}  # every partial sum is exact: order cannot show
    assert torch.equal(*(interpret(gemm_graph(*a[0], **a[1]), exact)["y"] for a in (
        (("gemm",), {}), (("row_parallel_gemm",), {"parts": 8, "wire": "f32"}))))  # fmt: skip


def test_routing_is_defined() -> None:
    """Two of three experts by softmax score, ties to the lowest index, renormalised; combined in expert order."""
    b = TermBuilder()
    logits = b.intern("input", (), {"name": "logits"}, ("T", 3), F32)
    results = [b.intern("input", (), {"name": f"y{e}"}, ("T", 2), F32) for e in range(3)]
    attrs = {"top_k": 2, "score": "softmax", "renormalise": True, "scale": 2.0, "tie_break": "lowest index"}
    weights = b.intern("route", (logits,), attrs | {"selection": "computed", "capacity": None}, ("T", 3), F32)
    out = b.intern("combine", (weights, *results), {"order": "expert", "format": "f32"}, ("T", 2), F32)
    graph = b.graph("g", {"weights": weights, "out": out}, {})
    values = {"logits": torch.tensor([[0.0, 1.0, 0.0], [5.0, 5.0, 5.0]])}
    values |= {f"y{e}": torch.full((2, 2), float("nan") if e == 2 else 10.0**e) for e in range(3)}
    found = interpret(graph, values)
    share = torch.tensor(1.0).sigmoid() * 2
    torch.testing.assert_close(found["weights"], torch.tensor([[2 - share, share, 0.0], [1.0, 1.0, 0.0]]))
    want = found["weights"][:, :1] * 1.0 + found["weights"][:, 1:2] * 10.0
    assert torch.equal(found["out"], want.expand(2, 2))  # the expert not chosen (NaN) is not even multiplied by 0


# ---------------------------------------------------------------------------------------------- prefill is any chunking


def test_rows_of_a_prefix_are_the_rows_of_the_whole() -> None:
    """Prefill, decode, chunks and padding are one function: on row-invariant kernels a prefix has the same bits."""
    kernels = {"gemm": "jetgraph::row_tile_gemm", "attention": "jetgraph::attention"}
    graph = build("train", layers=1, vocabulary=64)
    nodes = [replace(n, kernel=kernels.get(n.op, n.kernel)) for n in graph.nodes]
    graph = replace(graph, nodes=tuple(nodes))
    g = torch.Generator().manual_seed(3)
    leaves = {
        n.attr("name"): torch.randn(n.type.shape, generator=g).to(torch.bfloat16) * 0.1
        for n in graph.nodes
        if n.op == "parameter"
    }
    tokens = {"token": torch.randint(0, 64, (40,), generator=g), "target": torch.randint(0, 64, (40,), generator=g)}

    def rows(count: int) -> dict[str, Tensor]:
        inputs = {k: v[:count] for k, v in tokens.items()} | {"position": torch.arange(count)}
        return interpret(graph, {**leaves, **inputs})

    whole = rows(40)
    for count in (1, 2, 17, 39):
        for name, value in rows(count).items():
            assert torch.equal(value, whole[name][:count]), (count, name)

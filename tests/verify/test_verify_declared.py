"""What graphs declare beside their nodes (merged weights, shards, guards, sibling graphs, versions), and split sums.

Every bound has the pair just valid, just invalid.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest

from jetgraph.graph import PrecisionGraph
from jetgraph.precision import Format, Granularity, Scale
from jetgraph.verify import Result, Verdict, verify
from jetgraph.verify.declared import declared
from jetgraph.verify.finder import find
from jetgraph.verify.forward import Forward
from jetgraph.verify.guards import uncovered
from tests.verify.mutations import Context, apply
from tests.verify.toy_transformer import WEIGHT, build, with_meta

LAYER = "model.layers.0"


def rules(train: PrecisionGraph, infer: PrecisionGraph) -> list[str]:
    return [fault.rule for fault in verify(train, infer).faults]


def declares(infer: PrecisionGraph | None = None, train: PrecisionGraph | None = None, **meta: object) -> list[str]:
    infer = build("infer", layers=1) if infer is None else infer
    return [f.rule for f in declared(Forward(train or build("train", layers=1)), Forward(with_meta(infer, **meta)))]


# -------------------------------------------------------------------------------------------------- merged weights


@pytest.mark.parametrize(("first", "origin", "fault"), [
    (256, 0, False), (256, 256, False), (320, 320, False), (320, 64, False),
    (320, 0, True), (257, 0, True), (383, 256, True), (384, 256, False),
])  # fmt: skip
def test_a_part_starts_a_block(first: int, origin: int, fault: bool) -> None:
    segments = {f"{LAYER}.self_attn.v_proj.weight": ["qkv", first, origin]}
    assert declares(segments=segments) == ["JG006"] * fault


def test_where_a_block_straddles_is_said_in_rows() -> None:
    """Fused q 576, k 192: row 576 lies in rows 512–639 of a 128-row grid."""
    name = f"{LAYER}.self_attn.k_proj.weight"
    infer = with_meta(build("infer", layers=1), segments={name: [f"{LAYER}.self_attn.qkv_proj.weight", 576, 0]})
    (fault,) = verify(build("train", layers=1), infer).faults
    assert (fault.rule, fault.fqn) == ("JG006", name)
    assert fault.expected == "a block that starts at row 576 of model.layers.0.self_attn.qkv_proj.weight, its first"
    assert fault.got == "rows 512–639 of model.layers.0.self_attn.qkv_proj.weight in one block"
    assert fault.infer_source.startswith("engine.py:")
    assert name in fault.remedy


def test_the_same_segments_in_training_are_the_same_grid() -> None:
    segments = {f"{LAYER}.self_attn.v_proj.weight": ["qkv", 320, 0]}
    assert declares(segments=segments, train=with_meta(build("train", layers=1), segments=segments)) == []


def test_without_a_grid_nothing_straddles() -> None:
    plain = build("infer", layers=1, activation=None, weight=None)
    assert declares(plain, segments={f"{LAYER}.self_attn.v_proj.weight": ["qkv", 320, 0]}) == []
    rows = replace(WEIGHT, granularity=Granularity.per_block(1, 128))
    assert declares(build("infer", layers=1, weight=rows), segments={f"{LAYER}.mlp.up_proj.weight": ["m", 3, 0]}) == []
    whole = replace(WEIGHT, granularity=Granularity.per_tensor())
    up = f"{LAYER}.mlp.up_proj.weight"
    assert declares(build("infer", layers=1, weight=whole), segments={up: ["m", 512, 0]}) == []
    assert declares(build("infer", layers=1, weight=whole), segments={up: ["m", 256, 0]}) == ["JG006"]


# ------------------------------------------------------------------------------------------------------------ shards


@pytest.mark.parametrize(("name", "axis", "parts", "fault"), [
    ("mlp.gate_proj", 0, 4, False),
    ("mlp.gate_proj", 0, 8, True),  # 64 rows a rank
    ("mlp.gate_proj", 0, 3, True),  # no whole rows
    ("mlp.down_proj", 1, 4, False),
    ("mlp.down_proj", 1, 8, True),
])  # fmt: skip
def test_shards_hold_whole_blocks(name: str, axis: int, parts: int, fault: bool) -> None:
    assert declares(shards={f"{LAYER}.{name}.weight": [axis, parts]}) == ["JG007"] * fault


def test_along_k_the_activations_groups_count_too() -> None:
    fine = replace(WEIGHT, granularity=Granularity.per_block(128, 32))
    infer = build("infer", layers=1, weight=fine)
    shards = {f"{LAYER}.mlp.down_proj.weight": [1, 8]}
    assert declares(infer, shards=shards) == ["JG007"]
    groups = Scale(Granularity.per_group(64))
    assert declares(build("infer", layers=1, weight=fine, activation=groups), shards=shards) == []


def test_training_that_cuts_the_same_way_quantises_the_same_blocks() -> None:
    shards = {f"{LAYER}.mlp.gate_proj.weight": [0, 8]}
    assert declares(shards=shards, train=with_meta(build("train", layers=1), shards=shards)) == []


def test_n10_qwen_shapes_per_rank() -> None:
    """N10: kv 64 rows at tp = 2 (Qwen2.5-0.5B), 192 (Qwen3-30B-A3B at tp = 4): refused before loading."""
    kv = build("infer", layers=1, heads=2, kv_heads=2)  # 128 rows of K
    train = build("train", layers=1, heads=2, kv_heads=2)
    assert declares(kv, train, shards={f"{LAYER}.self_attn.k_proj.weight": [0, 2]}) == ["JG007"]
    moe = [build(side, layers=1, intermediate=768) for side in ("infer", "train")]
    assert declares(*moe, shards={f"{LAYER}.mlp.gate_proj.weight": [0, 4]}) == ["JG007"]
    assert declares(*moe, shards={f"{LAYER}.mlp.gate_proj.weight": [0, 2]}) == []


# --------------------------------------------------------------------------------------------------- row-parallel sums


def row_parallel(parts: int, wire: str, name: str = "o_proj"):
    def edit(c: Context) -> int | None:
        if c.node.op != "gemm" or not c.node.fqn.endswith(name):
            return None
        attrs = {"contraction": "nt", "parts": parts, "wire": wire}
        return c.b.intern("row_parallel_gemm", c.inputs, attrs, c.node.type.shape, c.node.type.precision, c.node.kernel)

    return edit


def pair(train_edit, infer_edit) -> Result:
    graphs = [build(side) for side in ("train", "infer")]
    edits = (train_edit, infer_edit)
    return verify(*(g if edit is None else apply(g, edit) for g, edit in zip(graphs, edits, strict=True)))


def test_fp32_partials_are_contained_modulo_reduction_order() -> None:
    result = pair(None, row_parallel(2, "f32"))
    assert (result.verdict, result.exit_status, result.modulo) == (Verdict.CONTAINED, 0, ("reduction order",))
    assert not result.bitwise
    assert [f.rule for f in result.faults] == ["JG016", "JG016"]
    assert "CONTAINED: infer 'toy-infer' ⊑ train 'toy-train' modulo reduction order, not bitwise" in result.text()
    assert "got 2 partial sums added over a wire in f32" in result.text()
    assert result.certificate is not None
    assert result.certificate.verdict == "CONTAINED modulo reduction order"


def test_bf16_partials_are_a_rounding_difference() -> None:
    """59 % of outputs changed at tp = 8: this is no matter of order."""
    result = pair(None, row_parallel(8, "bf16"))
    assert result.verdict is Verdict.VIOLATED
    assert [(f.rule, f.op) for f in result.faults] == [("JG004", "row_parallel_gemm")] * 2
    assert result.modulo == ()


@pytest.mark.parametrize(("train", "infer", "expected"), [
    (row_parallel(2, "bf16"), row_parallel(2, "bf16"), []),
    (row_parallel(2, "f32"), row_parallel(4, "f32"), ["JG016"] * 2),
    (row_parallel(2, "bf16"), row_parallel(4, "bf16"), ["JG004"] * 2),
    (row_parallel(2, "bf16"), None, ["JG004"] * 2),
    (row_parallel(2, "f32"), None, ["JG016"] * 2),
    (row_parallel(2, "f32"), row_parallel(2, "bf16"), ["JG004"] * 2),
])  # fmt: skip
def test_how_both_sides_add(train, infer, expected: list[str]) -> None:
    assert [f.rule for f in pair(train, infer).faults] == expected


def test_other_faults_at_a_row_parallel_linear_are_found_as_ever() -> None:
    from tests.verify.mutations import MUTATIONS

    infer = apply(apply(build("infer"), MUTATIONS["activation 1x64"].edit), row_parallel(2, "f32"))
    faults = verify(build("train"), infer).faults
    assert sorted(f.rule for f in faults) == ["JG002"] * 8 + ["JG016"] * 2


def test_a_qualified_fault_hides_no_missing_observable() -> None:
    infer = apply(build("infer"), row_parallel(2, "f32"))
    infer = infer.restrict({k: i for k, i in infer.outputs.items() if k != "v.1"})
    assert verify(build("train"), infer).verdict is Verdict.UNKNOWN
    assert set(rules(build("train"), infer)) == {"JG016", "JG095"}


# -------------------------------------------------------------------------------------------------------------- experts


def route(**changes: object):
    def edit(c: Context) -> int | None:
        if c.node.op != "route":
            return None
        attrs = {**dict(c.node.attrs), **changes}
        return c.b.intern("route", c.inputs, attrs, c.node.type.shape, c.node.type.precision)  # type: ignore[arg-type]

    return edit


def moe(infer_edit=None, train_edit=None) -> list[str]:
    graphs = [build(side, layers=1, experts=3) for side in ("train", "infer")]
    edits = (train_edit, infer_edit)
    return rules(*(g if edit is None else apply(g, edit) for g, edit in zip(graphs, edits, strict=True)))


def test_an_moe_layer_is_contained() -> None:
    assert moe() == []


@pytest.mark.parametrize("change", [
    {"score": "sigmoid"}, {"top_k": 1}, {"renormalise": False}, {"scale": 2.5}, {"tie_break": "any"},
    {"selection": "replayed"},
])  # fmt: skip
def test_each_routing_attribute_is_compared(change: dict[str, object]) -> None:
    assert moe(route(**change)) == ["JG022"]
    assert moe(route(**change), route(**change)) == []


def test_a_router_in_fp8_is_a_routing_fault_and_no_other() -> None:
    def quantised(c: Context) -> int | None:
        if c.node.op != "gemm" or not c.node.fqn.endswith("mlp.gate"):
            return None
        scale = Scale(Granularity.per_group(128))
        return c.with_inputs([c.b.quantize(c.inputs[0], scale, "ref.quantize"), c.inputs[1]])

    assert moe(quantised) == ["JG022"]


def test_router_logits_not_rounded() -> None:
    def unrounded(c: Context) -> int | None:
        return c.with_inputs([c.b.nodes[c.inputs[0]].inputs[0]]) if c.node.op == "route" else None

    assert moe(unrounded) == ["JG022"]


@pytest.mark.parametrize("change", [{"order": "rank"}, {"format": "bf16"}])
def test_how_experts_are_combined(change: dict[str, str]) -> None:
    def edit(c: Context) -> int | None:
        if c.node.op != "combine":
            return None
        attrs = {**dict(c.node.attrs), **change}
        return c.b.intern("combine", c.inputs, attrs, c.node.type.shape, c.node.type.precision, c.node.kernel)

    assert moe(edit) == ["JG022"]


def test_two_experts_exchanged_are_an_operand_fault_not_routing() -> None:
    def exchanged(c: Context) -> int | None:
        w, first, second, *rest = c.inputs if c.node.op == "combine" else [0, 0, 0]
        return c.with_inputs([w, second, first, *rest]) if c.node.op == "combine" else None

    assert moe(exchanged) == ["JG012"]


def test_an_experts_weight_in_another_grid_is_no_routing_fault() -> None:
    finer = replace(WEIGHT, granularity=Granularity.per_block(64, 128))

    def edit(c: Context) -> int | None:
        mine = c.node.op == "quantize" and "experts.1.up" in str(dict(c.old(0).attrs).get("name"))
        return c.b.quantize(c.inputs[0], finer, c.node.kernel) if mine else None

    assert moe(edit) == ["JG002"]


def test_a_capacity_limit_couples_tokens_on_both_sides_alike() -> None:
    assert moe(route(capacity=64), route(capacity=64)) == ["JG019"]


def test_a_routing_attribute_nobody_could_read_is_unknown() -> None:
    unread = route(tie_break="unknown")
    assert moe(unread) == ["JG091"]
    assert moe(unread, unread) == ["JG091", "JG091"]


# ------------------------------------------------------------------------------------------- guards, families, versions


@pytest.mark.parametrize(("train", "infer", "left"), [
    ([], ["T <= 8"], []),
    (["T <= 8"], [], ["T <= 8"]),
    (["T <= 8"], ["T <= 8"], []),
    (["T <= 8"], ["T <= 9"], ["T <= 8"]),
    (["2 <= T"], ["2 <= T"], []),
    (["2 <= T"], ["1 <= T"], ["2 <= T"]),
    (["0 <= T"], [], []),
    (["2 <= T <= 8"], ["2 <= T", "T <= 8"], []),
    (["2 <= T <= 8"], ["2 <= T"], ["2 <= T <= 8"]),
    (["2 <= T", "T <= 8"], ["3 <= T <= 7"], []),
    (["T % 4 == 1"], ["T % 8 == 5"], []),
    (["T % 8 == 5"], ["T % 4 == 1"], ["T % 8 == 5"]),
    (["T % 4 == 1"], ["T % 8 == 6"], ["T % 4 == 1"]),
    (["T % 4 == 1"], ["T == 53"], []),
    (["T % 4 == 1"], ["T == 54"], ["T % 4 == 1"]),
    (["T == 53"], ["T == 53"], []),
    (["T == 53"], ["53 <= T", "T <= 53"], []),
    (["T == 53"], ["53 <= T"], ["T == 53"]),
    (["T % 8 == 0"], ["T % 8 == 0", "T <= 9"], []),
    (["positions are consecutive"], ["positions are consecutive"], []),
    (["positions are consecutive"], ["positions are sorted"], ["positions are consecutive"]),
    (["s0 <= 64"], ["s0 <= 64"], ["s0 <= 64"]),  # symbols with the same name on both sides
    (["Eq(s0, 64)"], ["Eq(s0, 64)"], ["Eq(s0, 64)"]),
    (["B == 1"], ["B == 1"], ["B == 1"]),
    (["T"], ["T <= 8"], ["T"]),
    (["T < 8"], ["T <= 7"], ["T < 8"]),  # another way to write it is not understood, and so not covered
])  # fmt: skip
def test_guards(train: list[str], infer: list[str], left: list[str]) -> None:
    assert uncovered(train, infer) == left
    faults = declares(train=with_meta(build("train", layers=1), guards=train), guards=infer)
    assert faults == ["JG094"] * len(left)


def test_coverage_of_guards_by_trying_every_count() -> None:
    """Never a wrong yes; and no wrong no between bounds, nor between congruences."""

    def holds(guard: str, count: int) -> bool:
        return bool(eval(guard, {"T": count}))  # the five forms are Python

    bounds = ["2 <= T", "T <= 9", "3 <= T <= 8", "T == 6"]
    congruences = ["T % 2 == 0", "T % 4 == 2", "T % 4 == 1", "T % 8 == 2"]
    decided = 0
    for theirs, first, second in product(bounds + congruences, repeat=3):
        admitted = [t for t in range(30) if holds(first, t) and holds(second, t)]
        true = all(holds(theirs, t) for t in admitted)
        said = not uncovered([theirs], [first, second])
        assert said <= true, (theirs, first, second)
        alike = any({theirs, first, second} <= set(kind) for kind in (bounds, congruences))
        if admitted and alike and (first == second or first in bounds):
            assert said == true, (theirs, first, second)
            decided += 1
    assert decided > 70


def test_a_graph_compiled_later() -> None:
    infer = build("infer", layers=1)
    own = infer.semantic_digest
    assert declares(infer, family={"T <= 16, CUDA graph": own, "any T": own}) == []
    faults = declared(
        Forward(build("train", layers=1)), Forward(with_meta(infer, family={"any T": own, "T <= 16": "ab" * 32}))
    )
    assert [(f.rule, f.fqn) for f in faults] == [("JG094", "T <= 16")]
    assert "verify anything else before it serves" in faults[0].remedy


def test_uncovered_is_unknown_never_contained() -> None:
    result = verify(with_meta(build("train"), guards=["T <= 64"]), build("infer"))
    assert (result.verdict, result.exit_status) == (Verdict.UNKNOWN, 3)
    assert result.certificate is None


def test_versions_of_kv_entries() -> None:
    entries = {"prefix cache, adapter b": "step 8, adapter b", "request 1": "step 8"}
    result = verify(build("train"), with_meta(build("infer"), state={"version": "step 8", "entries": entries}))
    assert (result.verdict, result.modulo, result.bitwise) == (Verdict.CONTAINED, ("version vector",), False)
    assert [(f.rule, f.fqn) for f in result.faults] == [("JG018", "prefix cache, adapter b")]
    assert result.certificate is not None  # it speaks of entries of one version, as it always does
    assert json.loads(result.to_json())["exit_status"] == 0


@pytest.mark.parametrize(("key", "value"), [
    ("segments", {f"{LAYER}.mlp.up_proj.weight": ["m"]}), ("segments", 3),
    ("shards", {f"{LAYER}.mlp.up_proj.weight": [2, 2]}), ("shards", {f"{LAYER}.mlp.up_proj.weight": [0, 0]}),
    ("state", {"version": "8"}), ("state", {"entries": {}}), ("family", ["abc"]), ("guards", 7),
])  # fmt: skip
def test_a_declaration_that_cannot_be_read_is_unknown(key: str, value: object) -> None:
    train = with_meta(build("train", layers=1), guards=["T <= 4"]) if key == "guards" else None
    infer = with_meta(build("infer", layers=1), **{key: value})
    faults = declared(Forward(train or build("train", layers=1)), Forward(infer))
    assert [(f.rule, f.fqn) for f in faults] == [("JG091", key)]


def test_the_sequential_view_is_only_a_view() -> None:
    """The finder alone compares terms as they are: a row-parallel GEMM is another op."""
    infer = apply(build("infer", layers=1), row_parallel(2, "f32"))
    assert not find(Forward(build("train", layers=1)), Forward(infer)).complete
    assert {Format.F32} == {n.type.precision.format for n in infer.nodes if n.op == "row_parallel_gemm"}

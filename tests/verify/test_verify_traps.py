"""Traps found by small counterexamples (containment.md): each looks contained or like many faults, and is not."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from jetgraph.graph import Node, PrecisionGraph, Role
from jetgraph.normal_form import TermBuilder
from jetgraph.precision import BF16, Format, Granularity
from jetgraph.verify import Verdict, verify
from jetgraph.verify.evidence import coupling
from jetgraph.verify.finder import find
from jetgraph.verify.forward import Forward
from tests.verify.mutations import MUTATIONS, Context, apply, eps
from tests.verify.toy_transformer import WEIGHT, build, rewrite, sha, with_meta


def rules(train: PrecisionGraph, infer: PrecisionGraph) -> list[str]:
    return [fault.rule for fault in verify(train, infer).faults]


def one(side: str, edit, **changes) -> PrecisionGraph:
    return apply(build(side, **changes), edit)


# ---------------------------------------------------------------------------------------------------------- vacuity


def test_the_empty_graph_proves_nothing() -> None:
    infer = build("infer")
    empty = PrecisionGraph("empty", (), {}, infer.meta)
    assert verify(build("train"), empty).verdict is not Verdict.CONTAINED


def test_a_graph_without_attention_proves_nothing() -> None:
    b = TermBuilder()
    graph = b.graph(
        "g",
        {"logits": b.pointwise("silu", [b.input("x")])},
        {**build("infer").meta, "parameters": {}, "operands": {}, "scope": {}},
    )
    assert "JG095" in rules(graph, graph)
    assert verify(graph, graph).verdict is Verdict.UNKNOWN


def test_a_loaded_bias_that_nobody_reads() -> None:
    infer = build("infer")
    parameters = {**infer.meta["parameters"], "lm_head.bias": {"digest": sha("b"), "shape": [9], "format": "bf16"}}
    assert rules(build("train"), with_meta(infer, parameters=parameters)) == ["JG095"]
    assert not rules(build("train"), with_meta(infer, parameters=parameters, dead=["lm_head.bias"]))


def test_k_observed_before_rotary_is_not_what_attention_reads() -> None:
    """Checking the cache alone or the call alone missed a fault each way."""
    infer = build("infer")
    other = next(
        i for i, n in enumerate(infer.nodes) if n.op == "round" and infer.nodes[n.inputs[0]].fqn.endswith("k_proj")
    )
    assert set(rules(build("train"), replace(infer, outputs={**infer.outputs, "k.0": other}))) & {"JG020", "JG095"}


# ------------------------------------------------------------------------------------------------------------- terms


def test_two_engine_nodes_may_share_an_image() -> None:
    """Training quantises once what the engine quantises twice: φ is a homomorphism, not injective."""
    infer = build("infer")
    index = next(i for i, n in enumerate(infer.nodes) if n.op == "quantize")
    copy = infer.nodes[index]
    nodes: list[Node] = []
    new: dict[int, int] = {}
    for i, node in enumerate(infer.nodes):
        inputs = [new[j] for j in node.inputs]
        if node.op == "gemm" and node.fqn.endswith("0.self_attn.v_proj"):
            nodes.append(replace(copy, inputs=(new[copy.inputs[0]],)))
            inputs[0] = len(nodes) - 1
        nodes.append(replace(node, inputs=tuple(inputs)))
        new[i] = len(nodes) - 1
    twice = PrecisionGraph(infer.name, tuple(nodes), {k: new[i] for k, i in infer.outputs.items()}, infer.meta)
    result = verify(build("train"), twice)
    assert result.verdict is Verdict.CONTAINED
    assert result.certificate is not None


def test_operands_of_add_may_be_exchanged_but_not_those_of_sub() -> None:
    def exchange(op: str) -> PrecisionGraph:
        infer = build("infer")
        swapped = [replace(n, inputs=n.inputs[::-1]) if n.op == op else n for n in infer.nodes]
        return PrecisionGraph(infer.name, tuple(swapped), infer.outputs, infer.meta)

    assert not rules(build("train"), exchange("add"))
    assert set(rules(build("train"), exchange("sub"))) == {"JG012"}


def test_a_dropped_bias_is_refuted_once() -> None:
    def bias(c: Context) -> int | None:
        if c.node.op != "gemm" or not c.node.fqn.endswith("q_proj"):
            return None
        b = c.b.parameter(f"{c.node.fqn}.bias", [256])
        return c.b.pointwise("add", [c.with_inputs(c.inputs), b])

    assert rules(one("train", bias), build("infer")) == ["JG011", "JG011"]
    assert rules(build("train"), one("infer", bias)).count("JG011") == 2


def test_minus_zero_is_another_number() -> None:
    def constant(value: float) -> PrecisionGraph:
        b = TermBuilder()
        return b.graph("g", {"y": b.pointwise("add", [b.input("x"), b.const(value)])}, {})

    assert not find(Forward(constant(0.0)), Forward(constant(0.0))).faults
    assert [f.rule for f in find(Forward(constant(0.0)), Forward(constant(-0.0))).faults] == ["JG011"]


def test_swapped_k_and_v() -> None:
    def swap(c: Context) -> int | None:
        return c.with_inputs([c.inputs[0], c.inputs[2], c.inputs[1]]) if c.node.op == "attention" else None

    assert set(rules(build("train"), one("infer", swap))) == {"JG012"}


def test_poison_never_equals_poison() -> None:
    edit = MUTATIONS["output read from empty"].edit
    assert set(rules(one("train", edit), one("infer", edit))) >= {"JG011"}


def test_backward_nodes_are_no_images() -> None:
    """The same term computed only for a gradient is not part of the forward graph; extra outputs do not matter."""
    train = build("train", backward=True)
    assert not rules(train, build("infer"))
    assert rules(train, replace(build("infer"), outputs={**build("infer").outputs, "grad": 0})) == ["JG020"]


def test_unknown_silences_what_follows_but_not_other_faults() -> None:
    def unknown(c: Context) -> int | None:
        if c.node.op != "rsqrt":
            return None
        return c.b.intern("unknown", c.inputs, {"name": "aten::my_rsqrt"}, c.node.type.shape, c.node.type.precision)

    result = verify(build("train"), one("infer", unknown))
    assert result.verdict is Verdict.UNKNOWN
    assert {f.rule for f in result.faults} == {"JG090"}
    assert verify(one("train", unknown), build("infer")).verdict is Verdict.UNKNOWN
    both = apply(one("infer", unknown), MUTATIONS["attention scale"].edit)
    assert set(rules(build("train"), both)) == {"JG011", "JG090"}


def test_two_different_faults_are_both_roots() -> None:
    infer = apply(apply(build("infer"), eps), MUTATIONS["silu not rounded"].edit)
    assert sorted(rules(build("train"), infer)) == ["JG004"] * 2 + ["JG011"] * 5


def test_an_extra_round_is_one_fault() -> None:
    def extra(c: Context) -> int | None:
        return c.b.round(c.with_inputs(c.inputs), Format.BF16) if c.node.op == "rsqrt" else None

    assert rules(build("train"), one("infer", extra)) == ["JG004"] * 5


# ------------------------------------------------------------------------------------------------ weights and policy


@pytest.mark.parametrize("name", ["model.norm.weight", "model.rotary_emb.inv_freq", "model.embed_tokens.weight"])
def test_any_parameter_with_another_value(name: str) -> None:
    infer = build("infer")
    parameters = {**infer.meta["parameters"]}
    parameters[name] = {**parameters[name], "digest": sha("other")}
    assert rules(build("train"), with_meta(infer, parameters=parameters)) == ["JG017"]


def test_stored_codes_are_enough_for_a_quantised_weight_only() -> None:
    """An engine has no master of what it stores in FP8; of what it uses in bf16 it needs the digest."""
    infer = build("infer")
    quantised = {k: v for k, v in infer.meta["parameters"].items() if k not in infer.meta["operands"]}
    assert not rules(build("train"), with_meta(infer, parameters=quantised))
    del quantised["model.norm.weight"]
    assert rules(build("train"), with_meta(infer, parameters=quantised)) == ["JG091"]


def test_a_weight_quantised_at_load_with_another_grid_is_one_fault() -> None:
    """Graph, stored operand and policy all disagree: the graph's fault is the root."""
    finer = replace(WEIGHT, granularity=Granularity.per_block(64, 128))
    infer = with_meta(build("infer", weight=finer), scope=build("train").meta["scope"])
    assert rules(build("train"), infer) == ["JG002"] * 14


def test_quantised_outside_the_scope() -> None:
    pair = []
    for side in ("train", "infer"):
        graph = build(side)
        pair.append(with_meta(graph, scope={k: v for k, v in graph.meta["scope"].items() if "down_proj" not in k}))
    assert rules(*pair) == ["JG021"] * 4


def test_scopes_that_differ_name_the_layers() -> None:
    infer = build("infer")
    scope = {**infer.meta["scope"], "lm_head": {"activation": "bf16", "weight": "bf16"}}
    faults = verify(build("train"), with_meta(infer, scope=scope)).faults
    assert [(f.rule, f.fqn) for f in faults] == [("JG021", "lm_head")]


def test_no_scope_is_unknown() -> None:
    infer = build("infer")
    bare = PrecisionGraph(infer.name, infer.nodes, infer.outputs, {k: v for k, v in infer.meta.items() if k != "scope"})
    assert verify(build("train"), bare).verdict is not Verdict.CONTAINED


def test_no_meta_at_all_is_never_contained() -> None:
    bare = [PrecisionGraph(g.name, g.nodes, g.outputs, {}) for g in (build("train"), build("infer"))]
    assert verify(*bare).verdict is Verdict.UNKNOWN


# -------------------------------------------------------------------------------------------------------- row coupling


def test_what_couples_rows() -> None:
    graph = build("infer", layers=1)
    quantize = next(n for n in graph.nodes if n.op == "quantize" and "T" in n.type.shape)
    attention = next(n for n in graph.nodes if n.op == "attention")
    gemm = next(n for n in graph.nodes if n.op == "gemm")

    def reason(node: Node) -> bool:
        return coupling(node, [graph.nodes[i] for i in node.inputs]) is not None

    def with_scale(**changes: object) -> Node:
        scale = quantize.type.precision.scale
        assert scale is not None
        precision = replace(quantize.type.precision, scale=replace(scale, **changes))  # type: ignore[arg-type]
        return replace(quantize, type=replace(quantize.type, precision=precision))

    assert not any(map(reason, graph.nodes))
    assert reason(with_scale(granularity=Granularity.per_token_group(128)))
    assert reason(with_scale(granularity=Granularity.per_tensor()))
    assert not reason(with_scale(granularity=Granularity.per_token()))
    assert not reason(with_scale(granularity=Granularity.per_tensor(), dynamic=False))
    assert reason(replace(attention, attrs=tuple((k, "none" if k == "mask" else v) for k, v in attention.attrs)))
    assert reason(replace(gemm, attrs=(("contraction", "tn"),)))
    assert reason(replace(gemm, type=replace(gemm.type, shape=("T", "T"))))


# ------------------------------------------------------------------------------------------------------------- bitwise


def test_bitwise_needs_named_equal_row_invariant_kernels() -> None:
    def kernel(op: str, name: str) -> PrecisionGraph:
        infer = build("infer")
        nodes = tuple(replace(n, kernel=name) if n.op == op else n for n in infer.nodes)
        return PrecisionGraph(infer.name, nodes, infer.outputs, infer.meta)

    for infer in (kernel("attention", "flash"), kernel("gemm", ""), kernel("silu", "fused")):
        result = verify(build("train"), infer)
        assert (result.verdict, result.bitwise) == (Verdict.CONTAINED, False)
        assert set(rules(build("train"), infer)) == {"JG015"}
        assert result.certificate is not None
        assert not result.certificate.bitwise
        assert "not bitwise" in result.text()


# ---------------------------------------------------------------------------------------------------------------- time


def test_linear_time_also_when_all_is_wrong() -> None:
    """36 layers, every norm and every activation wrong: no candidate scan may go quadratic."""
    train, infer = build("train", layers=36), build("infer", layers=36)
    wrong = apply(apply(infer, eps), MUTATIONS["rotary products not rounded"].edit)
    start = time.perf_counter()
    assert len(find(Forward(train), Forward(wrong)).faults) == 36 * 10 + 1
    assert time.perf_counter() - start < 15  # 0.2 s alone; a quadratic scan takes minutes


def test_rewrite_without_change_is_the_identity() -> None:
    infer = build("infer")
    assert rewrite(infer, lambda *_: None) == infer
    assert Role.FPROP in {n.role for n in infer.nodes}


# ------------------------------------------------------------------------------------------------- containment's traps


def test_36_wrong_layers_and_a_wrong_head_are_37_faults_in_two_lines() -> None:
    def head_in_bf16(c: Context) -> int | None:
        if c.node.op != "gemm" or c.node.fqn != "lm_head":
            return None
        attrs = dict(c.node.attrs)
        return c.b.intern("gemm", c.inputs, attrs, c.node.type.shape, BF16, c.node.kernel)

    infer = apply(apply(build("infer", layers=36), MUTATIONS["attention scale"].edit), head_in_bf16)
    result = verify(build("train", layers=36), infer)
    assert len(result.faults) == 37
    assert [(f.first.rule, f.count, f.where) for f in result.folded] == [("JG011", 36, "layers 0–35"), ("JG010", 1, "")]
    text = result.text()
    assert "(37 faults in 2 lines)" in text
    assert text.count("at train modeling.py:") == text.count("infer engine.py:") == 2
    assert "expected scale 0.125; got scale 0.12625" in text
    assert "do: make attention at model.layers.*.self_attn use scale 0.125 instead of scale 0.12625" in text
    assert "expected f32; got bf16" in text
    assert "do: use a GEMM with f32 output for lm_head in the engine" in text


def test_temperature_in_bf16_is_of_the_observable_chain() -> None:
    """Both scale logits by 0.7; the engine rounds the quotient before log-softmax."""

    def scaled(rounds: bool):
        def edit(c: Context) -> int | None:
            if c.node.op != "log_softmax":
                return None
            quotient = c.b.pointwise("div", [c.inputs[0], c.b.const(0.7)])
            return c.with_inputs([c.b.round(quotient, Format.BF16) if rounds else quotient])

        return edit

    assert rules(one("train", scaled(False)), one("infer", scaled(False))) == []
    assert rules(one("train", scaled(False)), one("infer", scaled(True))) == ["JG020"]
    assert rules(one("train", scaled(True)), one("infer", scaled(False))) == ["JG020"]


def test_up_gate_instead_of_gate_up_in_the_merged_weight() -> None:
    """The merged [gate; up] is loaded as [up; gate]: the slices are right, the parameters under them exchanged."""
    names = ("gate_proj", "up_proj")

    def loaded_swapped(c: Context) -> int | None:
        if c.node.op != "parameter":
            return None
        name = str(c.node.attr("name"))
        mine = next((n for n in names if f".{n}." in name), None)
        if mine is None:
            return None
        return c.b.parameter(name.replace(mine, names[1 - names.index(mine)]), c.node.type.shape)  # type: ignore[arg-type]

    result = verify(build("train"), one("infer", loaded_swapped))
    assert [f.rule for f in result.faults] == ["JG013"] * 4
    assert {f.fqn.rpartition(".")[2] for f in result.faults} == set(names)
    assert "gate_proj.weight; got f8e4m3[128x128] of parameter model.layers.*.mlp.up_proj.weight" in result.text()


def test_symbols_with_the_same_name_on_both_sides_are_not_the_same_symbol() -> None:
    graphs = [with_meta(build(side), guards=["s0 <= 64"]) for side in ("train", "infer")]
    assert rules(*graphs) == ["JG094"]


def test_a_requantisation_at_load_shows_only_in_the_codes() -> None:
    infer = build("infer")
    name = "model.layers.0.mlp.down_proj.weight"
    operands = {**infer.meta["operands"], name: {**infer.meta["operands"][name], "digest": sha("power of two")}}
    (fault,) = verify(build("train"), with_meta(infer, operands=operands)).faults
    assert (fault.rule, fault.fqn) == ("JG017", name)
    assert "sync" in fault.remedy

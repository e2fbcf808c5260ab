"""Rows V*, C* and N13 of the public bug reports: the mutant that must be refused, by name, and what must still pass."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from typer.testing import CliRunner

from jetgraph.cli import app
from jetgraph.graph import PrecisionGraph
from jetgraph.normal_form import TermBuilder
from jetgraph.precision import Format, Precision
from jetgraph.verify import Verdict, verify
from tests.verify.mutations import MUTATIONS, Context, Edit, apply
from tests.verify.toy_transformer import build, with_meta


def swap_operands(op: str) -> Edit:
    def edit(c: Context) -> int | None:
        return c.with_inputs(c.inputs[::-1]) if c.node.op == op else None

    return edit


def per_tensor(c: Context) -> int | None:
    if c.node.op != "quantize" or "T" not in c.node.type.shape:
        return None
    from dataclasses import replace

    from jetgraph.precision import Granularity

    scale = c.node.type.precision.scale
    assert scale is not None
    return c.b.quantize(c.inputs[0], replace(scale, granularity=Granularity.per_tensor()), c.node.kernel)


def table_in_bf16(c: Context) -> int | None:
    """model.to(bf16) casts inv_freq: the engine reads the parameter rounded."""
    if c.node.op != "mul" or not c.reads("parameter") or c.node.fqn != "model.rotary_emb":
        return None
    rounded = [
        c.b.intern("round", (i,), {"format": "bf16"}, c.b.nodes[i].type.shape, Precision(Format.BF16))
        if c.old(port).op == "parameter"
        else i
        for port, i in enumerate(c.inputs)
    ]
    return c.with_inputs(rounded)


def head_in_f32(c: Context) -> int | None:
    """The logits are not rounded to BF16 on this side."""
    return c.inputs[0] if c.node.op == "round" and c.node.fqn == "lm_head" else None


def weight_before_cast(c: Context) -> int | None:
    """RMSNorm multiplies by its weight before the cast: the round of the normalised value is gone."""
    return c.inputs[0] if c.node.op == "round" and "layernorm" in c.node.fqn and c.old(0).op == "mul" and c.chain(
        c.node.inputs[0], ("mul", "broadcast")
    ) else None  # fmt: skip


MUTANTS: dict[str, tuple[Edit, set[str], str]] = {
    "N13 V11 eps": (MUTATIONS["eps"].edit, {"JG011"}, "input_layernorm"),
    "N13 activation per tensor": (per_tensor, {"JG002"}, "q_proj"),
    "N13 scale power of two": (MUTATIONS["activation power of two"].edit, {"JG003"}, "q_proj"),
    "N13 V11 operands of sub": (swap_operands("sub"), {"JG012"}, "self_attn"),
    "N13 weight of another layer": (MUTATIONS["K weight of the next layer"].edit, {"JG013"}, "k_proj"),
    "V3 silu keeps FP32": (MUTATIONS["silu not rounded"].edit, {"JG004"}, "mlp"),
    "V4 norm: weight before the cast": (weight_before_cast, {"JG004"}, "layernorm"),
    "V4 residual in FP32": (MUTATIONS["residual not rounded before norm"].edit, {"JG004"}, "layernorm"),
    "V5 inv_freq in BF16": (table_in_bf16, {"JG004", "JG011", "JG001"}, "rotary_emb"),
    "V17 FP32 head on one side": (head_in_f32, {"JG020", "JG004"}, ""),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_is_refused_and_named(name: str) -> None:
    edit, rules, place = MUTANTS[name]
    result = verify(build("train"), apply(build("infer"), edit))
    assert result.exit_status == 1
    assert {fault.rule for fault in result.faults} & rules, result.text()
    assert place in result.text()
    assert result.certificate is None


@pytest.mark.parametrize("name", ["V17 FP32 head on one side", "V3 silu keeps FP32", "V5 inv_freq in BF16"])
def test_the_same_change_on_both_sides_is_one_flow(name: str) -> None:  # [V17]
    edit = MUTANTS[name][0]
    assert verify(apply(build("train"), edit), apply(build("infer"), edit)).verdict is Verdict.CONTAINED


def test_n13_extra_consumers_in_training_still_pass() -> None:  # [N13, V8]
    """An induced subgraph match is broken by one extra edge; containment is not."""
    train = build("train")
    index = next(i for i, n in enumerate(train.nodes) if n.op == "quantize" and "T" in n.type.shape)
    b = TermBuilder()
    b.nodes, b.digests = list(train.nodes), list(train.node_digests)
    extra = b.intern("sq", (index,), {}, train.nodes[index].type.shape, Precision(Format.F32))
    more = PrecisionGraph(train.name, tuple(b.nodes), {**train.outputs, "grad.x": extra}, train.meta)
    assert verify(more, build("infer")).bitwise


def test_v10_ten_thousand_nodes_of_equal_layers_in_seconds_not_a_minute() -> None:  # [V10, N13]
    train, infer = build("train", layers=108), build("infer", layers=108)
    assert len(train.nodes) > 9_900
    start = time.process_time()
    assert verify(train, infer).bitwise
    assert time.process_time() - start < 20


def change_codes(graph: PrecisionGraph, number: int) -> PrecisionGraph:
    operands = {k: dict(v) for k, v in graph.meta["operands"].items()}
    for name in sorted(operands)[:number]:
        operands[name]["digest"] = "0" * 64
    return with_meta(graph, operands=operands)


def test_v16_c6_the_report_says_what_is_shared_and_what_is_quantised_again() -> None:
    said = verify(build("train"), build("infer"))
    assert "14 of 14 quantised weights are shared as the very codes that training uses" in said.text()
    assert "none re-quantised" in said.text()
    result = verify(build("train"), change_codes(build("infer"), 3))
    assert result.exit_status == 1
    assert "11 of 14 quantised weights are shared" in result.text()
    assert "3 (21.4%) re-quantised or of unknown origin" in result.text()
    assert len(result.weights.differing_codes) == 3
    bf16: Callable[[str], PrecisionGraph] = lambda side: build(side, activation=None, weight=None)  # noqa: E731
    assert "no quantised weights in the engine" in verify(bf16("train"), bf16("infer")).text()


def test_v1_kernels_that_depend_on_the_batch_are_reported_never_hidden() -> None:  # [V1]
    infer = build("infer")
    kernels = {name: {"row_invariant": False} for name in infer.meta["kernels"]}
    result = verify(build("train"), with_meta(infer, kernels=kernels))
    assert result.verdict is Verdict.CONTAINED
    assert not result.bitwise
    assert {f.rule for f in result.faults} == {"JG015"}
    assert "not bitwise" in result.text()


def test_c4_doctor_prints_every_version_and_a_gemm_value() -> None:
    text = CliRunner().invoke(app, ["doctor"]).output
    for name in ("jetgraph", "python", "torch", "transformers", "triton", "deep_gemm", "torchao", "vllm", "device"):
        assert any(line.split()[0] == name for line in text.splitlines()), name
    assert "3840 (expected 3840): ok" in text

"""`fp8_tensorwise`: the recipe of the peers trains here and is never contained: its scale couples tokens (JG019)."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import jetgraph
import jetgraph.lift.all
import jetgraph.lowering.torch_ops
from jetgraph.extract import expected_rollout
from jetgraph.interpret import interpret
from jetgraph.trainer import capture_step
from jetgraph.verify import Verdict, verify
from tests.core.small_models import random_ids, random_model
from tests.core.test_lift_refuses import TOKENS, lift

RULE = (448.0, 1e-12, "mulq/a", False)
ops = torch.ops.jetgraph
assert jetgraph.lift.all


def whole_axis(x, rows: int, group: int, b_rows: int = 0):
    """Per-tensor codes of x (rows 0) or one scale a row (rows 1), times codes of x that say nothing of x's own."""
    weight = torch.eye(24, dtype=torch.bfloat16)
    a = ops.quantize(x, rows, 0, *RULE)
    return ops.fp8_gemm(*a, *ops.quantize(weight, 0, 0, *RULE), None, b_rows, group)


@pytest.mark.parametrize("rows", [0, 1])
def test_whole_axis_groups_are_lifted_as_the_operator_computes_them(rows):
    x = torch.randn(TOKENS, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    lifter, _, builder = lift(lambda t: ops.quantize(t, rows, 0, *RULE)[0], x)
    granularities = {str(n.type.precision.scale.granularity) for n in builder.nodes if n.op == "quantize"}
    assert granularities == {"*x*" if rows == 0 else "1x*"}


def test_one_row_alone_and_in_company_differ():
    """What JG019 is about: the same token, other neighbours, another result."""
    x = torch.randn(TOKENS, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    alone, together = whole_axis(x[:1], 0, 0), whole_axis(torch.cat([x[:1], x[1:] * 100]), 0, 0)[:1]
    assert not torch.equal(alone, together)
    per_token = whole_axis(x[:1], 1, 0), whole_axis(torch.cat([x[:1], x[1:] * 100]), 1, 0)[:1]
    assert torch.equal(*per_token)


@pytest.mark.slow
def test_a_rollout_of_it_is_never_contained():
    model = jetgraph.compile(random_model("llama", layers=1), "fp8_tensorwise")
    step = capture_step(model.jetgraph, random_ids(model, 1, 53))
    assert step.graph.meta["unknown"] == []
    with torch.no_grad():
        leaves = {**step.inputs, **dict(model.named_parameters()), **dict(model.named_buffers())}
        assert torch.equal(interpret(step.graph, leaves)["logits"], step.logits[0])
    rollout = expected_rollout(step.graph)
    rollout = dataclasses.replace(rollout, name="infer", meta={**rollout.meta, "side": "infer"})
    result = verify(step.graph, rollout)
    assert result.verdict is not Verdict.CONTAINED
    coupled = [fault for fault in result.faults if fault.rule == "JG019"]
    assert coupled
    assert any("*x*" in str(fault) for fault in coupled)

"""Forms that look like a covered operator and are not must be UNKNOWN by name, never another program's term."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import jetgraph.lift.all
import jetgraph.lowering.torch_ops
from jetgraph.fx_record import record_graph
from jetgraph.interpret import interpret
from jetgraph.lift.lifter import Lifter
from jetgraph.normal_form import TermBuilder
from jetgraph.precision import BF16, F32
from jetgraph.record import Op

TOKENS = 53
RULE = (448.0, 1e-12, "div", False)
assert jetgraph.lift.all


def lift(function, x):
    """(lifter, value of the only output, graph) of a function of one [T, 24] tensor."""
    records: list[Op] = record_graph(make_fx(function)(x))
    builder = TermBuilder()
    lifter = Lifter(builder, TOKENS)
    precision = BF16 if x.dtype is torch.bfloat16 else F32
    leaf = lifter.layouts.token_matrix(builder.intern("input", (), {"name": "x"}, ("T", x.shape[1]), precision))
    env = lifter.run(records, {records[0].name: leaf})
    return lifter, lifter.outputs(records, env)[0], builder


WRONG = {
    "groups along the tokens": lambda x: torch.ops.jetgraph.quantize(x.t(), 1, 128, *RULE)[0],
    "groups per head": lambda x: torch.ops.jetgraph.quantize(x.view(TOKENS * 4, 6), 1, 128, *RULE)[0],
    "bits as another dtype": lambda x: x.view(torch.int16).to(torch.float32),
    "mean over tokens": lambda x: x.float().t().mean(-1),
    "log_softmax per head": lambda x: torch.log_softmax(x.float().view(TOKENS, 4, 6), -1),
    "narrower integer": lambda x: x.to(torch.int64).to(torch.int32).to(torch.float32),
    "bf16 and a wide scalar": lambda x: x + 0.1,
    "bf16 power": lambda x: x.pow(3),
    "half precision": lambda x: x.to(torch.float16) * 2,
    "a constant beyond FP32": lambda x: x.float() * 1e39,
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_by_name(name):
    x = torch.randn(TOKENS, 24, generator=torch.Generator().manual_seed(0)).bfloat16()
    lifter, _, _ = lift(WRONG[name], x)
    assert lifter.unknown, name


def programs():
    """Arrangements and arithmetic that must come out bit for bit."""
    return {
        "heads": lambda x: (x.view(TOKENS, 4, 6).transpose(0, 1) * 2.0).transpose(0, 1).reshape(TOKENS, 24),
        "rotate": lambda x: torch.cat((-x[:, 12:], x[:, :12]), -1) * x,
        "negative slices": lambda x: torch.cat((x[:, -5:], x[:, :-5]), 1) + x,
        "expand": lambda x: (x.view(TOKENS, 4, 6)[:, :, None] * x.view(TOKENS, 4, 6)[:, :, :, None]).sum(-1),
        "norm": lambda x: (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16(),
        "empty sum": lambda x: x.float().view(TOKENS, 1, 24).sum(1),
        "wide sum": lambda x: x.float().sum(-1, keepdim=True) * x,
        "permute": lambda x: x.view(TOKENS, 2, 3, 4).permute(0, 3, 1, 2).reshape(TOKENS, 24) - x,
    }


@pytest.mark.parametrize("name", programs())
def test_covered_programs_come_out_bit_for_bit(name):
    x = torch.randn(TOKENS, 24, generator=torch.Generator().manual_seed(1)).bfloat16()
    function = programs()[name]
    lifter, value, builder = lift(function, x)
    assert lifter.unknown == []
    got = interpret(builder.graph("g", {"out": lifter.layouts.read(value)}, {}), {"x": x})["out"]
    assert torch.equal(got.float(), function(x).float().reshape(got.shape))


def test_the_recorder_forgets_views_of_what_was_written():
    from jetgraph.capture import recording

    model = torch.nn.Linear(2, 2)
    with torch.no_grad(), recording(model, {}) as recorder:
        base = torch.ones(2, 2)
        row = base[0]
        torch.add(base, base, out=base)
        assert recorder.name_of(row).startswith("stale_")
        a, b = torch.ones(2), torch.ones(2)
        before = recorder.name_of(a)
        torch._foreach_add_([a, b], 1.0)
        assert recorder.name_of(a) != before

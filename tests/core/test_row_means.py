"""Means along a row as an operator of ours: replaced where asked, same bits on the CPU, same meaning in the graph."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from jetgraph.lowering import torch_ops  # noqa: F401  (registers the operator)
from jetgraph.passes.edit import mark_forward
from jetgraph.passes.row_means import row_means


def traced(function, *inputs):
    module = make_fx(function, tracing_mode="fake")(*inputs)
    mark_forward(module.graph)
    return module


def calls(module, target):
    return [n for n in module.graph.nodes if n.target is target]


OWN, ATEN = torch.ops.jetgraph.row_mean.default, torch.ops.aten.mean.dim


@pytest.mark.parametrize("keepdim", [True, False])
def test_a_mean_of_rows_is_replaced_and_keeps_every_bit(keepdim):
    x = torch.randn(7, 33)
    module = traced(lambda x: x.pow(2).mean(-1, keepdim=keepdim) + 1, x)
    expected = module(x)
    assert row_means(module, frozenset({"cpu"})) == 1
    assert not calls(module, ATEN)
    assert len(calls(module, OWN)) == 1
    assert torch.equal(module(x), expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.mean(0, keepdim=True),
        lambda x: x.mean((0, 1)),
        lambda x: x.double().mean(-1),
        lambda x: x.mean(-1, dtype=torch.float64),
        lambda x: torch.mean(x, None, keepdim=True),
    ],
    ids=["another axis", "two axes", "float64", "in float64", "all axes"],
)
def test_other_means_stay(function):
    module = traced(function, torch.randn(7, 33))
    assert row_means(module, frozenset({"cpu"})) == 0
    assert not calls(module, OWN)


def test_a_backward_mean_stays():
    module = traced(lambda x: x.mean(-1), torch.randn(7, 33))
    for node in module.graph.nodes:
        node.meta["partitioner_tag"] = "is_backward"
    assert row_means(module, frozenset({"cpu"})) == 0


def test_the_cpu_keeps_atens():
    module = traced(lambda x: x.mean(-1), torch.randn(7, 33))
    assert row_means(module) == 0

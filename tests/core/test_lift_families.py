"""Model families nobody wrote for: the whole step lifts without an unknown operator and replays bit for bit.

Two sequences a step, longer than the families' windows, so that every attention kind is exercised.
"""

from __future__ import annotations

import pytest

import jetgraph
from jetgraph.replay import replay_step
from jetgraph.trainer import capture_step
from tests.core.small_models import random_family, random_ids

pytestmark = pytest.mark.slow
JET = ["llama3", "qwen2", "mistral", "gemma2", "gemma3", "phi4", "olmo2", "gpt_neox"]
STOCK = ["mistral", "gemma2", "gpt_neox", "qwen2"]
WINDOWS = {"mistral": {7}, "gemma2": {6, 0}, "gemma3": {6, 0}}
SOFTCAPS = {("gemma2", "jet"): 3.0}
"""transformers' own SDPA path leaves Gemma 2's soft cap of the scores out, so its graph says 0: that is what ran."""


def captured(kind, policy, provider):
    model = jetgraph.compile(random_family(kind), policy, provider=provider)
    step = capture_step(model.jetgraph, random_ids(model, 2, 11))
    return replay_step(model, step)


def check(graph, kind, policy):
    assert graph.meta["unknown"] == []
    assert graph.meta["replay"]["passed"], graph.meta["replay"]["cases"]
    assert any("gradients: equal" in case for case in graph.meta["replay"]["cases"])
    attention = [node for node in graph.nodes if node.op == "attention"]
    assert {node.attr("mask") for node in attention} == {"causal"}
    assert {node.attr("window") for node in attention} == WINDOWS.get(kind, {0})
    assert {node.attr("softcap") for node in attention} == {SOFTCAPS.get((kind, policy), 0.0)}


@pytest.mark.parametrize("kind", JET)
def test_a_family_under_jet(kind):
    check(captured(kind, "jet", "reference"), kind, "jet")


@pytest.mark.parametrize("kind", STOCK)
def test_a_family_on_stock_kernels(kind):
    check(captured(kind, "bf16", "stock"), kind, "bf16")


def test_a_biased_bf16_linear_rounds_once():
    graph = captured("qwen2", "bf16", "reference")
    check(graph, "qwen2", "bf16")
    gemms = {i for i, node in enumerate(graph.nodes) if node.op == "gemm" and node.kernel == "jetgraph::row_tile_gemm"}
    sums = [node for node in graph.nodes if node.op == "add" and gemms & set(node.inputs)]
    assert len(sums) == 6  # q, k and v of two layers: the bias joins the FP32 sums

"""Graphs emitted by Inductor run, round elsewhere than they say, and so never verify (JG092)."""

from __future__ import annotations

import pytest
import torch

import jetgraph
from jetgraph.trainer import capture_step
from jetgraph.verify import Verdict, verify
from tests.core.small_models import one_step, random_ids, random_model

pytestmark = pytest.mark.slow


def test_inductor_runs_and_its_graph_is_unknown():
    model = jetgraph.compile(random_model(layers=1), "jet", codegen="inductor")
    ids = random_ids(model, 1, 53)
    logits, gradients = one_step(model, ids)
    exact, expected = one_step(jetgraph.compile(random_model(layers=1), "jet"), ids)
    assert (logits.double() - exact.double()).norm() < 0.2 * exact.double().norm()
    assert gradients.keys() == expected.keys()
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, logits)
    model.jetgraph.coverage().require()
    graph = capture_step(model.jetgraph).graph
    assert graph.meta["compiler"] == "inductor"
    result = verify(graph, graph)
    assert result.verdict is Verdict.UNKNOWN
    assert "JG092" in {fault.rule for fault in result.faults}

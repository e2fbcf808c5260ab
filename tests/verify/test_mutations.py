"""Every single fault of the measured table gives its rule and its number of root faults: no echo, nothing hidden.

`pair` is a trainer graph and an engine graph; graphs of real models join by a row in `PAIRS`.
"""

from __future__ import annotations

from functools import cache

import pytest

from jetgraph.graph import PrecisionGraph
from jetgraph.verify import Severity, Verdict, verify
from tests.verify.mutations import MUTATIONS, apply
from tests.verify.toy_transformer import build

LAYERS = 30


@cache
def toy() -> tuple[PrecisionGraph, PrecisionGraph]:
    return build("train", layers=LAYERS, backward=True), build("infer", layers=LAYERS)


PAIRS = {"toy": toy}


@pytest.fixture(params=PAIRS, scope="module")
def pair(request: pytest.FixtureRequest) -> tuple[PrecisionGraph, PrecisionGraph]:
    return PAIRS[request.param]()


def layers_of(graph: PrecisionGraph) -> int:
    return sum(node.op == "attention" for node in graph.nodes)


def test_unchanged_is_contained(pair: tuple[PrecisionGraph, PrecisionGraph]) -> None:
    assert verify(*pair).verdict is Verdict.CONTAINED


@pytest.mark.parametrize("name", MUTATIONS)
def test_one_layer(pair: tuple[PrecisionGraph, PrecisionGraph], name: str) -> None:
    train, infer = pair
    mutation = MUTATIONS[name]
    result = verify(train, apply(infer, mutation.edit, layer=7))
    assert result.verdict is Verdict.VIOLATED
    assert result.certificate is None
    assert {fault.rule for fault in result.faults} == {mutation.rule}, result.text()
    assert len(result.faults) == mutation.one, result.text()


@pytest.mark.parametrize("name", MUTATIONS)
def test_all_layers(pair: tuple[PrecisionGraph, PrecisionGraph], name: str) -> None:
    train, infer = pair
    mutation = MUTATIONS[name]
    result = verify(train, apply(infer, mutation.edit))
    per_layer, besides = mutation.every
    assert {fault.rule for fault in result.faults} == {mutation.rule}, result.text()
    assert len(result.faults) == per_layer * layers_of(infer) + besides, result.text()
    assert len(result.folded) <= 9, result.text()
    assert all(fault.severity is Severity.VIOLATION and fault.remedy for fault in result.faults)

"""Pairs that ran on an H200, kept with their certificates: what was accepted there stays acceptable, and no more is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jetgraph.verify import Source, Verdict, checker, verify

PAIRS = Path(__file__).parents[2] / "benchmarks/results/h200/pairs"


@pytest.mark.parametrize(("name", "bitwise"), [("jet", True), ("vllm-stock", False), ("verl-start", True)])
def test_an_h200s_certificate_is_accepted_for_its_pair_alone(name, bitwise, capsys):
    folder = PAIRS / name
    files = [str(folder / f"{part}.json") for part in ("certificate", "train", "infer")]
    assert checker.main(files) == 0
    assert json.loads((folder / "certificate.json").read_text())["bitwise"] is bitwise
    other = PAIRS / ("jet" if name != "jet" else "verl-start")
    assert checker.main([files[0], str(other / "train.json"), files[2]]) == 1
    result = verify(Source.load(folder / "train.json", "train"), Source.load(folder / "infer.json", "infer"))
    assert result.verdict is Verdict.CONTAINED
    assert result.bitwise is bitwise

"""The benchmark of `verify` measures what it says, and its bar for 36 layers holds here too."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.report import Row, report, table
from benchmarks.verify import measure, pair, rows, stacked
from jetgraph.verify import verify
from tests.verify.toy_transformer import build


def test_stacked_layers_are_the_model_that_is_built() -> None:
    for side in ("train", "infer"):
        assert stacked(side, 6).semantic_digest == build(side, layers=6).semantic_digest
        for key in ("parameters", "operands", "scope"):
            assert set(stacked(side, 6).meta[key]) == set(build(side, layers=6).meta[key])


def test_36_layers_are_verified_within_the_bar() -> None:
    measured = measure(0, 1)
    assert measured["edges"] > 15_000
    assert measured["read"] + measured["verify"] < 1.0 * 3  # three times the bar: this machine may be shared
    assert {row.metric for row in rows({"36 layers": measured})} >= {"36 layers: verify", "36 layers: read and verify"}


def test_training_has_its_share_of_edges_and_contains_the_rollout() -> None:
    train, infer = pair(10_000)
    assert 0.9 < (train.num_edges + infer.num_edges) / 10_000 < 1.1
    assert 3.1 < train.num_edges / infer.num_edges < 3.3
    assert verify(train, infer).bitwise


def test_a_missed_bar_is_told_and_exits_1(tmp_path: Path, capsys) -> None:
    good, bad = Row.below("a", 1.0, "s", 2.0), Row.above("b", 1.0, "x", 2.0)
    file = tmp_path / "deep" / "rows.json"
    assert report([good, Row.fact("c", 7)], file, "cpu") == 0
    assert report([good, bad], file, "cpu") == 1
    assert "MISSED" in capsys.readouterr().out
    assert json.loads(file.read_text())["rows"][1] == {
        "metric": "b",
        "value": 1.0,
        "unit": "x",
        "bar": "≥ 2",
        "ok": False,
    }
    assert table([good]).splitlines()[1].split() == ["a", "1", "s", "<", "2", "ok"]

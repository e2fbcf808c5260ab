"""`benchmarks.verl_report`: rows of a folder that a VeRL run left, written by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import verl_report


def logged(step: int, **others: float) -> str:
    data = {
        "jetgraph/total/max": 0.0,
        "jetgraph/total/fraction_exact": 1.0,
        "jetgraph/num_tokens": 100.0,
        "jetgraph/alarms": 0.0,
        "jetgraph/sync/stall_seconds": 0.5,
        "jetgraph/sync/changed/bfloat16": 0.02 * step,
        "critic/rewards/mean": float(step),
        "actor/grad_norm": 2.0,
        "response_length/mean": 7.0,
        "timing_s/gen": 90.0 if step == 1 else 3.0,
    }
    return json.dumps({"step": step, "data": data | others})


def write(folder: Path, lines: list[str], verdict: str = "CONTAINED") -> Path:
    (folder / "jetgraph-run").mkdir()
    manifest = {"verdict": verdict, "bitwise": True, "environment": {"train": {"device": "NVIDIA H200"}}}
    (folder / "jetgraph-run" / "admission.json").write_text(json.dumps(manifest))
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_rows_are_of_all_whole_steps(tmp_path: Path):
    lines = [logged(step) for step in range(1, 8)]
    found, device = verl_report.rows(write(tmp_path, [*lines, lines[0][:50]]))
    table = {row.metric: row for row in found}
    assert device == "NVIDIA H200"
    assert table["steps"].value == 7
    assert table["tokens compared"].value == 700
    assert table["reward of the first 5 steps"].value == 3.0
    assert table["reward of the last 5 steps"].value == 5.0
    assert table["gen, median"].value == 3.0  # without the first step, which compiles
    assert table["bfloat16 that a sync changed, median"].value == pytest.approx(0.08)
    assert all(row.ok is not False for row in found)


def test_a_token_that_is_not_exact_and_a_refusal_miss_their_bars(tmp_path: Path):
    moved = {"jetgraph/total/max": 0.25, "jetgraph/total/fraction_exact": 0.5}
    found, _ = verl_report.rows(write(tmp_path, [logged(1), logged(2, **moved)], "VIOLATED"))
    assert [row.metric for row in found if row.ok is False] == [
        "contained before step 1",
        "largest |Δlogprob|",
        "fraction exact, smallest of steps",
    ]


def test_a_run_without_a_step_says_so(tmp_path: Path):
    with pytest.raises(ValueError, match=r"metrics.jsonl: no step was logged"):
        verl_report.rows(tmp_path)

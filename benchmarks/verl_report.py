"""Rows of a VeRL run of `examples/rl/grpo.py`, from its folder:  python -m benchmarks.verl_report FOLDER [--json FILE]

The verdict that it started with, how far rollout and training were apart in every step, rewards, and seconds by phase.
Under policy jet the bar is a mismatch of exactly 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import fmean, median

from benchmarks.report import Row, report

WINDOW = 5
"""Steps at each end that a reward is the mean of."""
PHASES = "gen", "old_log_prob", "update_actor", "update_weights", "step"
"""Of VeRL's ``timing_s/``."""


def steps(path: Path) -> list[dict[str, float]]:
    """What VeRL's file logger wrote, a line a step; without the half line that a killed run may end with.

    Raises:
        ValueError: there is no step.
    """
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line)["data"])
        except ValueError:
            continue
    if not found:
        raise ValueError(f"{path}: no step was logged; the run's output says why")
    return found


def rows(folder: Path) -> tuple[list[Row], str]:
    """Figures of the run in ``folder``, and the device that it trained on."""
    logged = steps(folder / "metrics.jsonl")
    path = folder / "jetgraph-run" / "admission.json"
    manifest = json.loads(path.read_text()) if path.is_file() else None
    found = [Row.above("steps", len(logged), "", 1)]
    if manifest is not None:
        contained = manifest["verdict"] == "CONTAINED"
        found += [
            Row("contained before step 1", float(contained), "", "= 1", contained),
            Row.fact("bitwise", float(manifest["bitwise"])),
        ]
    largest = max(step["jetgraph/total/max"] for step in logged)
    exact = min(step["jetgraph/total/fraction_exact"] for step in logged)
    found += [
        Row.fact("tokens compared", sum(step["jetgraph/num_tokens"] for step in logged)),
        Row("largest |Δlogprob|", largest, "nats", "= 0", largest == 0),
        Row("fraction exact, smallest of steps", exact, "", "= 1", exact == 1),
        Row.fact("alarms", sum(step["jetgraph/alarms"] for step in logged)),
    ]
    for what, part in (("first", slice(None, WINDOW)), ("last", slice(-WINDOW, None))):
        rewards = fmean(step["critic/rewards/mean"] for step in logged[part])
        found.append(Row.fact(f"reward of the {what} {WINDOW} steps", rewards))
    found += [
        Row.fact("norm of the gradient, median", median(step["actor/grad_norm"] for step in logged)),
        Row.fact("tokens of an answer, mean", fmean(step["response_length/mean"] for step in logged)),
    ]
    settled = logged[1:] or logged  # the first step compiles
    for dtype in ("bfloat16", "float8_e4m3fn"):
        name = f"jetgraph/sync/changed/{dtype}"
        if all(name in step for step in logged):
            found.append(Row.fact(f"{dtype} that a sync changed, median", median(step[name] for step in logged)))
    found.append(Row.fact("stall of a sync, median", median(s["jetgraph/sync/stall_seconds"] for s in settled), "s"))
    for phase in PHASES:
        if f"timing_s/{phase}" in settled[0]:
            found.append(Row.fact(f"{phase}, median", median(step[f"timing_s/{phase}"] for step in settled), "s"))
    return found, str(manifest["environment"]["train"]["device"]) if manifest else "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found, device = rows(given.folder)
    return report(found, given.json, device)


if __name__ == "__main__":
    sys.exit(main())

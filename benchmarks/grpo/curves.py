"""What the arms wrote, a line a step → figures of each arm, and curves with their spread over the seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.report import Row

Step = dict[str, Any]
WINDOW = 10
"""Steps at each end that a reward is the mean of; and of the curve of rewards, which is smoothed over them."""
PANELS: dict[str, Callable[[Step], float]] = {
    "reward": lambda step: step["reward"],
    "mean |Δlogprob|, nats": lambda step: step["mismatch"]["mean"],
    "k3, nats": lambda step: step["mismatch"]["k3"],
    "norm of the gradient": lambda step: step["grad_norm"],
}


def read(path: Path) -> list[Step]:
    """Every whole line; a process that was stopped may have left half a one."""
    steps = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            steps.append(json.loads(line))
        except ValueError:
            continue
    return steps


def by_seed(steps: Sequence[Step]) -> dict[int, list[Step]]:
    runs: dict[int, list[Step]] = {}
    for step in steps:
        runs.setdefault(step["seed"], []).append(step)
    return {seed: sorted(run, key=lambda step: step["step"]) for seed, run in sorted(runs.items())}


def rows(arm: str, steps: Sequence[Step], *, must_be_exact: bool) -> list[Row]:
    """Figures of one arm; a spread is (lowest, highest) over the seeds.

    Raises:
        ValueError: the arm did no step.
    """
    if not steps:
        raise ValueError(f"{arm}: no step was done")
    runs = by_seed(steps)
    found = [
        Row.fact(f"{arm}, seeds", len(runs)),
        Row.fact(f"{arm}, steps of the shortest run", min(map(len, runs.values()))),
        Row.fact(f"{arm}, tokens compared", sum(step["mismatch"]["num_tokens"] for step in steps)),
    ]
    for what, part in (("first", slice(None, WINDOW)), ("last", slice(-WINDOW, None))):
        of_runs = [fmean(step["reward"] for step in run[part]) for run in runs.values()]
        found += _spread(f"{arm}, reward of the {what} {WINDOW} steps", of_runs, "")
    largest = max(step["mismatch"]["max"] for step in steps)
    exact = min(step["mismatch"]["fraction_exact"] for step in steps)
    bars = (("= 0", largest == 0), ("= 1", exact == 1)) if must_be_exact else (("", None), ("", None))
    found += [
        Row.fact(f"{arm}, mean |Δlogprob|, median of steps", _median(steps, "mean"), "nats"),
        Row.fact(f"{arm}, p99.9 |Δlogprob|, median of steps", _median(steps, "p999"), "nats"),
        Row(f"{arm}, largest |Δlogprob|", largest, "nats", *bars[0]),
        Row.fact(f"{arm}, k1, median of steps", _median(steps, "k1"), "nats"),
        Row.fact(f"{arm}, k3, median of steps", _median(steps, "k3"), "nats"),
        Row(f"{arm}, fraction exact, smallest of steps", exact, "", *bars[1]),
    ]
    for what, part in (("first", slice(None, WINDOW)), ("last", slice(-WINDOW, None))):
        of_runs = [fmean(step["mismatch"]["mean"] for step in run[part]) for run in runs.values()]
        found += _spread(f"{arm}, mean |Δlogprob| of the {what} {WINDOW} steps", of_runs, "nats")
    norms = [step["grad_norm"] for step in steps]
    found += [
        Row.fact(f"{arm}, norm of the gradient, median", median(norms)),
        Row.fact(f"{arm}, norm of the gradient, largest", max(norms)),
        Row.fact(f"{arm}, tokens of an answer, mean", fmean(step["answer_length"] for step in steps)),
        Row.fact(f"{arm}, share of answers cut off", fmean(step["cut_off"] for step in steps)),
    ]
    settled = [step for run in runs.values() for step in run[1:]] or list(steps)  # a first step compiles
    for phase in settled[0]["seconds"]:
        found.append(Row.fact(f"{arm}, {phase}, median", median(step["seconds"][phase] for step in settled), "s"))
    found.append(Row.fact(f"{arm}, step, median", median(sum(step["seconds"].values()) for step in settled), "s"))
    return found


def _median(steps: Sequence[Step], figure: str) -> float:
    return median(step["mismatch"][figure] for step in steps)


def _spread(metric: str, values: Sequence[float], unit: str) -> list[Row]:
    found = [Row.fact(f"{metric}, mean of seeds", fmean(values), unit)]
    if len(values) > 1:
        found += [Row.fact(f"{metric}, lowest", min(values), unit), Row.fact(f"{metric}, highest", max(values), unit)]
    return found


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Each value as the mean of it and the ``window`` − 1 before it."""
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def draw(arms: dict[str, Sequence[Step]], path: Path) -> None:
    """Four panels; an arm is a line, the mean over its seeds, in a band from the lowest to the highest."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(9, 6), sharex=True, layout="constrained")
    for axes, (label, value) in zip(panels.flat, PANELS.items(), strict=True):
        window = WINDOW if label == "reward" else 1
        for name, steps in arms.items():
            runs = [smoothed([value(step) for step in run], window) for run in by_seed(steps).values()]
            columns = [[run[i] for run in runs if i < len(run)] for i in range(max(map(len, runs), default=0))]
            numbers = range(1, len(columns) + 1)
            (line,) = axes.plot(numbers, list(map(fmean, columns)), label=name, linewidth=1.4)
            lowest, highest = list(map(min, columns)), list(map(max, columns))
            axes.fill_between(numbers, lowest, highest, color=line.get_color(), alpha=0.2, linewidth=0)
        axes.set_ylabel(label + (f", mean of {WINDOW} steps" if window > 1 else ""))
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    for axes in panels[1]:
        axes.set_xlabel("step")
    panels[0][0].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)

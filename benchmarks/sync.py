"""What a full weight sync costs a running engine:  python -m benchmarks.sync [--json FILE]

A random model of Qwen3-8B's sizes is served by our plugin in a process of its own (`benchmarks.arms`); that process
also holds the BF16 masters, as a trainer on the same device does.  Each turn moves a weight and sends everything.

- stall: seconds in which the engine cannot step (stop, write, read back, refresh); the bar is twice the seconds that
  copying as many bytes within the device takes, measured in the same turn;
- all: seconds of the whole update, quantising, staging, digests and checks included; the engine serves meanwhile;
- bytes sent, and the peak of device memory above what was there before (on a CPU: by how much the process grew).

``--staging cpu`` keeps the waiting copy on the host.  ``--tiny`` runs it on any machine, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.arms import Arm, cache_options
from benchmarks.gpu_time import device_name
from benchmarks.report import Row, report, save
from benchmarks.rollout import folders, setup

TURNS = 5
OVER_COPY = 2.0
PLACES = ("device", "cpu")


def measure(work: Path, options: argparse.Namespace) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Where the update waits, and what the turns so far reported, after each turn."""
    served = folders(work, options.layers, tiny=options.tiny)
    name = "jet, batch-invariant"
    engine: dict[str, Any] = {
        "dtype": "bfloat16", "max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True,
        "enable_prefix_caching": True,
    }  # fmt: skip
    if torch.cuda.is_available():
        engine |= cache_options(served[name], 4 * 256)
    for place in options.staging:
        with Arm(name, setup(name, served[name], engine)) as arm:
            asked = {"do": "sync", "masters": str(served["bf16"]), "policy": "jet"}
            staging = None if place == "device" else "cpu"
            arm.ask({**asked, "staging": staging})  # the first one loads the masters
            turns: list[dict[str, Any]] = []
            for _ in range(options.turns):
                turns.append(arm.ask({**asked, "staging": staging}))
                yield place, turns
            arm.ask({"do": "generate", "batch": 1, "prompt": 8, "tokens": 2})  # it still serves


def rows(place: str, turns: Sequence[dict[str, Any]], *, bars: bool) -> list[Row]:
    def middle(key: str) -> float:
        return median(turn[key] for turn in turns)

    ratio = median(turn["stall"] / turn["copy"] for turn in turns)
    metric = f"staged on the {place}: stall beside one copy of the bytes"
    return [
        Row.fact(f"staged on the {place}: stall", middle("stall"), "s"),
        Row.fact(f"staged on the {place}: all", middle("seconds"), "s"),
        Row.fact(f"staged on the {place}: sent", middle("bytes") / 1e9, "GB"),
        Row.fact(f"staged on the {place}: peak memory above before", middle("peak") / 1e9, "GB"),
        Row.fact(f"staged on the {place}: copy within the device", median(t["bytes"] / t["copy"] for t in turns) / 1e9,
                 "GB/s"),
        Row.below(metric, ratio, "x", OVER_COPY) if bars and place == "device" else Row.fact(metric, ratio, "x"),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--staging", nargs="+", choices=PLACES, default=list(PLACES), help="where an update waits")
    parser.add_argument("--work", type=Path, help="keeps the model folders there for the next run")
    parser.add_argument("--tiny", action="store_true", help="two small layers, on any machine: no measurement")
    options = parser.parse_args()
    if options.tiny:
        options.layers, options.turns, options.staging = 2, 2, ["device"]
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA device, and this machine has none; --tiny runs anywhere")
    device = device_name() if torch.cuda.is_available() else "cpu, tiny: no measurement"
    table: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for place, turns in measure(options.work or Path(folder), options):
            table[place] = rows(place, turns, bars=not options.tiny)
            save([row for found in table.values() for row in found], options.json, device)
    return report([row for found in table.values() for row in found], options.json, device)


if __name__ == "__main__":
    sys.exit(main())

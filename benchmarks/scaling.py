"""Steps of 1, 2, 4 and 8 layers, and what our Python costs:  python -m benchmarks.scaling [--json FILE]

Needs a CUDA device (``--tiny`` runs small layers anywhere, without bars).  Forward+backward of 8,192 tokens; a layer's
share must stay what it is with one layer.  Our own Python around a compiled block is timed alone, with nothing inside:
`run_region`'s wrapper and the two observers, by wall clock, over the step's time; bar: below 1 %.

Exit status 1 if a figure misses its bar.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.block import LENGTH
from benchmarks.decoder import QWEN3_8B, TINY, Arm, interleaved, make_arm, numbers
from benchmarks.gpu_time import device_name
from benchmarks.report import Row, report
from jetgraph.backend import Backend, run_region
from jetgraph.capture import CompiledRegion

LAYERS = (1, 2, 4, 8)
MOST_GROWTH, MOST_OVERHEAD = 1.1, 1.0
CALLS = 200


def own_seconds(x: Tensor, embeddings: tuple[Tensor, Tensor]) -> float:
    """Seconds of our Python for one layer's forward and backward: everything of a call but torch and the kernels."""
    backend, region = Backend("empty", lambda graph: []), CompiledRegion()
    graph = torch.fx.Graph()
    graph.output(graph.placeholder("x"))
    empty = torch.fx.GraphModule(torch.nn.Module(), graph)
    kinds = [backend._executed(region, kind, empty, [x]) for kind in ("forward", "backward")]

    def nothing(*args, **kwargs) -> None:
        for run in kinds:
            run([x])

    call = run_region("empty", backend, torch.nn.Identity(), nothing, lambda: None)
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call(x, attention_mask=None, position_embeddings=embeddings)
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def figures(
    layers: tuple[int, ...], sizes: dict[str, int], batch: int, length: int, device: torch.device,
    repeats: int, bars: bool,
) -> list[Row]:  # fmt: skip
    x, dy = numbers(batch, length, sizes, device)
    compiler = "inductor" if bars else "aot_eager"
    rows: list[Row] = []
    steps: dict[str, dict[int, float]] = {"bf16": {}, "jet": {}}
    for count in layers:
        arms: dict[str, Arm] = {name: make_arm(name, sizes, count, device, compiler) for name in steps}
        times = interleaved({n: lambda a=a: a.step(x, dy) for n, a in arms.items()}, device, 2, repeats)
        for name, milliseconds in times.items():
            steps[name][count] = milliseconds
            rows.append(Row.fact(f"{count} layers, {arms[name].name}", milliseconds, "ms"))
        rows.append(Row.fact(f"{count} layers, ours over BF16", times["bf16"] / times["jet"], "x"))
        embeddings = next(iter(arms["jet"].embeddings.values()))
        del arms
    first, last = layers[0], layers[-1]
    growth = steps["jet"][last] / last / (steps["jet"][first] / first)
    metric = f"a layer's time, of {last} layers over {first}"
    rows.append(Row.below(metric, growth, "x", MOST_GROWTH) if bars else Row.fact(metric, growth, "x"))
    own = own_seconds(x, embeddings)
    rows.append(Row.fact("our Python a layer", own * 1e6, "µs"))
    share, metric = 100 * own * 1e3 * last / steps["jet"][last], f"our Python in a step of {last} layers"
    rows.append(Row.below(metric, share, "%", MOST_OVERHEAD) if bars else Row.fact(metric, share, "%"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="the program's own test: small layers on any machine")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("layers of Qwen3-8B need a CUDA device, and this machine has none; --tiny runs anywhere")
    if options.tiny:
        rows = figures((1, 2), TINY, 2, 16, device, options.repeats, False)
    else:
        rows = figures(LAYERS, QWEN3_8B, 4, LENGTH, device, options.repeats, True)
    return report(rows, options.json, device_name() if device.type == "cuda" else "cpu")


if __name__ == "__main__":
    sys.exit(main())

"""Tokens a second of rollouts, four arms taking turns:  python -m benchmarks.rollout [--json FILE]

A random model of Qwen3-8B's sizes, random prompts of 256 tokens, sampled at temperature 1 to a fixed length, at batch
1, 64 and 512.  Arms, each a warm process of its own (`benchmarks.arms`):

- bf16: stock vLLM on the BF16 folder;
- fp8: stock vLLM on the block-FP8 checkpoint that jetgraph exports, read without jetgraph;
- jet: our plugin, its linears alone (``ops: stock``), the fastest form;
- jet, batch-invariant: our plugin's exact operators, one result a row whatever the batch, without a setting of vLLM's.

All four need more than one H200 holds at batch 512; ``--arms`` chooses, and a ratio needs its two arms in one run.

A turn asks every arm the same, in an order that rotates; a figure is the median over turns, and ratios are medians of
each turn's own ratio, so that a clock that drifts touches both sides.  The JSON is written after every turn.  An arm
that refuses to start says why and is left out.  Bars hold on a GPU; ``--tiny`` runs everything once on any machine,
and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.arms import (
    Arm,
    ArmFailed,
    cache_options,
    give_back_memory,
    with_stock_operators,
    without_plugin,
    write_model,
)
from benchmarks.gpu_time import device_name
from benchmarks.report import Row, report, save
from jetgraph.export import export_checkpoint

ARMS = ("bf16", "fp8", "jet", "jet, batch-invariant")
BATCHES = (1, 64, 512)
PROMPT, TOKENS, TURNS = 256, 128, 5
BLOCK = 16
"""Tokens of a page of the cache: a sequence's last page is not full."""
ENGINE_ITSELF = 3 << 30
"""Bytes of an engine beside weights and cache: context, activations of 8,192 tokens, logits, CUDA graphs."""
AGAINST_FP8, AGAINST_BF16, INVARIANT = 0.98, 1.25, 0.90
"""Ours beside stock FP8, ours beside BF16 at batch 64 and 512, batch-invariant beside our fastest."""


def folders(work: Path, layers: int, *, tiny: bool) -> dict[str, Path]:
    """What each arm serves, made once and kept in ``work``."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = write_model(work / "bf16", layers, tiny=tiny, device=device)
    exact = work / "jet-exact"
    if not (exact / "config.json").is_file():
        export_checkpoint(model, exact, "jet", device=device)
        give_back_memory()
    return {
        "bf16": model,
        "fp8": without_plugin(exact, work / "fp8"),
        "jet": with_stock_operators(exact, work / "jet-stock"),
        "jet, batch-invariant": exact,
    }


def setup(name: str, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    return {"folder": str(folder), "ours": name.startswith("jet"), "options": options}


def engine_options(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The same for every arm; on one GPU they share its memory."""
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_model_len": arguments.prompt + arguments.tokens + 1,
        "max_num_seqs": max(arguments.batches),
        "max_num_batched_tokens": 8192 if torch.cuda.is_available() else 512,
        "enable_prefix_caching": False,
        "enforce_eager": arguments.eager,
    }
    if torch.cuda.is_available():
        rows = max(arguments.batches)
        options |= cache_options(folder, rows * (arguments.prompt + arguments.tokens + BLOCK))
        sizes = sorted({1 << i for i in range(rows.bit_length())} | set(arguments.batches))
        options["compilation_config"] = {} if arguments.eager else {"cudagraph_capture_sizes": sizes}
    return options


def require_memory(arguments: argparse.Namespace, served: dict[str, Path], free: int) -> None:
    """Refuse arms that a GPU with ``free`` bytes cannot hold at once, before minutes are spent on starting them.

    Raises:
        ValueError: says what they need.
    """
    need = 0
    for name in arguments.arms:
        weights = sum(file.stat().st_size for file in served[name].glob("*.safetensors"))
        need += weights + engine_options(arguments, served[name])["kv_cache_memory_bytes"] + ENGINE_ITSELF
    if need > free:
        raise ValueError(
            f"{len(arguments.arms)} engines need {need / 1e9:.0f} GB of the device and {free / 1e9:.0f} are free: run "
            "fewer --arms at a time (a ratio needs its two alone), or smaller --batches"
        )


def started(stack: ExitStack, arguments: argparse.Namespace) -> dict[str, Arm]:
    """The arms that start, each warmed up by one small batch; on a GPU they start together."""
    served = folders(arguments.work, arguments.layers, tiny=arguments.tiny)
    if torch.cuda.is_available():
        require_memory(arguments, served, torch.cuda.mem_get_info()[0])

    def start(name: str) -> Arm | None:
        try:
            arm = Arm(name, setup(name, served[name], engine_options(arguments, served[name])))
            stack.callback(arm.close)
            arm.ask({"do": "generate", "batch": 2, "prompt": arguments.prompt, "tokens": 4})
        except ArmFailed as refused:
            print(f"left out: {refused}", flush=True)
            return None
        print(f"{name}: started in {arm.started['start_seconds']:.0f} s", flush=True)
        return arm

    with ThreadPoolExecutor(len(arguments.arms) if torch.cuda.is_available() else 1) as pool:
        arms = dict(zip(arguments.arms, pool.map(start, arguments.arms), strict=True))
    return {name: arm for name, arm in arms.items() if arm is not None}


def measure(arms: dict[str, Arm], batch: int, arguments: argparse.Namespace) -> Iterator[dict[str, list[float]]]:
    """Tokens a second by arm, after each turn; a turn before them is not counted, in which arms meet this batch."""
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    names = list(arms)
    for turn in range(-1, arguments.turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            asked = {"do": "generate", "batch": batch, "prompt": arguments.prompt, "tokens": arguments.tokens}
            got = arms[name].ask({**asked, "seed": turn + 1})
            if turn >= 0:
                speeds[name].append(got["tokens"] / got["seconds"])
        said = ", ".join(f"{name} {found[-1]:.0f}" for name, found in speeds.items() if found)
        print(f"batch {batch}, turn {turn + 1}: {said or 'warm'}", flush=True)
        if turn >= 0:
            yield speeds


def rows(batch: int, speeds: dict[str, list[float]], *, bars: bool) -> list[Row]:
    """Medians, and ratios with their bars if ``bars``; and of how many turns."""
    found = [Row.fact(f"batch {batch}, turns", max(map(len, speeds.values()), default=0))]
    found += [Row.fact(f"batch {batch}, {name}", median(s), "tokens/s") for name, s in speeds.items()]
    wanted: Sequence[tuple[str, str, float | None]] = [
        ("jet", "fp8", AGAINST_FP8),
        ("jet", "bf16", AGAINST_BF16 if batch >= 64 else None),
        ("jet, batch-invariant", "jet", INVARIANT),
        ("fp8", "bf16", None),
    ]
    for ours, theirs, bar in wanted:
        if ours not in speeds or theirs not in speeds:
            continue
        ratio = median(a / b for a, b in zip(speeds[ours], speeds[theirs], strict=True))
        metric = f"batch {batch}, {ours} beside {theirs}"
        found.append(Row.fact(metric, ratio, "x") if bar is None or not bars else Row.above(metric, ratio, "x", bar))
    return found


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens sampled from it")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs and compilation")
    parser.add_argument("--work", type=Path, help="keeps the model folders there for the next run")
    parser.add_argument("--tiny", action="store_true", help="two small layers, once, on any machine: no measurement")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.layers, options.batches, options.prompt, options.tokens, options.turns = 2, [1, 3], 12, 6, 2
        options.eager = True
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA device, and this machine has none; --tiny runs anywhere")
    return options


def main() -> int:
    options = parse()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        options.work = options.work or Path(folder)
        arms = started(stack, options)
        device = device_name() if torch.cuda.is_available() else "cpu, tiny: no measurement"
        table: dict[int, list[Row]] = {}
        for batch in options.batches:
            for speeds in measure(arms, batch, options):
                table[batch] = rows(batch, speeds, bars=not options.tiny)
                save([row for found in table.values() for row in found], options.json, device)
    return report([row for found in table.values() for row in found], options.json, device)


if __name__ == "__main__":
    sys.exit(main())

"""What a decoder layer keeps for backward, and the peak of a step:  python -m benchmarks.memory [--json FILE]

Needs a CUDA device (``--tiny`` runs a small block anywhere, without peaks).  Bytes kept are those of every distinct
storage that autograd saves in one forward, parameters left out, over tokens: what torch keeps, not what a graph says.

Bars: ours ≤ 1/1.5 of BF16 with the default partitioner, as our graphs have it; peak of a step below torchao's.
Exit status 1 if a figure misses its bar or a peer is missing.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.block import LENGTH, made, without_broken_peers
from benchmarks.decoder import ARMS, QWEN3_8B, TINY, Arm, numbers
from benchmarks.gpu_time import device_name
from benchmarks.report import Row, report

LEAST_RATIO = 1.5
DEFAULT_ARMS = ("bf16", "torchao", "bf16-default", "jet-unfused", "jet")


def kept_bytes(arm: Arm, x: Tensor) -> tuple[int, dict[str, int]]:
    """Bytes that autograd saves in a forward of x, and how many of them in each dtype."""
    parameters = {p.untyped_storage().data_ptr() for p in arm.model.parameters()}
    parameters |= {t.untyped_storage().data_ptr() for pair in arm.embeddings.values() for t in pair}
    storages: dict[int, tuple[str, int]] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.numel():
            storages[storage.data_ptr()] = (str(tensor.dtype).removeprefix("torch."), storage.nbytes())
            alive.append(tensor)  # a freed address would be counted once for two tensors
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        arm.forward(x.requires_grad_())
    by_dtype: dict[str, int] = {}
    for dtype, size in storages.values():
        by_dtype[dtype] = by_dtype.get(dtype, 0) + size
    return sum(by_dtype.values()), by_dtype


def peak_bytes(arm: Arm, x: Tensor, dy: Tensor) -> int:
    """Most memory that a step holds beyond what was there before it."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    arm.step(x, dy)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def figures(arms: dict[str, Arm], sizes: dict[str, int], batch: int, length: int, device: torch.device) -> list[Row]:
    x, dy = numbers(batch, length, sizes, device)
    rows = without_broken_peers(arms, lambda arm: arm.step(x, dy))  # and whatever is compiled or cached once
    tokens, kept, peaks = batch * length, {}, {}
    for name, arm in arms.items():
        total, by_dtype = kept_bytes(arm, x)
        kept[name] = total / tokens
        rows.append(Row.fact(f"{arm.name}: kept for backward a token and layer", kept[name], "B"))
        rows += [Row.fact(f"{arm.name}: of it {dtype}", n / tokens, "B") for dtype, n in sorted(by_dtype.items())]
        if device.type == "cuda":
            peaks[name] = peak_bytes(arm, x, dy) / 2**20
            rows.append(Row.fact(f"{arm.name}: peak of a step", peaks[name], "MiB"))
    for base in ("bf16-default", "bf16"):
        if base in kept and "jet" in kept:
            metric, ratio = f"kept by {arms[base].name} over ours", kept[base] / kept["jet"]
            is_bar = base == "bf16-default"
            rows.append(Row.above(metric, ratio, "x", LEAST_RATIO) if is_bar else Row.fact(metric, ratio, "x"))
    if {"jet", "torchao"} <= peaks.keys():
        rows.append(Row.below("peak of a step, ours over torchao's", peaks["jet"] / peaks["torchao"], "x", 1.0))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--arm", action="append", choices=list(ARMS), help="all but Inductor's by default")
    parser.add_argument("--tiny", action="store_true", help="the program's own test: a small block on any machine")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("a block of Qwen3-8B needs a CUDA device, and this machine has none; --tiny runs anywhere")
    sizes, (batch, length) = (TINY, (2, 48)) if options.tiny else (QWEN3_8B, (4, LENGTH))
    compiler = "aot_eager" if options.tiny else "inductor"
    arms, rows = made(options.arm or list(DEFAULT_ARMS), sizes, device, compiler)
    rows += figures(arms, sizes, batch, length, device)
    return report(rows, options.json, device_name() if device.type == "cuda" else "cpu")


if __name__ == "__main__":
    sys.exit(main())

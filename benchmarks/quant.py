"""Quantisers and fused kernels against the bandwidth of a copy, in one run:  python -m benchmarks.quant [--json FILE]

Needs a CUDA device and triton.  Each figure is the bytes that the kernel must move (inputs read once, codes and scales
written once) over its median time, as a fraction of what `copy_` moves of the same tensor.  ``--sweep`` measures other
tiles of the fused kernels too, without bars; processes compile them first, since that takes most of the time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.gpu_time import device_name, milliseconds
from benchmarks.report import Row, report
from jetgraph.lowering import reference, triton_fused, triton_quantize, triton_transpose
from jetgraph.lowering.triton_fused import Tile
from jetgraph.lowering.triton_fused_provider import silu_way
from jetgraph.lowering.triton_silu import WAYS

RULE = (448.0, 1e-12, "div", False)
BAR = 0.85
GROUP = 128
COMPILERS = 12
"""Processes that compile a sweep's kernels."""

SWEEP: dict[str, list[Tile]] = {
    "fused both": [
        *(Tile(128, 4, registers) for registers in (0, 128)),
        *(Tile(128, 8, registers) for registers in (0, 80)),
    ],
    "fused 128x1": [*(Tile(128, warps) for warps in (2, 4, 8)), Tile(128, 4, 96)],
    "norm → 1x128": [Tile(1, 1), Tile(1, 1, 128), Tile(1, 1, 96), Tile(1, 2), Tile(2, 2)],
    "silu·up → 1x128": [
        Tile(height, warps) for height, warps in ((16, 2), (16, 4), (32, 4), (32, 8), (64, 4), (64, 8))
    ],
    "silu·up → both": [
        *(Tile(128, 8, registers) for registers in (0, 80)), *(Tile(128, 4, registers) for registers in (0, 128)),
        Tile(128, 16),
    ],
    "silu·up backward → both, twice": [
        *(Tile(128, 8, registers) for registers in (0, 80)), Tile(128, 4, 168), Tile(128, 16),
        *(Tile(128, 8, registers, split=False) for registers in (0, 128)),
    ],
}  # fmt: skip
SWEEP["residual, norm → 1x128"] = SWEEP["norm → 1x128"]


def fused_kernels(tokens: int, features: int) -> dict[str, tuple[float, Callable[..., object]]]:
    """Name → (bytes a number, call); random inputs that all kernels share."""
    x, residual, dy = (torch.randn(tokens, features, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight = torch.randn(features, device="cuda", dtype=torch.bfloat16)
    scale, agrees = 4 / GROUP, silu_way(torch.device("cuda", torch.cuda.current_device()))[0]

    def norm(added: Tensor | None, both: bool, **options) -> object:
        return triton_fused.rms_norm_quantize(x, added, weight, 1e-6, True, both, GROUP, *RULE, **options)

    def silu(both: bool, way: int = agrees, **options) -> object:
        return triton_fused.silu_mul_quantize(x, residual, both, GROUP, *RULE, way=way, **options)

    def backward(way: int = agrees, **options) -> object:
        return triton_fused.silu_mul_backward_quantize(dy, x, residual, GROUP, *RULE, way=way, **options)

    both_bytes, rows_bytes = 2 + 2 * scale, 1 + scale
    kernels: dict[str, tuple[float, Callable[..., object]]] = {
        "fused both": (2 + both_bytes, lambda **o: triton_fused.quantize_rows_and_tokens(x, GROUP, *RULE, **o)),
        "fused 128x1": (2 + rows_bytes, lambda **o: triton_fused.quantize_tokens(x, GROUP, *RULE, **o)),
        "norm → 1x128": (2 + rows_bytes, lambda **o: norm(None, False, **o)),
        "norm → both": (2 + both_bytes, lambda **o: norm(None, True, **o)),
        "residual, norm → 1x128": (6 + rows_bytes, lambda **o: norm(residual, False, **o)),
        "residual, norm → both": (6 + both_bytes, lambda **o: norm(residual, True, **o)),
        "silu·up → 1x128": (4 + rows_bytes, lambda **o: silu(False, **o)),
        "silu·up → both": (4 + both_bytes, lambda **o: silu(True, **o)),
        "silu·up backward → both, twice": (6 + 2 * both_bytes, backward),
    }
    for way in range(len(WAYS)):
        if way != agrees:
            kernels[f"silu by {WAYS[way]}: silu·up → both"] = 4 + both_bytes, lambda w=way, **o: silu(True, w, **o)
    if agrees != len(WAYS) - 1:
        kernels["silu by division: silu·up backward"] = 6 + 2 * both_bytes, lambda **o: backward(len(WAYS) - 1, **o)
    return kernels


def fused_rows(tokens: int, features: int, bandwidth: float, sweep: bool) -> list[Row]:
    rows: list[Row] = []
    for name, (bytes_each, call) in fused_kernels(tokens, features).items():
        metric = f"{name} of [{tokens}, {features}], of copy"
        moved = bytes_each * tokens * features / 1e9 / bandwidth
        share = moved / milliseconds(call)
        rows.append(Row.fact(metric, share) if "silu by" in name else Row.above(metric, share, "", BAR))
        print(rows[-1], flush=True)
        for tile in SWEEP.get(name, []) if sweep else []:
            try:
                share = moved / milliseconds(lambda t=tile, c=call: c(tile=t), 12, 2)
            except Exception as error:  # a tile that does not fit is no reason to lose the others
                print(f"{metric}: {tile}: {type(error).__name__}: {str(error)[:200]}", flush=True)
                continue
            rows.append(Row.fact(f"{metric}: {tile}", share))
            print(rows[-1], flush=True)
    return rows


def compile_one(name: str, tile: Tile, features: int) -> None:
    """Into the cache on disk; 384 tokens take the same kernels as 65,536."""
    fused_kernels(384, features)[name][1](tile=tile)
    torch.cuda.synchronize()


def compile_sweep(features: int) -> None:
    with ProcessPoolExecutor(COMPILERS, mp_context=get_context("spawn")) as pool:
        jobs = [pool.submit(compile_one, name, tile, features) for name, tiles in SWEEP.items() for tile in tiles]
        failed = [job.exception() for job in jobs if job.exception()]
    print(f"{len(jobs)} kernels compiled, {len(failed)} failed", *failed[:3], flush=True)


def plain_rows(tokens: int, features: int) -> tuple[list[Row], float]:
    """Quantisers alone, and the copy's bandwidth in TB/s."""
    x = torch.randn(tokens, features, device="cuda", dtype=torch.bfloat16)
    shape = f"[{tokens}, {features}]"
    copy = torch.empty_like(x)
    bandwidth = 4 * x.numel() / milliseconds(lambda: copy.copy_(x)) / 1e9
    kernels = {
        "1x128": (3 + 4 / GROUP, lambda: triton_quantize.quantize(x, 1, GROUP, *RULE)),
        "128x128": (3, lambda: triton_quantize.quantize(x, GROUP, GROUP, *RULE)),
        "128x128, transposed": (3, lambda: triton_fused.quantize_transposed(x, GROUP, *RULE)),
        "128x1, transposed": (3 + 4 / GROUP, lambda: triton_quantize.quantize_tokens(x, GROUP, *RULE)),
    }
    codes = x.to(torch.float8_e4m3fn)
    kernels["codes transposed"] = 2, lambda: triton_transpose.transpose_codes(codes)
    rows = [Row.fact(f"copy of BF16 {shape}", bandwidth, "TB/s")]
    for name, (bytes_each, call) in kernels.items():
        moved = bytes_each * x.numel() / milliseconds(call) / 1e9
        rows.append(Row.above(f"{name} of {shape}, of copy", moved / bandwidth, "", BAR))
    for warps in (2, 8):
        moved = 2 * x.numel() / milliseconds(lambda w=warps: triton_transpose.transpose_codes(codes, w)) / 1e9
        rows.append(Row.fact(f"codes transposed of {shape}, of copy: {warps} warps", moved / bandwidth))
    moved = 2 * x.numel() / milliseconds(lambda: codes.t().contiguous(), 5) / 1e9
    rows.append(Row.fact(f"codes transposed of {shape}, by ATen, of copy", moved / bandwidth))
    plain = 3 * x.numel() / milliseconds(lambda: reference.quantize(x, 1, GROUP, *RULE), repeats=3) / 1e9
    rows.append(Row.fact(f"1x128 of {shape}, reference in plain torch, of copy", plain / bandwidth))
    return rows, bandwidth


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--features", type=int, default=4096)
    parser.add_argument("--sweep", action="store_true", help="other tiles of the fused kernels too")
    options = parser.parse_args()
    if options.sweep:
        compile_sweep(options.features)
    rows, bandwidth = plain_rows(options.tokens, options.features)
    rows += fused_rows(options.tokens, options.features, bandwidth, options.sweep)
    return report(rows, options.json, device_name())


if __name__ == "__main__":
    sys.exit(main())

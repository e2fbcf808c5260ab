"""Quantisers and fused kernels against the bandwidth of a copy, in one run:  python -m benchmarks.quant [--json FILE]

Needs a CUDA device and triton.  Each figure is the bytes that the kernel must move (inputs read once, codes and scales
written once) over its median time, as a fraction of what `copy_` moves of the same tensor.  ``--sweep``
measures other tiles of the fused kernels too, without bars.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu_time import device_name, milliseconds
from benchmarks.report import Row, report
from jetgraph.lowering import reference, triton_fused, triton_quantize
from jetgraph.lowering.triton_fused import Tile
from jetgraph.lowering.triton_fused_provider import silu_divides

RULE = (448.0, 1e-12, "div", False)
BAR = 0.85
GROUP = 128


SWEEP = {
    "rows": [Tile(height, warps) for height in (16, 32, 64) for warps in (2, 4, 8)],
    "both": [Tile(128, warps) for warps in (4, 8, 16)],
}


def fused_kernels(tokens: int, features: int) -> dict[str, tuple[float, str, Callable[..., object]]]:
    """Name → (bytes a number, tiles to sweep, call); random inputs that all kernels share."""
    x, residual, dy = (torch.randn(tokens, features, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    weight = torch.randn(features, device="cuda", dtype=torch.bfloat16)
    scale, divides = 4 / GROUP, silu_divides(torch.device("cuda", torch.cuda.current_device()))

    def norm(added: bool, both: bool, **options) -> object:
        other = residual if added else None
        return triton_fused.rms_norm_quantize(x, other, weight, 1e-6, True, both, GROUP, *RULE, **options)

    def silu(both: bool, by_division: bool = divides, **options) -> object:
        return triton_fused.silu_mul_quantize(x, residual, both, GROUP, *RULE, divides=by_division, **options)

    def backward(by_division: bool = divides, **options) -> object:
        return triton_fused.silu_mul_backward_quantize(dy, x, residual, GROUP, *RULE, divides=by_division, **options)

    return {
        "fused both": (4 + 2 * scale, "both", lambda **o: triton_fused.quantize_rows_and_tokens(x, GROUP, *RULE, **o)),
        "fused 128x1": (3 + scale, "both", lambda **o: triton_fused.quantize_tokens(x, GROUP, *RULE, **o)),
        "norm → 1x128": (3 + scale, "", lambda **o: norm(False, False)),
        "norm → both": (4 + 2 * scale, "both", lambda **o: norm(False, True, **o)),
        "residual, norm → 1x128": (7 + scale, "", lambda **o: norm(True, False)),
        "residual, norm → both": (8 + 2 * scale, "both", lambda **o: norm(True, True, **o)),
        "silu·up → 1x128": (5 + scale, "rows", lambda **o: silu(False, **o)),
        "silu·up → both": (6 + 2 * scale, "both", lambda **o: silu(True, **o)),
        "silu·up backward → both, twice": (10 + 4 * scale, "both", backward),
        "by division: silu·up → both": (6 + 2 * scale, "", lambda **o: silu(True, True)),
        "by division: silu·up backward": (10 + 4 * scale, "", lambda **o: backward(True)),
    }


def fused_rows(tokens: int, features: int, bandwidth: float, sweep: bool) -> list[Row]:
    rows: list[Row] = []
    numbers = tokens * features
    for name, (bytes_each, tiles, call) in fused_kernels(tokens, features).items():
        metric = f"{name} of [{tokens}, {features}], of copy"
        share = bytes_each * numbers / milliseconds(call) / 1e9 / bandwidth
        rows.append(Row.fact(metric, share) if "division" in name else Row.above(metric, share, "", BAR))
        for tile in SWEEP.get(tiles, []) if sweep else []:
            share = bytes_each * numbers / milliseconds(lambda t=tile, c=call: c(tile=t), 12, 2) / 1e9 / bandwidth
            rows.append(Row.fact(f"{metric}: {tile.tokens} tokens, {tile.warps} warps", share))
        print(rows[-1], flush=True)
    return rows


def plain_rows(tokens: int, features: int) -> tuple[list[Row], float]:
    """Quantisers alone, and the copy's bandwidth in TB/s."""
    x = torch.randn(tokens, features, device="cuda", dtype=torch.bfloat16)
    shape = f"[{tokens}, {features}]"
    copy = torch.empty_like(x)
    bandwidth = 4 * x.numel() / milliseconds(lambda: copy.copy_(x)) / 1e9
    kernels = {
        "1x128": (3 + 4 / GROUP, lambda: triton_quantize.quantize(x, 1, GROUP, *RULE)),
        "128x128": (3, lambda: triton_quantize.quantize(x, GROUP, GROUP, *RULE)),
        "128x1, transposed": (3 + 4 / GROUP, lambda: triton_quantize.quantize_tokens(x, GROUP, *RULE)),
        "1x128 and 128x1": (4 + 8 / GROUP, lambda: triton_quantize.quantize_rows_and_tokens(x, GROUP, *RULE)),
    }
    rows = [Row.fact(f"copy of BF16 {shape}", bandwidth, "TB/s")]
    for name, (bytes_each, call) in kernels.items():
        moved = bytes_each * x.numel() / milliseconds(call) / 1e9
        rows.append(Row.above(f"{name} of {shape}, of copy", moved / bandwidth, "", BAR))
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
    rows, bandwidth = plain_rows(options.tokens, options.features)
    rows += fused_rows(options.tokens, options.features, bandwidth, options.sweep)
    return report(rows, options.json, device_name())


if __name__ == "__main__":
    sys.exit(main())

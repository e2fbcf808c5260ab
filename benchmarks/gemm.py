"""Every usable FP8 GEMM provider beside BF16 cuBLAS:  python -m benchmarks.gemm [--json FILE]

Needs a CUDA device.  The shapes are the linears of a Qwen3-8B-like model; TFLOP/s are 2·M·N·K over the median time of
the provider's whole call, copies of scales included.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.gpu_time import device_name, milliseconds
from benchmarks.report import Row, report
from jetgraph.lowering import registry
from jetgraph.lowering.provider import Gemm, Quantizer

RULE = (448.0, 1e-12, "div", False)
LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
TOKENS = (16, 8192)


def quantized(rows: int, cols: int, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    provider = registry.choose(Quantizer(*block, RULE), registry.this_device())
    return provider.quantize(x, *block, *RULE)


def figures(label: str, num_rows: int, gemm: Gemm, depth: int) -> list[Row]:
    device = registry.this_device()
    operations = 2 * num_rows * gemm.num_out * depth / 1e9
    x, w = (torch.randn(n, depth, device="cuda", dtype=torch.bfloat16) for n in (num_rows, gemm.num_out))
    rows = [Row.fact(f"{label}, BF16 cuBLAS", operations / milliseconds(lambda: x @ w.t()), "TFLOP/s")]
    a, b = quantized(num_rows, depth, (1, 128)), quantized(gemm.num_out, depth, (gemm.b_rows, 128))
    for name, provider in registry.PROVIDERS.items():
        if name == "reference" or not registry.probe(name, device).ok or provider.refuses(gemm):
            continue
        time = milliseconds(lambda p=provider: p.fp8_gemm(*a, *b, None, gemm.b_rows, 128))
        rows.append(Row.fact(f"{label}, {name}", operations / time, "TFLOP/s"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for name, (num_out, depth) in LINEARS.items():
        for tokens in TOKENS:
            rows += figures(f"FPROP {name} M={tokens}", tokens, Gemm(num_out, depth), depth)
        rows += figures(f"WGRAD {name} {max(TOKENS)} tokens", num_out, Gemm(depth, 0, 1), max(TOKENS))
    return report(rows, options.json, device_name())


if __name__ == "__main__":
    sys.exit(main())

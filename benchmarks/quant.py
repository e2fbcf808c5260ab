"""Quantisers against the bandwidth of a copy, measured in the same run:  python -m benchmarks.quant [--json FILE]

Needs a CUDA device and triton.  Each figure is the bytes that the kernel must move (inputs read once, codes and scales
written once) over its median time, as a fraction of what `copy_` moves of the same tensor.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from benchmarks.gpu_time import device_name, milliseconds
from benchmarks.report import Row, report
from jetgraph.lowering import reference, triton_quantize

RULE = (448.0, 1e-12, "div", False)
BAR = 0.85
GROUP = 128


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--features", type=int, default=4096)
    options = parser.parse_args()
    x = torch.randn(options.tokens, options.features, device="cuda", dtype=torch.bfloat16)
    shape = f"[{options.tokens}, {options.features}]"
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
    return report(rows, options.json, device_name())


if __name__ == "__main__":
    sys.exit(main())

"""Crafted inputs: the rows that ordinary data never reach and where definitions part.

Replaying real text cannot tell an amax floor of 1e-12 from one of 1e-10, nor eps 1e-5 from 1e-6; these rows can.
T rows, C features; BF16 unless said otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOORS = (1e-12, 1e-10, 1e-4, 1.0 / 512.0)
"""Amax floors in use: ours and torchao, vLLM activations, DeepGEMM, vLLM native and fused (448 / (448 · 512))."""


def ordinary(rows: int, cols: int, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, cols, generator=generator).to(torch.bfloat16).to(device)


def scaled(rows: int, cols: int, device: str, scale: float) -> Tensor:
    return (ordinary(rows, cols, device, seed=1).float() * scale).to(torch.bfloat16)


def near_floors(cols: int, device: str) -> Tensor:
    """One row per floor and side: its largest magnitude is below, at about, and above that floor."""
    base = ordinary(1, cols, "cpu", seed=2).float()
    base = base / base.abs().max()
    rows = [base * (floor * factor) for floor in FLOORS for factor in (0.03, 0.5, 0.97, 1.0, 1.03, 2.0, 30.0)]
    return torch.cat(rows).to(torch.bfloat16).to(device)


def ties(cols: int, device: str) -> Tensor:
    """amax 3.9375 with 0.59765625 among the values: dividing gives another code than multiplying by 1/s (row N3)."""
    row = torch.full((1, cols), 0.59765625)
    row[:, 0] = 3.9375
    negative = -row
    return torch.cat([row, negative, row * 2.0**-20, row * 2.0**30]).to(torch.bfloat16).to(device)


def powers_of_two(cols: int, device: str) -> Tensor:
    """amax exactly 448·2^k, one BF16 step below and one above it."""
    rows = []
    for exponent in (-30, -8, 0, 8, 30):
        for amax in (1.7421875, 1.75, 1.7578125):
            row = ordinary(1, cols, "cpu", seed=exponent + 40).float()
            row = row / row.abs().max() * 0.9
            row[:, cols // 2] = 1.0
            rows.append(row * amax * 2.0 ** (exponent + 8))
    return torch.cat(rows).to(torch.bfloat16).to(device)


def one_ulp_above_powers_of_two(cols: int, device: str) -> Tensor:
    """FP32 rows whose amax/448 is the FP32 number just above a power of two: `ceil(log2(x))` in FP32 is wrong there."""
    rows = []
    for exponent in (-7, -20, 3):
        amax = torch.nextafter(torch.tensor(448.0 * 2.0**exponent), torch.tensor(float("inf")))
        while amax / 448.0 <= 2.0**exponent:
            amax = torch.nextafter(amax, torch.tensor(float("inf")))
        row = ordinary(1, cols, "cpu", seed=3).float()
        row = row / row.abs().max() * amax * 0.9
        row[:, 0] = amax
        rows.append(row)
    return torch.cat(rows).to(device)


def non_finite(cols: int, device: str) -> Tensor:
    x = ordinary(3, cols, device, seed=4)
    x[0, 1], x[1, 1], x[2, 1] = float("inf"), float("-inf"), float("nan")
    return x


def small_integers(rows: int, cols: int, device: str, largest: int = 3, seed: int = 5) -> Tensor:
    """Integers of magnitude at most ``largest``: sums of their products are exact in FP32 in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-largest, largest + 1, (rows, cols), generator=generator).to(torch.bfloat16).to(device)


def finite_bf16(cols: int, device: str) -> Tensor:
    """Every finite BF16 number, in rows of ``cols``, padded with zeros."""
    bits = torch.arange(0, 1 << 16, dtype=torch.int32).to(torch.int16)
    every = bits.view(torch.bfloat16)
    every = every[every.isfinite()]
    padded = torch.nn.functional.pad(every, (0, -every.numel() % cols))
    return padded.view(-1, cols).to(device)


def for_quantising(cols: int, device: str) -> dict[str, Tensor]:
    """Rows by the name they have in a report; ``cols`` a multiple of 128."""
    return {
        "ordinary": ordinary(64, cols, device),
        "scale 1e-3": scaled(16, cols, device, 1e-3),
        "scale 1e-6": scaled(16, cols, device, 1e-6),
        "subnormal": scaled(16, cols, device, 1e-39),
        "huge": scaled(16, cols, device, 5e37),
        "near amax floors": near_floors(cols, device),
        "zeros": torch.zeros(4, cols, dtype=torch.bfloat16, device=device),
        "ties": ties(cols, device),
        "powers of two": powers_of_two(cols, device),
    }


def for_norms(cols: int, device: str) -> dict[str, Tensor]:
    """Rows whose squares sum exactly in FP32 (small integers times powers of two), and the scales where eps shows."""
    return {
        "exact sums": small_integers(64, cols, device),
        "exact sums, scale 2^-10": small_integers(16, cols, device) * 2.0**-10,
        "exact sums, scale 2^-20": small_integers(16, cols, device) * 2.0**-20,
        "subnormal": (small_integers(8, cols, device).float() * 2.0**-133).to(torch.bfloat16),
        "zeros": torch.zeros(4, cols, dtype=torch.bfloat16, device=device),
    }

"""Two ways to compare: the same bits, or within a bound."""

from __future__ import annotations

import torch
from torch import Tensor

from jetgraph.attest.report import Check, Outcome


def same_bits(op: str, claim: str, rows: str, got: Tensor, want: Tensor, *, declared: bool = True) -> Check:
    """Bit for bit; −0 and +0 are different, any two NaNs are the same."""
    if got.shape != want.shape or got.dtype != want.dtype:
        note = f"got {got.dtype} {tuple(got.shape)}, definition {want.dtype} {tuple(want.shape)}"
        return Check(op, claim, rows, Outcome.FAILS, declared=declared, note=note)
    differing = _bits(got) != _bits(want)
    if got.dtype.is_floating_point and got.element_size() > 1:
        differing &= ~(got.isnan() & want.isnan())
    return Check.compared(op, claim, rows, int(differing.sum()), differing.numel(), declared=declared)


def _bits(x: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.contiguous().view(sizes[x.element_size()])


def bounded(
    op: str, claim: str, rows: str, got: Tensor, oracle: tuple[Tensor, Tensor], *, declared: bool = True
) -> Check:
    """|got − exact| ≤ bound for every value; ``oracle`` is (exact, bound) in float64."""
    exact, bound = oracle
    error = (got.double() - exact).abs()
    outside = ~(error <= bound)
    worst = float((error / bound).nan_to_num(nan=float("inf")).max())
    return Check.compared(op, claim, rows, int(outside.sum()), outside.numel(), worst=worst, declared=declared)


def tried(op: str, rows: str, got: Tensor, definitions: dict[str, Tensor], *, declared: bool = True) -> list[Check]:
    """Bit for bit against several definitions: the first is the declared one, the others only show what else fits."""
    return [
        same_bits(op, claim, rows, got, want, declared=declared and index == 0)
        for index, (claim, want) in enumerate(definitions.items())
    ]

"""What a comparison hands to the pictures: differences as plain values, independent of who found them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Difference:
    """One place where the two graphs differ.

    ``train`` and ``infer`` are node indices of the graphs given to the picture, None where a side has no such node.
    ``rule`` is an id such as ``JG001``; ``text`` one sentence for people.  ``fqn`` places a difference that is at no
    node of either side.

    >>> Difference(train=737, infer=402, rule="JG001", text="expected f8e4m3[1x128]; got bf16").rule
    'JG001'
    """

    train: int | None
    infer: int | None
    rule: str
    text: str
    fqn: str = ""


def from_faults(faults: Iterable[Any]) -> tuple[Difference, ...]:
    """The faults of a `jetgraph.verify.Result`, read by attribute so that pictures need no verifier."""
    return tuple(
        Difference(f.train, f.infer, f.rule, f"{f.op}: expected {f.expected}; got {f.got}", f.fqn) for f in faults
    )

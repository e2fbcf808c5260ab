"""Guards: what a captured graph assumes of the token count T, and whether one side's assumptions cover the other's.

A guard is text in ``meta["guards"]``.  Five forms are understood, all integers, and decided exactly:

    2 <= T        T <= 8192        2 <= T <= 8192        T == 64        T % 8 == 0

A sentence of plain words ("positions are consecutive") covers itself, word for word.  Anything else covers nothing, not
even itself: symbols of two captures share names by accident ("s0 <= 64" may be tokens here and requests there), and σ,
the map from the engine's symbols to the trainer's, has T alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_BOUNDS = re.compile(r"(?:(?P<low>\d+) <= )?T(?: <= (?P<high>\d+))?")
_EQUAL = re.compile(r"T(?: % (?P<modulus>[1-9]\d*))? == (?P<value>\d+)")
_SENTENCE = re.compile(r"[A-Za-z][A-Za-z ,'-]*")


@dataclass(frozen=True)
class Range:
    """low <= T <= high, and T ≡ residue (mod modulus).  ``high`` None is unbounded."""

    low: int = 0
    high: int | None = None
    modulus: int = 1
    residue: int = 0

    def implies(self, other: Range) -> bool:
        """Whether every integer of this range is one of the other's; never a wrong yes.

        >>> Range(8, 64).implies(Range(2, 8192)), Range(2).implies(Range(2, 8192))
        (True, False)
        >>> Range(modulus=8, residue=5).implies(Range(modulus=4, residue=1)), Range(5, 5).implies(Range(0, 9, 4, 1))
        (True, True)
        """
        if self.low == self.high:
            same = self.low % other.modulus == other.residue
        else:
            same = self.modulus % other.modulus == 0 and self.residue % other.modulus == other.residue
        below = other.high is None or (self.high is not None and self.high <= other.high)
        return self.low >= other.low and below and same


def parse(guard: str) -> Range | None:
    """The range that a guard of one of the five forms states; None for anything else."""
    bounds = _BOUNDS.fullmatch(guard)
    if bounds is not None and guard != "T":
        return Range(int(bounds["low"] or 0), int(bounds["high"]) if bounds["high"] else None)
    equal = _EQUAL.fullmatch(guard)
    if equal is None:
        return None
    value = int(equal["value"])
    return Range(value, value) if equal["modulus"] is None else Range(modulus=int(equal["modulus"]), residue=value)


def uncovered(train: Iterable[str], infer: Iterable[str]) -> list[str]:
    """The trainer's guards that some token count within the engine's guards may break.

    Each must follow from the engine's tightest bounds or from one of its congruences: sound, and complete but for facts
    that several congruences imply only together.

    >>> uncovered(["2 <= T <= 8192", "positions are consecutive"], ["2 <= T", "T <= 512"])
    ['positions are consecutive']
    """
    stated = list(infer)
    ranges = [r for guard in stated if (r := parse(guard)) is not None]
    low = max((r.low for r in ranges), default=0)
    high = min((r.high for r in ranges if r.high is not None), default=None)
    ranges = [Range(low, high), *(Range(low, high, r.modulus, r.residue) for r in ranges)]

    def covered(guard: str) -> bool:
        wanted = parse(guard)
        if wanted is None:
            return guard in stated and _SENTENCE.fullmatch(guard) is not None
        return any(r.implies(wanted) for r in ranges)

    return [guard for guard in train if not covered(guard)]

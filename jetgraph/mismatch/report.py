"""What was measured, as frozen values that any logger takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jetgraph.mismatch.estimators import Difference


@dataclass(frozen=True)
class Counts:
    """Tokens and sequences of a batch, and what was wrong with them."""

    num_tokens: int
    """Measured: kept by the mask and legal."""
    num_illegal: int
    """Kept by the mask and left out here: NaN, above 0, or of a version that the trainer has not reached."""
    num_nan: int
    num_positive: int
    num_rounded_positive: int
    """Above 0 by a rounding; measured as they are."""
    num_impossible: int
    """−inf on both sides: a sampled token that neither side could have sampled.  Measured as agreement."""
    num_sequences: int
    num_empty_sequences: int
    """Sequences without a measured token; no statistic of sequences contains them."""


@dataclass(frozen=True)
class Split:
    """One set of tokens: the whole difference, and its two causes where they were separated."""

    total: Difference
    """Trainer − rollout."""
    numeric: Difference | None
    """Shadow − rollout: the same weights on two machines.  Without shadow it is ``total`` if no token is stale."""
    staleness: Difference | None
    """Trainer − shadow: two weights on one machine."""

    def series(self) -> Iterator[tuple[str, Difference]]:
        for name in ("total", "numeric", "staleness"):
            if (found := getattr(self, name)) is not None:
                yield name, found


@dataclass(frozen=True)
class Mismatch:
    """Train–inference mismatch of one batch.

    A batch without tokens has ``whole`` None and no statistics: 0.0 would read as a perfect match.
    """

    whole: Split | None
    by_position: tuple[tuple[str, Split], ...]
    """("0-63", …), ("64-255", …) and so on, of the buckets that have tokens; sequences are then their part inside."""
    counts: Counts
    clip: tuple[float, float]
    lag_mean: float | None
    lag_max: int | None

    @property
    def decisive(self) -> tuple[str, Difference] | None:
        """The series that a limit on numerics is about: ``numeric`` if it is known, else ``total``."""
        if self.whole is None:
            return None
        return ("numeric", self.whole.numeric) if self.whole.numeric is not None else ("total", self.whole.total)

    def scalars(self, prefix: str = "jetgraph/", *, by_position: bool = True) -> dict[str, float]:
        """``{prefix}total/k3``, ``{prefix}numeric/mean/64-255``, ``{prefix}num_illegal`` …; finite floats only."""
        found = {name: float(value) for name, value in dataclasses.asdict(self.counts).items()}
        for name in ("lag_mean", "lag_max"):
            if (value := getattr(self, name)) is not None:
                found[name] = float(value)
        splits = [("", self.whole)] if self.whole is not None else []
        splits += [(f"/{bucket}", split) for bucket, split in self.by_position if by_position]
        for suffix, split in splits:
            for series, statistics in split.series():
                for name, value in dataclasses.asdict(statistics).items():
                    found[f"{series}/{name}{suffix}"] = float(value)
        return {prefix + name: value for name, value in found.items()}

    def to_plain(self) -> dict[str, Any]:
        """Of JSON's types; `from_plain` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Mismatch:
        """
        Raises:
            TypeError: fields are missing or unknown.
        """
        whole = plain["whole"]
        return cls(
            **plain
            | {
                "whole": None if whole is None else _split(whole),
                "by_position": tuple((bucket, _split(split)) for bucket, split in plain["by_position"]),
                "counts": Counts(**plain["counts"]),
                "clip": tuple(plain["clip"]),
            }
        )


def _split(plain: dict[str, Any]) -> Split:
    return Split(**{name: None if value is None else Difference(**value) for name, value in plain.items()})

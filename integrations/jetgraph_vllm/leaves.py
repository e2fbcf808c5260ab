"""What values of a captured engine program stand for, besides terms: both lifters bind placeholders to these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stored:
    """A live tensor that holds one or several checkpoint weights; ``kind`` is codes, scale, weight (BF16) or bias."""

    module: str
    kind: str
    transposed: bool = False


@dataclass(frozen=True)
class CacheWrite:
    """The state token of one layer's KV cache update."""

    k: int
    v: int
    layer: str


@dataclass(frozen=True)
class RotaryTable:
    fqn: str

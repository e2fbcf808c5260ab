"""Merged weights: where each checkpoint part lies inside one vLLM parameter.  No vLLM in here.

vLLM runs q, k, v (and gate, up) as one module.  Each part keeps its own grid of scales, so a part's scale rows start at
the sum of the rounded-up row counts before it, which is not the rounded-up sum of rows:

    rows 576, 192, 192, blocks of 128 → scale rows 5 + 2 + 2 = 9, v's start at 7 and not at ⌈768/128⌉ = 6
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetgraph.lowering import reference

_SHARDS = {"q": 0, "k": 1, "v": 2}


@dataclass(frozen=True)
class Part:
    """One checkpoint weight inside a merged parameter: its name, its rows, its rows of scales."""

    name: str
    rows: tuple[int, int]
    scale_rows: tuple[int, int]

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def num_scale_rows(self) -> int:
        return self.scale_rows[1] - self.scale_rows[0]


def lay_out(names: tuple[str, ...], sizes: list[int], block_rows: int) -> tuple[Part, ...]:
    """Parts one below the other; ``block_rows`` is the height of a scale block.

    >>> [(p.rows, p.scale_rows) for p in lay_out(("q", "k", "v"), [576, 192, 192], 128)]
    [((0, 576), (0, 5)), ((576, 768), (5, 7)), ((768, 960), (7, 9))]
    """
    if len(names) != len(sizes):
        names = tuple(f"{'+'.join(names)}[{i}]" for i in range(len(sizes)))
    parts, row, scale_row = [], 0, 0
    for name, size in zip(names, sizes, strict=True):
        num_scale_rows = -(-size // block_rows)
        parts.append(Part(name, (row, row + size), (scale_row, scale_row + num_scale_rows)))
        row, scale_row = row + size, scale_row + num_scale_rows
    return tuple(parts)


def merged(parts: tuple[Part, ...], block_rows: int) -> Part | None:
    """All parts as one, whose grid of scales is theirs one below the other; None if a block would straddle two.

    >>> merged(lay_out(("q", "k", "v"), [512, 128, 128], 128), 128).scale_rows
    (0, 6)
    >>> merged(lay_out(("q", "k", "v"), [576, 192, 192], 128), 128) is None
    True
    """
    if any(part.num_rows % block_rows for part in parts[:-1]):
        return None
    return Part("+".join(part.name for part in parts), (0, parts[-1].rows[1]), (0, parts[-1].scale_rows[1]))


class PartLoader:
    """vLLM's weight loader of one parameter: puts every part in its rows, checks it, counts it.

    ``place`` is what goes to ``parameter.weight_loader``; vLLM calls it with the shard ("q", "k", "v" or 0, 1) of a
    merged module and without one elsewhere.  ``synced``: no checkpoint is loaded, weight sync brings the weights.
    """

    synced = False

    def __init__(self, parts: tuple[Part, ...], suffix: str, num_cols: int, dtype: torch.dtype, scales: bool) -> None:
        self.parts = parts
        self.suffix = suffix
        self.num_cols = num_cols
        self.dtype = dtype
        self.scales = scales
        self.loads = [0] * len(parts)

    def rows_of(self, part: Part) -> tuple[int, int]:
        return part.scale_rows if self.scales else part.rows

    def place(self, parameter: Tensor, loaded: Tensor, shard: str | int | None = None) -> None:
        index = self._index(shard)
        part = self.parts[index]
        start, stop = self.rows_of(part)
        name = f"{part.name}.{self.suffix}"
        if loaded.dtype != self.dtype:
            raise ValueError(f"{name} is {_short(loaded.dtype)}, expected {_short(self.dtype)}: use jetgraph.export")
        expected = (stop - start, self.num_cols)
        if tuple(loaded.shape) != expected:
            raise ValueError(
                f"{name} has shape {tuple(loaded.shape)}, expected {expected}: another model or block size"
            )
        target = parameter.data[start:stop]
        if target.dtype != self.dtype:
            raise TypeError(
                f"{name}: the engine holds it as {_short(target.dtype)}, which would round {_short(self.dtype)}"
            )
        reference.unpin_weight(target)
        target.copy_(loaded)
        self.loads[index] += 1

    def _index(self, shard: str | int | None) -> int:
        if shard is None and len(self.parts) == 1:
            return 0
        index = _SHARDS.get(shard, shard)  # type: ignore[arg-type]
        if isinstance(index, int) and index < len(self.parts):
            return index
        names = ", ".join(part.name for part in self.parts)
        raise ValueError(
            f"{self.suffix} loaded with shard {shard!r}: expected the separate weights {names}, not one fused weight"
        )


def check_loaded(weights: PartLoader) -> None:
    """Every part came with the checkpoint, if one was loaded."""
    if weights.synced and not any(weights.loads):
        return
    for part, num_loads in zip(weights.parts, weights.loads, strict=True):
        if not num_loads:
            raise ValueError(f"{part.name}.{weights.suffix} is not in the checkpoint: export it again")


def check_loaded_in_pairs(weights: PartLoader, scales: PartLoader) -> None:
    """Every part has a weight and a scale, and both were renewed equally often."""
    check_loaded(weights)
    for part, num_weights, num_scales in zip(weights.parts, weights.loads, scales.loads, strict=True):
        if num_weights == num_scales:
            continue
        have = f"{weights.suffix} loaded {num_weights} times, {scales.suffix} {num_scales} times"
        raise ValueError(f"{part.name}: {have}: an FP8 weight must come with its scale, export the checkpoint again")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

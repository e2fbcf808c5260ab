"""What backward reads of forward: the values that have to be kept, and how many bytes they take.

A graph says what is read, not what a compiler stores: it may store less and compute a value again.
"""

from __future__ import annotations

from math import ceil, prod

from jetgraph.graph import Phase, PrecisionGraph, ValueType
from jetgraph.precision import Format

_BYTES = {Format.BF16: 2, Format.F32: 4, Format.F64: 8, Format.I64: 8, Format.E4M3: 1, Format.E8M0: 1}


def size_of(kind: ValueType) -> tuple[float, bool]:
    """Bytes of a value with its scales, and whether they are bytes per token.

    >>> from jetgraph.precision import BF16, Granularity, Precision, Scale
    >>> size_of(ValueType(("T", 576), BF16))
    (1152.0, True)
    >>> size_of(ValueType((576, 1536), Precision(Format.E4M3, Scale(Granularity.per_block(128, 128)))))
    (884976.0, False)
    >>> size_of(ValueType(("T", 256), Precision(Format.E4M3, Scale(Granularity.per_token_group(128)))))
    (264.0, True)
    """
    per_token = "T" in kind.shape
    shape = [1 if size == "T" else int(size) for size in kind.shape]
    total = float(prod(shape)) * _BYTES[kind.precision.format]
    scale = kind.precision.scale
    if scale is not None and len(shape) == 2:
        rows, cols = scale.granularity.rows, scale.granularity.cols
        grid_cols = 1 if cols is None else ceil(shape[1] / cols)
        if per_token:
            grid_rows = 0.0 if rows is None else 1 / rows
        else:
            grid_rows = 1 if rows is None else ceil(shape[0] / rows)
        total += grid_rows * grid_cols * _BYTES[scale.format]
    return total, per_token


def kept(graph: PrecisionGraph) -> dict[int, tuple[float, bool]]:
    """Size (`size_of`) of every value that forward computes and backward reads; leaves are there anyway."""
    found = {}
    for node in graph.nodes:
        if node.phase is Phase.BACKWARD:
            for i in node.inputs:
                if graph.nodes[i].phase is Phase.FORWARD and graph.nodes[i].inputs and i not in found:
                    found[i] = size_of(graph.nodes[i].type)
    return found


def in_words(size: float, per_token: bool) -> str:
    """
    >>> in_words(1152.0, True), in_words(884976.0, False)
    ('1,152 B per token', '884,976 B')
    """
    number = f"{size:,.0f}" if size == int(size) else f"{size:,.1f}"
    return f"{number} B per token" if per_token else f"{number} B"

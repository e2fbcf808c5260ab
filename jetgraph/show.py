"""One HTML page of a training graph, alone or beside the rollout's with every difference that verification found."""

from __future__ import annotations

from pathlib import Path

from jetgraph.graph import PrecisionGraph
from jetgraph.verify import verify
from jetgraph.viz import from_faults, write_html


def write_page(path: Path, train: PrecisionGraph, infer: PrecisionGraph | None = None) -> Path:
    """Write the page; returns its path."""
    title = f"Precision flow of {train.meta.get('model', train.name)}"
    if infer is None:
        return write_html(path, train, title=title)
    result = verify(train, infer)
    return write_html(path, train, infer, from_faults(result.faults), title=title, verdict=str(result.verdict))

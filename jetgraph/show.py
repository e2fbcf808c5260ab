"""One HTML page of a training graph, alone or beside the rollout's with every difference that verification found."""

from __future__ import annotations

from pathlib import Path

from jetgraph.graph import PrecisionGraph
from jetgraph.verify import verify
from jetgraph.viz.html import Difference, write_html


def write_page(path: Path, train: PrecisionGraph, infer: PrecisionGraph | None = None) -> Path:
    """Write the page; returns its path."""
    if infer is None:
        return write_html(path, train, title=f"jetgraph: {train.name}")
    result = verify(train, infer)
    differences = [
        Difference(fault.train, fault.infer, fault.rule, f"expected {fault.expected}; got {fault.got}")
        for fault in result.faults
    ]
    title = f"jetgraph: {train.meta.get('model', '')} · {result.verdict}"
    return write_html(path, train, infer, differences, title=title)

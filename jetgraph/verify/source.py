"""A graph file as both readers see it: the finder's graph, and what the checker reads of the same bytes.

Parsing costs more than comparing, so it happens once.  Whoever does not trust that runs `jetgraph check`, which starts
from the bytes again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jetgraph import bounded_json
from jetgraph.graph import GraphError, PrecisionGraph
from jetgraph.verify.certificate import CertificateError, refusals, the_checker
from jetgraph.verify.meta import require_form

if TYPE_CHECKING:
    from jetgraph.verify import checker


SIDES = {"train": ("train",), "infer": ("infer", "expected")}
"""What a file's ``meta.side`` may say where a side is asked for; `jetgraph extract` writes "expected"."""


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """A million nodes make no cycles, but the collector would walk all of them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True)
class Source:
    graph: PrecisionGraph
    read: checker.Graph

    @classmethod
    def of(cls, graph: PrecisionGraph, side: str) -> Source:
        """The file that `PrecisionGraph.save` would write."""
        return cls(graph, cls.parse(graph.to_json().encode(), side).read)

    @classmethod
    def parse(cls, data: bytes, side: str) -> Source:
        """The content of a graph file, which may be hostile; ``side`` is "train" or "infer".

        Raises:
            GraphError: one sentence that says what is wrong.
        """
        checker = the_checker()
        try:
            with without_garbage_collection(), refusals():
                parsed = bounded_json.parse(data)
                graph = PrecisionGraph.from_data(parsed)
                require_form(parsed["meta"])
                return cls(graph, checker.Graph(parsed, side, checker.sha(data)))
        except (bounded_json.Unreadable, CertificateError) as error:
            raise GraphError(f"not a jetgraph graph file: {error}") from error

    @classmethod
    def load(cls, path: str | Path, side: str) -> Source:
        """The graph file at ``path``, captured from that side.

        A graph is contained in itself: a path given twice, or two in the wrong order, would say nothing of a run.

        Raises:
            GraphError: one sentence that names the path and says what is wrong.
        """
        try:
            source = cls.parse(bounded_json.read_bytes(path), side)
        except bounded_json.Unreadable as error:
            raise GraphError(str(error)) from error
        except GraphError as error:
            raise GraphError(f"{path}: {error}") from error
        captured = source.graph.meta.get("side", side)
        if captured not in SIDES[side]:
            raise GraphError(
                f"{path} was captured from side {captured!r}, expected {SIDES[side][0]!r}: give the training graph "
                "first, then the rollout's"
            )
        return source

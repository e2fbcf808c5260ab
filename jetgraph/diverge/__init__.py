"""Where do training and rollout first compute different bits?

`roots` runs both graphs beside each other on one prompt and compares the values that verification aligned: between
graph and graph every number is at hand.  `compare_recording` holds what a live engine computed, as a digest for each
token at the border of every linear, against training's graph: no tensor leaves the engine.

    found = list(roots(Side(train, leaves), Side(infer, leaves), verify(train, infer)))
    print(report(found, …))
"""

from __future__ import annotations

from jetgraph.diverge.boundaries import Boundary, boundaries
from jetgraph.diverge.recorded import Recording, RecordingError, RecordingReport, compare_recording
from jetgraph.diverge.roots import Comparison, Root, Side, compare_graphs
from jetgraph.diverge.values import Difference, difference

__all__ = [
    "Boundary",
    "Comparison",
    "Difference",
    "Recording",
    "RecordingError",
    "RecordingReport",
    "Root",
    "Side",
    "boundaries",
    "compare_graphs",
    "compare_recording",
    "difference",
]

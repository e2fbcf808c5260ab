"""Where do training and rollout first compute different bits?

`compare_graphs` runs both graphs beside each other on one prompt and compares the values that verification aligned:
between graph and graph every number is at hand.  `compare_recording` holds what a live engine computed, as a digest for
each token at the border of every linear, against training's graph: no tensor leaves the engine.

    found = compare_graphs(Side(train, leaves), Side(infer, leaves), verify(train, infer))
    print(comparison_text(found))
"""

from __future__ import annotations

from jetgraph.diverge.boundaries import Boundary, boundaries
from jetgraph.diverge.recorded import Recording, RecordingError, RecordingReport, compare_recording
from jetgraph.diverge.report import comparison_json, comparison_text, recording_json, recording_text
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
    "comparison_json",
    "comparison_text",
    "difference",
    "recording_json",
    "recording_text",
]

"""The window of a counterexample: every op around one difference, both sides drawn alike.

Where a section folds runs of pointwise ops into one box, a window draws each op, for it is the single missing rounding
that must be seen; what is further than a few steps away is left out and named where the lines are cut.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable

from jetgraph.viz.condense import Condensed, condense, leaf, port_titles
from jetgraph.viz.layers import Place, consumers
from jetgraph.viz.scene import BACKWARD, FORWARD, Scene, arrange, scenes
from jetgraph.viz.study import FoldedDifference, Side, Study
from jetgraph.viz.svg import panes

BEFORE, AFTER = 3, 2
"""How many steps along edges a window reaches upstream and downstream."""
NOTE_WIDTH = 96
MAX_NAMED = 2


def window_svg(study: Study, number: int, title: str = "") -> str:
    """The surroundings of the ``number``-th difference (from 1, as they are listed) as one SVG text.  Of a difference
    that several layers share the first layer is drawn.

    Raises:
        ValueError: there is no such difference, or it is at no node of either graph.
    """
    if not 1 <= number <= len(study.differences):
        known = len(study.differences)
        raise ValueError(f"difference {number}: there {'is' if known == 1 else 'are'} {known or 'none'}")
    difference = study.differences[number - 1]
    drawn = window(study, difference)
    first, *others = difference.members
    count = f", first of {len(others) + 1}" if others else ""
    heading = f"{difference.rule} · {difference.where}{count}"
    notes = textwrap.wrap(first.text, NOTE_WIDTH)
    return panes(study, drawn, title or heading, notes)


def window(study: Study, difference: FoldedDifference) -> tuple[Scene, ...]:
    """The drawing around the first member of a difference: one scene for both sides, or one per side."""
    first = difference.members[0]
    marked = (first.train, first.infer)[: len(study.sides)]
    for side, index in zip(study.sides, marked, strict=True):
        if index is not None:
            place, view = side.placed[index], FORWARD if index in side.forward else BACKWARD
            break
    else:
        raise ValueError(f"{difference.rule} at {difference.where} is at no node of a graph: there is nothing to draw")
    near: list[set[int]] = [set() for _ in study.sides]
    for scene in scenes(study, place, view, every_op=True):
        for k in _near(scene, marked):
            for s, box in enumerate(scene.items[k].boxes[: len(study.sides)]):
                if box is not None and box.kind not in ("port", "exit"):
                    near[s].update(box.nodes)
    parts = [_cut(side, members, place, view) for side, members in zip(study.sides, near, strict=True)]
    return arrange(study, parts, view)


def _near(scene: Scene, marked: Iterable[int | None]) -> set[int]:
    """Items within reach of those that hold a marked node."""
    up: dict[int, list[int]] = defaultdict(list)
    down: dict[int, list[int]] = defaultdict(list)
    for wire in scene.wires:
        up[wire.target].append(wire.source)
        down[wire.source].append(wire.target)
    start = {
        k
        for k, item in enumerate(scene.items)
        for box, index in zip(item.boxes, marked, strict=False)
        if box is not None and box.kind not in ("port", "exit") and index in box.nodes
    }
    found = set(start)
    for steps, near in ((BEFORE, up), (AFTER, down)):
        frontier = start
        for _ in range(steps):
            frontier = {m for k in frontier for m in near[k]} - found
            found |= frontier
    return found


def _cut(side: Side, members: set[int], place: Place, view: str) -> Condensed:
    graph, paths = side.graph, side.paths
    outside = port_titles(graph, place, side.placed, paths, side.forward)

    def entering(index: int) -> str:
        if side.placed[index] != place or not graph.nodes[index].inputs:
            return outside(index)
        return f"from {graph.nodes[index].op} {leaf(paths[index])}"

    exits = {}
    users = consumers(graph)
    for index in sorted(members):
        leaving = [u for u in users[index] if u not in members and (u in side.forward) is (view == FORWARD)]
        if leaving and graph.nodes[index].inputs:
            names = list(dict.fromkeys(leaf(paths[u]) for u in leaving if paths[u]))
            more = " …" if len(names) > MAX_NAMED else ""
            exits[index] = f"to {', '.join(names[:MAX_NAMED])}{more}" if names else "goes on"
    return condense(graph, members, paths, entering, exits, every_op=True)

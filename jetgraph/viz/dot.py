"""Graphviz DOT of the model folded by equal layers, or of one layer: for `dot -Tsvg` and whatever else reads DOT.

Every text is a plain quoted label, never a record or an HTML label, so `<>{}|` mean nothing; what still does is
escaped: the quote, the backslash (escString), the ampersand (entities) and line ends.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from jetgraph.viz.legend import PALETTE, format_class
from jetgraph.viz.scene import BACKWARD, FORWARD, Scene, Wire, scenes
from jetgraph.viz.study import Study
from jetgraph.viz.svg import differing_wire, times

_FILLS = {
    "gemm": ("#26323f", "#ffffff"),
    "attention": ("#4a3f6b", "#ffffff"),
    "quantize": ("#fdeedd", "#1c2430"),
    "weight": ("#e6f1f8", "#1c2430"),
    "input": ("#e6f1f8", "#1c2430"),
    "unknown": ("#fce4f0", "#1c2430"),
}
"""Background and ink by kind of box, as in scene.css."""
_ESCAPES = {"\\": "\\\\", '"': '\\"', "&": "&amp;", "\r\n": "\\n", "\n": "\\n", "\r": "\\n", "\0": ""}


def quoted(text: str) -> str:
    r"""A DOT string that renders as exactly this text.

    >>> print(quoted('a->b|{c} "d" \\N & é'))
    "a->b|{c} \"d\" \\N &amp; é"
    """
    return '"' + "".join(_ESCAPES.get(char, char) for char in text.replace("\r\n", "\n")) + '"'


def dot(study: Study, layer: int | None = None, backward: bool = False) -> str:
    """The overview (each section once, as a cluster with all its boxes), or one layer.

    With two graphs the right one's boxes and edges follow in clusters of their own, and what differs is drawn in one
    colour and marked ≠.

    Raises:
        ValueError: there is no such layer.
    """
    if layer is not None and not any(layer in side.blocks for side in study.sides):
        raise ValueError(f"layer {layer}: {study.train.graph.name} has no such layer")
    lines = [
        f"digraph {quoted(study.train.graph.name)} {{",
        '  graph [fontname="Helvetica", rankdir=TB, labeljust=l, compound=true];',
        '  node [shape=box, style="rounded,filled", fillcolor="#ffffff", fontname="Helvetica", fontsize=10];',
        '  edge [fontname="monospace", fontsize=9];',
    ]
    for s in range(len(study.sides)):
        lines += textwrap.indent("\n".join(_side(study, s, layer, backward)), "  ").split("\n")
    return "\n".join([*lines, "}"]) + "\n"


def _side(study: Study, s: int, layer: int | None, backward: bool) -> Iterator[str]:
    side = study.sides[s]
    several = len(study.sides) > 1
    if several:
        yield f"subgraph cluster_{s} {{"
        yield f"  label={quoted(side.name)};"
    before: list[str] = []
    for k, section in enumerate(study.sections):
        place = section.first if layer is None else layer
        if (layer is not None and layer not in section.places) or place not in side.blocks:
            continue
        label = (
            " · ".join(part for part in (section.title, times(section)) if part) if layer is None else f"layer {layer}"
        )
        yield f"  subgraph cluster_{s}_{k} {{"
        yield f"    label={quoted(label)}; style=rounded; color={quoted('#c9d1db')};"
        ends: list[str] = []
        for v, view in enumerate((FORWARD, BACKWARD)[: 1 + backward]):
            drawn = scenes(study, place, view)
            scene = drawn[min(s, len(drawn) - 1)]
            prefix = f"n{s}_{k}_{v}_"
            yield from (f"    {line}" for line in _scene(study, scene, s, prefix))
            if view == FORWARD:
                ends = _ends(scene, s, prefix)
        yield "  }"
        if before and ends:
            yield f'  {before[-1]} -> {ends[0]} [style=dashed, color="#5b6675"];'
        before = ends or before
    if several:
        yield "}"


def _scene(study: Study, scene: Scene, s: int, prefix: str) -> Iterator[str]:
    marked = study.marked[study.sides[s].name]
    for k, item in enumerate(scene.items):
        box = item.boxes[s]
        if box is None:
            continue
        differs = box.kind not in ("port", "exit") and any(n in marked for n in box.nodes)
        attrs = {"label": "\n".join(part for part in (box.title + " ≠" * differs, box.subtitle) if part)}
        if box.kind in ("port", "exit"):
            attrs |= {"shape": "plaintext", "style": "", "fontcolor": "#5b6675"}
        elif box.kind in _FILLS:
            fill, ink = _FILLS[box.kind]
            attrs |= {"fillcolor": fill, "fontcolor": ink}
        if differs:
            attrs |= {"color": PALETTE["differs"], "penwidth": "2.5"}
        yield f"{prefix}{k} [{_attrs(attrs)}];"
    for wire in scene.wires:
        yield from _edge(study, scene, wire, s, prefix)


def _edge(study: Study, scene: Scene, wire: Wire, s: int, prefix: str) -> Iterator[str]:
    value = wire.values[s]
    if value is None or any(scene.items[k].boxes[s] is None for k in (wire.source, wire.target)):
        return
    precision = study.sides[s].graph.nodes[value].type.precision
    colour = PALETTE["differs" if differing_wire(study, scene, wire, s) else format_class(precision)]
    attrs = {"label": precision.short(), "color": colour, "fontcolor": colour}
    if precision.scale is not None:
        attrs["penwidth"] = "2"
    yield f"{prefix}{wire.source} -> {prefix}{wire.target} [{_attrs(attrs)}];"


def _ends(scene: Scene, s: int, prefix: str) -> list[str]:
    """The first and the last box of a section, through which the folded sections are joined."""
    own = [k for k, item in enumerate(scene.items) if item.boxes[s] is not None]
    entering = [k for k in own if (box := scene.items[k].boxes[s]) and box.title == "layer input"] or own[:1]
    leaving = [k for k in own if (box := scene.items[k].boxes[s]) and box.title == "to next"] or own[-1:]
    return [f"{prefix}{entering[0]}", f"{prefix}{leaving[0]}"] if own else []


def _attrs(attrs: dict[str, str]) -> str:
    return ", ".join(f"{name}={quoted(value)}" for name, value in attrs.items())

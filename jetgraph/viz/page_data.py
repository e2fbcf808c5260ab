"""The data of the page: nodes as columns of indices into one table of strings, and which box and wire shows which node.

Sections fold equal layers, so boxes and wires name *ordinals* of a layer's numbering (`Block.numbering`), and every
layer of a section says which node each ordinal is.
"""

from __future__ import annotations

from typing import Any

from jetgraph.viz.condense import Box
from jetgraph.viz.kept import in_words, kept
from jetgraph.viz.layers import Block
from jetgraph.viz.legend import format_class
from jetgraph.viz.scene import Scene
from jetgraph.viz.study import Section, Side, Study


class Strings:
    """One table of distinct strings; columns hold indices."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        return self.index.setdefault(text, len(self.index))


def page_data(known: Study, drawn: list[list[tuple[Scene, ...]]]) -> dict[str, Any]:
    """Everything the script reads.  ``drawn`` has per section its views (`html.VIEWS`), each one scene, or two where
    the sides are drawn apart; items and wires of the second are numbered on."""
    strings = Strings()
    matching = known.matching
    return {
        "sides": [_columns(known, side, strings) for side in known.sides],
        "sections": [_section(known, section, drawn[k], strings) for k, section in enumerate(known.sections)],
        "partner": [-1 if p is None else p for p in matching.train_of] if matching else [],
        "differences": [[[d.train, d.infer] for d in group.members] for group in known.differences],
        "marked": [sorted(known.marked[side.name]) for side in known.sides],
        "strings": list(strings.index),
    }


def _columns(known: Study, side: Side, strings: Strings) -> dict[str, Any]:
    nodes = side.graph.nodes
    status = "".join((known.status(side.name, i) or "-")[0] for i in range(len(nodes))) if known.infer else ""
    return {
        "name": side.name,
        "op": [strings(n.op) for n in nodes],
        "ins": [list(n.inputs) for n in nodes],
        "attrs": [strings(" ".join(f"{k}={v}" for k, v in n.attrs if k != "name")) for n in nodes],
        "type": [strings(str(n.type)) for n in nodes],
        "format": [strings(format_class(n.type.precision)) for n in nodes],
        "fqn": [strings(n.fqn or path) for n, path in zip(nodes, side.paths, strict=True)],
        "path": [strings(str(dict(n.attrs).get("name", ""))) for n in nodes],
        "role": [strings(n.role.value) for n in nodes],
        "kernel": [strings(n.kernel) for n in nodes],
        "source": [strings(n.source) for n in nodes],
        "reason": [strings(n.reason) for n in nodes],
        "kept": [[i, strings(in_words(*size))] for i, size in kept(side.graph).items()],
        "status": status,
        "outputs": [[index, name] for name, index in side.graph.outputs.items()],
    }


def _section(known: Study, section: Section, views: list[tuple[Scene, ...]], strings: Strings) -> dict[str, Any]:
    of_first = [side.blocks.get(section.first) for side in known.sides]
    ordinal = [{n: k for k, n in enumerate(block.numbering)} if block else {} for block in of_first]
    instances = [
        {"layer": place, "nodes": [_numbering(side.blocks.get(place)) for side in known.sides]}
        for place in section.places
    ]
    return {
        "instances": instances,
        "owned": [len(block.nodes) if block else 0 for block in of_first],
        "views": [_view(scenes, ordinal, strings) for scenes in views],
    }


def _view(scenes: tuple[Scene, ...], ordinal: list[dict[int, int]], strings: Strings) -> dict[str, Any]:
    """``items``: per place a box a side; ``wires``: (source item, target item, ordinals of the value, -1 for none)."""
    items: list[Any] = []
    wires: list[list[int]] = []
    for scene in scenes:
        first = len(items)
        items += [
            [_box(box, ordinal[s], strings) for s, box in enumerate(item.boxes[: len(ordinal)])] for item in scene.items
        ]
        for wire in scene.wires:
            values = [-1 if v is None else ordinal[s][v] for s, v in enumerate(wire.values[: len(ordinal)])]
            wires.append([first + wire.source, first + wire.target, *values])
    return {"items": items, "wires": wires}


def _box(box: Box | None, ordinal: dict[int, int], strings: Strings) -> Any:
    """Title, whether the box computes its nodes (a port and an exit only name one), and its nodes."""
    if box is None:
        return 0
    return [strings(box.title), int(box.kind not in ("port", "exit")), [ordinal[n] for n in box.nodes]]


def _numbering(block: Block | None) -> list[int]:
    return list(block.numbering) if block else []

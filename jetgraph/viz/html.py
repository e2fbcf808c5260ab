"""Writes the precision graph as one HTML file that opens from disk: no network, no dependencies, no build step.

The drawings are in the page as SVG and sections fold natively, so it reads and prints without JavaScript; the script
adds selection, search and jumps.  Data are columns of indices into one table of strings.  Every text is escaped for
where it stands; names come from models and may hold anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from jetgraph.graph import PrecisionGraph
from jetgraph.viz.differences import Difference
from jetgraph.viz.layers import Block
from jetgraph.viz.legend import legend
from jetgraph.viz.scene import BACKWARD, FORWARD, Scene, scenes
from jetgraph.viz.study import Section, Side, Study, study
from jetgraph.viz.svg import css, draw, strip, times

VIEWS = (FORWARD, BACKWARD)


def write_html(
    path: str | Path,
    train: PrecisionGraph,
    infer: PrecisionGraph | None = None,
    differences: Iterable[Difference] = (),
    title: str = "",
    verdict: str = "",
) -> Path:
    """One self-contained page of one graph, or of training and rollout side by side.

    ``differences`` are listed and marked; ``verdict`` (such as ``CONTAINED``) is printed in the head as given, never
    derived here.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_html(train, infer, differences, title, verdict), encoding="utf-8")
    return path


def render_html(
    train: PrecisionGraph,
    infer: PrecisionGraph | None = None,
    differences: Iterable[Difference] = (),
    title: str = "",
    verdict: str = "",
) -> str:
    """The text of the page (see `write_html`)."""
    known = study(train, infer, differences)
    drawn = [{view: scenes(known, section.first, view) for view in VIEWS} for section in known.sections]
    backward = any(scene.items for views in drawn for scene in views[BACKWARD])
    title = title or f"Precision flow of {train.meta.get('model', train.name)}"
    return Template(css("page.html")).substitute(
        title=escape(title),
        css=css("scene.css") + css("page.css"),
        body_class="" if backward else ' class="single-phase"',
        facts=_facts(known, verdict),
        sections="\n".join(_section(known, k, drawn[k]) for k in range(len(known.sections))),
        differences=_differences(known),
        legend=legend(len(known.sides) > 1),
        data=for_script(_data(known, drawn)),
        js=css("page.js"),
    )


def for_script(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it opens a tag, an entity or a JavaScript line.

    >>> for_script(["</script>"])
    '["\\\\u003c/script\\\\u003e"]'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


# ------------------------------------------------------------------------------------------------------------ markup


def _facts(known: Study, verdict: str) -> str:
    words = []
    if verdict:
        words.append(f'<span class="{"good" if verdict.startswith("CONTAINED") else "bad"}">{escape(verdict)}</span>')
    for side in known.sides:
        policy = side.graph.meta.get("policy")
        name = f"{side.name} ({policy})" if policy else side.name
        words.append(escape(f"{name}: {len(side.graph.nodes):,} nodes, {side.graph.num_edges:,} edges"))
    if known.matching is not None:
        words.append(f"{len(known.matching.equal):,} rollout nodes equal to training's")
    return " · ".join(words)


def _section(known: Study, k: int, views: dict[str, tuple[Scene, ...]]) -> str:
    section = known.sections[k]
    counts = " · ".join(
        f"{side.name} {len(side.blocks[section.first].nodes):,}" for side in known.sides if section.first in side.blocks
    )
    marked = sum(
        n in known.marked[side.name]
        for side in known.sides
        if section.first in side.blocks
        for n in side.blocks[section.first].nodes
    )
    parts = [f"<b>{escape(section.title)}</b>"]
    if times(section):
        parts.append(f'<span class="times">{times(section)}</span>')
    if marked:
        parts.append(f'<span class="bad">≠ {marked} node{"s"[: marked > 1]} differ{"s"[marked > 1 :]}</span>')
    parts.append(f'<span class="note">{counts} nodes</span>')
    pick = '<label class="pick">panel shows <select></select></label>' if len(section.places) > 1 else ""
    stacked = " stacked" if len(section.places) > 1 else ""
    return (
        f'<details class="section{stacked}"><summary><div class="title">{"".join(parts)}</div>{strip(known, section)}'
        f'</summary><div class="body">{pick}{_panes(known, k, views)}</div></details>'
    )


def _panes(known: Study, k: int, views: dict[str, tuple[Scene, ...]]) -> str:
    forward = "".join(
        _pane(known, views[FORWARD], k, 0, s) for s in range(len(known.sides)) if any(v.items for v in views[FORWARD])
    )
    pair = " pair" if len(known.sides) > 1 else ""
    backward = _pane(known, views[BACKWARD], k, 1, 0) if views[BACKWARD][0].items else ""
    return f'<div class="panes{pair}">{forward}</div>' + (f'<div class="back">{backward}</div>' if backward else "")


def _pane(known: Study, drawn: tuple[Scene, ...], section: int, view: int, side: int) -> str:
    scene, offset = drawn[0], 0
    if len(drawn) > 1 and side == 1:
        scene, offset = drawn[1], len(drawn[0].items)
    name = known.sides[side].name
    caption = f"<figcaption>{name} <span>· {VIEWS[view]}</span></figcaption>"
    picture = draw(known, scene, side, offset)
    return f'<figure class="pane" data-pane="{section}.{view}.{side}">{caption}{picture}</figure>'


def _differences(known: Study) -> str:
    if not known.differences:
        return ""
    total = sum(len(d.members) for d in known.differences)
    items = []
    for k, d in enumerate(known.differences):
        count = f" ×{len(d.members)}" if len(d.members) > 1 else ""
        items.append(
            f'<li><button type="button" data-difference="{k}"><span class="rule">{escape(d.rule)}{count}</span> '
            f'<span class="where">{escape(d.where)}</span><span class="text">{escape(d.text)}</span></button></li>'
        )
    head = f"{total} difference{'s'[: total > 1]} in {len(items)} line{'s'[: len(items) > 1]}"
    return f'<section class="panel" id="differences"><h2>≠ {head}</h2><ol>{"".join(items)}</ol></section>'


# -------------------------------------------------------------------------------------------------------------- data


class _Strings:
    """One table of distinct strings; columns hold indices."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {"": 0}

    def __call__(self, text: str) -> int:
        return self.index.setdefault(text, len(self.index))


def _data(known: Study, drawn: list[dict[str, tuple[Scene, ...]]]) -> dict[str, Any]:
    strings = _Strings()
    return {
        "sides": [_columns(known, side, strings) for side in known.sides],
        "sections": [_layout(known, section, drawn[k]) for k, section in enumerate(known.sections)],
        "views": VIEWS,
        "differences": [[[d.train, d.infer] for d in group.members] for group in known.differences],
        "marked": [sorted(known.marked[side.name]) for side in known.sides],
        "strings": list(strings.index),
    }


def _columns(known: Study, side: Side, strings: _Strings) -> dict[str, Any]:
    nodes = side.graph.nodes
    status = "".join((known.status(side.name, i) or "-")[0] for i in range(len(nodes))) if known.infer else ""
    return {
        "name": side.name,
        "op": [strings(n.op) for n in nodes],
        "ins": [list(n.inputs) for n in nodes],
        "attrs": [strings(" ".join(f"{k}={v}" for k, v in n.attrs if k != "name")) for n in nodes],
        "type": [strings(str(n.type)) for n in nodes],
        "fqn": [strings(n.fqn) for n in nodes],
        "path": [strings(str(dict(n.attrs).get("name", ""))) for n in nodes],
        "role": [strings(n.role.value) for n in nodes],
        "kernel": [strings(n.kernel) for n in nodes],
        "source": [strings(n.source) for n in nodes],
        "reason": [strings(n.reason) for n in nodes],
        "status": status,
        "outputs": [[index, name] for name, index in side.graph.outputs.items()],
    }


def _layout(known: Study, section: Section, views: dict[str, tuple[Scene, ...]]) -> dict[str, Any]:
    """Boxes by ordinals in the first layer's numbering, and the numbering of every layer of the section."""
    of_first = [side.blocks.get(section.first) for side in known.sides]
    ordinal = [{n: k for k, n in enumerate(block.numbering)} if block else {} for block in of_first]
    items = [
        [[_box(box, ordinal, s) for s, box in enumerate(item.boxes)] for scene in views[v] for item in scene.items]
        for v in VIEWS
    ]
    instances = [
        {"layer": place, "nodes": [_numbering(side.blocks.get(place)) for side in known.sides]}
        for place in section.places
    ]
    owned = [len(block.nodes) if block else 0 for block in of_first]
    return {"instances": instances, "owned": owned, "views": items}


def _box(box, ordinal, side: int):
    if box is None:
        return 0
    return {
        "title": box.title,
        "own": box.kind not in ("port", "exit"),
        "ordinals": [ordinal[side][n] for n in box.nodes],
    }


def _numbering(block: Block | None) -> list[int]:
    return list(block.numbering) if block else []

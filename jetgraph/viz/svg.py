"""Draws scenes and the overview as SVG text: the same marks in the page and in single files for a paper or a README.

Single files carry their own white background and resolved colours, use no external font, and read in dark pages too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from jetgraph.graph import PrecisionGraph, Role
from jetgraph.precision import Precision
from jetgraph.viz.condense import leaf
from jetgraph.viz.differences import Difference
from jetgraph.viz.legend import flag_at, format_class
from jetgraph.viz.linears import gemms, key_ops
from jetgraph.viz.scene import BACKWARD, FORWARD, LOW_KINDS, Item, Scene, Wire, scenes
from jetgraph.viz.study import Section, Side, Study, study

MARGIN = 14.0
KEY_WIDTH, KEY_HEIGHT, KEY_GAP = 122.0, 62.0, 8.0
LETTER = 22.0
SIDE_LABEL, LABEL_CHARACTER, TITLE_CHARACTER, CAPITAL = 42.0, 6.3, 8.6, 8.2
"""Width of a row's label at least, of one of its characters, and of one of a title's."""
_LETTERS = {"attention": ("qkv", ""), "embed": ("W", ""), "DGRAD": ("dy", "W"), "WGRAD": ("dy", "x")}
"""What the operands of an op are called."""


def css(name: str) -> str:
    return (files("jetgraph.viz") / name).read_text(encoding="utf-8")


def resolved_css() -> str:
    """scene.css with its variables replaced by the light theme's values: converters know no variables."""
    text = re.sub(r"/\*.*?\*/", "", css("scene.css"), flags=re.S)
    root, rest = re.match(r"\s*:root \{(.*?)\}(.*)", text, flags=re.S).groups()  # type: ignore[union-attr]
    values = dict(re.findall(r"--([\w-]+): ([^;]+);", root))
    return re.sub(r"var\(--([\w-]+)\)", lambda m: values[m[1]], rest).strip()


# --------------------------------------------------------------------------------------------------------- one scene


def draw(study: Study, scene: Scene, side: int, first_item: int = 0, first_wire: int = 0) -> str:
    """One side of a scene as an ``<svg>`` element; ``data-box`` and ``data-wire`` are the numbers of an item and a wire
    in the scene, counted from ``first_item`` and ``first_wire``."""
    wires = [_wire(study, scene, wire, side, first_wire + k) for k, wire in enumerate(scene.wires)]
    body = [line for line, _ in wires] + [label for _, label in wires]
    body += [_item(study, item, side, str(first_item + k)) for k, item in enumerate(scene.items)]
    return _svg(scene.width + 2 * MARGIN, scene.height + 2 * MARGIN, _shift(MARGIN, MARGIN, "".join(body)))


def _svg(width: float, height: float, body: str, extra: str = "") -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    return f'<svg class="jg" xmlns="http://www.w3.org/2000/svg" {size}>{extra}{body}</svg>'


def _shift(x: float, y: float, body: str) -> str:
    return f'<g transform="translate({x:g} {y:g})">{body}</g>'


def _item(study: Study, item: Item, side: int, key: str) -> str:
    box = item.boxes[side]
    ghost = box is None
    box = box or item.boxes[1 - side]
    assert box is not None
    low = box.kind in LOW_KINDS
    if ghost and box.kind in ("port", "exit"):
        return ""
    words = ["box", "ghost" if ghost else box.kind] + ["low"] * low
    differs = False
    if not ghost and box.kind != "port":
        name = study.sides[side].name
        differs = box.kind != "exit" and any(n in study.marked[name] for n in box.nodes)
        words += ["differs"] * differs
    middle, w, h = item.width / 2, item.width, item.height
    text = (
        f'<text class="t" x="{middle:.1f}" y="{h / 2 + 3.5:.1f}">{escape(box.title)}{_tail(box.subtitle)}</text>'
        if low
        else f'<text class="t" x="{middle:.1f}" y="15">{escape(box.title)}</text>'
        f'<text class="s" x="{middle:.1f}" y="28">{escape(box.subtitle)}</text>'
    )
    flag = flag_at(w) if differs else ""
    place = f'transform="translate({item.x:.1f} {item.y:.1f})"'
    rect = f'<rect width="{w:.1f}" height="{h:.1f}"/>'
    data = "" if ghost else f" data-box={quoteattr(key)}"
    return f'<g class="{" ".join(words)}"{data} {place}>{rect}{text}{flag}</g>'


def _tail(subtitle: str) -> str:
    return f' <tspan class="s">{escape(subtitle)}</tspan>' if subtitle else ""


def differing_wire(study: Study, scene: Scene, wire: Wire, side: int) -> bool:
    """A wire differs if both sides have it with another λ, or if it leads to a marked op on this side only."""
    value = wire.values[side]
    if value is None or len(study.sides) == 1:
        return False
    other = wire.values[1 - side]
    if other is not None:
        here, there = study.sides[side].graph.nodes[value], study.sides[1 - side].graph.nodes[other]
        return here.type.precision != there.type.precision
    reader = scene.items[wire.target].boxes[side]
    marked = study.marked[study.sides[side].name]
    return reader is not None and reader.kind != "exit" and any(n in marked for n in reader.nodes)


def _wire(study: Study, scene: Scene, wire: Wire, side: int, key: int) -> tuple[str, str]:
    """Its line and its labels: labels are drawn above all lines."""
    value = wire.values[side]
    target, source = (scene.items[k].boxes[side] for k in (wire.target, wire.source))
    if value is None or target is None or source is None:
        return "", ""
    precision = study.sides[side].graph.nodes[value].type.precision
    differs = " differs" if differing_wire(study, scene, wire, side) else ""
    words = escape(precision.short())
    labels = "".join(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{a}">{words}</text>' for x, y, a in wire.labels)
    group = f'<g class="wire {format_class(precision)}{differs}" data-wire="{key}">'
    return f'{group}<path d="{_path(wire.points)}"/></g>', f"{group}{labels}</g>" if labels else ""


def _path(points: Sequence[tuple[float, float]]) -> str:
    words = [f"M{points[0][0]:.1f} {points[0][1]:.1f}"]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if abs(x0 - x1) < 0.05:
            words.append(f"V{y1:.1f}")
        else:
            bend = max(10.0, (y1 - y0) * 0.55)
            words.append(f"C{x0:.1f} {y0 + bend:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}")
    return "".join(words)


# ---------------------------------------------------------------------------------------------------------- overview


def strip(study: Study, section: Section, view: str = FORWARD) -> str:
    """The key ops of a section, a row a side (in backward a row a role): each linear with the λ of both operands."""
    body, width, height = _strip(study, section, view)
    return _svg(width, height, body) if body else ""


@dataclass(frozen=True)
class _Row:
    side: Side
    label: str
    keys: dict[str, int]
    """by the name of the column, the node"""


def _rows(study: Study, section: Section, view: str) -> list[_Row]:
    """Forward: every side.  Backward: DGRAD and WGRAD of every side that has them."""
    found = [(side, side.blocks[section.first].nodes) for side in study.sides if section.first in side.blocks]
    rows = []
    for side, nodes in found:
        if view == FORWARD:
            keys = [i for i in key_ops(side.graph, nodes) if i in side.forward]
            rows.append(_Row(side, side.name, {_key_name(side, i): i for i in keys}))
            continue
        inside = set(nodes)
        known = [gemm for gemm in gemms(side.graph) if gemm.node in inside]
        for role in (Role.DGRAD, Role.WGRAD):
            rows.append(_Row(side, role.value, {leaf(g.fqn) or "gemm": g.node for g in known if g.role == role.value}))
    rows = [row for row in rows if row.keys]
    if view != FORWARD and len({row.side.name for row in rows}) > 1:
        rows = [replace(row, label=f"{row.side.name} {row.label}") for row in rows]
    return rows


def _strip(study: Study, section: Section, view: str = FORWARD) -> tuple[str, float, float]:
    both = {v: _rows(study, section, v) for v in (FORWARD, BACKWARD)}
    rows = both[view]
    if not rows:
        return "", 4.0, 4.0
    columns: dict[str, int] = {}
    for row in [*both[FORWARD], *rows]:
        for name, index in row.keys.items():
            if view == FORWARD or row.side.graph.nodes[index].op != "embed":
                columns.setdefault(name, len(columns))
    if len(study.sides) == 1 and both[BACKWARD]:
        both[FORWARD] = [replace(row, label=Role.FPROP.value) for row in both[FORWARD]]
        rows = both[view]
    labels = [row.label for pair in both.values() for row in pair]
    labelled = len(study.sides) > 1 or bool(both[BACKWARD])
    label = max(SIDE_LABEL, *(len(words) * CAPITAL + 8 for words in labels)) if labelled else 0.0
    one_line = len(columns) == 1
    pitch = (label + KEY_WIDTH + 3 * KEY_GAP, 0.0) if one_line else (0.0, KEY_HEIGHT + KEY_GAP)
    body = []
    for r, row in enumerate(rows):
        x0, y = r * pitch[0], r * pitch[1]
        if label:
            body.append(f'<text class="n" x="{x0:.0f}" y="{y + KEY_HEIGHT / 2 + 4:.0f}">{escape(row.label)}</text>')
        for name, index in row.keys.items():
            role = row.side.graph.nodes[index].role
            twins = [o.keys[name] for o in rows if o.side is not row.side and name in o.keys]
            others = [s for s in study.sides if s is not row.side]
            twin = next((i for i in twins if others[0].graph.nodes[i].role is role), None)
            x = x0 + label + columns[name] * (KEY_WIDTH + KEY_GAP) + 2
            body.append(_shift(x, y + 2, _key(study, row.side, name, index, twin)))
    width = (len(rows) - 1) * pitch[0] + label + len(columns) * (KEY_WIDTH + KEY_GAP) - KEY_GAP + 4
    return "".join(body), width, (len(rows) - 1) * pitch[1] + KEY_HEIGHT + 4


def _key_name(side: Side, index: int) -> str:
    node = side.graph.nodes[index]
    return leaf(side.paths[index]) if node.op == "gemm" and side.paths[index] else node.op


def _operands(graph: PrecisionGraph, index: int) -> list[Precision]:
    node = graph.nodes[index]
    return [graph.nodes[i].type.precision for i in node.inputs if graph.nodes[i].type.precision.format.value != "i64"]


def _key(study: Study, side: Side, name: str, index: int, twin: int | None) -> str:
    found = list(dict.fromkeys(_operands(side.graph, index))) if name == "attention" else _operands(side.graph, index)
    differs = index in study.marked[side.name]
    if twin is not None:
        other = next(s for s in study.sides if s is not side)
        differs = differs or _operands(side.graph, index) != _operands(other.graph, twin)
    node = side.graph.nodes[index]
    letters = _LETTERS.get(node.role.value if node.op == "gemm" else node.op, ("x", "W"))
    chips = "".join(_chip(p, letters[k], 22 + 18 * k) for k, p in enumerate(found[:2]))
    rect = f'<rect width="{KEY_WIDTH:g}" height="{KEY_HEIGHT:g}"/>'
    title = f'<text class="t" x="{KEY_WIDTH / 2:g}" y="15">{escape(name)}</text>'
    where = f'data-key="{study.sides.index(side)}.{index}"'
    return f'<g class="key{" differs" if differs else ""}" {where}>{rect}{title}{chips}</g>'


def _chip(precision: Precision, letter: str, y: float) -> str:
    width = KEY_WIDTH - LETTER - 8
    text = f'<text x="{width / 2:g}" y="11">{escape(precision.short())}</text>'
    chip = f'<rect width="{width:g}" height="15"/>{text}'
    name = f'<text class="s" x="{LETTER / 2 + 2:g}" y="{y + 11:g}">{letter}</text>'
    return f'{name}<g class="chip {format_class(precision)}" transform="translate({LETTER + 2:g} {y:g})">{chip}</g>'


def _note(study: Study, section: Section) -> str:
    counts = [f"{s.name} {len(s.blocks[section.first].nodes):,}" for s in study.sides if section.first in s.blocks]
    return " · ".join(counts) + " nodes" + (" each" if len(section.places) > 1 else "")


def times(section: Section) -> str:
    """``equal ×30`` for folded layers."""
    return f"equal ×{len(section.places)}" if len(section.places) > 1 else ""


def overview_svg(study: Study, title: str) -> str:
    """The whole model as one column of sections, equal layers drawn as a stack."""
    cards, y, width = [], 44.0, 0.0
    for k, section in enumerate(study.sections):
        body, w, h = _strip(study, section)
        inner = max(w, 280.0)
        width = max(width, inner)
        cards.append((section, body, y, h + 44))
        y += h + 44 + 26
        if k == len(study.sections) - 1:
            y -= 26
    width += 28
    parts = [f'<text class="h" x="0" y="20">{escape(title)}</text>']
    for k, (section, body, top, height) in enumerate(cards):
        if k:
            parts.append(f'<path class="flow" d="M{width / 2:.0f} {top - 25:.0f}v20m-4.500 -5l4.500 5l4.500 -5"/>')
        sheets = "".join(
            f'<g class="stack"><rect x="{d}" y="{top + d:.0f}" width="{width:.0f}" height="{height:.0f}"/></g>'
            for d in ((8, 4) if len(section.places) > 1 else ())
        )
        head = f'<text class="h" x="14" y="21">{escape(section.title)}</text>'
        note = " · ".join(part for part in (times(section), _note(study, section)) if part)
        head += f'<text class="n" x="{width - 14:.0f}" y="21" text-anchor="end">{escape(note)}</text>'
        rect = f'<rect width="{width:.0f}" height="{height:.0f}"/>'
        parts.append(sheets + _shift(0, top, f'<g class="card">{rect}{head}{_shift(14, 33, body)}</g>'))
    return _standalone(width + 10, y + 6, "".join(parts))


def _standalone(width: float, height: float, body: str) -> str:
    style = f'<style>{escape(resolved_css())}</style><rect width="100%" height="100%" fill="#ffffff"/>'
    return _svg(width + 2 * MARGIN, height + 2 * MARGIN, _shift(MARGIN, MARGIN, body), style)


def write_overview_svg(
    path: str | Path,
    train: PrecisionGraph,
    infer: PrecisionGraph | None = None,
    differences: Sequence[Difference] = (),
    title: str = "",
) -> Path:
    """The model folded by equal layers, as one SVG file."""
    path = Path(path)
    known = study(train, infer, differences)
    path.write_text(overview_svg(known, title or f"precision flow of {_model(train)}"), encoding="utf-8")
    return path


def write_layer_svg(
    path: str | Path,
    train: PrecisionGraph,
    infer: PrecisionGraph | None = None,
    layer: int = 0,
    differences: Sequence[Difference] = (),
    title: str = "",
) -> Path:
    """The forward dataflow of one layer, training and rollout side by side if both are given."""
    path = Path(path)
    path.write_text(layer_svg(study(train, infer, differences), layer, title), encoding="utf-8")
    return path


def layer_svg(study: Study, layer: int, title: str = "", view: str = FORWARD) -> str:
    """The dataflow of one layer, both sides beside each other if there are two.

    Raises:
        ValueError: no side has such a layer, or it has nothing in this view.
    """
    if not any(layer in side.blocks for side in study.sides):
        raise ValueError(f"layer {layer}: {study.train.graph.name} has no such layer")
    drawn = scenes(study, layer, view)
    if not any(scene.items for scene in drawn):
        raise ValueError(f"layer {layer}: {study.train.graph.name} has no {view} part")
    return panes(study, drawn, title or f"layer {layer}, {view}")


def panes(study: Study, drawn: Sequence[Scene], title: str, notes: Sequence[str] = ()) -> str:
    """Scenes as one file: a title, lines of text, and each side under its name."""
    top = 34.0 + 16 * len(notes)
    x, height, parts = 0.0, 0.0, []
    for s, side in enumerate(study.sides):
        scene = drawn[min(s, len(drawn) - 1)]
        head = f'<text class="h" x="0" y="16">{escape(side.name)}</text>' if len(study.sides) > 1 else ""
        parts.append(_shift(x, top, head + _shift(0, 16, draw(study, scene, s))))
        x += scene.width + 2 * MARGIN + 24
        height = max(height, scene.height + 2 * MARGIN + top + 16)
    parts.append(f'<text class="h" x="0" y="16">{escape(title)}</text>')
    parts += [f'<text class="n" x="0" y="{34 + 16 * k}">{escape(note)}</text>' for k, note in enumerate(notes)]
    longest = max(len(title) * TITLE_CHARACTER, *(len(note) * LABEL_CHARACTER for note in ("", *notes)))
    return _standalone(max(x - 24, longest), height, "".join(parts))


def _model(graph: PrecisionGraph) -> str:
    return str(graph.meta.get("model", graph.name))

"""Draws scenes and the overview as SVG text: the same marks in the page and in single files for a paper or a README.

Single files carry their own white background and resolved colours, use no external font, and read in dark pages too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from jetgraph.graph import PrecisionGraph
from jetgraph.precision import Precision
from jetgraph.viz.condense import leaf
from jetgraph.viz.differences import Difference
from jetgraph.viz.linears import key_ops
from jetgraph.viz.scene import FORWARD, LOW_KINDS, Item, Scene, Wire, scenes
from jetgraph.viz.study import Section, Side, Study, study

_FORMAT = {"bf16": "bf16", "f32": "f32", "f64": "f32", "f8e4m3": "f8"}
MARGIN = 14.0
KEY_WIDTH, KEY_HEIGHT, KEY_GAP = 122.0, 62.0, 8.0
LETTER = 22.0
SIDE_LABEL = 42.0


def css(name: str) -> str:
    return (files("jetgraph.viz") / name).read_text(encoding="utf-8")


def resolved_css() -> str:
    """scene.css with its variables replaced by the light theme's values: converters know no variables."""
    text = re.sub(r"/\*.*?\*/", "", css("scene.css"), flags=re.S)
    root, rest = re.match(r"\s*:root \{(.*?)\}(.*)", text, flags=re.S).groups()  # type: ignore[union-attr]
    values = dict(re.findall(r"--([\w-]+): ([^;]+);", root))
    return re.sub(r"var\(--([\w-]+)\)", lambda m: values[m[1]], rest).strip()


def format_class(precision: Precision) -> str:
    return _FORMAT.get(precision.format.value, "int")


# --------------------------------------------------------------------------------------------------------- one scene


def draw(study: Study, scene: Scene, side: int, offset: int = 0) -> str:
    """One side of a scene as an ``<svg>`` element; a box's ``data-box`` is its item's number plus ``offset``."""
    body = [_wire(study, scene, wire, side) for wire in scene.wires]
    body += [_item(study, item, side, str(offset + k)) for k, item in enumerate(scene.items)]
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
    flag = f'<text class="flag" x="{w - 3:.1f}" y="-3" text-anchor="end">≠</text>' if differs else ""
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


def _wire(study: Study, scene: Scene, wire: Wire, side: int) -> str:
    value = wire.values[side]
    target, source = (scene.items[k].boxes[side] for k in (wire.target, wire.source))
    if value is None or target is None or source is None:
        return ""
    precision = study.sides[side].graph.nodes[value].type.precision
    differs = " differs" if differing_wire(study, scene, wire, side) else ""
    words = escape(precision.short())
    labels = "".join(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{a}">{words}</text>' for x, y, a in wire.labels)
    return f'<g class="wire {format_class(precision)}{differs}"><path d="{_path(wire.points)}"/>{labels}</g>'


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


def strip(study: Study, section: Section) -> str:
    """The key ops of a section, one row a side: each linear with the λ of its activation and weight."""
    body, width, height = _strip(study, section)
    return _svg(width, height, body)


def _strip(study: Study, section: Section) -> tuple[str, float, float]:
    rows = []
    columns: dict[str, int] = {}
    for side in study.sides:
        block = side.blocks.get(section.first)
        keys = [i for i in key_ops(side.graph, block.nodes) if i in side.forward] if block else []
        named = {_key_name(side, i): i for i in keys}
        for name in named:
            columns.setdefault(name, len(columns))
        rows.append((side, named))
    rows = [(side, named) for side, named in rows if named]
    label = SIDE_LABEL if len(study.sides) > 1 else 0.0
    body = []
    one_line = len(columns) == 1
    pitch = (label + KEY_WIDTH + 3 * KEY_GAP, 0.0) if one_line else (0.0, KEY_HEIGHT + KEY_GAP)
    for r, (side, named) in enumerate(rows):
        x0, y = r * pitch[0], r * pitch[1]
        if label:
            body.append(f'<text class="n" x="{x0:.0f}" y="{y + KEY_HEIGHT / 2 + 4:.0f}">{side.name}</text>')
        for name, index in named.items():
            others = [n for s, n in rows if s is not side]
            twin = others[0].get(name) if others else None
            x = x0 + label + columns[name] * (KEY_WIDTH + KEY_GAP) + 2
            body.append(_shift(x, y + 2, _key(study, side, name, index, twin)))
    if not columns:
        return "", 4.0, 4.0
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
    letters = {"attention": ("qkv", ""), "embed": ("W", "")}.get(side.graph.nodes[index].op, ("x", "W"))
    chips = "".join(_chip(p, letters[k], 22 + 18 * k) for k, p in enumerate(found[:2]))
    rect = f'<rect width="{KEY_WIDTH:g}" height="{KEY_HEIGHT:g}"/>'
    title = f'<text class="t" x="{KEY_WIDTH / 2:g}" y="15">{escape(name)}</text>'
    return f'<g class="key{" differs" if differs else ""}">{rect}{title}{chips}</g>'


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
    known = study(train, infer, differences)
    if not any(layer in side.blocks for side in known.sides):
        raise ValueError(f"layer {layer}: {train.name} has no such layer")
    drawn = scenes(known, layer, FORWARD)
    x, height, parts = 0.0, 0.0, []
    for s, side in enumerate(known.sides):
        scene = drawn[min(s, len(drawn) - 1)]
        head = f'<text class="h" x="0" y="16">{escape(side.name)}</text>' if len(known.sides) > 1 else ""
        body = draw(known, scene, s if len(known.sides) > 1 else 0)
        parts.append(_shift(x, 34, head + _shift(0, 16, body)))
        x += scene.width + 2 * MARGIN + 24
        height = max(height, scene.height + 2 * MARGIN + 50)
    parts.append(f'<text class="h" x="0" y="16">{escape(title or f"layer {layer}, forward")}</text>')
    path.write_text(_standalone(x - 24, height, "".join(parts)), encoding="utf-8")
    return path


def _model(graph: PrecisionGraph) -> str:
    return str(graph.meta.get("model", graph.name))

"""Writes precision graphs as one HTML file that opens from disk: no network, no dependencies, no build step.

All drawings are made in Python (`scene`, `layered`, `svg`) and are in the page as SVG; sections fold natively, so the
page reads and prints without JavaScript.  The scripts of `page/` add selection, search, filters, zoom and jumps.
Every text is escaped for where it stands; names come from models and may hold anything.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from jetgraph.graph import PrecisionGraph
from jetgraph.viz.apart import why_apart
from jetgraph.viz.differences import Difference
from jetgraph.viz.kept import in_words, kept
from jetgraph.viz.legend import CLASS_NAMES, format_class, legend, precisions
from jetgraph.viz.page_data import page_data
from jetgraph.viz.scene import BACKWARD, FORWARD, Scene, scenes
from jetgraph.viz.study import NAMES, Section, Study, study
from jetgraph.viz.svg import css, draw, strip, times

VIEWS = ((FORWARD, False), (BACKWARD, False), (FORWARD, True), (BACKWARD, True))
"""The drawings of a section: a phase, and whether every op is a box of its own.  The scripts count on this order."""
SCRIPTS = ("model", "stage", "selection", "panel", "filters", "search", "main")
Views = list[tuple[Scene, ...]]


def write_html(
    path: str | Path,
    train: PrecisionGraph,
    infer: PrecisionGraph | None = None,
    differences: Iterable[Difference] = (),
    title: str = "",
    verdict: str = "",
    names: tuple[str, str] = NAMES,
) -> Path:
    """One self-contained page of one graph, or of any two side by side.

    ``differences`` are listed and marked; ``verdict`` (such as ``CONTAINED``) is printed in the head as given, never
    derived here; ``names`` are what the two sides are called.  The folder is made if there is none.

    Raises:
        ValueError: both names are the same.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render_html(train, infer, differences, title, verdict, names), encoding="utf-8")
    return path


def render_html(
    train: PrecisionGraph,
    infer: PrecisionGraph | None = None,
    differences: Iterable[Difference] = (),
    title: str = "",
    verdict: str = "",
    names: tuple[str, str] = NAMES,
) -> str:
    """The text of the page (see `write_html`)."""
    known = study(train, infer, differences, names)
    drawn = [[scenes(known, section.first, *view) for view in VIEWS] for section in known.sections]
    backward = any(scene.items for views in drawn for scene in views[1])
    title = title or f"Precision flow of {train.meta.get('model', train.name)}"
    return Template(page_file("page.html")).substitute(
        title=escape(title),
        css=css("scene.css") + page_file("page.css"),
        body_class=" ".join(["pair"] * (len(known.sides) > 1) + ["single-phase"] * (not backward)),
        facts=_facts(known, verdict),
        formats=_format_chips(known),
        roles=_role_chips(known),
        sections="\n".join(map(partial(_section, known), range(len(drawn)), drawn)),
        templates="\n".join(map(partial(_templates, known), range(len(drawn)), drawn)),
        differences=_differences(known),
        legend=legend(known),
        about=_about(known),
        data=for_script(page_data(known, drawn)),
        js="\n".join(page_file(f"{name}.js") for name in SCRIPTS),
    )


def page_file(name: str) -> str:
    return (files("jetgraph.viz") / "page" / name).read_text(encoding="utf-8")


def for_script(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it opens a tag, an entity or a JavaScript line.

    >>> for_script(["</script>"])
    '["\\\\u003c/script\\\\u003e"]'
    """
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


# -------------------------------------------------------------------------------------------------------------- head


def _facts(known: Study, verdict: str) -> str:
    words = []
    if verdict:
        words.append(f'<b class="{"good" if verdict.startswith("CONTAINED") else "bad"}">{escape(verdict)}</b>')
    for side in known.sides:
        policy = side.graph.meta.get("policy")
        name = f"{side.name} ({policy})" if policy else side.name
        words.append(escape(f"{name}: {len(side.graph.nodes):,} nodes, {side.graph.num_edges:,} edges"))
    if known.matching is not None:
        left, right = (side.name for side in known.sides)
        words.append(escape(f"{len(known.matching.equal):,} nodes of {right} equal to nodes of {left}"))
    return " · ".join(f"<span>{word}</span>" for word in words)


def _format_chips(known: Study) -> str:
    chip = '<button type="button" class="filter {0}" data-format="{0}" aria-pressed="false">{1}</button>'
    found = dict.fromkeys(map(format_class, precisions(known)))
    return "".join(chip.format(cls, CLASS_NAMES[cls]) for cls in found)


def _role_chips(known: Study) -> str:
    present = {node.role.value for side in known.sides for node in side.graph.nodes}
    return "".join(
        f'<button type="button" class="filter" data-role="{role}" aria-pressed="false">{role}</button>'
        for role in ("FPROP", "DGRAD", "WGRAD")
        if role in present
    )


# ---------------------------------------------------------------------------------------------------------- sections


def _section(known: Study, k: int, views: Views) -> str:
    section = known.sections[k]
    marked = sum(n in known.marked[side.name] for side, block in _blocks(known, section) for n in block.nodes)
    parts = [f"<b>{escape(section.title)}</b>"]
    if times(section):
        parts.append(f'<span class="times">{times(section)}</span>')
    if marked:
        parts.append(f'<span class="bad">≠ {marked} node{"s"[: marked > 1]} differ{"s"[marked > 1 :]}</span>')
    if why := why_apart(known, section):
        parts.append(f'<span class="apart">apart: {escape(why)}</span>')
    parts.append(f'<span class="note">{escape(_note(known, section))}</span>')
    backward = strip(known, section, BACKWARD)
    stacked = " stacked" if len(section.places) > 1 else ""
    return (
        f'<details class="section{stacked}"><summary><div class="title">{"".join(parts)}</div>'
        f'<div class="strip">{strip(known, section)}</div>'
        + (f'<div class="strip of-backward">{backward}</div>' if backward else "")
        + f'</summary><div class="body">{_bar(section)}'
        + "".join(_stage(known, k, v, views[v]) for v in (0, 1))
        + "</div></details>"
    )


def _blocks(known: Study, section: Section):
    return [(s, s.blocks[section.first]) for s in known.sides if section.first in s.blocks]


def _note(known: Study, section: Section) -> str:
    """How many nodes, and what a layer keeps for backward."""
    counts = [f"{side.name} {len(block.nodes):,}" for side, block in _blocks(known, section)]
    words = [" · ".join(counts) + " nodes" + (" each" if len(section.places) > 1 else "")]
    for side, block in _blocks(known, section):
        sizes = kept(side.graph)
        per_token = sum(sizes[n][0] for n in block.nodes if n in sizes and sizes[n][1])
        if per_token:
            whose = f"{side.name} " if len(known.sides) > 1 else ""
            words.append(f"{whose}keeps {in_words(per_token, True)}")
    return " · ".join(words)


def _bar(section: Section) -> str:
    pick = '<label class="pick">names are of <select></select></label>' if len(section.places) > 1 else ""
    return (
        f'<div class="bar">{pick}<span class="hint">drag to pan, Ctrl and wheel to zoom</span>'
        '<button type="button" data-zoom="-1" title="smaller ( - )" aria-label="smaller">−</button>'
        '<output class="scale">100%</output>'
        '<button type="button" data-zoom="1" title="larger ( + )" aria-label="larger">+</button>'
        '<button type="button" data-zoom="0" title="fit the width ( 0 )">Fit</button>'
        '<button type="button" data-focus title="this section alone ( f )">Focus</button></div>'
    )


def _stage(known: Study, k: int, view: int, drawn: tuple[Scene, ...]) -> str:
    """The panes of one phase: every side that has something there."""
    sides = [s for s in range(len(known.sides)) if any(item.boxes[s] for scene in drawn for item in scene.items)]
    if view == 0 and any(scene.items for scene in drawn):
        sides = list(range(len(known.sides)))
    panes = "".join(_pane(known, k, view, s, drawn) for s in sides)
    return f'<div class="stage of-{VIEWS[view][0]}" data-stage="{k}.{view}">{panes}</div>' if panes else ""


def _pane(known: Study, k: int, view: int, side: int, drawn: tuple[Scene, ...]) -> str:
    name, phase = escape(known.sides[side].name), VIEWS[view][0]
    label = escape(f"{known.sides[side].name}, {known.sections[k].title}, {phase}", quote=True)
    return (
        f'<figure class="pane" data-pane="{k}.{view}.{side}"><figcaption>{name} <span>· {phase}</span></figcaption>'
        f'<div class="viewport" tabindex="0" role="group" aria-label="{label}"><div class="clip">'
        f'<div class="sheet">{_picture(known, side, drawn)}</div></div></div></figure>'
    )


def _picture(known: Study, side: int, drawn: tuple[Scene, ...]) -> str:
    *before, scene = drawn if side else drawn[:1]
    return draw(known, scene, side, sum(len(s.items) for s in before), sum(len(s.wires) for s in before))


def _templates(known: Study, k: int, views: Views) -> str:
    """The drawings with every op, inert until they are asked for."""
    return "".join(
        f'<template data-picture="{k}.{v}.{s}">{_picture(known, s, views[v])}</template>'
        for v in (2, 3)
        for s in range(len(known.sides))
        if any(scene.items for scene in views[v])
    )


# ------------------------------------------------------------------------------------------------------------- aside


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
    head = f"{total:,} difference{'s'[: total > 1]} in {len(items):,} line{'s'[: len(items) > 1]}"
    return (
        f'<section class="panel" id="differences"><h2>≠ {head}<span class="walk">'
        '<button type="button" id="previous" title="previous line ( p )" aria-label="previous">‹</button>'
        '<output id="counter"></output>'
        '<button type="button" id="next" title="next line ( n )" aria-label="next">›</button></span></h2>'
        f"<ol>{''.join(items)}</ol></section>"
    )


def _about(known: Study) -> str:
    """Where each graph comes from, as its file says."""
    parts = []
    for side in known.sides:
        meta, rows = side.graph.meta, []
        for key in ("model", "policy", "provider", "device", "compiler"):
            if meta.get(key):
                rows.append((key, str(meta[key])))
        versions = meta.get("versions")
        if isinstance(versions, dict):
            rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
        replay = meta.get("replay")
        if isinstance(replay, dict) and isinstance(replay.get("cases"), list):
            outcome = "passed" if replay.get("passed") else "failed"
            rows.append(("replay", f"{outcome}, {len(replay['cases'])} cases"))
        if meta.get("unknown"):
            rows.append(("unknown", ", ".join(map(str, meta["unknown"]))))
        rows.append(("digest", side.graph.semantic_digest))
        cells = "".join(f"<dt>{escape(key)}</dt><dd>{escape(value)}</dd>" for key, value in rows)
        parts.append(f"<h3>{escape(side.name)}</h3><dl>{cells}</dl>")
    return "".join(parts)

"""A comparison in words: folded over equal layers and modules, for 80 columns and for machines.

The JSON form is stable within a version:

    {"format": "jetgraph-diff", "version": 1, "note": …, "equal": false, "exit_status": 1, "left_out": "",
     "a": {"name": …, "policy": …, "nodes": 7026, "edges": 9617, "unknown": 0, "semantic_digest": …}, "b": {…},
     "run": [{"field": "policy", "a": "jet", "b": "bf16"}, …],
     "changes": [{"kind": "format", "what": "x of gemm FPROP", "a": "f8e4m3[1x128]", "b": "bf16", "count": 210,
                  "where": [{"place": "layers 0–29", "layers": [0, …], "modules": ["mlp.up_proj", …]}],
                  "members": [{"a": 311, "b": 290, "port": 0}, …]}, …]}

`kind` is a key of `compare.KINDS`; a member's `a` and `b` are node numbers or null, its `port` is null unless the
change is at an edge; a layer's number is `*` in names, another layer's `*+1` or `*-1`.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from jetgraph.graph import PrecisionGraph
from jetgraph.viz.compare import KINDS, PRESENT, Change, Comparison
from jetgraph.viz.layers import Place, layer_of, relative, spans

NOTE = "A comparison of two descriptions, not a verification: `jetgraph verify` decides whether B is contained in A."
WIDTH = 80
_LAYER = re.compile(r"(?<=[A-Za-z_]\.)\d+(?=\.|$)")
"""A layer's number in a module's path or an output's name; not the fraction of a number."""


@dataclass(frozen=True)
class Where:
    """Modules that the same change is in, in the same layers (or one place outside them)."""

    place: str
    layers: tuple[int, ...]
    modules: tuple[str, ...]

    def __str__(self) -> str:
        return ": ".join(part for part in (self.place, ", ".join(_braced(self.modules))) if part)


@dataclass(frozen=True)
class FoldedChange:
    kind: str
    what: str
    before: str
    after: str
    where: tuple[Where, ...]
    members: tuple[Change, ...]


def folded(comparison: Comparison) -> tuple[FoldedChange, ...]:
    """Changes that say the same, joined over layers and modules; in the order of `KINDS`, the frequent ones first."""
    sides = comparison.study.sides
    order = {_inside(path): k for k, path in enumerate(dict.fromkeys(path for side in sides for path in side.paths))}
    groups: dict[tuple[str, str, str, str], list[tuple[Place, str, Change]]] = defaultdict(list)
    for change in comparison.changes:
        place, path = _place(comparison, change)
        words = [_starred(text, place) for text in (change.what, change.before, change.after)]
        groups[change.kind, words[0], words[1], words[2]].append((place, _inside(path), change))
    lines = []
    for key, group in groups.items():
        where = _where(sorted(((place, path) for place, path, _ in group), key=lambda found: order.get(found[1], 0)))
        lines.append(FoldedChange(*key, where, tuple(change for _, _, change in group)))
    kinds = list(KINDS)
    return tuple(sorted(lines, key=lambda line: (kinds.index(line.kind), -len(line.members))))


def _place(comparison: Comparison, change: Change) -> tuple[Place, str]:
    if change.kind == "output":
        layer = layer_of(change.what)
        return ("" if layer is None else layer), ""
    known = comparison.study
    side, index = (known.train, change.left) if change.left is not None else (known.infer, change.right)
    assert side is not None
    assert index is not None
    return side.placed[index], side.paths[index]


def _starred(text: str, place: Place) -> str:
    """Layer numbers in a text, seen from a layer: 7 in layer 7 is ``*``, 6 is ``*-1``."""
    if not isinstance(place, int):
        return text

    def star(match: re.Match[str]) -> str:
        distance = int(match[0]) - place
        return f"*{distance:+d}" if distance else "*"

    return _LAYER.sub(star, text, count=1)


def _inside(fqn: str) -> str:
    """Inside a layer the path from the layer on; elsewhere all of it.

    >>> _inside("model.layers.7.mlp.up_proj"), _inside("model.layers.7"), _inside("lm_head")
    ('mlp.up_proj', 'residual', 'lm_head')
    """
    head, star, rest = relative(fqn).partition(".*")
    return (rest.removeprefix(".") or "residual") if star else head


def _where(found: list[tuple[Place, str]]) -> tuple[Where, ...]:
    layers: dict[str, set[int]] = defaultdict(set)
    outside: dict[str, dict[str, None]] = defaultdict(dict)
    for place, module in found:
        if isinstance(place, int):
            layers[module].add(place)
        else:
            outside[place][module] = None
    alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for module, numbers in layers.items():
        alike[tuple(sorted(numbers))].append(module)
    parts = [Where(_layers(numbers), numbers, _named(modules)) for numbers, modules in alike.items()]
    return (*parts, *(Where(place, (), _named(modules)) for place, modules in outside.items()))


def _named(modules: Any) -> tuple[str, ...]:
    return tuple(module for module in modules if module)


def _layers(numbers: tuple[int, ...]) -> str:
    return f"layer{'s'[: len(numbers) > 1]} {spans(numbers)}"


def _braced(modules: tuple[str, ...]) -> list[str]:
    """
    >>> _braced(("mlp.up_proj", "mlp.down_proj", "lm_head"))
    ['mlp.{up_proj, down_proj}', 'lm_head']
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        head, _, name = module.rpartition(".")
        groups[head].append(name)
    words = []
    for head, names in groups.items():
        if not head:
            words += names
        elif len(names) == 1:
            words.append(f"{head}.{names[0]}")
        else:
            words.append(f"{head}.{{{', '.join(names)}}}")
    return words


# ------------------------------------------------------------------------------------------------------ for machines


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The form above."""
    graphs, unknown = comparison.graphs, comparison.num_unknown
    return {
        "format": "jetgraph-diff",
        "version": 1,
        "note": NOTE,
        "equal": comparison.equal,
        "exit_status": comparison.exit_status,
        "left_out": comparison.left_out,
        "a": _side(graphs[0], unknown[0]),
        "b": _side(graphs[1], unknown[1]),
        "run": [{"field": field, "a": a, "b": b} for field, a, b in comparison.run],
        "changes": [_change(line) for line in folded(comparison)],
    }


def _side(graph: PrecisionGraph, unknown: int) -> dict[str, Any]:
    return {
        "name": graph.name,
        "policy": graph.meta.get("policy"),
        "nodes": len(graph.nodes),
        "edges": graph.num_edges,
        "unknown": unknown,
        "semantic_digest": graph.semantic_digest,
    }


def _change(line: FoldedChange) -> dict[str, Any]:
    return {
        "kind": line.kind,
        "what": line.what,
        "a": line.before,
        "b": line.after,
        "count": len(line.members),
        "where": [{"place": w.place, "layers": list(w.layers), "modules": list(w.modules)} for w in line.where],
        "members": [{"a": c.left, "b": c.right, "port": c.port} for c in line.members],
    }


# -------------------------------------------------------------------------------------------------------- for people


def report(comparison: Comparison, files: tuple[str, str] = ("", "")) -> Group:
    """Everything `jetgraph diff` prints, as one rich renderable; ``files`` are where the graphs come from."""
    parts: list[RenderableType] = [_head(comparison, files)]
    if comparison.run:
        parts += [Text("run", style="bold"), *(_indented(f"{f}: {a} → {b}") for f, a, b in comparison.run), Text()]
    lines = folded(comparison)
    for kind, meaning in KINDS.items():
        here = [line for line in lines if line.kind == kind]
        if here:
            total = sum(len(line.members) for line in here)
            parts.append(Text.assemble((kind, "bold"), (f" ×{total:,}  {meaning}", "dim")))
            parts += [part for lines_alike in _alike(here) for part in _said(lines_alike)] + [Text()]
    parts.append(_foot(comparison))
    return Group(*parts)


def text(comparison: Comparison, width: int = WIDTH) -> str:
    """The same without colour, for files and tests."""
    console = Console(width=width, no_color=True, force_terminal=False, file=io.StringIO(), highlight=False)
    with console.capture() as capture:
        console.print(report(comparison), soft_wrap=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def _head(comparison: Comparison, files: tuple[str, str]) -> Text:
    head = Text()
    for side, file, graph in zip(comparison.study.sides, files, comparison.graphs, strict=True):
        policy = f", policy {graph.meta['policy']}" if graph.meta.get("policy") else ""
        sizes = f"{graph.name}{policy}: {len(graph.nodes):,} nodes, {graph.num_edges:,} edges"
        head.append(side.name, style="bold")
        head.append(f"  {file}\n   {sizes}\n" if file else f"  {sizes}\n")
    if comparison.left_out:
        head.append(f"{comparison.left_out}\n")
    return head


def _alike(lines: list[FoldedChange]) -> list[list[FoldedChange]]:
    """Lines that say the same of the same places (of x in FPROP and of dy in DGRAD) are printed as one."""
    groups: dict[tuple, list[FoldedChange]] = defaultdict(list)
    for line in lines:
        groups[line.before, line.after, line.where].append(line)
    return list(groups.values())


def _said(lines: list[FoldedChange]) -> list[RenderableType]:
    line, total = lines[0], sum(len(line.members) for line in lines)
    if PRESENT in (line.before, line.after):
        change = f"only in {'A' if line.before == PRESENT else 'B'}"
    else:
        change = f"{line.before} → {line.after}"
    count = f"  ×{total:,}" if total > 1 else ""
    what = _indented(f"{', '.join(line.what for line in lines)}: {change}{count}")
    return [what, *(Padding(Text(str(w), style="dim"), (0, 0, 0, 6)) for w in line.where if str(w))]


def _indented(words: str) -> Padding:
    return Padding(Text(words), (0, 0, 0, 2))


def _foot(comparison: Comparison) -> Text:
    foot = Text()
    if not comparison.changes:
        foot.append("no difference between the graphs\n" if comparison.equal else "no op or edge differs\n")
    unknown = comparison.num_unknown
    if any(unknown):
        foot.append(
            f"{unknown[0]:,} operators of A and {unknown[1]:,} of B are outside the vocabulary: they were compared by "
            "name alone\n"
        )
    return foot.append(NOTE, style="dim")

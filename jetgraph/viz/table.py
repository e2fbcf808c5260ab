"""The terminal view of one graph (`jetgraph inspect`): 80 columns, readable without colour, the same facts as JSON.

The JSON form is stable within a version; `as_json` says what it holds.
"""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from jetgraph.graph import PrecisionGraph
from jetgraph.viz.layers import relative, spans
from jetgraph.viz.linears import FoldedGemm, folded, gemms
from jetgraph.viz.study import study
from jetgraph.viz.tree import folded_title, sections, tree

WIDTH, VERSION = 80, 1
LISTED = ("saved", "unknown", "dead")
"""Lists in a graph's ``meta`` that a person must see: what backward keeps, what is outside the vocabulary or unused."""
MAX_LISTED = 12


def summary(graph: PrecisionGraph) -> Group:
    """Everything `jetgraph inspect` prints, as one rich renderable."""
    known = as_json(graph)
    parts: list[RenderableType] = [_head(known), _ops(known), Text(), tree("forward", known["sections"])]
    parts.append(_linears(known))
    parts += [_rules(known)] if known["rules"] else []
    parts += [_listed(name, known[name]) for name in LISTED if known[name]]
    return Group(*parts)


def print_summary(graph: PrecisionGraph, console: Console | None = None) -> None:
    (console or Console()).print(summary(graph), soft_wrap=False)


def text(graph: PrecisionGraph, width: int = WIDTH) -> str:
    """The same without colour, for files and tests."""
    console = Console(width=width, no_color=True, force_terminal=False, record=True, file=io.StringIO())
    console.print(summary(graph))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


def as_json(graph: PrecisionGraph) -> dict[str, Any]:
    """The facts of the terminal view as plain values.

    ``format`` and ``version`` name this form.  ``name``, ``model``, ``policy``, ``provider``, ``device``, ``versions``
    are the file's own (absent if it has none); ``nodes`` and ``edges`` are counts, ``phases``, ``ops`` and ``values``
    (short λ) count nodes.  ``sections`` is the folded forward: title, how many layers are ``equal``, their numbers,
    nodes of one, and its modules with ops, roundings, what is quantised, and each GEMM's operands and result.
    ``linears`` has a row for each GEMM of a linear, folded over equal ``layers`` (``*`` in its FQN); ``rules`` are the
    policy's rules that fired, with the nodes they decided.  ``saved``, ``unknown`` and ``dead`` are lists of text.
    """
    rows = folded(gemms(graph))
    reasons = Counter(n.reason for n in graph.nodes if n.reason)
    return {
        "format": "jetgraph-inspect",
        "version": VERSION,
        "name": graph.name,
        **{k: graph.meta[k] for k in ("model", "policy", "provider", "device", "versions") if k in graph.meta},
        "nodes": len(graph.nodes),
        "edges": graph.num_edges,
        "semantic_digest": graph.semantic_digest,
        "phases": dict(Counter(n.phase.value for n in graph.nodes)),
        "ops": dict(Counter(n.op for n in graph.nodes).most_common()),
        "values": dict(Counter(n.type.precision.short() for n in graph.nodes).most_common()),
        "sections": sections(study(graph)),
        "linears": [_row(row) for row in rows],
        "rules": [{"reason": reason, "nodes": count} for reason, count in reasons.items()],
        **{name: _as_list(graph.meta.get(name)) for name in LISTED},
    }


def _row(row: FoldedGemm) -> dict[str, Any]:
    first = row.first
    return {
        "fqn": row.fqn,
        "layers": list(row.layers),
        "role": first.role,
        "operands": list(first.operands),
        "result": first.result,
        "kernel": first.kernel,
        "reason": first.reason,
    }


def _as_list(value: Any) -> list[str]:
    if not value:
        return []
    return [f"{k}: {v}" for k, v in value.items()] if isinstance(value, dict) else [str(v) for v in value]


# ---------------------------------------------------------------------------------------------------------- sections


def _head(known: dict[str, Any]) -> Text:
    head = Text()
    head.append(f"{known['name']}", style="bold")
    about = [str(known[k]) for k in ("model", "device") if known.get(k)]
    about += [f"{k} {known[k]}" for k in ("policy", "provider") if known.get(k)]
    head.append(f"  {', '.join(about)}\n" if about else "\n")
    phases = ", ".join(f"{count:,} {phase}" for phase, count in known["phases"].items())
    head.append(f"{known['nodes']:,} nodes ({phases}), {known['edges']:,} edges\n")
    head.append(" → ".join(folded_title(section) for section in known["sections"]) + "\n")
    head.append(f"semantic digest {known['semantic_digest'][:16]}…\n", style="dim")
    return head


def _ops(known: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name in ("values", "ops"):
        table.add_row(name, Text("  ".join(f"{key}\u00a0{count:,}" for key, count in known[name].items())))
    return table


def _linears(known: dict[str, Any]) -> Table:
    """One block a linear, one line a GEMM: which operands meet, and which kernel multiplies them."""
    numbers = {rule["reason"]: k for k, rule in enumerate(known["rules"], 1)}
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), title="\nlinears")
    table.title_justify, table.title_style = "left", "bold"
    for name in ("linear", "GEMM", "operands", "kernel", "rule"):
        table.add_column(name, no_wrap=name in ("GEMM", "operands", "rule"), overflow="fold")
    before = ""
    for row in known["linears"]:
        where = f" ({spans(row['layers'])})" if row["layers"] else ""
        name = _short(row["fqn"]) + where
        operands = " × ".join(row["operands"])
        kernel = row["kernel"].rsplit("::", 1)[-1]
        rule = f"[{numbers[row['reason']]}]" if row["reason"] else ""
        table.add_row(Text("" if name == before else name), row["role"], Text(operands), Text(kernel), Text(rule))
        before = name
    return table


def _short(fqn: str) -> str:
    """Inside a layer the path from the layer on; elsewhere all of it."""
    head, star, rest = relative(fqn).partition(".*.")
    return rest if star else head


def _rules(known: dict[str, Any]) -> Text:
    lines = Text("\npolicy rules\n", style="bold")
    for k, rule in enumerate(known["rules"], 1):
        lines.append(f"[{k}] {rule['reason']}  ({rule['nodes']:,} nodes)\n", style="not bold")
    return lines


def _listed(name: str, items: list[str]) -> Text:
    lines = Text(f"\n{name} ({len(items):,})\n", style="bold")
    for item in items[:MAX_LISTED]:
        lines.append(f"{item}\n", style="not bold")
    if len(items) > MAX_LISTED:
        lines.append(f"… and {len(items) - MAX_LISTED:,} more\n", style="not bold")
    return lines

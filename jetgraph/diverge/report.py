"""What was found, in a few lines for people and as JSON for machines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from jetgraph.diverge.recorded import RecordingReport
from jetgraph.diverge.roots import Comparison, Root
from jetgraph.graph import PrecisionGraph
from jetgraph.verify import RULES, Fault
from jetgraph.verify.fault import layer_of, words

MAX_ENTRIES = 4


def comparison_text(found: Comparison) -> str:
    lines = []
    for number, root in enumerate(found.roots, 1):
        lines += _root(found, root, "first edge that differs" if number == 1 else f"root {number}")
    if not found.roots:
        lines.append(f"no edge differs: {found.num_compared} values equal bit for bit; verify says {found.verdict}")
    elif len(found.roots) == 1:
        lines.append(f"({found.num_compared} values compared; verify says {found.verdict})")
    else:
        unexplained = sum(not root.explained_by for root in found.roots)
        lines.append(
            f"{len(found.roots)} roots, {unexplained} without an entry of the verification report; "
            f"{found.num_compared} values compared; verify says {found.verdict}"
        )
    return "\n".join([*lines, *(f"unknown: {text}" for text in found.unknown)])


def _root(found: Comparison, root: Root, title: str) -> list[str]:
    d, infer = root.difference, found.infer.nodes[root.infer]
    layer = layer_of(infer.fqn) if infer.fqn else None
    place = f" at {infer.fqn}" if infer.fqn else ""
    place += "" if layer is None else f", layer {layer}"
    what = words(found.infer, root.infer, infer.fqn)
    reader = "an output" if root.consumer is None else f"%{root.consumer} {_named(found.infer, root.consumer)}"
    return [
        f"{title}: {what}{place}  →  {reader}",
        f"    {d.num_different:,} of {d.num_elements:,} {d.what} differ; the first at {list(d.index)}: "
        f"train {d.train:.9g}, infer {d.infer:.9g}, {_ulps(d.ulps)} apart",
        *(_side(*side) for side in (("train", found.train, root.train), ("infer", found.infer, root.infer))),
        *_entries(root.explained_by, str(found.verdict)),
    ]


def _side(name: str, graph: PrecisionGraph, index: int) -> str:
    node = graph.nodes[index]
    kernel = f", kernel {node.kernel}" if node.kernel else ""
    return f"    {name} %{index} {node.op} λ {node.type.precision.short()}{kernel}, {node.source or 'no source line'}"


def _named(graph: PrecisionGraph, index: int) -> str:
    node = graph.nodes[index]
    return f"{node.op} at {node.fqn}" if node.fqn else node.op


def _ulps(ulps: float) -> str:
    return f"{ulps:.3g} ulp"


def _entries(faults: Sequence[Fault], verdict: str) -> list[str]:
    if not faults:
        return [f"    explained by no entry of the verification report ({verdict})"]
    told = Counter(f"{f.rule} {RULES[f.rule].title}: expected {f.expected}; got {f.got}" for f in faults)
    lines = [
        f"    explained by {text}" + (f"  ×{count}" if count > 1 else "")
        for text, count in list(told.items())[:MAX_ENTRIES]
    ]
    return lines + ([f"    … and {len(told) - MAX_ENTRIES} entries more"] if len(told) > MAX_ENTRIES else [])


def comparison_json(found: Comparison) -> dict[str, Any]:
    return {
        "verdict": str(found.verdict),
        "exit_status": found.exit_status,
        "num_compared": found.num_compared,
        "unknown": list(found.unknown),
        "roots": [_root_json(found, root) for root in found.roots],
    }


def _root_json(found: Comparison, root: Root) -> dict[str, Any]:
    d, infer = root.difference, found.infer.nodes[root.infer]
    return {
        "fqn": infer.fqn,
        "layer": layer_of(infer.fqn),
        "edge": [root.infer, root.consumer],
        "train": _node_json(found.train, root.train),
        "infer": _node_json(found.infer, root.infer),
        "difference": {
            "of": d.what,
            "elements": d.num_elements,
            "different": d.num_different,
            "index": list(d.index),
            "train": repr(d.train),
            "infer": repr(d.infer),
            "ulps": repr(d.ulps),
        },
        "explained_by": [f.to_dict() for f in root.explained_by],
    }


def _node_json(graph: PrecisionGraph, index: int) -> dict[str, Any]:
    node = graph.nodes[index]
    return {
        "node": index,
        "op": node.op,
        "precision": str(node.type.precision),
        "kernel": node.kernel,
        "source": node.source,
    }


def recording_text(found: RecordingReport) -> str:
    """The same for a live engine, of which only digests are known."""
    lines = []
    if not found.first:
        lines.append(
            f"live engine: no border differs: {found.num_borders} inputs and outputs of linears, and the logprobs, "
            f"are equal bit for bit on {found.num_rows} tokens"
        )
    else:
        lines += [
            f"live engine: {found.first} is the first border that differs, on {found.num_different} of "
            f"{found.num_rows} tokens, the first at position {found.row} ({found.how})",
            f"    equal before it: {found.after or 'nothing'}; between them training runs {_summary(found)}",
            *_entries(found.explained_by, "no entry is about these nodes"),
        ]
    if found.not_recorded:
        names = ", ".join(found.not_recorded[:3]) + (" …" if len(found.not_recorded) > 3 else "")
        lines.append(f"    the engine has no module for {len(found.not_recorded)} borders: {names}")
    return "\n".join([*lines, *(f"unknown: {text}" for text in found.unknown)])


def _summary(found: RecordingReport) -> str:
    """``mean, rsqrt, mul, round (models/llama/modeling_llama.py:60 …)``"""
    nodes = [found.train.nodes[i] for i in found.between if found.train.nodes[i].inputs]
    ops = list(dict.fromkeys(n.op for n in nodes))
    sources = list(dict.fromkeys(n.source for n in nodes if n.source))
    where = f" ({sources[0]}{' …' if len(sources) > 1 else ''})" if sources else ""
    return f"{len(nodes)} nodes, {', '.join(ops[:6])}{' …' if len(ops) > 6 else ''}{where}"


def recording_json(found: RecordingReport) -> dict[str, Any]:
    return {
        "exit_status": found.exit_status,
        "first": found.first,
        "after": found.after,
        "position": found.row if found.first else None,
        "how": found.how,
        "different": found.num_different,
        "tokens": found.num_rows,
        "borders": found.num_borders,
        "between": list(found.between),
        "explained_by": [f.to_dict() for f in found.explained_by],
        "not_recorded": list(found.not_recorded),
        "unknown": list(found.unknown),
    }

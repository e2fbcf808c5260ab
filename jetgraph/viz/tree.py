"""The forward of a graph as a tree of sections and modules: what `jetgraph inspect` prints, and the facts behind it.

One branch stands for all layers of a section.  A linear is one line with the λ of its operands and its result; another
module says how many ops it holds, which, and where it rounds.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.text import Text
from rich.tree import Tree

from jetgraph.graph import Node, PrecisionGraph
from jetgraph.viz.layers import relative
from jetgraph.viz.linears import gemms
from jetgraph.viz.study import Section, Side, Study

LEAVES = frozenset({"parameter", "operand", "input", "const"})
MAX_OPS = 4
"""Kinds of ops named for one module."""


def sections(study: Study) -> list[dict[str, Any]]:
    """Plain values, a section a row: title, layers, nodes (of one layer) and its modules in the order they run."""
    side = study.train
    linears = {gemm.node: (gemm.operands, gemm.result) for gemm in gemms(side.graph)}
    return [_section(side, section, linears) for section in study.sections]


def _section(side: Side, section: Section, linears: dict[int, Any]) -> dict[str, Any]:
    nodes = side.blocks[section.first].nodes
    modules: dict[str, list[int]] = {}
    for index in sorted(nodes):
        if index in side.forward and side.graph.nodes[index].op not in LEAVES:
            modules.setdefault(_inside(side.paths[index]), []).append(index)
    return {
        "title": section.title,
        "equal": len(section.places),
        "layers": [place for place in section.places if isinstance(place, int)],
        "nodes": len(nodes),
        "backward_nodes": sum(i not in side.forward for i in nodes),
        "modules": [_module(side.graph, path, members, linears) for path, members in modules.items()],
    }


def _module(graph: PrecisionGraph, path: str, members: list[int], linears: dict[int, Any]) -> dict[str, Any]:
    nodes = [graph.nodes[i] for i in members]
    found = [
        {"role": graph.nodes[i].role.value, "operands": list(linears[i][0]), "result": linears[i][1]}
        for i in members
        if i in linears
    ]
    return {
        "path": path,
        "ops": dict(Counter(node.op for node in nodes)),
        "roundings": dict(Counter(node.type.precision.short() for node in nodes if node.op == "round")),
        "quantises": [node.type.precision.short() for node in nodes if node.op == "quantize"],
        "gemms": found,
        "unknown": [str(node.attr("name")) for node in nodes if _is_unknown(node)],
    }


def _is_unknown(node: Node) -> bool:
    return node.op in ("unknown", "poison")


def _inside(path: str) -> str:
    """The path from the layer on; a layer's own ops and those without a module have none."""
    head, star, rest = relative(path).partition(".*")
    return rest.removeprefix(".") if star else head


def folded_title(section: dict[str, Any]) -> str:
    """
    >>> folded_title({"title": "layers 0–29", "equal": 30})
    'layers 0–29, equal ×30'
    """
    return section["title"] + (f", equal ×{section['equal']}" if section["equal"] > 1 else "")


def tree(name: str, found: list[dict[str, Any]]) -> Tree:
    """The rows of `sections` as branches."""
    root = Tree(Text(name, style="bold"), guide_style="dim")
    for section in found:
        each = " each" if section["equal"] > 1 else ""
        back = f", {section['backward_nodes']:,} of them backward" if section["backward_nodes"] else ""
        head = Text.assemble((folded_title(section), "bold"), (f"  {section['nodes']:,} nodes{each}{back}", "dim"))
        branches = {"": root.add(head)}
        for module in section["modules"]:
            *above, leaf = module["path"].split(".")
            parent = branches[""]
            for depth in range(len(above)):
                path = ".".join(above[: depth + 1])
                branches[path] = parent = branches.get(path) or parent.add(Text(above[depth]))
            facts = _facts(module)
            if module["path"] in branches:
                branches[module["path"]].add(facts)
            else:
                line = Text.assemble(leaf, "  ", facts)
                branches[module["path"]] = parent.add(line)
    return root


def _facts(module: dict[str, Any]) -> Text:
    words = Text()
    for gemm in module["gemms"]:
        words.append(f"{' × '.join(gemm['operands'])} → {gemm['result']}", style="cyan")
    if module["gemms"]:
        return words
    ops = {op: count for op, count in module["ops"].items() if op not in ("round", "quantize")}
    named = [op if count == 1 else f"{op} ×{count}" for op, count in list(ops.items())[:MAX_OPS]]
    words.append(", ".join(named) + ("…" if len(ops) > MAX_OPS else ""))
    for short, count in module["roundings"].items():
        words.append(f"; rounds to {short}" + (f" ×{count}" if count > 1 else ""), style="dim")
    for short in dict.fromkeys(module["quantises"]):
        words.append(f"; quantises to {short}", style="yellow")
    for name in module["unknown"]:
        words.append(f"; unknown {name}", style="red")
    words.plain = words.plain.removeprefix("; ")
    return words

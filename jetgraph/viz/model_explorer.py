"""Files for Google's Model Explorer (ai-edge-model-explorer): graphs, edge overlays, node data, synced navigation.

Sections and equal layers are namespaces, which the viewer opens collapsed and lays out when they are expanded.  Every
node is there up to `MAX_NODES`; in larger graphs only the first of equal layers is drawn in full.  λ is on every edge,
weights included, twice: as the output's metadata ("view on edge") and as edge overlays, one a λ, whose edges carry it
as their label.

One file of graphs opens by itself; beside it lie node data (λ of every node, or what differs) and, for two graphs, the
partners for the viewer's synchronised navigation.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetgraph.graph import Node
from jetgraph.viz.compare import port_name, word
from jetgraph.viz.condense import leaf
from jetgraph.viz.layers import Place, relative
from jetgraph.viz.legend import PALETTE, format_class
from jetgraph.viz.study import Side, Study
from jetgraph.viz.svg import times

_TINTS = {"bf16": "#e6f1f8", "f8": "#fdeedd", "f32": "#e3f4ee", "int": "#eeeeee"}
_LEAVES = ("parameter", "operand", "input")
INK = "#1c2430"
MAX_NODES = 8000
"""The viewer takes tens of seconds for more, most of them for layers that are equal."""
PANES = ("edgeOverlaysDataListLeftPane", "edgeOverlaysDataListRightPane")
"""Where a graph's overlays are offered; the first graph opens on the left, the second also on the right."""


def write_model_explorer(path: str | Path, study: Study) -> tuple[Path, ...]:
    """Write ``path`` (graphs with their overlays), ``*.nodes.json`` and, of two graphs, ``*.sync.json``; all paths."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = {path: graphs(study), path.with_suffix(".nodes.json"): node_data(study)}
    if study.infer is not None:
        files[path.with_suffix(".sync.json")] = sync_navigation(study)
    for file, content in files.items():
        file.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    return tuple(files)


@dataclass(frozen=True)
class _View:
    """One side and what its nodes are called in the files: their numbers, but a layer that is drawn as one node has
    one name, and each reader a constant of its own, or constants would tie all layers together."""

    side: Side
    titles: dict[Place, str]
    closed: dict[Place, Place]
    """layers drawn as one node, with the equal layer that is drawn in full"""

    def id(self, index: int) -> str:
        place = self.side.placed[index]
        if place not in self.closed:
            return str(index)
        return f"layer {place}" if index in self.side.forward else f"layer {place}, backward"

    def source(self, index: int, port: int) -> str:
        source = self.side.graph.nodes[index].inputs[port]
        return f"{source}@{index}.{port}" if self.side.graph.nodes[source].op == "const" else self.id(source)

    def namespace(self, index: int) -> str:
        """Section, layer, module, and backward apart (inside the sections it would close cycles): what the viewer
        nests; a slash inside a name would nest too."""
        place, path = self.side.placed[index], self.side.paths[index]
        if self.side.graph.nodes[index].op in _LEAVES:
            path = path.rpartition(".")[0]
        parts = ["" if index in self.side.forward else "backward", self.titles.get(place, "")]
        if place in self.closed:
            path = ""
        elif isinstance(place, int):
            parts.append(f"layer {place}")
            path = relative(path).partition(".*")[2].removeprefix(".")
        return "/".join(part.replace("/", "∕") for part in (*parts, *path.split(".")) if part)


def _views(study: Study) -> list[_View]:
    large = max(len(side.graph.nodes) for side in study.sides) > MAX_NODES
    titles, closed = {}, {}
    for section in study.sections:
        title = _ascii(", ".join(part for part in (section.title, times(section)) if part))
        titles.update(dict.fromkeys(section.places, title))
        if large:
            closed.update(dict.fromkeys(section.places[1:], section.first))
    return [_View(side, titles, closed) for side in study.sides]


def graphs(study: Study) -> dict[str, Any]:
    """The graph collection: one graph a side, named as the sides are."""
    found = [
        {"id": view.side.name, "nodes": _nodes(view), "tasksData": dict.fromkeys(PANES[: k + 1], [_overlays(view)])}
        for k, view in enumerate(_views(study))
    ]
    return {"label": study.train.graph.name, "graphs": found, "graphSorting": "name_desc"}


def _nodes(view: _View) -> list[dict[str, Any]]:
    side, nodes = view.side, view.side.graph.nodes
    named: dict[int, list[str]] = defaultdict(list)
    for name, index in side.graph.outputs.items():
        named[index].append(name)
    found = []
    layers: dict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        if node.op == "const":
            continue
        if side.placed[index] in view.closed:
            layers[view.id(index)].append(index)
            continue
        namespace = view.namespace(index)
        for port, i in enumerate(node.inputs):
            if nodes[i].op == "const":
                found.append(_node(nodes[i], view.source(index, port), namespace, [], []))
        sources = [view.source(index, port) for port in range(len(node.inputs))]
        found.append(_node(node, view.id(index), namespace, sources, named[index]))
    return found + [_layer(view, id, members) for id, members in layers.items()]


def _node(node: Node, id: str, namespace: str, sources: list[str], outputs: list[str]) -> dict[str, Any]:
    return {
        "id": id,
        "label": _label(node),
        "namespace": namespace,
        "attrs": [{"key": k, "value": v} for k, v in _facts(node, outputs).items() if v],
        "incomingEdges": _edges(sources),
        "inputsMetadata": [
            {"id": str(port), "attrs": [{"key": "__tensor_tag", "value": port_name(node, port)}]}
            for port in range(len(sources))
        ],
        "outputsMetadata": [{"id": "0", "attrs": _output(node)}],
        "style": {"backgroundColor": _TINTS[format_class(node.type.precision)]},
    }


def _layer(view: _View, id: str, members: list[int]) -> dict[str, Any]:
    """A layer as one node, which says where an equal one is drawn."""
    nodes = view.side.graph.nodes
    read = [view.id(i) for index in members for i in nodes[index].inputs if nodes[i].op != "const"]
    twin = view.closed[view.side.placed[members[0]]]
    return {
        "id": id,
        "label": id,
        "namespace": view.namespace(members[0]),
        "attrs": [
            {"key": "equal to", "value": f"layer {twin}, which is drawn in full"},
            {"key": "nodes", "value": str(len(members))},
        ],
        "incomingEdges": _edges([source for source in dict.fromkeys(read) if source != id]),
    }


def _edges(sources: list[str]) -> list[dict[str, str]]:
    return [
        {"sourceNodeId": source, "sourceNodeOutputId": "0", "targetNodeInputId": str(port)}
        for port, source in enumerate(sources)
    ]


def _label(node: Node) -> str:
    attrs = dict(node.attrs)
    if node.op in _LEAVES:
        return f"{leaf(str(attrs['name']))}"
    return f"const {attrs['value']!r}" if node.op == "const" else word(node).removeprefix("backward ")


def _ascii(words: str) -> str:
    """The viewer draws its boxes with a font of ASCII alone."""
    return words.replace("–", "-").replace("×", "x")


def _facts(node: Node, outputs: list[str]) -> dict[str, str]:
    attrs = {k: repr(v) if isinstance(v, float) else str(v) for k, v in node.attrs}
    scale = node.type.precision.scale
    return {
        "op": node.op,
        **attrs,
        "λ": str(node.type.precision),
        "dtype": node.type.precision.format.value,
        "granularity": str(scale.granularity) if scale else "",
        "scale rule": str(scale.rule) if scale else "",
        "shape": "[" + ", ".join(map(str, node.type.shape)) + "]",
        "module": node.fqn,
        "role": node.role.value,
        "phase": node.phase.value,
        "kernel": node.kernel,
        "policy rule": node.reason,
        "source": node.source,
        "output": ", ".join(outputs),
    }


def _output(node: Node) -> list[dict[str, str]]:
    shape = "x".join(map(str, node.type.shape))
    short = node.type.precision.short()
    return [
        {"key": "λ", "value": short},
        {"key": "tensor_shape", "value": shape},
        {"key": "dtype", "value": node.type.precision.format.value},
    ]


def _overlays(view: _View) -> dict[str, Any]:
    """One overlay a λ, so that each can be switched on alone; ordered by how often it occurs."""
    edges: dict[str, dict[tuple[str, str], None]] = defaultdict(dict)
    colour: dict[str, str] = {}
    for edge in view.side.graph.edges():
        short = edge.precision.short()
        colour[short] = PALETTE[format_class(edge.precision)]
        ends = view.source(edge.consumer, edge.in_index), view.id(edge.consumer)
        if ends[0] != ends[1] and ("@" not in ends[0] or view.side.placed[edge.consumer] not in view.closed):
            edges[short][ends] = None
    overlays = [
        {
            "name": short,
            "edgeColor": colour[short],
            "edgeWidth": 2,
            "edges": [{"sourceNodeId": a, "targetNodeId": b, "label": short} for a, b in found],
            "showEdgesConnectedToSelectedNodeOnly": True,
        }
        for short, found in sorted(edges.items(), key=lambda item: -len(item[1]))
    ]
    return {"type": "edge_overlays", "name": f"λ of every edge ({view.side.name})", "overlays": overlays}


def node_data(study: Study) -> dict[str, Any]:
    """Per graph a value and a colour a node: what differs if two graphs were given, else λ."""
    found = {}
    for view in _views(study):
        results = _differing(study, view) if study.infer is not None else _precisions(view)
        name = f"differences, {view.side.name}" if study.infer is not None else "λ"
        found[view.side.name] = {"name": name, "results": results}
    return found


def _precisions(view: _View) -> dict[str, Any]:
    return {
        str(i): {"value": n.type.precision.short(), "bgColor": _TINTS[format_class(n.type.precision)], "textColor": INK}
        for i, n in enumerate(view.side.graph.nodes)
        if n.op != "const" and view.side.placed[i] not in view.closed
    }


def _differing(study: Study, view: _View) -> dict[str, Any]:
    words: dict[str, dict[str, None]] = defaultdict(dict)
    for folded in study.differences:
        for member in folded.members:
            index = member.train if view.side is study.train else member.infer
            if index is not None:
                words[view.id(index)][folded.rule] = None
    return {
        id: {"value": ", ".join(rules), "bgColor": PALETTE["differs"], "textColor": "#ffffff"}
        for id, rules in words.items()
    }


def sync_navigation(study: Study) -> dict[str, Any]:
    """Partners, for the viewer's mapping from file; a node without one maps to nothing."""
    assert study.matching is not None
    left, right = _views(study)
    pairs = {
        (left.id(a), right.id(b)): None
        for b, a in enumerate(study.matching.train_of)
        if a is not None and study.train.graph.nodes[a].op != "const"
    }
    entries = [{"leftNodeIds": [a], "rightNodeIds": [b]} for a, b in pairs]
    return {"type": "sync_navigation", "mappingEntries": entries, "disableMappingFallback": True}

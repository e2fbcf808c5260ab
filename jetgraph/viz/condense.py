"""Draws fewer boxes than there are nodes, without hiding where a number is rounded.

Quantise, GEMM, attention, weights and every rounding that follows them are boxes of their own; a run of pointwise and
rounding ops inside one module is one box that names its ops.  Contraction keeps the graph acyclic: a node's level
grows by one at every border between boxes, and only nodes of one level and module are joined.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from struct import pack

from jetgraph.graph import Node, Phase, PrecisionGraph
from jetgraph.viz.layers import Place

ALONE = frozenset(
    {"quantize", "gemm", "attention", "attention_backward", "embed", "embed_backward", "parameter", "operand"}
    | {"input", "poison", "unknown"}
)
_KINDS = {"parameter": "weight", "operand": "weight", "embed": "gemm", "attention_backward": "attention"}
_TELLING = ("format", "size", "exponent", "index", "eps")
"""Attributes worth a place beside the op's name."""
MAX_NAMED_OPS = 2
MAX_KERNEL = 26
"""Characters of a kernel's name in a box; the panel has all of it."""
FLOWS = ("layer input", "gradient in")
"""Titles of the ports by which the activations and the gradient enter."""


@dataclass(frozen=True)
class Box:
    """``kind``: quantize, gemm, attention, weight, input, round, pointwise, op (one op of what is elsewhere drawn as
    pointwise), unknown; or port (a value from outside)
    and exit (a value that leaves).  ``nodes`` are node indices; of a port and an exit those that are named."""

    kind: str
    title: str
    subtitle: str
    nodes: tuple[int, ...]


@dataclass
class Condensed:
    """Boxes in a topological order, and edges (producer box, consumer box, value node)."""

    boxes: list[Box] = field(default_factory=list)
    edges: list[tuple[int, int, int]] = field(default_factory=list)


def condense(
    graph: PrecisionGraph,
    members: Iterable[int],
    paths: Sequence[str],
    port_title: Callable[[int], str],
    exits: Mapping[int, str],
    every_op: bool = False,
) -> Condensed:
    """The boxes of ``members``; with ``every_op`` one box a node.  Values from elsewhere enter by ports titled
    ``port_title(node)``; nodes of ``exits`` get an exit box with that title.  Constants are written inside the box
    that uses them."""
    members = [i for i in sorted(members) if graph.nodes[i].op != "const"]
    cluster = {i: i for i in members} if every_op else _clusters(graph, members, paths)
    result = Condensed()
    box_of: dict[int, int] = {}
    groups: dict[int, list[int]] = defaultdict(list)
    for index in members:
        groups[cluster[index]].append(index)
    inside = set(members)
    ports: dict[str, list[int]] = defaultdict(list)
    for index in members:
        for i in graph.nodes[index].inputs:
            if i not in inside and graph.nodes[i].op != "const" and i not in ports[port_title(i)]:
                ports[port_title(i)].append(i)
    for title, values in ports.items():
        if values:
            box_of.update(dict.fromkeys(values, len(result.boxes)))
            result.boxes.append(Box("port", title, "", tuple(values)))
    for nodes in groups.values():
        box_of.update(dict.fromkeys(nodes, len(result.boxes)))
        entering = [i for n in nodes for i in graph.nodes[n].inputs if i not in inside and graph.nodes[i].op != "const"]
        box = _box(graph, nodes, paths, [port_title(i) for i in entering])
        result.boxes.append(replace(box, kind="op") if every_op and box.kind == "pointwise" else box)
    result.edges = _edges(graph, members, box_of)
    for value, title in exits.items():
        if value in inside:
            result.edges.append((box_of[value], len(result.boxes), value))
            result.boxes.append(Box("exit", title, "", (value,)))
    return result


def _edges(graph: PrecisionGraph, members: Sequence[int], box_of: Mapping[int, int]) -> list[tuple[int, int, int]]:
    found: dict[tuple[int, int, int], None] = {}
    for index in members:
        for i in graph.nodes[index].inputs:
            if i in box_of and box_of[i] != box_of[index]:
                found[box_of[i], box_of[index], i] = None
    return list(found)


def _clusters(graph: PrecisionGraph, members: Sequence[int], paths: Sequence[str]) -> dict[int, int]:
    """A representative per node: connected nodes of one module and level (see the module's docstring)."""
    level: dict[int, int] = {}
    root: dict[int, int] = {}

    def joins(producer: int, consumer: int) -> bool:
        ops = {graph.nodes[producer].op, graph.nodes[consumer].op}
        return not ops & ALONE and paths[producer] == paths[consumer]

    def find(index: int) -> int:
        while root[index] != index:
            index = root[index]
        return index

    for index in members:
        root[index] = index
        known = [i for i in graph.nodes[index].inputs if i in level]
        leaf_level = -1 if not graph.nodes[index].inputs else 0
        level[index] = max((level[i] + (not joins(i, index)) for i in known), default=leaf_level)
        for i in known:
            if joins(i, index) and level[i] == level[index]:
                a, b = find(i), find(index)
                root[max(a, b)] = min(a, b)
    return {index: find(index) for index in members}


def leaf(path: str) -> str:
    """
    >>> leaf("model.layers.3.mlp.up_proj.weight"), leaf("lm_head"), leaf("model.layers.3")
    ('up_proj.weight', 'lm_head', 'residual')
    """
    parts = path.split(".")
    if parts[-1].isdigit():
        return "residual"
    return ".".join(parts[-2:]) if parts[-1] in ("weight", "bias") else parts[-1]


def _box(graph: PrecisionGraph, nodes: list[int], paths: Sequence[str], entering: list[str]) -> Box:
    node = graph.nodes[nodes[0]]
    name = leaf(paths[nodes[0]])
    key = tuple(nodes)
    if node.op == "quantize":
        return Box("quantize", "quantise", f"{node.type.precision.short()} {name}", key)
    if node.op in ("gemm", "attention", "attention_backward", "embed", "embed_backward"):
        role = node.role.value or ("backward" if node.phase is Phase.BACKWARD else "")
        word = {"gemm": "GEMM", "attention_backward": "attention", "embed_backward": "embed"}.get(node.op, node.op)
        title = f"{word} {name}" if node.op == "gemm" else f"{word} {role}".strip()
        return Box(_KINDS.get(node.op, node.op), title.strip(), _kernel(node, role if node.op == "gemm" else ""), key)
    if node.op in ("parameter", "operand"):
        return Box("weight", name, _shape(node), key)
    if node.op in ("input", "unknown", "poison"):
        return Box("unknown" if node.op != "input" else "input", f"{node.op} {node.attr('name')}", _shape(node), key)
    if len(nodes) == 1 and node.op == "round":
        return Box("round", f"round {node.attr('format')}", "", key)
    return _chain(graph, key, name, entering)


def _chain(graph: PrecisionGraph, nodes: tuple[int, ...], name: str, entering: list[str]) -> Box:
    ops = [op_words(graph, graph.nodes[i]) for i in nodes]
    if len(ops) <= MAX_NAMED_OPS:
        return Box("pointwise", " → ".join(ops), name, nodes)
    table = next((t for t in entering if "rotary" in t), "")
    counts = Counter(graph.nodes[i].op for i in nodes)
    rounds = counts.pop("round", 0)
    first = " ".join(op for op, _ in counts.most_common(4))
    ellipsis = " …" if len(counts) > 4 else ""
    title = f"{table or name or 'gradient'}: {len(ops)} ops"
    rounding = f" · {rounds} round{'s'[: rounds > 1]}" if rounds else ""
    return Box("pointwise", title, f"{first}{ellipsis}{rounding}", nodes)


def _number(value: object) -> str:
    """The shortest text that is this FP32 number.

    >>> _number(9.999999747378752e-06), _number(0.125)
    ('1e-05', '0.125')
    """
    if not isinstance(value, float):
        return str(value)
    texts = (f"{value:.{digits}g}" for digits in range(1, 9))
    return next((text for text in texts if pack("f", float(text)) == pack("f", value)), f"{value:.9g}")


def op_words(graph: PrecisionGraph, node: Node) -> str:
    """An op with the constants it reads (each with its format) and the attribute that tells it from its like."""
    leaves = [graph.nodes[i] for i in node.inputs if graph.nodes[i].op == "const"]
    constants = [f"{leaf.type.precision.short()} {_number(leaf.attr('value'))}" for leaf in leaves]
    attrs = dict(node.attrs)
    if node.op == "slice":
        detail = f"{attrs['start']}:{attrs['stop']}"
    else:
        detail = next((str(attrs[name]) for name in _TELLING if name in attrs), "")
    return " ".join(part for part in (node.op, detail, *constants) if part)


def _kernel(node: Node, role: str) -> str:
    name = node.kernel.rsplit("::", 1)[-1].strip("_")
    name = name if len(name) <= MAX_KERNEL else name[: MAX_KERNEL - 1] + "…"
    return " · ".join(part for part in (role, name) if part)


def _shape(node: Node) -> str:
    return "[" + ", ".join(map(str, node.type.shape)) + "]"


def port_titles(
    graph: PrecisionGraph, here: Place, placed: Sequence[Place], paths: Sequence[str], forward: frozenset[int]
) -> Callable[[int], str]:
    """Names for values that enter a section, worded so that they hold for all equal layers."""

    def title(index: int) -> str:
        node = graph.nodes[index]
        there = placed[index]
        if there == here:
            what = node.op if node.op in ("quantize", "gemm", "attention") else ""
            return "saved " + " ".join(part for part in (what, leaf(paths[index])) if part)
        if not node.inputs:
            return leaf(paths[index])
        if not isinstance(there, int) and node.phase is Phase.FORWARD:
            origin = _origin(graph, index, paths)
            if origin and "embed" not in origin:
                return origin
        return FLOWS[node.phase is Phase.BACKWARD]

    def safe(index: int) -> str:
        words = title(index)
        return words if isinstance(here, int) else words.replace(FLOWS[0], "from " + _of(placed[index]))

    return safe


def _of(place: Place) -> str:
    return f"layer {place}" if isinstance(place, int) else str(place)


def _origin(graph: PrecisionGraph, index: int, paths: Sequence[str]) -> str:
    """The module outside the layers that made a value which one layer merely arranges (rotary tables)."""
    for _ in range(8):
        if not any(part.isdigit() for part in paths[index].split(".")):
            return leaf(paths[index])
        if len(graph.nodes[index].inputs) != 1:
            return ""
        index = graph.nodes[index].inputs[0]
    return ""

"""Cuts a graph into sections a person knows (embedding, decoder layers, head, loss) and folds equal layers.

Two layers are equal if their nodes are equal as terms over what enters the layer: op, attributes, type, kernel, role
and layer-relative FQN of every node, and how they are wired.  The same numbering (`Block.nodes`, `Block.externals`)
then names the same thing in each of them, so one drawing stands for all and still points at real nodes.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from jetgraph.graph import Phase, PrecisionGraph
from jetgraph.ops import COMMUTATIVE

Place = int | str
"""A layer's number, or ``embedding``, ``head``, ``loss``, ``model`` (a graph without layers), ``""`` for constants."""

EMBEDDING, HEAD, LOSS, MODEL, NOWHERE = "embedding", "head", "loss", "model", ""
_LOSS_OPS = frozenset({"log_softmax", "log_softmax_backward", "gather", "gather_backward"})
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def layer_of(fqn: str) -> int | None:
    """
    >>> layer_of("model.layers.7.mlp.experts.3"), layer_of("model.norm")
    (7, None)
    """
    match = _NUMBER.search(fqn)
    return int(match[0]) if match else None


def relative(fqn: str) -> str:
    """The path with its layer number replaced, equal for equal modules of all layers.

    >>> relative("model.layers.7.mlp.up_proj"), relative("k.7"), relative("lm_head")
    ('model.layers.*.mlp.up_proj', 'k.*', 'lm_head')
    """
    return _NUMBER.sub("*", fqn, count=1)


def spans(numbers: Sequence[int]) -> str:
    """
    >>> spans([0, 1, 2, 5])
    '0–2, 5'
    """
    runs: list[list[int]] = []
    for n in sorted(numbers):
        if runs and n == runs[-1][-1] + 1:
            runs[-1][-1:] = [n] if len(runs[-1]) > 1 else [runs[-1][0], n]
        else:
            runs.append([n])
    return ", ".join("–".join(map(str, run)) for run in runs)


def path_of(graph: PrecisionGraph, index: int) -> str:
    """A node's FQN; for a leaf the name it is known by."""
    node = graph.nodes[index]
    return str(dict(node.attrs)["name"]) if node.op in ("parameter", "operand", "input") else node.fqn


def consumers(graph: PrecisionGraph) -> list[list[int]]:
    """Per node the nodes that read it, in order."""
    users: list[list[int]] = [[] for _ in graph.nodes]
    for index, node in enumerate(graph.nodes):
        for i in dict.fromkeys(node.inputs):
            users[i].append(index)
    return users


def forward_view(graph: PrecisionGraph) -> frozenset[int]:
    """What the forward outputs need; a tensor that forward computes for the gradients alone belongs to backward."""
    outputs = [i for name, i in graph.outputs.items() if graph.nodes[i].phase is Phase.FORWARD and name[:5] != "grad."]
    live: set[int] = set()
    stack = outputs or [i for i, n in enumerate(graph.nodes) if n.phase is Phase.FORWARD]
    while stack:
        index = stack.pop()
        if index not in live:
            live.add(index)
            stack.extend(graph.nodes[index].inputs)
    return frozenset(live)


def places(graph: PrecisionGraph, paths: Sequence[str]) -> list[Place]:
    """The section of every node, from its path and from where it stands in the dataflow."""
    own = [None if node.op == "const" else layer_of(path) for node, path in zip(graph.nodes, paths, strict=True)]
    if all(layer is None for layer in own):
        return [NOWHERE if n.op == "const" else LOSS if n.op in _LOSS_OPS else MODEL for n in graph.nodes]
    users = consumers(graph)
    for index in _shared_by_layers(graph, own, users):
        own[index] = None
    result: list[Place] = [NOWHERE] * len(graph.nodes)
    after_layers = [False] * len(graph.nodes)
    after_backward = [False] * len(graph.nodes)
    for index, node in enumerate(graph.nodes):
        layer, backward = own[index], node.phase is Phase.BACKWARD
        after_layers[index] = any(after_layers[i] or own[i] is not None for i in node.inputs if graph.nodes[i].inputs)
        after_backward[index] = backward and any(
            after_backward[i] or (own[i] is not None and graph.nodes[i].phase is Phase.BACKWARD) for i in node.inputs
        )
        if layer is not None:
            result[index] = layer
        elif node.inputs:
            deep = not after_backward[index] if backward else after_layers[index]
            result[index] = LOSS if node.op in _LOSS_OPS else HEAD if deep else EMBEDDING
    for index, node in enumerate(graph.nodes):
        if result[index] == NOWHERE and node.op != "const":
            outside = (result[u] for u in users[index] if result[u] != NOWHERE and not isinstance(result[u], int))
            result[index] = next(outside, EMBEDDING)
    return result


def _shared_by_layers(graph: PrecisionGraph, own: Sequence[int | None], users: Sequence[Sequence[int]]) -> set[int]:
    """Nodes that one layer happens to hold for all of them: rotary tables after common subexpressions are merged."""
    private = [False] * len(graph.nodes)
    for index, node in enumerate(graph.nodes):
        leaf_of_layer = not node.inputs and own[index] is not None
        private[index] = leaf_of_layer or any(private[i] for i in node.inputs)
    shared: set[int] = set()
    for index in range(len(graph.nodes) - 1, -1, -1):
        layer = own[index]
        if layer is None or private[index] or graph.nodes[index].phase is Phase.BACKWARD:
            continue
        readers = [u for u in users[index] if graph.nodes[u].phase is Phase.FORWARD]
        reading = {own[u] for u in readers}
        if {layer} < reading or (readers and all(u in shared for u in readers)):
            shared.add(index)
    return shared


@dataclass(frozen=True)
class Block:
    """One section of one graph.  Equal blocks have equal signatures and number their nodes and externals alike."""

    place: Place
    nodes: tuple[int, ...]
    externals: tuple[int, ...]
    """nodes outside that are read here, in order of first use"""
    signature: str

    @property
    def numbering(self) -> tuple[int, ...]:
        return self.nodes + self.externals


def blocks(graph: PrecisionGraph, placed: Sequence[Place], paths: Sequence[str]) -> dict[Place, Block]:
    """Every section of a graph: embedding, layers in order, head, loss."""
    members: dict[Place, list[int]] = defaultdict(list)
    readers: list[set[Place]] = [set() for _ in graph.nodes]
    for index, place in enumerate(placed):
        if place != NOWHERE:
            members[place].append(index)
            for i in graph.nodes[index].inputs:
                readers[i].add(place)
    tags: dict[int, list[str]] = defaultdict(list)
    for name, index in graph.outputs.items():
        tags[index].append(relative(name))
    layers = sorted(p for p in members if isinstance(p, int))
    order = [p for p in (MODEL, EMBEDDING, *layers, HEAD, LOSS) if p in members]
    return {p: _block(graph, p, members[p], placed, paths, readers, tags) for p in order}


def _block(graph, place, members, placed, paths, readers, tags) -> Block:
    inside: dict[int, str] = {}

    def describe(index: int) -> str:
        node = graph.nodes[index]
        if index in inside:
            return inside[index]
        if node.op == "const":
            return f"const {node.attr('value')!r}"
        if len(readers[index]) > 2 and not isinstance(placed[index], int):
            return graph.node_digests[index].hex()
        return f"outside {node.type}"

    def inputs(index: int) -> list[int]:
        node = graph.nodes[index]
        return sorted(node.inputs, key=describe) if node.op in COMMUTATIVE else list(node.inputs)

    for index in members:
        node = graph.nodes[index]
        attrs = [(k, relative(v) if k == "name" and isinstance(v, str) else v) for k, v in node.attrs]
        where = (relative(paths[index]), node.role.value, node.phase.value, node.kernel, node.reason, tags.get(index))
        term = (node.op, attrs, str(node.type), where, [describe(i) for i in inputs(index)])
        inside[index] = hashlib.blake2b(repr(term).encode(), digest_size=12).hexdigest()
    nodes = tuple(sorted(members, key=lambda i: (inside[i], i)))
    externals: dict[int, int] = {}
    uses = []
    for index in nodes:
        for i in inputs(index):
            if i not in inside and graph.nodes[i].op != "const":
                uses.append(externals.setdefault(i, len(externals)))
    signature = hashlib.blake2b(repr(([inside[i] for i in nodes], uses)).encode(), digest_size=12).hexdigest()
    return Block(place, nodes, tuple(externals), signature)

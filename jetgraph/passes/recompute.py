"""Backward computes again what is elementwise in what it keeps anyway, instead of keeping it too.

requires: a joint graph
ensures:  no backward call reads a forward conversion, or a product of one, that it can have from tensors that are kept
          anyway or that take fewer bytes; the copies stand right before their first reader
numerics: unchanged: the same operators on the same numbers
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from jetgraph.passes import edit

_aten = torch.ops.aten
CHEAP = edit.VIEWS | {_aten._to_copy.default, _aten.mul.Tensor}


def recompute(module: GraphModule) -> int:
    """Rewrite ``module`` in place.  Returns how many tensors backward no longer keeps."""
    graph, copies, num_recomputed = module.graph, {}, 0
    for node in list(graph.nodes):
        late = _late(node)
        if not late or not edit.is_forward(node) or node.target not in CHEAP - edit.VIEWS:
            continue
        leaves = _leaves(node)
        needed = sum(_bytes(leaf) for leaf in leaves if leaf.op != "placeholder" and not _late(leaf))
        if needed >= _bytes(node):
            continue
        first = next(n for n in graph.nodes if n in late)
        copy = _copy(graph, node, leaves, first, copies)
        for user in late:
            user.replace_input_with(node, copy)
        num_recomputed += 1
    return num_recomputed


def _late(node: Node) -> set[Node]:
    """The backward calls that read ``node``."""
    return {user for user in node.users if user.op == "call_function" and not edit.is_forward(user)}


def _leaves(node: Node) -> set[Node]:
    """What ``node`` is computed from by `CHEAP` operators; a tensor that backward reads anyway is a leaf."""
    leaves: set[Node] = set()
    for source in node.all_input_nodes:
        is_leaf = source.op == "placeholder" or source.target not in CHEAP or _late(source)
        leaves |= {source} if is_leaf else _leaves(source)
    return leaves


def _copy(graph: Graph, node: Node, leaves: set[Node], place: Node, copies: dict[Node, list[Node]]) -> Node:
    """``node`` again for backward, before ``place``; a copy that stands before it is taken."""
    if node in leaves:
        return node
    for copy in copies.get(node, []):
        if copy < place:
            return copy
    inputs = {source: _copy(graph, source, leaves, place, copies) for source in node.all_input_nodes}
    with graph.inserting_before(place):
        args = torch.fx.map_arg(node.args, inputs.__getitem__)
        kwargs = torch.fx.map_arg(node.kwargs, inputs.__getitem__)
        copy = edit.call(graph, node.target, args, node, False, kwargs)  # type: ignore[arg-type]
    copies.setdefault(node, []).append(copy)
    return copy


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return 0  # a size
    count = value.numel()
    return (count if isinstance(count, int) else count.node.hint) * value.element_size()

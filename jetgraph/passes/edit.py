"""Editing a joint FX graph without losing what later stages read: values, FQNs, sources, phases, checkpoint tags."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.fx
from torch.fx import Graph, Node

_INHERITED = (
    "nn_module_stack",
    "fwd_nn_module_stack",
    "stack_trace",
    "seq_nr",
    "partitioner_tag",
    "autograd_backward",
    "recompute",  # without these two, activation checkpointing would save what it should recompute
    "ac_graph_id",
)


_aten = torch.ops.aten
VIEWS = frozenset(
    {
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.reshape.default,
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.detach.default,
    }
)


def is_forward(node: Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_forward"


def mark_forward(graph: Graph) -> None:
    """Tag every call as forward: an inference graph has no backward and AOTAutograd leaves it untagged."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["partitioner_tag"] = "is_forward"


def call(
    graph: Graph, target: Any, args: tuple, like: Node, forward: bool, kwargs: dict[str, Any] | None = None
) -> Node:
    """Insert a call at the graph's insertion point; it stands for part of ``like`` and inherits its metadata."""
    node = graph.call_function(target, args, kwargs or {})
    fake_args = torch.fx.map_arg(args, lambda a: a.meta["val"])
    fake_mode = torch._guards.detect_fake_mode([a.meta["val"] for a in node.all_input_nodes])
    with fake_mode or contextlib.nullcontext():
        node.meta["val"] = target(*fake_args, **(kwargs or {}))
    for key in _INHERITED:
        if key in like.meta:
            node.meta[key] = like.meta[key]
    node.meta["partitioner_tag"] = "is_forward" if forward else "is_backward"
    if forward:
        node.meta.pop("autograd_backward", None)
    return node


def results(graph: Graph, node: Node, count: int) -> tuple[Node, ...]:
    """The results of a call that returns a tuple, as nodes placed right after it."""
    items = []
    after = node
    for index in range(count):
        with graph.inserting_after(after):
            item = graph.call_function(operator.getitem, (node, index))
        item.meta.update({k: v for k, v in node.meta.items() if k != "val"})
        item.meta["val"] = node.meta["val"][index]
        items.append(item)
        after = item
    return tuple(items)


def origin(node: Node) -> Node:
    """The operator that computed a tensor, looking through views: it is what quantises its result."""
    while node.op == "call_function" and node.target in VIEWS:
        node = node.args[0]  # type: ignore[assignment]
    return node


@contextlib.contextmanager
def after(graph: Graph, node: Node) -> Iterator[None]:
    """Insert right after ``node``; after all placeholders if it is one."""
    if node.op == "placeholder":
        node = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(node):
        yield

"""What the fusions look for: the quantisers of a tensor, and nodes of a given shape of computation."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

import jetgraph.lowering.fused_ops  # noqa: F401  (the operators that fusions put into graphs)
from jetgraph.passes.edit import VIEWS, is_forward

aten, ops = torch.ops.aten, torch.ops.jetgraph


@dataclass(frozen=True)
class Quantisers:
    """The quantisers of one tensor: grouped along the features, perhaps along the tokens, of one group and rule."""

    rows: Node
    tokens: Node | None
    group: int
    rule: tuple

    @property
    def results(self) -> list[Node | None]:
        """codes, scales, codes_t, scales_t; None for what nobody reads."""
        return [*_halves(self.rows), *(_halves(self.tokens) if self.tokens else (None, None))]


def quantisers_of(value: Node, users: list[Node]) -> Quantisers | None:
    """The quantisers if they are all that reads ``value`` (through views) among ``users``; else None."""
    rows = [n for n in users if n.target is ops.quantize.default and n.args[1] == 1 and n.args[2]]
    tokens = [n for n in users if n.target is ops.quantize_tokens.default]
    if len(rows) != 1 or len(tokens) > 1 or len(rows) + len(tokens) != len(users):
        return None
    _, _, group, *rule = rows[0].args
    if tokens and tokens[0].args[1:] != (group, *rule):
        return None
    return Quantisers(rows[0], tokens[0] if tokens else None, group, tuple(rule))  # type: ignore[arg-type]


def readers(node: Node) -> list[Node]:
    """Operators that read the numbers of ``node``, looking through views."""
    return [u for user in node.users for u in (readers(user) if user.target in VIEWS else [user]) if not asks_tokens(u)]


def asks_tokens(node: Node) -> bool:
    """Whether ``node`` only asks a matrix [T, C] for T."""
    return is_call(node, aten.sym_size.int) and node.args[1] == 0 and node.args[0].meta["val"].ndim == 2  # type: ignore[union-attr]


def ask_codes(value: Node, codes: Node) -> None:
    """Let whoever asks views of ``value`` for T ask ``codes`` [T, C] instead."""
    for user in list(value.users):
        if user.target in VIEWS:
            ask_codes(user, codes)
        elif asks_tokens(user):
            user.replace_input_with(value, codes)


def forward_readers(node: Node) -> list[Node]:
    return [n for n in readers(node) if n.op == "output" or is_forward(n)]


def is_tensor(node: object) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def is_call(node: object, target: object) -> bool:
    return isinstance(node, Node) and node.target is target


def is_rounding(node: object) -> bool:
    """A conversion of FP32 to BF16."""
    return is_call(node, aten._to_copy.default) and node.meta["val"].dtype is torch.bfloat16  # type: ignore[union-attr]


def either_order(node: Node) -> list[tuple[Node, Node]]:
    """The operands of a commutative call, both ways; nothing if one is a number or a size."""
    if len(node.args) != 2 or node.kwargs or not all(map(is_tensor, node.args)):
        return []
    a, b = node.args
    return [(a, b), (b, a)]  # type: ignore[list-item]


def same_shape(a: Node, b: Node) -> bool:
    return tuple(a.meta["val"].shape) == tuple(b.meta["val"].shape)


def replace(old: Node | None, new: Node) -> None:
    if old is not None:
        old.replace_all_uses_with(new)


def first_of(graph: Graph, nodes: list[Node]) -> Node:
    """Whichever comes first in the graph."""
    wanted = set(nodes)
    return next(n for n in graph.nodes if n in wanted)


def _halves(node: Node) -> list[Node | None]:
    items = {n.args[1]: n for n in node.users if n.target is operator.getitem}
    return [items.get(0), items.get(1)]

"""Which node of the rollout's graph corresponds to which node of training's, for looking at both at once.

This is presentation, not proof: `jetgraph.verify` decides what is contained.  A node equal by content digest is EQUAL;
past a difference every digest differs, so there a node keeps a partner that computes the same from the partners of its
inputs (roundings aside: a missing one must not hide what follows), or that is the same op at the same path.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from jetgraph.graph import Node, PrecisionGraph
from jetgraph.ops import COMMUTATIVE


@dataclass(frozen=True)
class Matching:
    """Partners by node index, None where there is none; ``equal`` holds the infer nodes matched by digest."""

    train_of: tuple[int | None, ...]
    infer_of: tuple[int | None, ...]
    equal: frozenset[int]

    def is_equal(self, side: str, index: int) -> bool:
        other = index if side == "infer" else self.infer_of[index]
        return other in self.equal


def match(train: PrecisionGraph, infer: PrecisionGraph) -> Matching:
    """Partners of all infer nodes, in one pass over each graph."""
    by_digest: dict[bytes, int] = {}
    by_term: dict[tuple, int] = {}
    by_unrounded: dict[tuple, int] = {}
    by_place: dict[tuple, list[int]] = defaultdict(list)
    for index, node in enumerate(train.nodes):
        by_digest.setdefault(train.node_digests[index], index)
        by_term.setdefault(_term(node, node.inputs), index)
        by_unrounded.setdefault(_term(node, [_unrounded(train, i) for i in node.inputs]), index)
        by_place[_place(node)].append(index)
    train_of: list[int | None] = []
    infer_of: list[int | None] = [None] * len(train.nodes)
    equal: set[int] = set()
    seen: dict[tuple, int] = defaultdict(int)
    for index, node in enumerate(infer.nodes):
        ordinal = seen[_place(node)]
        seen[_place(node)] += 1
        partner = by_digest.get(infer.node_digests[index])
        if partner is not None:
            equal.add(index)
        else:
            partner = _by_inputs(train, node, [train_of[i] for i in node.inputs], by_term, by_unrounded)
            if partner is None:
                there = by_place[_place(node)]
                free = ordinal < len(there) and infer_of[there[ordinal]] is None
                partner = there[ordinal] if free else None
        train_of.append(partner)
        if partner is not None and infer_of[partner] is None:
            infer_of[partner] = index
    return Matching(tuple(train_of), tuple(infer_of), frozenset(equal))


def _by_inputs(
    train: PrecisionGraph, node: Node, partners: list[int | None], by_term: dict, by_unrounded: dict
) -> int | None:
    inputs = [p for p in partners if p is not None]
    if not inputs or len(inputs) < len(partners):
        return None
    exact = by_term.get(_term(node, inputs))
    return by_unrounded.get(_term(node, [_unrounded(train, i) for i in inputs])) if exact is None else exact


def _unrounded(graph: PrecisionGraph, index: int) -> int:
    while graph.nodes[index].op == "round":
        index = graph.nodes[index].inputs[0]
    return index


def _term(node: Node, inputs) -> tuple:
    return node.op, node.attrs, tuple(sorted(inputs)) if node.op in COMMUTATIVE else tuple(inputs)


def _place(node: Node) -> tuple:
    return node.fqn, node.op, node.role, node.phase, dict(node.attrs).get("name")

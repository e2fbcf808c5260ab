"""The trainer's terms in tables of exact keys: what makes containment a look-up and finding a partner cheap.

A key is the number of (op, attributes, type) and the images of the inputs.  Interned with it, equal terms are equal
keys, so walking the engine's nodes in order decides term inclusion in O(V + E).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property

from jetgraph.graph import Node
from jetgraph.ops import COMMUTATIVE, OPS
from jetgraph.verify.fault import layer_of
from jetgraph.verify.forward import Forward

CARRIES_PRECISION = frozenset({"slice", "cat", "broadcast", "permute", "pick", "neg", "embed"})
"""Ops whose result has their input's precision.  Their keys leave it out, or one missing round upstream would make
every slice of the unrounded value a fault of its own; `Finder` compares it where the inputs are unrepaired."""

CROWD = 64
"""A value with more users of one op than this (a rotary table, an eps) says nothing about who is whose partner."""


class Terms:
    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.nodes = forward.nodes
        self._numbers: dict[tuple, int] = {}
        self._known: dict[tuple[str, int, int], tuple[int, Node]] = {}
        self._table: dict[tuple[int, ...], int] = {}
        first: dict[int, int] = {}  # a lifted graph has one node per term; one written by hand may repeat itself
        for index in forward.live:
            node = self.nodes[index]
            ports = [first[i] for i in node.inputs]
            if node.op in COMMUTATIVE:
                ports.sort()
            first[index] = self._table.setdefault((self._number(node), *ports), index)

    def find(self, node: Node, inputs: Sequence[int]) -> int | None:
        """The trainer's node with this node's meaning over ``inputs``, which are the trainer's."""
        known = self._known.get((node.op, id(node.attrs), id(node.type)))
        number = self._number(node) if known is None else known[0]
        return self._table.get((number, *(sorted(inputs) if node.op in COMMUTATIVE else inputs)))

    def _number(self, node: Node) -> int:
        """Equal for nodes of equal meaning.  Nodes of a graph share attributes and types, so most are told by identity;
        an entry keeps its node, so that the identities stay taken."""
        identity = node.op, id(node.attrs), id(node.type)
        known = self._known.get(identity)
        if known is None:
            known = self._numbers.setdefault(_meaning(node), len(self._numbers)), node
            self._known[identity] = known
        return known[0]

    # ------------------------------------------------------------------------------- looking around, after a miss

    @cached_property
    def _uses(self) -> dict[tuple[str, int], list[int]]:
        uses: dict[tuple[str, int], list[int]] = defaultdict(list)
        for index in self.forward.live:
            node = self.nodes[index]
            for producer in dict.fromkeys(node.inputs):
                uses[node.op, producer].append(index)
        return dict(uses)

    @cached_property
    def _places(self) -> dict[tuple[str, str], list[int]]:
        places: dict[tuple[str, str], list[int]] = defaultdict(list)
        for index in self.forward.live:
            node = self.nodes[index]
            if not OPS[node.op].leaf:
                places[node.op, node.fqn].append(index)
        return dict(places)

    @cached_property
    def _layers(self) -> dict[tuple[str, int | None], list[int]]:
        layers: dict[tuple[str, int | None], list[int]] = defaultdict(list)
        for (op, fqn), indices in self._places.items():
            layers[op, layer_of(fqn)] += indices
        return dict(layers)

    def users(self, op: str, value: int) -> list[int]:
        return self._uses.get((op, value), [])

    def at_fqn(self, op: str, fqn: str) -> list[int]:
        return self._places.get((op, fqn), [])[:CROWD]

    def in_layer(self, op: str, fqn: str) -> list[int]:
        found = self._layers.get((op, layer_of(fqn)), [])
        return found if len(found) <= CROWD else []

    def rounded(self, value: int) -> int | None:
        """``round`` of a value, if the trainer computes it."""
        users = self.users("round", value)
        return users[0] if users else None

    def quantized(self, value: int) -> list[int]:
        return self.users("quantize", value)

    def made_from(self, value: int, base: int, limit: int = 64) -> bool:
        """Whether ``value`` is computed from ``base`` within a few steps."""
        stack, seen = [value], {value}
        while stack and len(seen) < limit:
            for producer in self.nodes[stack.pop(0)].inputs:
                if producer == base:
                    return True
                if producer not in seen:
                    seen.add(producer)
                    stack.append(producer)
        return False


def _meaning(node: Node) -> tuple:
    """Attributes enter by their print: 0.0 and -0.0 are equal in Python and different numbers to a kernel."""
    precision = "" if node.op in CARRIES_PRECISION else str(node.type.precision)
    return node.op, repr(node.attrs) if node.attrs else "", node.type.shape, precision

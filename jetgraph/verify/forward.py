"""The forward part of a graph: what its observables need.  Only this part is compared, on both sides."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from jetgraph.graph import Node, Phase, PrecisionGraph


@dataclass(frozen=True)
class Forward:
    """A graph seen from its forward observables; indices stay those of the whole graph, as certificates need them."""

    graph: PrecisionGraph

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        return self.graph.nodes

    @cached_property
    def observables(self) -> dict[str, int]:
        """Outputs by name, gradients and whatever else the backward pass computes left out."""
        outputs = self.graph.outputs.items()
        nodes = self.graph.nodes
        return {k: i for k, i in outputs if not k.startswith("grad.") and nodes[i].phase is Phase.FORWARD}

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Indices that some observable needs, in topological order."""
        nodes = self.nodes
        needed = bytearray(len(nodes))
        for index in self.observables.values():
            needed[index] = 1
        for index in range(len(nodes) - 1, -1, -1):
            if needed[index]:
                for producer in nodes[index].inputs:
                    needed[producer] = 1
        return tuple(index for index, flag in enumerate(needed) if flag)

    @cached_property
    def users(self) -> dict[int, list[int]]:
        users: dict[int, list[int]] = {}
        for index in self.live:
            for producer in self.nodes[index].inputs:
                users.setdefault(producer, []).append(index)
        return users

    def ancestors(self, indices: Iterable[int]) -> set[int]:
        """These nodes and all they need."""
        nodes = self.graph.nodes
        seen = set(indices)
        stack = list(seen)
        while stack:
            new = [i for i in nodes[stack.pop()].inputs if i not in seen]
            seen.update(new)
            stack += new
        return seen

"""The borders of modules in a training graph: values that a live engine also has in its hands, by the same name.

An engine merges q, k and v, fuses norms and hides its attention, but what goes into a linear and what comes out of it
are tensors of its modules.  Those are the places where training's graph and a running engine can be held together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jetgraph.graph import Phase, PrecisionGraph
from jetgraph.verify.forward import Forward


@dataclass(frozen=True)
class Boundary:
    """``name`` is ``model.layers.3.mlp.up_proj:input``; ``node`` is the value's place in the graph."""

    name: str
    node: int


def boundaries(graph: PrecisionGraph) -> list[Boundary]:
    """The embedding's output, then input and output of every linear, in the order in which they are computed."""
    forward = Forward(graph)
    found = sorted({(b.node, b.name) for b in _boundaries(forward)})
    return [Boundary(name, node) for node, name in found]


def _boundaries(forward: Forward) -> Iterator[Boundary]:
    graph = forward.graph
    for index in forward.live:
        node = graph.nodes[index]
        if node.op == "embed" and node.fqn:
            yield Boundary(f"{node.fqn}:output", index)
        if node.op == "gemm" and node.fqn and node.phase is Phase.FORWARD:
            source = node.inputs[0]
            while graph.nodes[source].op == "quantize":
                source = graph.nodes[source].inputs[0]
            yield Boundary(f"{node.fqn}:input", source)
            yield Boundary(f"{node.fqn}:output", _output(forward, index))


def _output(forward: Forward, gemm: int) -> int:
    """The sum that the module returns: with its bias if it has one, and rounded if training rounds it."""
    index = gemm
    for op in ("add", "round"):
        readers = [u for u in forward.users.get(index, ()) if forward.nodes[u].op == op]
        if op == "add":
            readers = [u for u in readers if any(_is_row(forward, i) for i in forward.nodes[u].inputs)]
        if len(readers) == 1 and len(forward.users[index]) == 1:
            (index,) = readers
    return index


def _is_row(forward: Forward, index: int) -> bool:
    """Whether a node is a bias: a parameter of one row."""
    node = forward.nodes[index]
    return node.op == "parameter" and len(node.type.shape) == 1

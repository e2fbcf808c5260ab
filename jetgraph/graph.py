"""The precision graph: a frozen, printable, hashable, executable graph whose every value says how it is represented.

A graph is a list of `Node`s in topological order.  A node has one value; its `inputs` are indices of earlier nodes, so
every port has one producer.

Shapes are [T, features] for what has a token axis, [rows, cols] or [n] for parameters; ranks, heads, batches and views
of the captured program do not exist here (`jetgraph.layout` removes them while lifting).

Two written forms, both with print/parse identity: text for people and golden files (`graph_text`), JSON for tools
(`graph_json`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetgraph import bounded_json, graph_json, graph_text
from jetgraph.node import Attr, GraphError, Labels, Node, Phase, Role, ValueType, term_digest
from jetgraph.ops import OPS
from jetgraph.precision import Precision

if TYPE_CHECKING:
    import networkx

__all__ = ["Attr", "Edge", "GraphError", "Node", "Phase", "PrecisionGraph", "Role", "ValueType"]


@dataclass(frozen=True, slots=True)
class Edge:
    """One use of a value: λ (`precision`) and, where a policy rule decided it, which one."""

    producer: int
    consumer: int
    in_index: int
    precision: Precision
    reason: str


@dataclass(frozen=True)
class PrecisionGraph:
    name: str
    nodes: tuple[Node, ...]
    outputs: Mapping[str, int]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known: set[tuple] = set()
        for index, node in enumerate(self.nodes):
            form = node.op, id(node.attrs), len(node.inputs)  # a graph's nodes share their attributes
            if form not in known:
                self._check_form(index, node)
                known.add(form)
            for i in node.inputs:
                if type(i) is not int or not 0 <= i < index:
                    raise GraphError(f"{self.name} %{index}: {node.op} reads a node that does not come before it")
        for output, index in self.outputs.items():
            if not 0 <= index < len(self.nodes):
                raise GraphError(f"{self.name}: output {output!r} names node %{index}, which does not exist")

    def _check_form(self, index: int, node: Node) -> None:
        spec = OPS.get(node.op)
        if spec is None:
            raise GraphError(f"{self.name} %{index}: op {node.op!r} is not in the vocabulary (jetgraph/ops.py)")
        if spec.arity is not None and len(node.inputs) != spec.arity:
            raise GraphError(f"{self.name} %{index}: {node.op} takes {spec.arity} inputs, got {len(node.inputs)}")
        names = [name for name, _ in node.attrs]
        if sorted(names) != sorted(spec.attrs):
            raise GraphError(f"{self.name} %{index}: {node.op} has attributes {list(spec.attrs)}, got {names}")

    # ------------------------------------------------------------------------------------------------ looking at it

    def edges(self) -> Iterator[Edge]:
        for consumer, node in enumerate(self.nodes):
            for in_index, producer in enumerate(node.inputs):
                source = self.nodes[producer]
                yield Edge(producer, consumer, in_index, source.type.precision, source.reason)

    @property
    def num_edges(self) -> int:
        return sum(len(node.inputs) for node in self.nodes)

    def restrict(self, outputs: Mapping[str, int]) -> PrecisionGraph:
        """The same graph with only these outputs and their ancestors."""
        order = self.ancestors(outputs.values())
        new = {old: i for i, old in enumerate(order)}
        nodes = tuple(self.nodes[i].renumbered(new) for i in order)
        return PrecisionGraph(self.name, nodes, {k: new[i] for k, i in outputs.items()}, self.meta)

    def ancestors(self, indices: Iterable[int]) -> list[int]:
        """These nodes and all that they need, in order."""
        live: set[int] = set()
        stack = list(indices)
        while stack:
            index = stack.pop()
            if index not in live:
                live.add(index)
                stack.extend(self.nodes[index].inputs)
        return sorted(live)

    def to_networkx(self) -> networkx.MultiDiGraph:
        """A MultiDiGraph with the input position on each edge (a DiGraph would merge the two edges of x * x)."""
        import networkx

        graph = networkx.MultiDiGraph(name=self.name)
        for index, node in enumerate(self.nodes):
            graph.add_node(index, op=node.op, attrs=node.attrs, fqn=node.fqn, phase=node.phase.value)
        for edge in self.edges():
            graph.add_edge(edge.producer, edge.consumer, port=edge.in_index, precision=str(edge.precision))
        return graph

    # ------------------------------------------------------------------------------------------------------ digests

    @cached_property
    def node_digests(self) -> tuple[bytes, ...]:
        """Per node the sha256 of its whole term: op, attributes, type and the digests of its inputs."""
        labels = Labels()
        digests: list[bytes] = []
        for node in self.nodes:
            label = labels.of(node.op, node.attrs, node.type)
            digests.append(term_digest(node.op, label, [digests[i] for i in node.inputs]))
        return tuple(digests)

    @cached_property
    def semantic_digest(self) -> str:
        """What is computed, on any machine: no kernels, versions, paths or symbol names enter it."""
        named = sorted([k, self.node_digests[i].hex()] for k, i in self.outputs.items())
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()

    @cached_property
    def execution_digest(self) -> str:
        """What ran: the semantic digest with every node's kernel, the library versions and the device."""
        kernels = sorted({d.hex() + n.kernel for d, n in zip(self.node_digests, self.nodes, strict=True) if n.kernel})
        ran = [self.semantic_digest, kernels, self.meta.get("versions"), self.meta.get("device")]
        return hashlib.sha256(json.dumps(ran, sort_keys=True).encode()).hexdigest()

    # -------------------------------------------------------------------------------------------------------- forms

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """What a notebook shows: the overview, folded by equal layers."""
        from jetgraph.viz.notebook import mimebundle

        return mimebundle(self)

    def to_json(self) -> str:
        return graph_json.write(self.name, self.nodes, self.outputs, self.meta)

    @classmethod
    def from_json(cls, text: str | bytes) -> PrecisionGraph:
        """The graph of a file's content, which may be hostile.

        Raises:
            GraphError: one sentence that says what is wrong.
        """
        try:
            data = bounded_json.parse(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
        except bounded_json.Unreadable as error:
            raise GraphError(f"not a jetgraph graph file: {error}") from error
        return cls.from_data(data)

    @classmethod
    def from_data(cls, data: Any) -> PrecisionGraph:
        """The graph of a parsed file: for who needs the parsed form too and would parse twice."""
        return cls(*graph_json.read(data))

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> PrecisionGraph:
        """The graph of a file, which may be hostile.

        Raises:
            GraphError: one sentence that names the file and says what is wrong.
        """
        try:
            data = bounded_json.read_bytes(path)
        except bounded_json.Unreadable as error:
            raise GraphError(str(error)) from error
        try:
            return cls.from_json(data)
        except GraphError as error:
            raise GraphError(f"{path}: {error}") from error

    def to_text(self) -> str:
        return graph_text.write(self.name, self.nodes, self.outputs, self.meta)

    @classmethod
    def from_text(cls, text: str) -> PrecisionGraph:
        return cls(*graph_text.read(text))

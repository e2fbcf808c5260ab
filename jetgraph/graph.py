"""The precision graph: a frozen, printable, hashable, executable graph whose every value says how it is represented.

A graph is a list of `Node`s in topological order.  A node has one value; its `inputs` are indices of earlier nodes, so
every port has one producer.  The *semantic* fields (op, inputs, attrs, type) are its meaning; the *provenance* fields
(fqn, role, phase, kernel, source, reason) say where it came from and never enter the semantic digest.

Shapes are [T, features] for what has a token axis, [rows, cols] or [n] for parameters; ranks, heads, batches and views
of the captured program do not exist here (`jetgraph.layout` removes them while lifting).

Two written forms, both with print/parse identity: text for people and golden files, JSON for tools.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetgraph.ops import OPS
from jetgraph.precision import Precision

if TYPE_CHECKING:
    import networkx

Attr = int | float | str | bool | tuple[int, ...] | None
VERSION = 1


class Role(str, Enum):
    FPROP = "FPROP"
    DGRAD = "DGRAD"
    WGRAD = "WGRAD"
    NONE = ""


class Phase(str, Enum):
    FORWARD = "forward"
    BACKWARD = "backward"


class GraphError(ValueError):
    """A graph, or a file that should hold one, is not well formed."""


@dataclass(frozen=True, slots=True)
class ValueType:
    """Shape (ints, or the symbol ``"T"`` for the token axis) and precision of a node's value."""

    shape: tuple[int | str, ...]
    precision: Precision

    def __str__(self) -> str:
        return f"{self.precision} [{','.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Node:
    op: str
    inputs: tuple[int, ...]
    attrs: tuple[tuple[str, Attr], ...]
    type: ValueType
    fqn: str = ""
    role: Role = Role.NONE
    phase: Phase = Phase.FORWARD
    kernel: str = ""
    source: str = ""
    reason: str = ""

    def attr(self, name: str) -> Attr:
        return dict(self.attrs)[name]


@dataclass(frozen=True, slots=True)
class Edge:
    """One use of a value: λ (`precision`) and, where a policy rule decided it, which one."""

    producer: int
    consumer: int
    in_index: int
    precision: Precision
    reason: str


PROVENANCE = tuple(f.name for f in fields(Node))[4:]


@dataclass(frozen=True)
class PrecisionGraph:
    name: str
    nodes: tuple[Node, ...]
    outputs: Mapping[str, int]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            spec = OPS.get(node.op)
            if spec is None:
                raise GraphError(f"{self.name} %{index}: op {node.op!r} is not in the vocabulary (jetgraph/ops.py)")
            if spec.arity is not None and len(node.inputs) != spec.arity:
                raise GraphError(f"{self.name} %{index}: {node.op} takes {spec.arity} inputs, got {len(node.inputs)}")
            if tuple(sorted(dict(node.attrs))) != tuple(sorted(spec.attrs)):
                raise GraphError(
                    f"{self.name} %{index}: {node.op} has attributes {list(spec.attrs)}, got {list(dict(node.attrs))}"
                )
            if any(not 0 <= i < index for i in node.inputs):
                raise GraphError(f"{self.name} %{index}: {node.op} reads a node that does not come before it")
        for output, index in self.outputs.items():
            if not 0 <= index < len(self.nodes):
                raise GraphError(f"{self.name}: output {output!r} names node %{index}, which does not exist")

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
        live: set[int] = set()
        stack = list(outputs.values())
        while stack:
            index = stack.pop()
            if index not in live:
                live.add(index)
                stack.extend(self.nodes[index].inputs)
        order = sorted(live)
        new = {old: i for i, old in enumerate(order)}
        nodes = tuple(_renumber(self.nodes[i], new) for i in order)
        return PrecisionGraph(self.name, nodes, {k: new[i] for k, i in outputs.items()}, self.meta)

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
    def node_digests(self) -> tuple[str, ...]:
        """Per node the hash of its whole term: op, attributes, type and the digests of its inputs."""
        digests: list[str] = []
        for node in self.nodes:
            digests.append(term_digest(node.op, node.attrs, node.type, tuple(digests[i] for i in node.inputs)))
        return tuple(digests)

    @property
    def semantic_digest(self) -> str:
        """What is computed, on any machine: no kernels, versions, paths or symbol names enter it."""
        named = sorted((k, self.node_digests[i]) for k, i in self.outputs.items())
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()

    @property
    def execution_digest(self) -> str:
        """What ran: the semantic digest with every node's kernel, the library versions and the device."""
        kernels = sorted({(d, n.kernel) for d, n in zip(self.node_digests, self.nodes, strict=True) if n.kernel})
        ran = [self.semantic_digest, kernels, self.meta.get("versions"), self.meta.get("device")]
        return hashlib.sha256(json.dumps(ran, sort_keys=True).encode()).hexdigest()

    # -------------------------------------------------------------------------------------------------------- forms

    def to_json(self) -> str:
        nodes = [_node_to_dict(node) for node in self.nodes]
        body = ",\n".join(json.dumps(node, ensure_ascii=False) for node in nodes)
        head = json.dumps({"jetgraph": VERSION, "name": self.name, "outputs": dict(self.outputs)}, ensure_ascii=False)
        meta = json.dumps(self.meta, ensure_ascii=False, sort_keys=True)
        return f'{head[:-1]}, "meta": {meta}, "nodes": [\n{body}\n]}}\n'

    @classmethod
    def from_json(cls, text: str) -> PrecisionGraph:
        try:
            data = json.loads(text)
            if data["jetgraph"] != VERSION:
                raise GraphError(f"graph file has version {data['jetgraph']!r}; this jetgraph reads version {VERSION}")
            nodes = tuple(_node_from_dict(node) for node in data["nodes"])
            return cls(data["name"], nodes, data["outputs"], data["meta"])
        except GraphError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise GraphError(f"not a jetgraph graph file: {type(error).__name__}: {str(error)[:120]}") from error

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> PrecisionGraph:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise GraphError(f"{path}: cannot be read: {error}") from error
        return cls.from_json(text)

    def to_text(self) -> str:
        lines = [f"graph {json.dumps(self.name)} {json.dumps(self.meta, ensure_ascii=False, sort_keys=True)}"]
        for index, node in enumerate(self.nodes):
            inputs = ", ".join(f"%{i}" for i in node.inputs)
            attrs = " ".join(f"{k}={json.dumps(v)}" for k, v in node.attrs)
            where = " ".join(
                f"{k}={json.dumps(str(_plain(getattr(node, k))), ensure_ascii=False)}"
                for k in PROVENANCE
                if _plain(getattr(node, k)) and getattr(node, k) is not Phase.FORWARD
            )
            line = f"%{index} = {node.op}({inputs}) {{{attrs}}} : {node.type}"
            lines.append(f"{line}  # {where}" if where else line)
        lines.append("return " + json.dumps(dict(self.outputs), ensure_ascii=False))
        return "\n".join(lines) + "\n"

    @classmethod
    def from_text(cls, text: str) -> PrecisionGraph:
        head, *body, tail = text.strip("\n").split("\n")
        match = re.fullmatch(r'graph ("(?:[^"\\]|\\.)*") (.*)', head)
        if match is None or not tail.startswith("return "):
            raise GraphError('graph text: expected a first line `graph "name" {…}` and a last line `return {…}`')
        nodes = []
        for index, line in enumerate(body):
            node = _LINE.fullmatch(line)
            if node is None or int(node["index"]) != index:
                raise GraphError(f"graph text, line {index + 2}: expected `%{index} = op(inputs) {{attrs}} : type`")
            nodes.append(
                _node_from_dict(
                    {
                        "op": node["op"],
                        "in": [int(i[1:]) for i in node["inputs"].split(", ") if i],
                        "attrs": {k: json.loads(v) for k, v in _ATTR.findall(node["attrs"])},
                        "precision": node["precision"],
                        "shape": [s if s == "T" else int(s) for s in node["shape"].split(",") if s],
                        **{k: json.loads(v) for k, v in _ATTR.findall(node["where"] or "")},
                    }
                )
            )
        return cls(json.loads(match[1]), tuple(nodes), json.loads(tail[7:]), json.loads(match[2]))


_ATTR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\[[^\]]*\]|[^\s]+)')
_LINE = re.compile(
    r"%(?P<index>\d+) = (?P<op>\w+)\((?P<inputs>[^)]*)\) \{(?P<attrs>(?:\"(?:[^\"\\]|\\.)*\"|[^\"}])*)\} : "
    r"(?P<precision>\w+(?:\[[^\]]*\])?) \[(?P<shape>[^\]]*)\](?:  # (?P<where>.*))?"
)


def term_digest(op: str, attrs: tuple[tuple[str, Attr], ...], type: ValueType, inputs: tuple[str, ...]) -> str:
    """sha256 of one node's meaning, given the digests of its inputs."""
    key = json.dumps([op, attrs, [str(s) for s in type.shape], str(type.precision), inputs])
    return hashlib.sha256(key.encode()).hexdigest()


def _plain(value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def _renumber(node: Node, new: Mapping[int, int]) -> Node:
    return Node(
        node.op, tuple(new[i] for i in node.inputs), node.attrs, node.type, *(getattr(node, k) for k in PROVENANCE)
    )


def _node_to_dict(node: Node) -> dict[str, Any]:
    data: dict[str, Any] = {"op": node.op, "in": list(node.inputs), "attrs": dict(node.attrs)}
    data |= {"shape": list(node.type.shape), "precision": str(node.type.precision)}
    return data | {k: _plain(v) for k in PROVENANCE if (v := getattr(node, k)) and v is not Phase.FORWARD}


def _node_from_dict(data: dict[str, Any]) -> Node:
    attrs = tuple(sorted((k, tuple(v) if isinstance(v, list) else v) for k, v in data["attrs"].items()))
    return Node(
        data["op"],
        tuple(data["in"]),
        attrs,
        ValueType(tuple(data["shape"]), Precision.parse(data["precision"])),
        data.get("fqn", ""),
        Role(data.get("role", "")),
        Phase(data.get("phase", "forward")),
        data.get("kernel", ""),
        data.get("source", ""),
        data.get("reason", ""),
    )

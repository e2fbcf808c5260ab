"""The written form for people and golden files: one node a line, with print/parse identity."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jetgraph.node import PROVENANCE, Attr, GraphError, Node, Phase, Role, ValueType
from jetgraph.precision import Precision

_ATTR = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\[[^\]]*\]|[^\s]+)')
_LINE = re.compile(
    r"%(?P<index>\d+) = (?P<op>\w+)\((?P<inputs>[^)]*)\) \{(?P<attrs>(?:\"(?:[^\"\\]|\\.)*\"|[^\"}])*)\} : "
    r"(?P<precision>\w+(?:\[[^\]]*\])?) \[(?P<shape>[^\]]*)\](?:  # (?P<where>.*))?"
)


def write(name: str, nodes: Sequence[Node], outputs: Mapping[str, int], meta: Mapping[str, Any]) -> str:
    lines = [f"graph {json.dumps(name)} {json.dumps(meta, ensure_ascii=False, sort_keys=True)}"]
    for index, node in enumerate(nodes):
        inputs = ", ".join(f"%{i}" for i in node.inputs)
        attrs = " ".join(f"{k}={json.dumps(v)}" for k, v in node.attrs)
        told = [k for k in PROVENANCE if getattr(node, k) and getattr(node, k) not in (Role.NONE, Phase.FORWARD)]
        where = " ".join(f"{k}={json.dumps(_plain(getattr(node, k)), ensure_ascii=False)}" for k in told)
        line = f"%{index} = {node.op}({inputs}) {{{attrs}}} : {node.type}"
        lines.append(f"{line}  # {where}" if where else line)
    lines.append("return " + json.dumps(dict(outputs), ensure_ascii=False))
    return "\n".join(lines) + "\n"


def read(text: str) -> tuple[str, tuple[Node, ...], dict[str, int], dict[str, Any]]:
    """(name, nodes, outputs, meta) of what `write` wrote.

    Raises:
        GraphError: a line is not in the form above, with its number.
    """
    head, *body, tail = text.strip("\n").split("\n")
    match = re.fullmatch(r'graph ("(?:[^"\\]|\\.)*") (.*)', head)
    if match is None or not tail.startswith("return "):
        raise GraphError('graph text: expected a first line `graph "name" {…}` and a last line `return {…}`')
    nodes = []
    for index, line in enumerate(body):
        parts = _LINE.fullmatch(line)
        if parts is None or int(parts["index"]) != index:
            raise GraphError(f"graph text, line {index + 2}: expected `%{index} = op(inputs) {{attrs}} : type`")
        nodes.append(_node(parts))
    return json.loads(match[1]), tuple(nodes), json.loads(tail[7:]), json.loads(match[2])


def _node(parts: re.Match[str]) -> Node:
    attrs = {k: json.loads(v) for k, v in _ATTR.findall(parts["attrs"])}
    where = {k: json.loads(v) for k, v in _ATTR.findall(parts["where"] or "")}
    shape = tuple(s if s == "T" else int(s) for s in parts["shape"].split(",") if s)
    return Node(
        parts["op"],
        tuple(int(i[1:]) for i in parts["inputs"].split(", ") if i),
        tuple(sorted((k, _tuple(v)) for k, v in attrs.items())),
        ValueType(shape, Precision.parse(parts["precision"])),
        where.get("fqn", ""),
        Role(where.get("role", "")),
        Phase(where.get("phase", "forward")),
        where.get("kernel", ""),
        where.get("source", ""),
        where.get("reason", ""),
    )


def _tuple(value: Any) -> Attr:
    return tuple(value) if isinstance(value, list) else value


def _plain(value: Role | Phase | str) -> str:
    return value.value if isinstance(value, Role | Phase) else value

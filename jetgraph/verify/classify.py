"""Which rule a difference falls under: pure functions from two values to a rule id and words.

Decisions that a reader may doubt:
- power of two is a *scale format* (JG003): it says which numbers a scale can be; `dynamic` is a *scale rule* (JG005);
- a GEMM result of another format is JG010, any other value's is JG001;
- reading `empty` memory is JG011: a poison value differs from everything, so containment is refuted, not unknown;
- an operand that is computed from the expected one, or the other way round, means a missing or extra op (JG011);
  unrelated operands are wrong wiring (JG012), and two parameters of other names are JG013.
"""

from __future__ import annotations

from jetgraph.graph import Node, PrecisionGraph
from jetgraph.precision import Precision, Scale
from jetgraph.verify.fault import number
from jetgraph.verify.terms import CARRIES_PRECISION

REPRESENTATION = ("round", "quantize")
"""Ops that change how a value is represented, not what it stands for."""

Difference = tuple[str, str, str]
"""(rule id, expected, got)"""


def precision_differences(expected: Precision, got: Precision, op: str) -> list[Difference]:
    """One difference per rule; only the differing fields are named."""
    if expected == got:
        return []
    if expected.format is not got.format or expected.scale is None or got.scale is None:
        return [("JG010" if op == "gemm" else "JG001", expected.short(), got.short())]
    found: dict[str, list[tuple[str, str]]] = {}
    for rule, name, e, g in _scale_fields(expected.scale, got.scale):
        if e != g:
            found.setdefault(rule, []).append((f"{name} {e}", f"{name} {g}"))
    return [(rule, ", ".join(e for e, _ in pairs), ", ".join(g for _, g in pairs)) for rule, pairs in found.items()]


def _scale_fields(e: Scale, g: Scale) -> list[tuple[str, str, object, object]]:
    return [
        ("JG002", "block", str(e.granularity), str(g.granularity)),
        ("JG003", "scale format", str(e.format), str(g.format)),
        ("JG003", "power of two", e.rule.power_of_two, g.rule.power_of_two),
        ("JG005", "qmax", e.rule.qmax, g.rule.qmax),
        ("JG005", "amax floor", e.rule.amax_floor, g.rule.amax_floor),
        ("JG005", "division", str(e.rule.division), str(g.rule.division)),
        ("JG005", "dynamic", e.dynamic, g.dynamic),
    ]


def attribute_differences(expected: Node, got: Node) -> list[Difference]:
    """One difference for all attributes of a node; an attribute that a lifter calls unknown is reported elsewhere."""
    pairs = [
        (f"{name} {number(e)}", f"{name} {number(g)}")
        for (name, e), (_, g) in zip(sorted(expected.attrs), sorted(got.attrs), strict=True)
        if repr(e) != repr(g) and "unknown" not in (e, g)
    ]
    if not pairs:
        return []
    rule = "JG001" if got.op == "round" else "JG011"
    return [(rule, ", ".join(e for e, _ in pairs), ", ".join(g for _, g in pairs))]


def type_differences(expected: Node, got: Node) -> list[Difference]:
    if expected.type.shape != got.type.shape:
        return [("JG011", f"shape {list(expected.type.shape)}", f"shape {list(got.type.shape)}")]
    return precision_differences(expected.type.precision, got.type.precision, got.op)


def stripped(graph: PrecisionGraph, index: int) -> int:
    """The value below its rounds and quantisations."""
    while graph.nodes[index].op in REPRESENTATION:
        index = graph.nodes[index].inputs[0]
    return index


def origin(graph: PrecisionGraph, index: int) -> Node:
    """The leaf that a value is a rearrangement or representation of; the value's own node if there is none."""
    node = graph.nodes[index]
    while len(node.inputs) == 1 and (node.op in REPRESENTATION or node.op in CARRIES_PRECISION):
        node = graph.nodes[node.inputs[0]]
    return node


def is_double(graph: PrecisionGraph, index: int) -> bool:
    """Whether a `quantize` reads, through rounds, a value that was quantised already."""
    node = graph.nodes[graph.nodes[index].inputs[0]]
    while node.op == "round":
        node = graph.nodes[node.inputs[0]]
    return node.op == "quantize"


def leaf_rule(expected: Node, got: Node) -> str | None:
    """The rule of an operand that differs because of the leaf it comes from."""
    if got.op == "operand":
        return "JG017"
    if got.op in ("poison", "const") or expected.op in ("poison", "const"):
        return "JG011"
    if got.op == expected.op == "parameter" and got.attrs != expected.attrs:
        return "JG013"
    return None

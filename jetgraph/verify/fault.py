"""One difference, with everything a person needs to remove it, and the words for it.

Every detector of this room returns `Fault`s; `fold` groups them and `report` prints them.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import asdict, dataclass, replace
from typing import Any

from jetgraph.graph import Node, PrecisionGraph
from jetgraph.verify.rules import RULES, Severity


@dataclass(frozen=True)
class Fault:
    """A root fault.  ``infer`` and ``train`` are node indices, None where the fault is not at a node of that side."""

    rule: str
    op: str
    fqn: str
    expected: str
    got: str
    infer: int | None = None
    train: int | None = None
    infer_source: str = ""
    train_source: str = ""

    @property
    def severity(self) -> Severity:
        return RULES[self.rule].severity

    @property
    def remedy(self) -> str:
        fields = {"fqn": self.fqn, "op": self.op, "expected": self.expected, "got": self.got}
        return RULES[self.rule].remedy.format(**fields)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "severity": str(self.severity), "remedy": self.remedy}

    def as_rule(self, rule: str) -> Fault:
        return replace(self, rule=rule)


def at(
    rule: str,
    expected: str,
    got: str,
    *,
    train: tuple[PrecisionGraph, int] | None = None,
    infer: tuple[PrecisionGraph, int] | None = None,
    op: str = "",
    fqn: str = "",
) -> Fault:
    """A fault at a node of either side or both; op and FQN are the engine node's where there is one."""
    t = train and train[0].nodes[train[1]]
    i = infer and infer[0].nodes[infer[1]]
    here = i or t
    return Fault(
        rule,
        op or (here.op if here else ""),
        fqn or (i.fqn if i and i.fqn else "") or (t.fqn if t else ""),
        expected,
        got,
        infer[1] if infer else None,
        train[1] if train else None,
        i.source if i else "",
        t.source if t else "",
    )


def on(side: str, graph: PrecisionGraph, index: int, rule: str, expected: str, got: str) -> Fault:
    """A fault at a node of the side called "train" or "infer"."""
    place = (graph, index)
    return at(rule, expected, got, train=place) if side == "train" else at(rule, expected, got, infer=place)


def words(graph: PrecisionGraph, index: int, beside: str = "") -> str:
    """A value in a few words: what makes it, seen through rounds and quantisations; its FQN if not ``beside``.

    `round(bf16) of gemm at model.layers.3.mlp.up_proj`, `f8e4m3[128x128] of parameter model.norm.weight`
    """
    prefix = ""
    node = graph.nodes[index]
    while node.op in ("round", "quantize"):
        prefix += f"round({node.attr('format')}) of " if node.op == "round" else f"{node.type.precision.short()} of "
        node = graph.nodes[node.inputs[0]]
    return prefix + _name(node, beside)


def _name(node: Node, beside: str) -> str:
    if node.op == "const":
        return f"const {number(node.attr('value'))}"
    if node.op == "operand":
        return f"stored codes {node.attr('name')}"
    if node.op == "poison":
        return f"uninitialised memory {node.attr('name')}"
    if node.op == "unknown":
        return f"unknown op {node.attr('name')}"
    if node.op in ("input", "parameter"):
        return f"{node.op} {node.attr('name')}"
    return node.op if not node.fqn or node.fqn == beside else f"{node.op} at {node.fqn}"


def number(value: object) -> str:
    """A float that FP32 holds exactly in as few digits as name it; anything else as Python prints it.

    >>> number(9.999999747378752e-06), number(1e-05 / 3)
    ('1e-05', '3.3333333333333337e-06')
    """
    if isinstance(value, float) and math.isfinite(value) and abs(value) < 3e38 and _as_f32(value) == value:
        return next(text for digits in range(1, 18) if _as_f32(float(text := f"{value:.{digits}g}")) == value)
    return repr(value)


def _as_f32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


_LAYER = re.compile(r"(?<=[A-Za-z_]\.)\d+(?=\.[A-Za-z_]|$|\s|,)")


def layer_of(fqn: str) -> int | None:
    """The first number in a dotted path: 7 of ``model.layers.7.mlp``; None outside the layers."""
    match = _LAYER.search(fqn)
    return int(match[0]) if match else None


def without_layer(text: str, layer: int | None) -> str:
    """Paths of one layer written so that the same fact reads the same in every layer.

    >>> without_layer("parameter model.layers.8.mlp.up_proj.weight", 7)
    'parameter model.layers.*+1.mlp.up_proj.weight'
    """
    if layer is None:
        return text

    def relative(match: re.Match[str]) -> str:
        offset = int(match[0]) - layer
        return "*" if offset == 0 else f"*{offset:+d}"

    return _LAYER.sub(relative, text)

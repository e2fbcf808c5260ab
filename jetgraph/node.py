"""One node of a precision graph, its value's type, and the digest of the term it stands for.

The *semantic* fields of a node (op, inputs, attrs, type) are its meaning; the *provenance* fields (fqn, role, phase,
kernel, source, reason) say where it came from and never enter a semantic digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum

from jetgraph.ops import COMMUTATIVE
from jetgraph.precision import Precision

Attr = int | float | str | bool | tuple[int, ...] | None
Attrs = tuple[tuple[str, Attr], ...]


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


@dataclass(frozen=True, slots=True, init=False)
class Node:
    op: str
    inputs: tuple[int, ...]
    attrs: Attrs
    type: ValueType
    fqn: str
    role: Role
    phase: Phase
    kernel: str
    source: str
    reason: str

    def __init__(
        self,
        op: str,
        inputs: tuple[int, ...],
        attrs: Attrs,
        type: ValueType,
        fqn: str = "",
        role: Role = Role.NONE,
        phase: Phase = Phase.FORWARD,
        kernel: str = "",
        source: str = "",
        reason: str = "",
    ) -> None:
        """What a frozen dataclass does, in half the time: graphs of a million nodes are read."""
        _set_op(self, op)
        _set_inputs(self, inputs)
        _set_attrs(self, attrs)
        _set_type(self, type)
        _set_fqn(self, fqn)
        _set_role(self, role)
        _set_phase(self, phase)
        _set_kernel(self, kernel)
        _set_source(self, source)
        _set_reason(self, reason)

    def attr(self, name: str) -> Attr:
        return dict(self.attrs)[name]

    def renumbered(self, new: Mapping[int, int]) -> Node:
        """The same node in a graph where node i has become node ``new[i]``."""
        inputs = tuple(new[i] for i in self.inputs)
        return Node(self.op, inputs, self.attrs, self.type, *(getattr(self, k) for k in PROVENANCE))


_set_op, _set_inputs, _set_attrs, _set_type, *_setters = (getattr(Node, field.name).__set__ for field in fields(Node))
_set_fqn, _set_role, _set_phase, _set_kernel, _set_source, _set_reason = _setters
PROVENANCE = tuple(f.name for f in fields(Node))[4:]


class Labels:
    """What a node is without its inputs: the sha256 of op, attributes, shape and precision, in the checker's JSON.

    A graph of a million nodes has a few hundred labels, so each is written once; the key tells apart what JSON does
    (0.0 and -0.0, 1 and 1.0).
    """

    def __init__(self) -> None:
        self._known: dict[tuple, bytes] = {}

    def of(self, op: str, attrs: Attrs, type: ValueType) -> bytes:
        key = op, repr(attrs) if attrs else "", type.shape, str(type.precision)
        label = self._known.get(key)
        if label is None:
            row = [op, dict(attrs), type.shape, str(type.precision)]
            text = json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n"
            label = self._known[key] = hashlib.sha256(text.encode()).digest()
        return label


def term_digest(op: str, label: bytes, inputs: Sequence[bytes]) -> bytes:
    """sha256 of one node's meaning: its label followed by the digests of its inputs, 32 bytes each.

    The operands of a commutative op are sorted, so the order in which a file lists them does not matter.
    """
    return hashlib.sha256(label + b"".join(sorted(inputs) if op in COMMUTATIVE else inputs)).digest()

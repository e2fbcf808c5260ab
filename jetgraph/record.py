"""A neutral, torch-free record of a captured program: what `jetgraph.lift` reads, and what a capture file stores.

An FX graph and a dispatch trace become the same list of `Op`s.  Records keep every argument and keyword, the traced
shape and dtype of every result, the module that ran (FQN) and the line of Python that asked for it.
"""

from __future__ import annotations

import ast
import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ref:
    """A use of an earlier op's result."""

    name: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that is not a number, string or tensor: a dtype (``kind="dtype"``) or an opaque object."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Traced shape (ints, or sympy text for symbolic sizes) and dtype (``"bfloat16"``) of a tensor.

    ``layout`` lists the dimensions from the largest stride to the smallest, empty for row-major: kernels that sum may
    visit memory in that order.
    """

    shape: tuple[int | str, ...]
    dtype: str
    layout: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Op:
    """One step: ``kind`` is placeholder, call or output; ``target`` e.g. ``aten.mul.Tensor``."""

    name: str
    kind: str
    target: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    value: Any = None
    fqn: str = ""
    source: str = ""
    phase: str = "forward"


def references(argument: Any) -> list[str]:
    """Names of all ops that an argument (nested lists, tuples, dicts) uses, in order."""
    if isinstance(argument, Ref):
        return [argument.name]
    if isinstance(argument, dict):
        return [name for value in argument.values() for name in references(value)]
    if isinstance(argument, (tuple, list)):
        return [name for value in argument for name in references(value)]
    return []


def evaluate_size(size: int | str, symbols: Mapping[str, int]) -> int:
    """A traced size as a number: ``"((s27 + 127)//128)"`` with ``{"s27": 53}`` is 1.

    Raises:
        ValueError: the text is not an integer expression of +, -, *, // over known symbols.
    """
    if isinstance(size, int):
        return size

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name) if name in symbols:
                return symbols[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _ARITHMETIC:
                return _ARITHMETIC[type(operator)](value(left), value(right))
        raise ValueError(f"size {size!r}: cannot be evaluated with symbols {sorted(symbols)}")

    return value(ast.parse(size, mode="eval").body)


_ARITHMETIC = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


# ------------------------------------------------------------------------------------------------------ as JSON


def to_json(ops: Sequence[Op]) -> str:
    return "[\n" + ",\n".join(json.dumps(_encode_op(op), ensure_ascii=False) for op in ops) + "\n]\n"


def from_json(text: str) -> list[Op]:
    return [_decode_op(item) for item in json.loads(text)]


def _encode_op(op: Op) -> list[Any]:
    return [
        op.name,
        op.kind,
        op.target,
        encode(op.args),
        encode(op.kwargs),
        encode(op.value),
        op.fqn,
        op.source,
        op.phase,
    ]


def _decode_op(item: list[Any]) -> Op:
    name, kind, target, args, kwargs, value, fqn, source, phase = item
    return Op(name, kind, target, decode(args), decode(kwargs), decode(value), fqn, source, phase)


def encode(value: Any) -> Any:
    if isinstance(value, Ref):
        return {"ref": value.name}
    if isinstance(value, Symbol):
        return {"symbol": [value.kind, value.text]}
    if isinstance(value, TensorSpec):
        return {"tensor": [list(value.shape), value.dtype, list(value.layout)]}
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        return {"dict": {k: encode(v) for k, v in value.items()}}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(decode(v) for v in value)
    if not isinstance(value, dict):
        return value
    ((tag, body),) = value.items()
    if tag == "ref":
        return Ref(body)
    if tag == "symbol":
        return Symbol(*body)
    if tag == "tensor":
        return TensorSpec(tuple(body[0]), body[1], tuple(body[2]))
    if tag == "float":
        return float(body)
    return {k: decode(v) for k, v in body.items()}

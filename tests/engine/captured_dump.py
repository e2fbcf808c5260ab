"""The text dump of a captured vLLM graph as a record: `tests/data/vllm-0.26.0-h200-qwen3-fp8.txt.gz`.

One line a node: op, name, target, dtype, shape, arguments.  Keyword arguments and everything about the attention layers
are not in it.
"""

from __future__ import annotations

import ast
import gzip
import re
from pathlib import Path
from typing import Any

from jetgraph.record import Op, Ref, Symbol, TensorSpec

DUMP = Path(__file__).resolve().parents[1] / "data" / "vllm-0.26.0-h200-qwen3-fp8.txt.gz"
_LINE = re.compile(r"(placeholder|call_function|call_method|output) (\S+) (.*) (torch\.\S+|None) (\(.*?\)) (\(.*\))")
_BUILTIN = re.compile(r"<(?:built-in method|built-in function|function|class) '?([\w.]+)'?.*>")


def read_dump() -> list[Op]:
    lines = gzip.decompress(DUMP.read_bytes()).decode().splitlines()
    return [_op(line) for line in lines if not line.startswith("#")]


def _op(line: str) -> Op:
    match = _LINE.fullmatch(line)
    assert match is not None, line
    kind, name, target, dtype, shape, arguments = match.groups()
    builtin = _BUILTIN.fullmatch(target)
    value = None if dtype == "None" else TensorSpec(_shape(shape), dtype.removeprefix("torch."))
    kind = kind if kind in ("placeholder", "output") else "call"
    return Op(
        name, kind, builtin[1] if builtin else target, _argument(ast.parse(arguments, mode="eval").body), {}, value
    )


def _shape(text: str) -> tuple[Any, ...]:
    return tuple(int(s) if s.isdigit() else s for s in re.findall(r"\w+", text))


def _argument(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return Ref(name)
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return tuple(_argument(item) for item in items)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=value)):
            return -value
    return Symbol("object", ast.unparse(node))

"""torch.fx graphs and live dispatch traces as `jetgraph.record` lists.  The torch half of recording."""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.fx

from jetgraph.record import Op, Ref, Symbol, TensorSpec

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


def record_argument(value: Any) -> Any:
    """A call's argument without its tensors: nodes become `Ref`s, dtypes and objects become `Symbol`s."""
    if isinstance(value, torch.fx.Node):
        return Ref(value.name)
    if isinstance(value, (tuple, list)):
        return tuple(record_argument(v) for v in value)
    if isinstance(value, dict):
        return {k: record_argument(v) for k, v in value.items()}
    if isinstance(value, slice):
        return Symbol("slice", repr(value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return str(value)
    if isinstance(value, torch.dtype):
        return Symbol("dtype", str(value).removeprefix("torch."))
    return Symbol("object", f"{type(value).__name__} {value}")


def record_value(value: Any) -> Any:
    """The traced result: `TensorSpec`, a tuple of them, a size as text, or None."""
    if isinstance(value, torch.Tensor):
        shape = tuple(int(s) if isinstance(s, int) else str(s) for s in value.shape)
        return TensorSpec(shape, str(value.dtype).removeprefix("torch."), memory_layout(value))
    if isinstance(value, (tuple, list)):
        return tuple(record_value(v) for v in value)
    return None if value is None else str(value)


def memory_layout(value: torch.Tensor) -> tuple[int, ...]:
    """Dimensions from the largest stride to the smallest; empty if the tensor is row-major."""
    if value.layout is not torch.strided or value.is_contiguous():
        return ()
    dims = [d for d in range(value.ndim) if value.shape[d] != 1]
    order = sorted(dims, key=lambda d: -_hint(value.stride(d)))
    return () if order == dims else tuple(order)


def _hint(size: int | torch.SymInt) -> int:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def record_graph(module: torch.fx.GraphModule, phase: str = "forward") -> list[Op]:
    """Every node of an FX graph, in order, with traced values, FQN and source line."""
    return [record_node(node, phase) for node in module.graph.nodes]


def record_node(node: torch.fx.Node, phase: str) -> Op:
    kind = {"placeholder": "placeholder", "output": "output"}.get(node.op, "call")
    return Op(
        node.name,
        kind,
        target_name(node.target),
        record_argument(node.args),
        record_argument(node.kwargs),
        record_value(node.meta.get("val", node.meta.get("example_value"))),
        module_fqn(node),
        source_line(node.meta.get("stack_trace")),
        phase,
    )


def target_name(target: Any) -> str:
    """``aten.mul.Tensor``, ``jetgraph.quantize.default``, ``getitem`` …"""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return getattr(target, "__name__", str(target))


def module_fqn(node: torch.fx.Node) -> str:
    """FQN, from ``L['self']`` on, of the module whose forward (or whose gradient) this node is part of."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return _dotted(list(stack.values())[-1][0]) if stack else ""


def relative_fqn(fqn: str) -> str:
    """``L['self'].mlp.up_proj``, or with ``.forward.__self__`` if set on the instance → ``mlp.up_proj``."""
    return _ROOT.sub("", fqn).replace("forward.__self__.", "").removeprefix(".")


_ROOT = re.compile(r"^L\['\w+'\]")


def _dotted(fqn: str) -> str:
    """``getattr(L['self'].layers, '0').mlp``, as an exported module has it → ``L['self'].layers.0.mlp``."""
    while (match := _GETATTR.search(fqn)) is not None:
        fqn = f"{fqn[: match.start()]}{match[1]}.{match[2]}{fqn[match.end() :]}"
    return fqn


_GETATTR = re.compile(r"getattr\(((?:(?!getattr\().)*?), '([^']*)'\)")


def source_line(stack_trace: str | None) -> str:
    """``file.py:line`` of a stack trace's innermost frame; only the last three path parts, so it is portable.

    `jetgraph.linear` is passed over: whoever called the linear is what the reader wants to see.
    """
    frames = _FRAME.findall(stack_trace or "")
    frames = [frame for frame in frames if not frame[0].endswith("jetgraph/linear.py")] or frames
    if not frames:
        return ""
    path, line, _ = frames[-1]
    return "/".join(path.split("/")[-3:]) + f":{line}"

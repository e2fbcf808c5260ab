"""Whether a fusion keeps every bit, found out on numbers at the moment it is applied.

The nodes of both forms are still in the graph; they are run from the same leaves, on the device that the graph is for,
with sizes that do not fill the last group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

SIZES = (131, 3)
"""Of the first free symbol (more than a group of 128) and of every other."""


@dataclass(frozen=True)
class Fusion:
    """One fusion that was tried: the operator, where, and why it was not applied ("" if it was)."""

    operator: str
    fqn: str
    refusal: str = ""


def disagreement(before: Sequence[Node], after: Sequence[Node], leaves: Iterable[Node]) -> str:
    """Why ``after`` is not ``before``, in one sentence; "" if all tensors have the same shape, dtype and bits.

    ``leaves`` are the nodes where evaluation starts; they get random numbers with a few large ones, zeros and -0.
    """
    with _disable_current_modes():  # a compiler traces with tensors that hold no numbers
        numbers = _Numbers(leaves)
        for old, new in zip(before, after, strict=True):
            want, got = numbers.of(old), numbers.of(new)
            if (want.shape, want.dtype) != (got.shape, got.dtype):
                expected = f"{want.dtype} {list(want.shape)} of {old.name}"
                return f"{new.name} is {got.dtype} {list(got.shape)}; expected {expected}"
            if not _same_bits(want, got):
                return f"{new.name} differs in bits from {old.name}"
    return ""


def _same_bits(a: Tensor, b: Tensor) -> bool:
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(words), b.contiguous().view(words))


class _Numbers:
    """Values of nodes, computed from made-up values of the leaves."""

    def __init__(self, leaves: Iterable[Node]) -> None:
        self.values: dict[Node, Any] = {}
        self.symbols: dict[Any, int] = {}
        generator = torch.Generator().manual_seed(0)
        for leaf in leaves:
            val = leaf.meta["val"]
            shape = [self._size(d) for d in val.shape]
            x = torch.randn(shape, generator=generator)
            x = x * torch.where(torch.rand(shape, generator=generator) < 0.01, 100.0, 1.0)
            x = torch.where(torch.rand(shape, generator=generator) < 0.02, -0.0, x)
            self.values[leaf] = x.to(val.dtype).to(val.device)

    def _size(self, size: Any) -> int:
        if isinstance(size, int):
            return size
        for symbol in sorted(size.node.expr.free_symbols, key=str):
            self.symbols.setdefault(symbol, SIZES[min(len(self.symbols), 1)])
        return int(size.node.expr.subs(self.symbols))

    def of(self, node: Node) -> Any:
        if node not in self.values:
            val = node.meta.get("val")
            if isinstance(val, (int, torch.SymInt)):
                self.values[node] = self._size(val)
            elif node.op != "call_function":
                raise AssertionError(f"{node.name} is no leaf of the fusion")
            else:
                args = torch.fx.map_arg(node.args, self.of)
                kwargs = torch.fx.map_arg(node.kwargs, self.of)
                with torch.no_grad():
                    self.values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return self.values[node]

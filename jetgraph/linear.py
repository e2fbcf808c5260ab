"""`Linear`: an `nn.Linear` that runs in its declared precision whoever calls it, or raises.

`jetgraph.compile` turns a model's linears into it by changing their class: names, parameters and state_dict stay.
That is the guarantee "never silently BF16": a deep copy, an unpickled model, a graph break, a block called by hand,
`TORCH_COMPILE_DISABLE`, a second `torch.compile` around it — all reach this forward, and this forward has no BF16 path
for a quantised layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import jetgraph.lowering.linear_ops  # noqa: F401  (registers torch.ops.jetgraph.linear)
from jetgraph.errors import CompileError
from jetgraph.policy import LinearPrecision


class PrecisionError(CompileError):
    """A layer was asked to run on operands that its declared precision does not start from."""


class Linear(torch.nn.Linear):
    """y = x Wᵀ + b in ``precision``; x [..., K] and the result [..., N] are BF16.

    Quantised: `jetgraph::linear`.  Unquantised: `jetgraph::row_tile_gemm`, whose rows do not depend on how many there
    are.  Under autocast to BF16 (FP32 masters), x, W and b are cast to BF16 once and then treated alike.

    Raises:
        PrecisionError: x or W is not BF16 and autocast to BF16 is not on.
    """

    fqn: str
    precision: LinearPrecision
    precision_text: str
    num_eager_calls: int

    def forward(self, input: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.num_eager_calls += 1
        x, weight, bias = self._in_bf16(input)
        rows = x.reshape(-1, self.in_features)
        if self.precision.quantized:
            out = torch.ops.jetgraph.linear(rows, weight, bias, self.precision_text)
        else:
            out = torch.ops.jetgraph.row_tile_gemm(rows, weight, bias)
        return out.view(*x.shape[:-1], self.out_features)

    def _in_bf16(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        weight, bias = self.weight, self.bias
        if x.dtype is weight.dtype is torch.bfloat16 and (bias is None or bias.dtype is torch.bfloat16):
            return x, weight, bias
        device = x.device.type
        if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16:
            cast = torch.bfloat16
            return x.to(cast), weight.to(cast), None if bias is None else bias.to(cast)
        raise PrecisionError(
            f"{self.fqn}: input is {x.dtype}, weight {weight.dtype}{'' if bias is None else f', bias {bias.dtype}'}; "
            "expected torch.bfloat16. With FP32 "
            "masters train under torch.autocast(dtype=torch.bfloat16) or FSDP2's "
            "MixedPrecisionPolicy(param_dtype=torch.bfloat16)"
        )

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"num_eager_calls": 0}  # a copy has run nothing yet

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.precision.weight.short()}"


def check_convertible(module: torch.nn.Linear, fqn: str, precision: LinearPrecision) -> None:
    """Whether ``module`` can become a `Linear` of ``precision``.

    Raises:
        PrecisionError: its class replaces `nn.Linear`'s forward, or it is one of another precision already.
    """
    if isinstance(module, Linear):
        if module.precision.without_reason() != precision.without_reason():
            raise PrecisionError(
                f"{fqn} is declared to run {module.precision.weight.short()} ({module.precision.reason}) already, as "
                f"{module.fqn}; expected {precision.weight.short()} ({precision.reason}): one layer has one precision"
            )
    elif type(module).forward is not torch.nn.Linear.forward:
        raise PrecisionError(
            f"{fqn} is a {type(module).__name__}, which replaces nn.Linear's forward; jetgraph cannot tell what it "
            "computes. Compile before wrapping it"
        )


def convert(module: torch.nn.Linear, fqn: str, precision: LinearPrecision) -> None:
    """Make ``module`` a `Linear` in place, as `check_convertible` allows."""
    check_convertible(module, fqn, precision)
    module.__class__ = Linear
    module.fqn, module.precision, module.precision_text = fqn, precision, str(precision)  # type: ignore[assignment]
    module.num_eager_calls = 0  # type: ignore[assignment]

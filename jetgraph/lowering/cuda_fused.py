"""The CUDA implementations of the fused operators: whom the registry chooses, by the operator and its features.

Importing this module registers them beside the definitions of `fused_ops`.  Whoever runs them, the bits are those of
the definition on the same device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jetgraph.lowering import registry
from jetgraph.lowering.operators import on_cuda
from jetgraph.lowering.provider import Fused
from jetgraph.lowering.triton_fused_provider import LIMIT


def _run(kernel: str, inputs: tuple[Tensor, ...], arguments: tuple, request: Fused) -> Any:
    """``inputs`` are the arguments that have one number for each of the result's; none if no kernel is for them."""
    x = arguments[0]
    usual = bool(inputs) and all(t.shape == x.shape and t.dtype is torch.bfloat16 for t in inputs)
    usual = usual and x.numel() < x.shape[-1] * LIMIT
    chosen = registry.choose(request, x.device) if usual else registry.PROVIDERS["reference"]
    return chosen.fused(kernel, *arguments)  # type: ignore[attr-defined]


def quantize_rows_and_tokens(x: Tensor, group: int, *rule) -> tuple[Tensor, ...]:
    request = Fused("quantize_rows_and_tokens", x.shape[-1], group, rule)
    return _run(request.kernel, (x,), (x, group, *rule), request)


def rms_norm_quantize(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, own_mean: bool, tokens: bool, group: int, *rule
) -> tuple[Tensor, ...]:
    request = Fused("rms_norm_quantize", x.shape[-1], group, rule, own_mean and weight.dtype is torch.bfloat16)
    inputs = (x,) if residual is None else (x, residual)
    inputs = inputs if weight.shape == x.shape[-1:] else ()  # one factor for all: it would read on
    return _run(request.kernel, inputs, (x, residual, weight, eps, own_mean, tokens, group, *rule), request)


def inverse_rms(x: Tensor, eps: float, own_mean: bool) -> Tensor:
    request = Fused("inverse_rms", x.shape[-1], 128, None, own_mean)
    return _run(request.kernel, (x,), (x, eps, own_mean), request)


def rms_norm_rotary(
    x: Tensor, weight: Tensor | None, eps: float, own_mean: bool, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    request = Fused("rms_norm_rotary", x.shape[-1], 128, None, own_mean)
    narrow = all(t.dtype is torch.bfloat16 for t in (cos, sin, x if weight is None else weight))
    narrow = narrow and (weight is None or weight.shape == x.shape[-1:])
    one_a_token = cos.shape == sin.shape in ((1, x.shape[1], x.shape[3]), (x.shape[0], x.shape[1], x.shape[3]))
    inputs, arguments = (x,), (x, weight, eps, own_mean, cos, sin)
    return _run(request.kernel, inputs if narrow and one_a_token else (), arguments, request)


def silu_mul_quantize(gate: Tensor, up: Tensor, tokens: bool, group: int, *rule) -> tuple[Tensor, ...]:
    request = Fused("silu_mul_quantize", gate.shape[-1], group, rule)
    return _run(request.kernel, (gate, up), (gate, up, tokens, group, *rule), request)


def silu_mul_backward_quantize(dy: Tensor, gate: Tensor, up: Tensor, group: int, *rule) -> tuple[Tensor, ...]:
    request = Fused("silu_mul_backward_quantize", gate.shape[-1], group, rule)
    return _run(request.kernel, (dy, gate, up), (dy, gate, up, group, *rule), request)


for _kernel in (
    quantize_rows_and_tokens, rms_norm_quantize, inverse_rms, rms_norm_rotary, silu_mul_quantize,
    silu_mul_backward_quantize,
):  # fmt: skip
    on_cuda(_kernel)

"""The `torch.ops.jetgraph` namespace: one operator per primitive that a lowered graph calls.

Each has a fake implementation (so torch.compile sees shapes) and runs `jetgraph.lowering.reference`.  Trainer, exporter
and engine plugin call these same operators; that is how one declared scale rule gives the same codes everywhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetgraph.lowering import reference
from jetgraph.lowering.cublaslt import dense
from jetgraph.lowering.operators import Operator
from jetgraph.lowering.scale_layout import row_scales, token_scales
from jetgraph.lowering.weight_codes import are_held, codes_of
from jetgraph.precision import Scale

E4M3 = torch.float8_e4m3fn


def scale_arguments(scale: Scale) -> tuple[int, int, float, float, str, bool]:
    """A declared `Scale` as the trailing arguments of `jetgraph::quantize`."""
    rows, cols = scale.granularity.rows or 0, scale.granularity.cols or 0
    rule = scale.rule
    return rows, cols, rule.qmax, rule.amax_floor, str(rule.division), rule.power_of_two


def _grid(size: int | torch.SymInt, block: int) -> int | torch.SymInt:
    return (size + block - 1) // block if block else 1


@Operator
def quantize(
    x: Tensor, rows: int, cols: int, qmax: float, amax_floor: float, division: str, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """x [R, C] → codes [R, C], scales [⌈R/rows⌉, ⌈C/cols⌉]; of single rows they lie as `scale_layout` says."""
    return reference.quantize(x, rows, cols, qmax, amax_floor, division, power_of_two)


@quantize.register_fake
def _quantized_fake(x, rows, cols, qmax, amax_floor, division, power_of_two):
    grid = _grid(x.shape[0], rows), _grid(x.shape[1], cols)
    scale = row_scales(x, *grid) if rows == 1 else x.new_empty(grid, dtype=torch.float32)
    return x.new_empty(x.shape, dtype=E4M3), scale


@Operator
def quantize_weight(
    weight: Tensor, rows: int, cols: int, qmax: float, amax_floor: float, division: str, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """`quantize` of a parameter, whose codes may be shared while weights are held (`weight_codes`)."""
    arguments = rows, cols, qmax, amax_floor, division, power_of_two
    return codes_of(weight, arguments, lambda w: torch.ops.jetgraph.quantize(w, *arguments))


quantize_weight.register_fake(_quantized_fake)


@Operator
def quantize_transposed(
    x: Tensor, rows: int, cols: int, qmax: float, amax_floor: float, division: str, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """x [R, C] → codes [C, R] and scales [⌈C/cols⌉, ⌈R/rows⌉]: `quantize`'s, stored transposed, as DGRAD reads them."""
    return reference.quantize_transposed(x, rows, cols, qmax, amax_floor, division, power_of_two)


@quantize_transposed.register_fake
def _transposed_fake(x, rows, cols, qmax, amax_floor, division, power_of_two):
    scale = x.new_empty((_grid(x.shape[1], cols), _grid(x.shape[0], rows)), dtype=torch.float32)
    return x.new_empty((x.shape[1], x.shape[0]), dtype=E4M3), scale


@Operator
def quantize_weight_transposed(
    weight: Tensor, rows: int, cols: int, qmax: float, amax_floor: float, division: str, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """`quantize_transposed` of a parameter; while weights are held, the codes of `quantize_weight`, transposed."""
    arguments = rows, cols, qmax, amax_floor, division, power_of_two
    if not are_held():
        return torch.ops.jetgraph.quantize_transposed(weight, *arguments)
    codes, scale = torch.ops.jetgraph.quantize_weight(weight, *arguments)
    return dense(codes.t()), scale.t().contiguous()


quantize_weight_transposed.register_fake(_transposed_fake)


@Operator
def quantize_tokens(
    x: Tensor, group: int, qmax: float, amax_floor: float, division: str, power_of_two: bool
) -> tuple[Tensor, Tensor]:
    """x [T, C] → codes [C, T], scales [C, ⌈T/group⌉], whose strides are (1, C): groups along the tokens, for WGRAD."""
    return reference.quantize_tokens(x, group, qmax, amax_floor, division, power_of_two)


@quantize_tokens.register_fake
def _(x, group, qmax, amax_floor, division, power_of_two):
    codes = x.new_empty((x.shape[1], x.shape[0]), dtype=E4M3)
    return codes, token_scales(x, x.shape[1], _grid(x.shape[0], group))


@Operator
def requantize_tokens(
    codes: Tensor,
    scale: Tensor,
    cols: int,
    group: int,
    qmax: float,
    amax_floor: float,
    division: str,
    power_of_two: bool,
) -> tuple[Tensor, Tensor]:
    """codes [T, C] grouped 1 x cols → codes [C, T] grouped along the tokens; a second quantisation of saved codes."""
    x = reference.dequantize(codes, scale, 1, cols)
    return reference.quantize_tokens(x, group, qmax, amax_floor, division, power_of_two)


@requantize_tokens.register_fake
def _(codes, scale, cols, group, qmax, amax_floor, division, power_of_two):
    out = codes.new_empty((codes.shape[1], codes.shape[0]))
    return out, token_scales(scale, codes.shape[1], _grid(codes.shape[0], group))


@Operator
def fp8_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    b_rows: int,
    group: int,
    provider: str = "",
) -> Tensor:
    """a [M, K] @ b [N, K].T (+ bias [N]) → BF16 [M, N]; accumulated in FP32 and rounded once.

    ``provider`` names whose kernel runs on a GPU; empty, the registry chooses.  Elsewhere the reference runs.
    """
    out = reference.fp8_gemm(a, a_scale, b, b_scale, b_rows, group)
    return (out if bias is None else out + bias.float()).to(torch.bfloat16)


@fp8_gemm.register_fake
def _(a, a_scale, b, b_scale, bias, b_rows, group, provider=""):
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.bfloat16)


@Operator
def row_tile_gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """BF16 x [..., K] @ weight [N, K].T (+ bias [N]), row-invariant, accumulated in FP32 and rounded once."""
    return reference.row_tile_gemm(x, weight, bias)


@row_tile_gemm.register_fake
def _(x, weight, bias=None):
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


@Operator
def row_mean(x: Tensor) -> Tensor:
    """FP32 x [..., C] → [..., 1]: means of rows, each of which has the same bits whatever other rows there are."""
    return x.mean(-1, keepdim=True)


@row_mean.register_fake
def _(x):
    return x.new_empty((*x.shape[:-1], 1))


def _save_linear(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:2])


def _linear_gradient(ctx, grad):
    """The library's GEMMs, each rounded once: a rollout computes no gradients, so their rows may depend on each other.

    A GPU multiplies BF16 and adds in FP32 by itself; elsewhere the operands are widened, or sums would be rounded.
    """
    x, weight = ctx.saved_tensors
    need_x, need_weight, need_bias = (*ctx.needs_input_grad, False)[:3]
    flat = grad.reshape(-1, grad.shape[-1])
    rows = x.reshape(-1, x.shape[-1])
    narrow = grad.is_cuda and grad.dtype is x.dtype is weight.dtype is torch.bfloat16
    left, right, wide = (flat, rows, weight) if narrow else (flat.float(), rows.float(), weight.float())
    d_x = (left @ wide).to(x.dtype).view(x.shape) if need_x else None
    d_weight = (left.t() @ right).to(weight.dtype) if need_weight else None
    return d_x, d_weight, flat.sum(0) if need_bias else None


row_tile_gemm.register_autograd(_linear_gradient, setup_context=_save_linear)


@Operator
def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, softcap: float = 0.0, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q [B, H, n, D], k and v [B, Hkv, L, D], first [B, n] → [B, n, H, D] and, for the gradient, log-sum-exp [B, H, n].

    The masks are `reference.attention`'s.
    """
    return reference.attention(q, k, v, scale, window, softcap, first)


@attention.register_fake
def _(q, k, v, scale, window=0, softcap=0.0, first=None):
    out = q.new_empty((q.shape[0], q.shape[2], q.shape[1], q.shape[3]))
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@Operator
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for grad [B, n, H, D], tokens first in memory; out and lse are what `attention` gave."""
    return reference.attention_backward(grad, q, k, v, scale, window, softcap, first)


@attention_backward.register_fake
def _(grad, q, k, v, out, lse, scale, window=0, softcap=0.0, first=None):
    return tuple(t.new_empty((t.shape[0], t.shape[2], t.shape[1], t.shape[3])).transpose(1, 2) for t in (q, k, v))


def _save_attention(ctx, inputs, output) -> None:
    *qkv, scale, window, softcap, first = inputs
    ctx.save_for_backward(*qkv, *output, first)
    ctx.options = scale, window, softcap
    ctx.set_materialize_grads(False)


def _attention_gradient(ctx, grad, grad_lse):
    if grad_lse is not None:
        raise NotImplementedError("jetgraph::attention: its log-sum-exp has no gradient; use the output alone")
    if grad is None:
        return (None,) * 7
    *operands, first = ctx.saved_tensors
    grads = torch.ops.jetgraph.attention_backward(grad, *operands, *ctx.options, first)
    return (*grads, None, None, None, None)


attention.register_autograd(_attention_gradient, setup_context=_save_attention)
attention_backward.refuse_gradient()


import jetgraph.lowering.cuda_ops  # noqa: E402, F401  (how the operators above run on a GPU; it needs them defined)

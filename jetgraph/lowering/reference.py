"""The `reference` provider: plain torch, any device, and the definition every other provider is measured against.

A row of any result depends on that row alone (and, in attention, on the keys before it), never on how many other rows
are in the call.  That is what makes a rollout's logprobs equal training's bit for bit:

* FP8 GEMM: e4m3 products are multiples of 2^-18 below 2^17.7, so a dot product of 128 codes needs 43 bits and is exact
  in float64 in any order; what remains is elementwise FP32 in the order of the groups.
* BF16 GEMM: every call into the library has exactly `TILE_ROWS` rows, zero padded: one shape, one kernel, one order.
* attention: sums in float64 with a single rounding to BF16 at the end.  An order of summation can then only show
  where a float64 error (about 2^-50) straddles a BF16 rounding boundary: odds, not a proof, measured 0.

Shapes: T tokens, K and N features, G groups of 128, H heads, D head size, S positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 128
TILE_ROWS = 16
E4M3 = torch.float8_e4m3fn
ROW_INVARIANT = frozenset(
    {
        "jetgraph::quantize",
        "jetgraph::fp8_gemm",
        "jetgraph::row_tile_gemm",
        "jetgraph::attention",
        "aten::mean",
        "aten::_log_softmax",
    }
)
"""Kernels, by the name a graph gives them, whose rows do not depend on the other rows of the call.

Ours by construction (above); the two of ATen reduce each row on its own and were measured (tests/core)."""


# ---------------------------------------------------------------------------------------------------- quantising


def quantize(
    x: Tensor,
    rows: int,
    cols: int,
    qmax: float,
    amax_floor: float,
    division: str,
    power_of_two: bool,
) -> tuple[Tensor, Tensor]:
    """Codes e4m3 [R, C] and FP32 scales [⌈R/rows⌉, ⌈C/cols⌉] of a matrix x [R, C], blocks of rows x cols.

    0 for ``rows`` or ``cols`` is the whole axis.  The arithmetic is `jetgraph.precision.ScaleRule`.  A block that holds
    NaN or ±inf gets NaN scale and NaN codes (torch's own cast would hide an inf as 448).
    """
    num_rows, num_cols = x.shape
    rows, cols = rows or max(num_rows, 1), cols or max(num_cols, 1)
    margin = (-num_cols % cols, -num_rows % rows)
    padded = F.pad(x.float(), (0, margin[0], 0, margin[1])) if any(margin) else x.float()
    grid = (padded.shape[0] // rows, padded.shape[1] // cols)
    blocks = padded.reshape(grid[0], rows, grid[1], cols)
    amax = blocks.abs().amax((1, 3)) if blocks.numel() else blocks.new_zeros(grid)
    amax = torch.where(amax.isfinite(), amax.clamp_min(amax_floor), torch.nan)
    scale = amax / qmax
    if power_of_two:
        scale = round_up_to_power_of_two(scale)
        amax = scale * qmax
    if division == "div":
        codes = blocks / scale[:, None, :, None]
    elif division == "mul1/s":
        codes = blocks * (1.0 / scale)[:, None, :, None]
    elif division == "mulq/a":
        codes = blocks * (qmax / amax)[:, None, :, None]
    else:
        raise ValueError(f"division {division!r}: expected div, mul1/s or mulq/a")
    codes = codes.clamp_(-qmax, qmax).to(E4M3).reshape(padded.shape)
    return codes[:num_rows, :num_cols].contiguous(), scale


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """Smallest power of two ≥ scale, by its bits: ceil(log2(·)) in FP32 is wrong one ulp above a power of two."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))


def dequantize(codes: Tensor, scale: Tensor, rows: int, cols: int) -> Tensor:
    """FP32 values [R, C] of codes [R, C] with one scale per block of rows x cols."""
    num_rows, num_cols = codes.shape
    full = scale.repeat_interleave(rows or max(num_rows, 1), 0)[:num_rows]
    return codes.float() * full.repeat_interleave(cols or max(num_cols, 1), 1)[:, :num_cols]


# ---------------------------------------------------------------------------------------------------------- GEMM


def fp8_gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, b_rows: int, group: int = GROUP) -> Tensor:
    """FP32 a @ b.T of codes a [M, K] and b [N, K], scaled per group of ``group`` along K.

    a_scale is [M, ⌈K/group⌉]; b_scale is [⌈N/b_rows⌉, ⌈K/group⌉] (b_rows = 128 for a weight, 1 for token groups).
    Per group the dot product of codes is exact; acc = acc + dot * (a_scale * b_scale) follows in FP32, group by group.
    """
    num_out = b.shape[0]
    b_scale = b_scale.repeat_interleave(b_rows, 0)[:num_out]
    left, right = decode(a), decoded(b)
    acc = torch.zeros(a.shape[0], num_out, dtype=torch.float32, device=a.device)
    for g in range(a_scale.shape[1]):
        part = slice(g * group, (g + 1) * group)
        dot = (left[:, part] @ right[:, part].t()).float()
        acc = acc + dot * (a_scale[:, g : g + 1] * b_scale[:, g][None])
    return acc


_pinned: dict[tuple[int, torch.Size], tuple[Tensor, Tensor]] = {}


def pin_weight(codes: Tensor) -> None:
    """Keep the float64 image of a weight's codes for `fp8_gemm` until `unpin_weight`; call again after changing them.

    Eight bytes per parameter buy decoding a rollout without converting the whole weight at every token.
    """
    _pinned[codes.data_ptr(), codes.shape] = (codes, decode(codes))


def unpin_weight(codes: Tensor) -> None:
    _pinned.pop((codes.data_ptr(), codes.shape), None)


def decoded(codes: Tensor) -> Tensor:
    """The codes as float64 numbers.  A pinned weight holds its storage, so its address names it alone."""
    pinned = _pinned.get((codes.data_ptr(), codes.shape))
    if pinned is not None and pinned[0].stride() == codes.stride():
        return pinned[1]
    return decode(codes)


_VALUES = torch.arange(256, dtype=torch.uint8).view(E4M3).to(torch.float64)


def decode(codes: Tensor) -> Tensor:
    """e4m3 codes as float64 numbers, by table: several times faster than the cast on a CPU."""
    if codes.device.type != "cpu":
        return codes.to(torch.float64)
    index = codes.contiguous().view(torch.uint8).view(-1).int()
    return torch.index_select(_VALUES, 0, index).view(codes.shape)


def row_tile_gemm(x: Tensor, weight: Tensor) -> Tensor:
    """BF16 x [..., K] @ weight [N, K].T, rounded once to BF16, in calls of exactly `TILE_ROWS` rows."""
    flat = x.reshape(-1, x.shape[-1])
    num_rows = flat.shape[0]
    padded = F.pad(flat, (0, 0, 0, -num_rows % TILE_ROWS))
    tiles = [F.linear(padded[i : i + TILE_ROWS], weight) for i in range(0, padded.shape[0], TILE_ROWS)]
    out = torch.cat(tiles)[:num_rows] if tiles else flat.new_empty(0, weight.shape[0])
    return out.view(*x.shape[:-1], weight.shape[0])


# ----------------------------------------------------------------------------------------------------- attention


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal grouped-query attention; q [B, H, n, D] are the last n of the L positions of k, v [B, Hkv, L, D].

    Returns [B, n, H, D] in q's dtype.  Scores, softmax and sums are float64; one rounding at the end.
    """
    probs = _probabilities(q, k, scale)
    out = torch.einsum("bgrql,bgld->bqgrd", probs, v.to(torch.float64))
    return out.flatten(2, 3).to(q.dtype)


def attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention` for grad [B, n, H, D], in float64 with one rounding each."""
    num_groups = k.shape[1]
    probs = _probabilities(q, k, scale)
    d_out = grad.to(torch.float64).transpose(1, 2).unflatten(1, (num_groups, -1))  # B g r n D
    query = q.to(torch.float64).unflatten(1, (num_groups, -1))
    d_probs = torch.einsum("bgrqd,bgld->bgrql", d_out, v.to(torch.float64))
    d_scores = probs * (d_probs - (d_probs * probs).sum(-1, keepdim=True)) * scale
    dq = torch.einsum("bgrql,bgld->bgrqd", d_scores, k.to(torch.float64)).flatten(1, 2)
    dk = torch.einsum("bgrql,bgrqd->bgld", d_scores, query)
    dv = torch.einsum("bgrql,bgrqd->bgld", probs, d_out)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _probabilities(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Softmax weights [B, Hkv, H/Hkv, n, L] in float64; query i sees keys 0 … L-n+i."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    query = q.to(torch.float64).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bgrqd,bgld->bgrql", query, k.to(torch.float64)) * scale
    last_key = torch.arange(num_keys - num_queries, num_keys, device=q.device)
    hidden = torch.arange(num_keys, device=q.device)[None] > last_key[:, None]
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)

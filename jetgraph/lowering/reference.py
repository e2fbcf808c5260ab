"""The `reference` provider: plain torch, any device, and the definition every other provider is measured against.

A row of any result depends on that row alone (and, in attention, on the keys before it), never on how many other rows
are in the call.  That is what makes a rollout's logprobs equal training's bit for bit:

* FP8 GEMM: e4m3 products are multiples of 2^-18 up to 448², so a dot product of up to `MAX_EXACT_CODES` codes (128 of
  them need 43 bits) is exact in float64 in any order; what remains is elementwise FP32 in the order of the groups.
* BF16 GEMM: products of BF16 are exact in FP32, and every call into the library has exactly `TILE_ROWS` rows, zero
  padded: one shape, one kernel, one order of summation.
* attention: sums in float64 with a single rounding to BF16 at the end.  An order of summation can then only show
  where a float64 error (about 2^-50) straddles a BF16 rounding boundary: odds, not a proof, measured 0.

Shapes: T tokens, K and N features, G groups of 128, H heads, D head size, S positions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jetgraph.lowering.scale_layout import row_scales, token_scales
from jetgraph.normal_form import as_f32

GROUP = 128
MAX_EXACT_CODES = 2**53 // (448**2 * 2**18)
"""171,196: every partial sum of so many e4m3 products is a multiple of 2^-18 that float64 holds."""
DIVISIONS = ("div", "mul1/s", "mulq/a")
TILE_ROWS = 16
FEW_ROWS = 64
E4M3 = torch.float8_e4m3fn
ROW_INVARIANT = frozenset(
    {
        "jetgraph::quantize",
        "jetgraph::fp8_gemm",
        "jetgraph::fp8_gemm.deep_gemm",
        "jetgraph::fp8_gemm.triton",
        "jetgraph::row_mean",
        "jetgraph::row_tile_gemm",
        "jetgraph::attention",
        "aten::mean",
        "aten::native_layer_norm",
        "aten::silu",
        "aten::gelu",
        "aten::tanh",
        "aten::rsqrt",
        "aten::cos",
        "aten::sin",
        "aten::_log_softmax",
    }
)
"""Kernels, by the name a graph gives them, whose rows do not depend on the other rows of the call.

Ours by construction (above); those of ATen work on each row on its own and were measured on the shapes of the tests.
DeepGEMM's was measured (docs/kernels.md); a probe that finds rows depending on their number keeps a provider out of the
forward pass."""


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

    0 for ``rows`` or ``cols`` is the whole axis.  Scales of groups along the features (``rows`` is 1) lie as
    `scale_layout` says.  The arithmetic is `jetgraph.precision.ScaleRule`.  A block that holds NaN or ±inf gets NaN
    scale and NaN codes (torch's own cast would hide an inf as 448).
    """
    num_rows, num_cols = x.shape
    single_rows = rows == 1
    grid = (num_blocks(num_rows, rows), num_blocks(num_cols, cols))
    rows, cols = rows or max(num_rows, 1), cols or max(num_cols, 1)
    margin = (grid[1] * cols - num_cols, grid[0] * rows - num_rows)
    padded = F.pad(x.float(), (0, margin[0], 0, margin[1])) if any(margin) else x.float()
    blocks = padded.reshape(grid[0], rows, grid[1], cols)
    amax = blocks.abs().amax((1, 3)) if blocks.numel() else blocks.new_zeros(grid)
    amax = torch.where(amax.isfinite(), amax.clamp_min(amax_floor), torch.nan)
    scale = amax / torch.full_like(amax, qmax)  # CUDA divides by a Python number as a product with its reciprocal
    if power_of_two:
        scale = round_up_to_power_of_two(scale)
    if division not in DIVISIONS:
        raise ValueError(f"division {division!r}: expected {', '.join(DIVISIONS)}")
    if division == "div" or power_of_two:  # dividing by a power of two is exact, as every other form would be
        codes = blocks / scale[:, None, :, None]
    else:
        codes = blocks * (1.0 / scale if division == "mul1/s" else qmax / amax)[:, None, :, None]
    codes = codes.clamp_(-qmax, qmax).to(E4M3).reshape(padded.shape)
    return codes[:num_rows, :num_cols].contiguous(), row_scales(x, *grid).copy_(scale) if single_rows else scale


def quantize_tokens(x: Tensor, group: int, *rule) -> tuple[Tensor, Tensor]:
    """x [T, C] in groups along the tokens: codes [C, T] and scales [C, ⌈T/group⌉]."""
    codes, scale = quantize(x.t(), 1, group, *rule)
    return codes, token_scales(x, *scale.shape).copy_(scale)


def quantize_transposed(x: Tensor, rows: int, cols: int, *rule) -> tuple[Tensor, Tensor]:
    """`quantize`, codes stored [C, R] and scales [⌈C/cols⌉, ⌈R/rows⌉]: of a weight, what DGRAD multiplies with."""
    codes, scale = quantize(x, rows, cols, *rule)
    return codes.t().contiguous(), scale.t().contiguous()


def num_blocks(size: int, block: int) -> int:
    """Blocks, and so scales, along an axis; the last may be ragged.  `block` 0 is the whole axis, even an empty one."""
    return -(-size // block) if block else 1


def round_up_to_power_of_two(scale: Tensor) -> Tensor:
    """Smallest power of two ≥ scale, by its bits: ceil(log2(·)) in FP32 is wrong one ulp above a power of two.

    NaN stays NaN: a block with a non-finite value must not get a scale that looks right."""
    mantissa, exponent = torch.frexp(scale)
    power = torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))
    return torch.where(scale.isnan(), scale, power)


def dequantize(codes: Tensor, scale: Tensor, rows: int, cols: int) -> Tensor:
    """FP32 values [R, C] of codes [R, C] with one scale per block of rows x cols."""
    num_rows, num_cols = codes.shape
    full = scale.repeat_interleave(rows or max(num_rows, 1), 0)[:num_rows]
    return codes.float() * full.repeat_interleave(cols or max(num_cols, 1), 1)[:, :num_cols]


# ---------------------------------------------------------------------------------------------------------- GEMM


def fp8_gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, b_rows: int, group: int = GROUP) -> Tensor:
    """FP32 a @ b.T of codes a [M, K] and b [N, K], scaled per group of ``group`` along K; 0 is the whole axis.

    a_scale is [M, ⌈K/group⌉], or [1, ⌈K/group⌉] if all rows share it; b_scale is [⌈N/b_rows⌉, ⌈K/group⌉] (b_rows = 128
    for a weight, 1 for token groups, 0 for one scale down all of N).  Per group the dot product of codes is exact;
    acc = acc + dot * (a_scale * b_scale) follows in FP32, group by group.

    Raises:
        ValueError: a group has more than `MAX_EXACT_CODES` codes, so that its dot product might not be exact; or the
            scales are not FP32 on the grids above.
    """
    num_rows, num_out = a.shape[0], b.shape[0]
    check_operands(a, a_scale, b, b_scale, b_rows, group)
    group = group or max(a.shape[1], 1)
    if min(group, a.shape[1]) > MAX_EXACT_CODES:
        raise ValueError(f"a group of {group} codes: expected at most {MAX_EXACT_CODES}, whose dot product is exact")
    left, right = _by_group(a, group).transpose(1, 2), _pinned_image(b, group)
    left_scale = a_scale.t()[:, :, None]
    right_scale = b_scale.repeat_interleave(b_rows or max(num_out, 1), 0)[:num_out].t()[:, None]
    acc = torch.zeros(num_rows, num_out, dtype=torch.float32, device=a.device)
    if num_rows <= FEW_ROWS:  # the same arithmetic in fewer calls: a step of decoding is all overhead
        for term in torch.bmm(left, right).float() * (left_scale * right_scale):
            acc = acc + term
        return acc
    for g in range(left.shape[0]):
        acc = acc + (left[g] @ right[g]).float() * (left_scale[g] * right_scale[g])
    return acc


def check_operands(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, b_rows: int, group: int) -> None:
    """Scales of another tensor, block size or format would broadcast or promote to finite, wrong numbers."""
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"codes {list(a.shape)} times {list(b.shape)}: expected the same number of columns")
    num_groups = num_blocks(a.shape[1], group)
    for name, codes, scale, num_rows in (
        ("a", a, a_scale, (a.shape[0], 1)),
        ("b", b, b_scale, (num_blocks(b.shape[0], b_rows),)),
    ):
        if scale.dtype is not torch.float32:
            raise ValueError(f"{name}'s scales are {scale.dtype}; expected torch.float32, the format they were made in")
        if scale.shape[0] not in num_rows or scale.shape[1] != num_groups:
            raise ValueError(
                f"{name}'s scales are {list(scale.shape)}; expected {[num_rows[0], num_groups]} for codes "
                f"{list(codes.shape)} in groups of {group or 'the whole axis'}"
            )


def _by_group(codes: Tensor, group: int) -> Tensor:
    """Codes [N, K] as float64 numbers [⌈K/group⌉, group, N]; the ragged last group is filled with zeros."""
    values = F.pad(codes.to(torch.float64), (0, -codes.shape[1] % group))
    return values.unflatten(1, (-1, group)).permute(1, 2, 0)


def row_tile_gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """BF16 x [..., K] @ weight [N, K].T (+ bias [N]): exact products, FP32 sums, one rounding to BF16.

    Every call into the library has exactly `TILE_ROWS` rows, so each row is summed in one order.
    """
    flat = x.reshape(-1, x.shape[-1])
    num_rows = flat.shape[0]
    wide = _pinned_image(weight, 0)
    padded = F.pad(flat.float(), (0, 0, 0, -num_rows % TILE_ROWS))
    shift = 0.0 if bias is None else bias.float()
    tiles = [(padded[i : i + TILE_ROWS] @ wide + shift).to(x.dtype) for i in range(0, padded.shape[0], TILE_ROWS)]
    out = torch.cat(tiles)[:num_rows] if tiles else flat.new_empty(0, weight.shape[0])
    return out.view(*x.shape[:-1], weight.shape[0])


# Widened weights.  A rollout multiplies by one weight at every token; its image is made once and pinned.

_pinned: dict[tuple, tuple[Tensor, Tensor]] = {}


def pin_weight(weight: Tensor, group: int = GROUP) -> None:
    """Keep the widened image of a weight until `unpin_weight`; pin again after changing it.

    FP8 codes take eight bytes per parameter (float64, grouped), a BF16 weight four (FP32).
    """
    key = _key(weight, (group or max(weight.shape[1], 1)) if weight.dtype == E4M3 else 0)
    _pinned.pop(key, None)
    _pinned[key] = (weight, _image(weight, key[-1]).contiguous())


def unpin_weight(weight: Tensor) -> None:
    for key in [k for k in _pinned if k[:-1] == _key(weight, 0)[:-1]]:
        del _pinned[key]


def _pinned_image(weight: Tensor, group: int) -> Tensor:
    """The widened weight; a pinned one holds its storage, so address, shape and strides name it alone."""
    pinned = _pinned.get(_key(weight, group))
    return _image(weight, group) if pinned is None else pinned[1]


def _image(weight: Tensor, group: int) -> Tensor:
    """[⌈K/group⌉, group, N] float64 of FP8 codes, [K, N] FP32 of a BF16 weight (group 0)."""
    return _by_group(weight, group) if group else weight.float().t()


def _key(weight: Tensor, group: int) -> tuple:
    return weight.data_ptr(), weight.shape, weight.stride(), group


# ----------------------------------------------------------------------------------------------------- attention


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Grouped-query attention; q [B, H, n, D] are the last n of the L positions of k, v [B, Hkv, L, D].

    Query i stands at position p = L - n + i and sees key j iff

        j ≤ p   and   (window = 0 or j > p - window)   and   (first is None or j ≥ first[b, i])

    ``first`` [B, n] int64 is the first visible key of each query: the start of its own sequence where several share one
    row, the number of pads where a row is padded on the left.  A query that sees no key gives zeros, and zero
    gradients.  ``softcap`` c > 0 turns each score s into c·tanh(s / c).  ``scale`` and ``softcap`` count as the FP32
    numbers nearest to them: a kernel gets no more, and neither does a graph.

    Returns [B, n, H, D] in q's dtype, and the log-sum-exp of each query's scores, FP32 [B, H, n], -inf where it sees no
    key.  Scores, softmax and sums are float64; one rounding at the end.

    Raises:
        ValueError: ``window`` or ``softcap`` is negative, or ``first`` is not int64 [B, n].
    """
    scores, _ = _scores(q, k, scale, window, softcap, first)
    probs, lse = _probabilities(scores)
    out = torch.einsum("bgrql,bgld->bqgrd", probs, v.to(torch.float64))
    # einsum's strides depend on sizes; a compiled graph reads these
    return out.flatten(2, 3).to(q.dtype).contiguous(), lse.float().flatten(1, 2)


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `attention` for grad [B, n, H, D], in float64 with one rounding each; tokens first in memory."""
    num_groups = k.shape[1]
    scores, slope = _scores(q, k, scale, window, softcap, first)
    probs, _ = _probabilities(scores)
    d_out = grad.to(torch.float64).transpose(1, 2).unflatten(1, (num_groups, -1))  # B g r n D
    query = q.to(torch.float64).unflatten(1, (num_groups, -1))
    d_probs = torch.einsum("bgrqd,bgld->bgrql", d_out, v.to(torch.float64))
    d_scores = probs * (d_probs - (d_probs * probs).sum(-1, keepdim=True)) * as_f32(scale)
    if slope is not None:
        d_scores = d_scores * slope
    dq = torch.einsum("bgrql,bgld->bgrqd", d_scores, k.to(torch.float64)).flatten(1, 2)
    dk = torch.einsum("bgrql,bgrqd->bgld", d_scores, query)
    dv = torch.einsum("bgrql,bgrqd->bgld", probs, d_out)
    dq, dk, dv = (g.to(t.dtype).transpose(1, 2).contiguous() for g, t in ((dq, q), (dk, k), (dv, v)))
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _probabilities(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of scores [..., L], zeros where all are -inf, and their log-sum-exp [...]."""
    if not scores.shape[-1]:
        return scores, scores.new_full(scores.shape[:-1], float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    sees_nothing = peak.isneginf()
    probs = scores.softmax(-1).masked_fill(sees_nothing, 0.0)
    largest = probs.amax(-1, keepdim=True)  # exp(peak - lse): no second pass of exponentials
    return probs, torch.where(sees_nothing, peak, peak - largest.log())[..., 0]


def _scores(
    q: Tensor, k: Tensor, scale: float, window: int, softcap: float, first: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Scores [B, Hkv, H/Hkv, n, L] in float64, -inf of hidden keys, and the derivative of the soft cap at each."""
    if window < 0 or softcap < 0:
        raise ValueError(f"attention window={window}, softcap={softcap}: expected 0 for none, or a positive number")
    query = q.to(torch.float64).unflatten(1, (k.shape[1], -1))
    scores = torch.einsum("bgrqd,bgld->bgrql", query, k.to(torch.float64)) * as_f32(scale)
    slope = None
    if softcap:
        softcap = as_f32(softcap)
        capped = torch.tanh(scores / softcap)
        scores, slope = capped * softcap, 1.0 - capped * capped
    return scores.masked_fill(_hidden_keys(q, k, window, first), float("-inf")), slope


def _hidden_keys(q: Tensor, k: Tensor, window: int, first: Tensor | None) -> Tensor:
    """True where a query must not see a key: [1 or B, 1, 1, n, L]."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    key = torch.arange(num_keys, device=q.device)
    position = torch.arange(num_keys - num_queries, num_keys, device=q.device)[:, None]
    hidden = key > position
    if window:
        hidden = hidden | (key <= position - window)
    hidden = hidden[None]
    if first is not None:
        if first.dtype != torch.int64 or first.shape != (q.shape[0], num_queries):
            raise ValueError(
                f"attention first is {first.dtype} {list(first.shape)}; expected int64 "
                f"{[q.shape[0], num_queries]}, the first visible key of each query"
            )
        hidden = hidden | (key < first[:, :, None])
    return hidden[:, None, None]

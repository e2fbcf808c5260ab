"""Triton kernels of the fused operators: something is computed and quantised in one read.

They give the bits of `lowering.fused_reference` on the same device: FP32 inside, rounded to BF16 wherever the
definition is, means of squares in `triton_rows`' order, silu as ATen's CUDA kernels compute it (`triton_silu`).

One tile is 128 tokens x 128 features, so that it is a group both ways; without codes along the tokens it may be lower.
The provider `triton_fused` says what is served and tests these kernels before anything runs them.
Shapes: T tokens, C features (a multiple of 16), G = ⌈C/128⌉, all matrices BF16 [T, C].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetgraph.lowering.triton_fused_kernels import (
    NORM,
    PLAIN,
    SILU_MUL,
    norm_kernel,
    silu_mul_backward_kernel,
    tile_kernel,
)
from jetgraph.lowering.triton_quantize import _empty, _rule_arguments
from jetgraph.lowering.triton_words import GROUP

UNIT = 8
"""Numbers in 16 bytes of BF16."""


class Tile(NamedTuple):
    """What may be chosen without changing a bit; `benchmarks.quant` measures alternatives."""

    tokens: int = 128
    """Of a tile without codes along the tokens; 128 with them."""
    warps: int = 8


ROWS_TILE, BOTH_TILE, BACKWARD_TILE = Tile(32, 4), Tile(128, 8), Tile(128, 8)
NORM_ROWS, NORM_UNROLL, NORM_WARPS = 8, 8, 4


def _words(x: Tensor) -> tuple[Tensor, int]:
    """x [..., C] as a matrix of words and its row stride in units; copied if rows do not start at 16 bytes."""
    x = x.reshape(-1, x.shape[-1])
    aligned = x.stride(1) == 1 and x.stride(0) % UNIT == 0 and x.data_ptr() % 16 == 0
    if not aligned:
        x = x.contiguous()
        x = x if x.data_ptr() % 16 == 0 else x.clone()
    return x.view(torch.int32), x.stride(0) // UNIT


Codes = tuple[Tensor, Tensor, Tensor, Tensor]


def _empty_codes(x: Tensor, rows: bool, tokens: bool) -> Codes:
    """Codes and scales along the features and along the tokens of x [T, C]; none where they are not asked for."""
    along_rows, along_tokens = _empty(x, 1, GROUP, False), _empty(x, GROUP, 1, True)
    if not rows:
        along_rows = _empty(x[:0], 1, GROUP, False)
    if not tokens:
        along_tokens = _empty(x[:0], 1, GROUP, False)
    return (*along_rows, *along_tokens)


def _stored(codes: Codes, whole: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the kernels write them: pairs of codes, scales, words of codes (bytes if T % 16), scales."""
    rows, scales, tokens, scales_t = codes
    return rows.view(torch.int16), scales, tokens.view(torch.int32 if whole else torch.uint8), scales_t


def _arguments(rule: tuple, native: bool) -> dict:
    return {**_rule_arguments(rule, native), "qmax_inverse": 1.0 / rule[0]}


def _quantize_tiles(
    source: tl.constexpr, a: Tensor, b: Tensor, r: Tensor, out: Codes, rule: tuple, tile: Tile, native: bool,
    rows: bool = True, tokens: bool = True, is_reversed: bool = False, divides: bool = True,
) -> None:  # fmt: skip
    num_rows, num_features = a.shape
    if not a.numel():
        return
    (a_words, a_units), (b_words, b_units) = _words(a), _words(b)
    height = GROUP if tokens else tile.tokens
    whole = num_rows % 16 == 0 and tokens
    tile_kernel[(triton.cdiv(num_rows, height) * triton.cdiv(num_features, GROUP),)](
        a_words, b_words, r, *_stored(out, whole), num_rows, num_features // UNIT, a_units, b_units,
        SOURCE=source.value, ROWS=rows, TOKENS=tokens, FOURTH=height // 4, WHOLE=whole, REVERSED=is_reversed,
        DIVIDES=divides or not native, num_warps=tile.warps, **_arguments(rule, native),
    )  # fmt: skip


def quantize_rows_and_tokens(x: Tensor, group: int, *rule, tile: Tile = BOTH_TILE, native: bool = True) -> Codes:
    """`jetgraph::quantize_rows_and_tokens` of x [T, C]."""
    out = _empty_codes(x, True, True)
    _quantize_tiles(PLAIN, x, x, out[1], out, rule, tile, native)
    return out


def quantize_tokens(x: Tensor, group: int, *rule, tile: Tile = BOTH_TILE, native: bool = True) -> tuple[Tensor, Tensor]:
    """`jetgraph::quantize_tokens` of x [T, C], for `benchmarks.quant` to compare."""
    out = _empty_codes(x, False, True)
    _quantize_tiles(PLAIN, x, x, out[1], out, rule, tile, native, rows=False)
    return out[2:]


def silu_mul_quantize(
    gate: Tensor,
    up: Tensor,
    tokens: bool,
    group: int,
    *rule,
    tile: Tile | None = None,
    native: bool = True,
    divides: bool = True,
) -> Codes:
    """`jetgraph::silu_mul_quantize` of gate, up [..., C]."""
    gate, up = (x.reshape(-1, x.shape[-1]) for x in (gate, up))
    out = _empty_codes(gate, True, tokens)
    tile = tile or (BOTH_TILE if tokens else ROWS_TILE)
    _quantize_tiles(SILU_MUL, gate, up, out[1], out, rule, tile, native, tokens=tokens, divides=divides)
    return out


def silu_mul_backward_quantize(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    group: int,
    *rule,
    tile: Tile = BACKWARD_TILE,
    native: bool = True,
    divides: bool = True,
) -> tuple[Tensor, ...]:
    """`jetgraph::silu_mul_backward_quantize` of dy, gate, up [..., C]: codes of d_gate, then of d_up."""
    inputs = [x.reshape(-1, x.shape[-1]) for x in (dy, gate, up)]
    num_rows, num_features = inputs[0].shape
    d_gate, d_up = (_empty_codes(inputs[0], True, True) for _ in range(2))
    if inputs[0].numel():
        (words, units), whole = zip(*map(_words, inputs), strict=True), num_rows % 16 == 0
        silu_mul_backward_kernel[(triton.cdiv(num_rows, GROUP) * triton.cdiv(num_features, GROUP),)](
            *words, *_stored(d_gate, whole), *_stored(d_up, whole), num_rows, num_features // UNIT, *units,
            FOURTH=GROUP // 4, WHOLE=whole, DIVIDES=divides or not native,
            num_warps=tile.warps, **_arguments(rule, native),
        )  # fmt: skip
    return (*d_gate, *d_up)


def rms_norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    own_mean: bool,
    tokens: bool,
    group: int,
    *rule,
    tile: Tile = BOTH_TILE,
    native: bool = True,
) -> tuple[Tensor, ...]:
    """`jetgraph::rms_norm_quantize` of x, residual [..., C] and weight [C], with `jetgraph::row_mean`'s mean.

    With codes along the tokens r must be known for 128 tokens first: one kernel writes the sums and r, another reads
    the sums again, the last ones first.
    """
    flat = x.reshape(-1, x.shape[-1])
    num_rows, num_features = flat.shape
    sums = (
        x.new_empty((0, *x.shape[1:]))
        if residual is None
        else torch.empty_like(x, memory_format=torch.contiguous_format)
    )
    r = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    out = _empty_codes(flat, True, tokens)
    if flat.numel():
        (x_words, x_units), (weight_words, _) = _words(flat), _words(weight)
        other, other_units = (x_words, x_units) if residual is None else _words(residual)
        norm_kernel[(triton.cdiv(num_rows, NORM_ROWS),)](
            x_words, other, weight_words, x_words if residual is None else sums.view(torch.int32), r,
            *_stored(out, False)[:2], num_rows, num_features // UNIT, x_units, other_units, eps,
            RESIDUAL=residual is not None, CODES=not tokens, ROWS=NORM_ROWS, UNROLL=NORM_UNROLL,
            num_warps=NORM_WARPS, **_arguments(rule, native),
        )  # fmt: skip
    if tokens:
        total = flat if residual is None else sums.view(-1, num_features)
        _quantize_tiles(NORM, total, weight, r, out, rule, tile, native, is_reversed=True)
    return (sums, r, *out)

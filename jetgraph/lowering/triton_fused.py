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

from jetgraph.lowering.reference import num_blocks
from jetgraph.lowering.triton_fused_kernels import NORM, PLAIN, SILU_MUL, silu_mul_backward_kernel, tile_kernel
from jetgraph.lowering.triton_fused_provider import LIMIT
from jetgraph.lowering.triton_launch import launch
from jetgraph.lowering.triton_norm_kernels import inverse_rms_kernel, norm_kernel
from jetgraph.lowering.triton_quantize import LEAST_SCALE, _empty, _rule_arguments
from jetgraph.lowering.triton_rows import pieces
from jetgraph.lowering.triton_silu import DIVISION
from jetgraph.lowering.triton_words import GROUP

UNIT = 8
"""Numbers in 16 bytes of BF16."""


class Tile(NamedTuple):
    """What may be chosen without changing a bit; `benchmarks.quant` measures alternatives."""

    tokens: int = 128
    """Of a program without codes along the tokens; 128 with them."""
    warps: int = 8
    registers: int = 0
    """At most, of a thread; 0 lets the compiler choose."""
    split: bool = True
    """Of two gradients, one a program, or both."""

    def options(self) -> dict:
        return {"num_warps": self.warps} | ({"maxnreg": self.registers} if self.registers else {})


BOTH_TILE, TOKENS_TILE = Tile(128, 4), Tile(128, 4)
SILU_ROWS_TILE, SILU_TILE, BACKWARD_TILE = Tile(32, 4), Tile(128, 8), Tile(128, 8)
NORM_TILE = Tile(1, 1)


def in_place(x: Tensor) -> bool:
    """Whether the kernels read x [T, C] where it lies: its rows start at multiples of 16 bytes, not far apart."""
    return x.stride(1) == 1 and x.stride(0) % UNIT == 0 and x.stride(0) < LIMIT and x.data_ptr() % 16 == 0


def as_words(x: Tensor) -> tuple[Tensor, int]:
    """x [..., C] as a matrix of words and its row stride in units; copied if it must be."""
    x = x.reshape(-1, x.shape[-1])
    if x.shape[0] >= LIMIT or x.shape[1] >= LIMIT:
        raise ValueError(f"got {list(x.shape)}; expected fewer than {LIMIT} tokens and features: split the call")
    if not in_place(x):
        x = x.contiguous()
        x = x if x.data_ptr() % 16 == 0 else x.clone()
    return x.view(torch.int32), x.stride(0) // UNIT


Codes = tuple[Tensor, Tensor, Tensor, Tensor]


def _empty_codes(x: Tensor, rows: bool, tokens: bool) -> Codes:
    """Codes and scales along the features and along the tokens of x [T, C]; none where they are not asked for."""
    along_rows = _empty(x, 1, GROUP, False) if rows else _nothing(x)
    return (*along_rows, *(_empty(x, GROUP, 1, True) if tokens else _nothing(x)))


def _nothing(x: Tensor) -> tuple[Tensor, Tensor]:
    """What stands for codes and scales that are not asked for."""
    size = x.shape[1]
    codes = x.new_empty((0, size), dtype=torch.float8_e4m3fn)
    return codes, x.new_empty((0, num_blocks(size, GROUP)), dtype=torch.float32)


def _stored(codes: Codes, whole: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As the kernels write them: pairs of codes, scales, words of codes (bytes if T % 16), scales."""
    rows, scales, tokens, scales_t = codes
    return rows.view(torch.int16), scales, tokens.view(torch.int32 if whole else torch.uint8), scales_t


def _arguments(rule: tuple, native: bool) -> dict:
    return {**_rule_arguments(rule, native), "qmax_inverse": 1.0 / rule[0]}


def _edges(num_rows: int, num_features: int, height: int = GROUP, width: int = GROUP) -> dict:
    """Whether rows of codes along the tokens are whole words, and whether tiles have no ragged edge."""
    return {"WHOLE": num_rows % 16 == 0, "EVEN": num_rows % height == 0 and num_features % width == 0}


def _quantize_tiles(
    source: tl.constexpr, a: Tensor, b: Tensor, r: Tensor, out: Codes, rule: tuple, tile: Tile, native: bool,
    rows: bool = True, tokens: bool = True, blocks: bool = False, way: int = DIVISION.value,
) -> None:  # fmt: skip
    num_rows, num_features = a.shape
    if not a.numel():
        return
    (a_words, a_units), (b_words, b_units) = as_words(a), as_words(b)
    height = GROUP if tokens else tile.tokens
    edges = _edges(num_rows, num_features, height)
    programs = num_blocks(num_rows, height) * num_blocks(num_features, GROUP)
    launch(tile_kernel, (programs,),
        a_words, b_words, r, *_stored(out, edges["WHOLE"]), num_rows, num_features // UNIT, a_units, b_units,
        SOURCE=source.value, ROWS=rows, TOKENS=tokens, BLOCKS=blocks, FOURTH=height // 4,
        WAY=way if native else DIVISION.value, **edges, **tile.options(), **_arguments(rule, native),
    )  # fmt: skip


def quantize_rows_and_tokens(x: Tensor, group: int, *rule, tile: Tile = BOTH_TILE, native: bool = True) -> Codes:
    """`jetgraph::quantize_rows_and_tokens` of x [T, C]."""
    out = _empty_codes(x, True, True)
    _quantize_tiles(PLAIN, x, x, out[1], out, rule, tile, native)
    return out


def quantize_tokens(
    x: Tensor, group: int, *rule, tile: Tile = TOKENS_TILE, native: bool = True
) -> tuple[Tensor, Tensor]:
    """`jetgraph::quantize_tokens` of x [T, C], for what `serves_tokens` says."""
    out = _empty_codes(x, False, True)
    _quantize_tiles(PLAIN, x, x, out[1], out, rule, tile, native, rows=False)
    return out[2:]


def quantize_transposed(
    x: Tensor, group: int, *rule, tile: Tile = TOKENS_TILE, native: bool = True
) -> tuple[Tensor, Tensor]:
    """`jetgraph::quantize_transposed` of x [R, C] in square blocks, for what `serves_tokens` says."""
    num_rows, num_features = x.shape
    codes = x.new_empty((num_features, num_rows), dtype=torch.float8_e4m3fn)
    scale = x.new_empty((-(-num_features // group), -(-num_rows // group)), dtype=torch.float32)
    out = (*_nothing(x), codes, scale)
    _quantize_tiles(PLAIN, x, x, scale, out, rule, tile, native, rows=False, blocks=True)
    return codes, scale


def serves_tokens(x: Tensor, group: int, *rule) -> bool:
    """Whether `quantize_tokens` and `quantize_transposed` are for x [T, C], and read it where it lies."""
    usual = x.dtype is torch.bfloat16 and group == GROUP and x.shape[1] % 16 == 0 and x.shape[0] < LIMIT
    return usual and rule[1] / rule[0] >= LEAST_SCALE and in_place(x)


def silu_mul_quantize(
    gate: Tensor,
    up: Tensor,
    tokens: bool,
    group: int,
    *rule,
    tile: Tile | None = None,
    native: bool = True,
    way: int = DIVISION.value,
) -> Codes:
    """`jetgraph::silu_mul_quantize` of gate, up [..., C]; silu by ``way`` of `triton_silu.WAYS`."""
    gate, up = (x.reshape(-1, x.shape[-1]) for x in (gate, up))
    out = _empty_codes(gate, True, tokens)
    tile = tile or (SILU_TILE if tokens else SILU_ROWS_TILE)
    _quantize_tiles(SILU_MUL, gate, up, out[1], out, rule, tile, native, tokens=tokens, way=way)
    return out


def silu_mul_backward_quantize(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    group: int,
    *rule,
    tile: Tile = BACKWARD_TILE,
    native: bool = True,
    way: int = DIVISION.value,
) -> tuple[Tensor, ...]:
    """`jetgraph::silu_mul_backward_quantize` of dy, gate, up [..., C]: codes of d_gate, then of d_up."""
    inputs = [x.reshape(-1, x.shape[-1]) for x in (dy, gate, up)]
    num_rows, num_features = inputs[0].shape
    d_gate, d_up = (_empty_codes(inputs[0], True, True) for _ in range(2))
    if inputs[0].numel():
        (words, units), edges = zip(*map(as_words, inputs), strict=True), _edges(num_rows, num_features)
        tiles = num_blocks(num_rows, GROUP) * num_blocks(num_features, GROUP)
        launch(silu_mul_backward_kernel, (tiles * (1 + tile.split),),
            *words, *_stored(d_gate, edges["WHOLE"]), *_stored(d_up, edges["WHOLE"]), num_rows, num_features // UNIT,
            *units, SPLIT=tile.split, FOURTH=GROUP // 4, WAY=way if native else DIVISION.value,
            **edges, **tile.options(), **_arguments(rule, native),
        )  # fmt: skip
    return (*d_gate, *d_up)


def inverse_rms(x: Tensor, eps: float, own_mean: bool, *, native: bool = True) -> Tensor:
    """`jetgraph::inverse_rms` of x [..., C], with `jetgraph::row_mean`'s mean."""
    flat = x.reshape(-1, x.shape[-1])
    num_rows, num_features = flat.shape
    r = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    if flat.numel():
        (words, units), cut = as_words(flat), pieces(num_features)
        height = 1 << max(2, min(5, (4096 // sum(cut)).bit_length() - 1))  # a few rows keep a program busy
        edges = _edges(num_rows, num_features, height, sum(cut))
        launch(inverse_rms_kernel, (num_blocks(num_rows, height),),
            words, r, num_rows, num_features // UNIT, units, eps, ROWS=height, PIECES=cut, EVEN=edges["EVEN"],
            NATIVE=native, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return r


def _rows_tile(length: int) -> Tile:
    """One row a program; as many warps as hold it in registers."""
    return NORM_TILE._replace(warps=min(8, max(1, triton.next_power_of_2(length) // 4096)))


def rms_norm_quantize(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    own_mean: bool,
    tokens: bool,
    group: int,
    *rule,
    tile: Tile | None = None,
    native: bool = True,
) -> tuple[Tensor, ...]:
    """`jetgraph::rms_norm_quantize` of x, residual [..., C] and weight [C], with `jetgraph::row_mean`'s mean.

    A row is read once and quantised along the features.  Codes along the tokens need r of 128 tokens, so a second
    launch reads the sums again: for 10 bytes of 8 it was faster than one launch whose tiles wait for their norms.
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
    if not flat.numel():
        return (sums, r, *out)
    cut = pieces(num_features)
    tile = tile or _rows_tile(sum(cut))
    (x_words, x_units), (weight_words, _) = as_words(flat), as_words(weight)
    other, other_units = (x_words, x_units) if residual is None else as_words(residual)
    total = x_words if residual is None else sums.view(torch.int32)
    shape, units = (num_rows, num_features // UNIT), (x_units, other_units)
    edges = _edges(num_rows, num_features, tile.tokens, sum(cut))
    launch(norm_kernel, (num_blocks(num_rows, tile.tokens),),
        x_words, other, weight_words, total, r, *_stored(out, False)[:2], *shape, *units, eps,
        RESIDUAL=residual is not None, ROWS=tile.tokens, PIECES=cut, EVEN=edges["EVEN"],
        **tile.options(), **_arguments(rule, native),
    )  # fmt: skip
    if tokens:
        quantized = flat if residual is None else sums.view(-1, num_features)
        _quantize_tiles(NORM, quantized, weight, r, out, rule, TOKENS_TILE, native, rows=False)
    return (sums, r, *out)

"""Gradients of `triton_attention.attention`, in blocks: memory grows with the sequence, not with its square.

A rollout computes no gradients, so nothing here needs to agree with anything bit for bit; but a gradient is the same
each time (every sum is one program's, in one order: no atomics), as a replayed training step must be.

    P = exp(S - lse)        dV = Pᵀ dO        dP = dO Vᵀ        δ = Σ dO · O
    dS = P (dP - δ) · scale (· (1 - tanh²) under a soft cap)    dQ = dS K         dK = dSᵀ Q

P and dS are rounded to BF16 for the products; all sums are FP32 (Dao, FlashAttention-2, arXiv 2307.08691, algorithm 2).
Rows are as in `triton_attention_kernels`: the G heads that share keys beside each other, so dK and dV need no second
pass over heads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from jetgraph.lowering.reference import num_blocks
from jetgraph.lowering.triton_attention import in_units, padded, refused
from jetgraph.lowering.triton_attention_kernels import LOG2E, MINUS_INF, exp2, product, soft_cap
from jetgraph.lowering.triton_launch import launch

QUERY_TILE, KEY_TILE = (128, 64, 8, 2), (64, 128, 8, 2)
"""BLOCK_M, BLOCK_N, warps, stages of the kernels of dQ and of dK and dV."""
WIDE_QUERY_TILE, WIDE_KEY_TILE = (64, 64, 8, 1), (64, 64, 8, 1)
"""For head sizes above 128."""
ROWS_MULTIPLE = 128
"""The kernel of dK and dV reads whole tiles of rows, so far behind the last."""


@triton.jit
def _weights(score, lse, scale, softcap, SOFTCAP: tl.constexpr, NATIVE: tl.constexpr):
    """P of raw scores q · k, and what the soft cap multiplies dS by; lse broadcasts against score."""
    shift = tl.where(lse == MINUS_INF, 0.0, lse * -LOG2E)
    if SOFTCAP:
        capped = soft_cap(score * scale, softcap, NATIVE)
        part = capped / softcap
        return exp2(tl.fma(capped, capped * 0 + LOG2E, shift + capped * 0), NATIVE), 1.0 - part * part
    else:
        return exp2(score * (scale * LOG2E) + shift, NATIVE), 1.0


@triton.jit
def _visible(positions, keys, firsts, window, FIRST: tl.constexpr, WINDOWED: tl.constexpr):
    """positions and firsts broadcast against keys."""
    seen = keys <= positions
    if FIRST:
        seen = seen & (keys >= firsts)
    if WINDOWED:
        seen = seen & (keys > positions - window)
    return seen


_INTEGERS = ["first", "last", "num_queries", "num_keys", "num_heads", "q_batch", "q_head", "q_token"]
_INTEGERS += ["k_batch", "k_head", "k_token", "v_batch", "v_head", "window"]


@triton.jit(do_not_specialize=_INTEGERS)
def query_gradient_kernel(
    q,
    k,
    v,
    out,
    grad,
    lse,
    rows,
    first,
    dq,
    num_queries,
    num_keys,
    num_heads,
    num_rows,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    window,
    scale,
    softcap,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIRST: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """dq, out and grad [B, n, H, D], lse [B, H, n]; lse and δ in the order of rows go to rows [2, B, Hkv, R]."""
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    group, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query, head = tile * BLOCK_Q + row // G, group * G + row % G
    valid = (row < BLOCK_Q * G) & (query < num_queries)
    positions = tl.where(valid, num_keys - num_queries + query, -1)
    stored = valid[:, None] & (d < D)[None, :]
    token = query.to(tl.int64)
    at = batch * q_batch * 8 + head * q_head * 8 + token * q_token * 8
    q_tile = tl.load(q + at[:, None] + d[None, :], mask=stored, other=0.0)
    at = ((batch * num_queries + token) * num_heads + head) * D
    d_out = tl.load(grad + at[:, None] + d[None, :], mask=stored, other=0.0)
    forward = tl.load(out + at[:, None] + d[None, :], mask=stored, other=0.0)
    d_row = tl.sum(d_out.to(tl.float32) * forward.to(tl.float32), 1)
    lse_row = tl.load(lse + (batch * num_heads + head) * num_queries + token, mask=valid, other=0.0)
    at = (batch * tl.num_programs(1) + group) * num_rows + token * G + row % G
    tl.store(rows + at, lse_row, mask=valid)
    tl.store(rows + tl.num_programs(2) * tl.num_programs(1).to(tl.int64) * num_rows + at, d_row, mask=valid)
    firsts = positions * 0
    lowest = num_keys - num_queries + tile * BLOCK_Q
    highest = num_keys - num_queries + tl.minimum((tile + 1) * BLOCK_Q, num_queries) - 1
    begin = 0
    if WINDOWED:
        begin = tl.maximum(lowest - window + 1, 0)
    if FIRST:
        firsts = tl.load(first + batch * num_queries + token, mask=valid, other=num_keys).to(tl.int32)
        begin = tl.maximum(begin, tl.min(firsts, 0))
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    k += batch * k_batch * 8 + group * k_head * 8
    v += batch * v_batch * 8 + group * v_head * 8
    for block in range(begin // BLOCK_N, tl.cdiv(highest + 1, BLOCK_N)):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        here = (keys < num_keys)[:, None] & (d < D)[None, :]
        at_key = (keys.to(tl.int64) * k_token * 8)[:, None] + d[None, :]
        key, value = tl.load(k + at_key, mask=here, other=0.0), tl.load(v + at_key, mask=here, other=0.0)
        score = product(q_tile, tl.trans(key), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), NATIVE)
        weight, slope = _weights(score, lse_row[:, None], scale, softcap, SOFTCAP, NATIVE)
        seen = _visible(positions[:, None], keys[None, :], firsts[:, None], window, FIRST, WINDOWED)
        d_weight = product(d_out, tl.trans(value), tl.zeros((BLOCK_M, BLOCK_N), tl.float32), NATIVE)
        d_score = tl.where(seen, weight * (d_weight - d_row[:, None]) * slope, 0.0)
        if NATIVE:
            d_score = d_score.to(key.dtype)
        acc = product(d_score, key, acc, NATIVE)
    at = ((batch * num_queries + token) * num_heads + head) * D
    tl.store(dq + at[:, None] + d[None, :], (acc * scale).to(dq.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=_INTEGERS)
def key_gradient_kernel(
    q,
    k,
    v,
    grad,
    rows,
    first,
    last,
    dk,
    dv,
    num_queries,
    num_keys,
    num_heads,
    num_rows,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    window,
    scale,
    softcap,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIRST: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """dk and dv [B, L, Hkv, D]; ``last`` [B, ⌈L / BLOCK_N⌉] is the last query that may see a block, if FIRST."""
    block = tl.program_id(0)
    group, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    here = (keys < num_keys)[:, None] & (d < D)[None, :]
    position = keys.to(tl.int64)
    at = batch * k_batch * 8 + group * k_head * 8 + position * k_token * 8
    key = tl.load(k + at[:, None] + d[None, :], mask=here, other=0.0)
    at = batch * v_batch * 8 + group * v_head * 8 + position * k_token * 8
    value = tl.load(v + at[:, None] + d[None, :], mask=here, other=0.0)
    shift = num_keys - num_queries
    begin = tl.maximum(block * BLOCK_N - shift, 0)
    end = num_queries
    if WINDOWED:
        end = tl.minimum(end, tl.minimum((block + 1) * BLOCK_N, num_keys) - 1 + window - shift)
    if FIRST:
        end = tl.minimum(end, tl.load(last + batch * tl.num_programs(0) + block) + 1)
    d_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    d_value = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    q += batch * q_batch * 8 + group * G * q_head * 8
    grad += (batch * num_queries * num_heads + group * G) * D
    lse = rows + (batch * tl.num_programs(1) + group) * num_rows
    delta = lse + tl.num_programs(2) * tl.num_programs(1).to(tl.int64) * num_rows
    for tile in range(begin * G // BLOCK_M, tl.cdiv(end * G, BLOCK_M)):
        row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        query, head = row // G, row % G
        valid = row < num_queries * G
        loaded = valid[:, None] & (d < D)[None, :]
        token = query.to(tl.int64)
        at_query = token * q_token * 8 + head * q_head * 8
        q_tile = tl.load(q + at_query[:, None] + d[None, :], mask=loaded, other=0.0)
        at_query = (token * num_heads + head) * D
        d_out = tl.load(grad + at_query[:, None] + d[None, :], mask=loaded, other=0.0)
        lse_row, d_row = tl.load(lse + row), tl.load(delta + row)  # no mask: 0 behind the last row
        positions = tl.where(valid, shift + query, -1)
        firsts = positions * 0
        if FIRST:
            firsts = tl.load(first + batch * num_queries + token, mask=valid, other=num_keys).to(tl.int32)
        score = product(key, tl.trans(q_tile), tl.zeros((BLOCK_N, BLOCK_M), tl.float32), NATIVE)
        weight, slope = _weights(score, lse_row[None, :], scale, softcap, SOFTCAP, NATIVE)
        seen = _visible(positions[None, :], keys[:, None], firsts[None, :], window, FIRST, WINDOWED)
        weight = tl.where(seen, weight, 0.0)
        d_weight = product(value, tl.trans(d_out), tl.zeros((BLOCK_N, BLOCK_M), tl.float32), NATIVE)
        d_score = weight * (d_weight - d_row[None, :]) * slope
        if NATIVE:
            weight, d_score = weight.to(d_out.dtype), d_score.to(q_tile.dtype)
        d_value = product(weight, d_out, d_value, NATIVE)
        d_key = product(d_score, q_tile, d_key, NATIVE)
    at = ((batch * num_keys + position) * tl.num_programs(1) + group) * D
    tl.store(dk + at[:, None] + d[None, :], (d_key * scale).to(dk.dtype.element_ty), mask=here)
    tl.store(dv + at[:, None] + d[None, :], d_value.to(dv.dtype.element_ty), mask=here)


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
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    native: bool = True,
    tiles: tuple[tuple[int, int, int, int], tuple[int, int, int, int]] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v for grad [B, n, H, D], tokens first in memory; out and lse are what `attention` gave.

    Raises:
        ValueError: what `attention` does not serve.
    """
    reason = refused(q, k, v, scale, window, softcap, first)
    if reason:
        raise ValueError(f"attention_backward got {reason}")
    (batch, num_heads, num_queries, size), (num_groups, num_keys) = q.shape, k.shape[1:3]
    make = torch.empty if out.numel() else torch.zeros
    dq, dk, dv = (make(_by_token(t), dtype=out_dtype, device=q.device) for t in (q, k, v))
    grads = dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)
    if not out.numel():
        return grads
    q, k, v = (in_units(t) for t in (q, k, v))
    if k.stride(2) != v.stride(2):
        k, v = k.contiguous(), v.contiguous()
    grad, out, lse = (_aligned(t) for t in (grad, out, lse))
    query_tile, key_tile = tiles or ((QUERY_TILE, KEY_TILE) if size <= 128 else (WIDE_QUERY_TILE, WIDE_KEY_TILE))
    starts = lse if first is None else first.clamp(0, num_keys).contiguous()
    last = lse if first is None else last_queries(starts, num_keys, key_tile[1])
    per_group = num_heads // num_groups
    num_rows = -(-num_queries * per_group // ROWS_MULTIPLE) * ROWS_MULTIPLE
    rows = lse.new_zeros((2, batch, num_groups, num_rows))
    numbers = (
        num_queries,
        num_keys,
        num_heads,
        num_rows,
        *(s // 8 for s in q.stride()[:3]),
        *(s // 8 for s in k.stride()[:3]),
        *(s // 8 for s in v.stride()[:2]),
        window,
        float(scale),
        float(softcap),
    )
    flags = {
        "G": per_group,
        "D": size,
        "BLOCK_D": padded(size),
        "FIRST": first is not None,
        "WINDOWED": window > 0,
        "SOFTCAP": softcap > 0,
        "NATIVE": native,
        "enable_fp_fusion": True,
    }
    block_m, block_n, warps, stages = query_tile
    launch(query_gradient_kernel, (num_blocks(num_queries, block_m // per_group), num_groups, batch),
        q, k, v, out, grad, lse, rows, starts, dq, *numbers,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages, **flags,
    )  # fmt: skip
    block_m, block_n, warps, stages = key_tile
    launch(key_gradient_kernel, (num_blocks(num_keys, block_n), num_groups, batch),
        q, k, v, grad, rows, starts, last, dk, dv, *numbers,
        BLOCK_M=block_m, BLOCK_N=block_n, num_warps=warps, num_stages=stages, **flags,
    )  # fmt: skip
    return grads


def last_queries(first: Tensor, num_keys: int, block: int) -> Tensor:
    """The last query [B, ⌈L / block⌉] whose first key [B, n] is not behind a block of keys; -1 if there is none."""
    num_blocks = -(-num_keys // block)
    queries = torch.arange(first.shape[1], device=first.device).expand_as(first)
    starting = first.new_full((first.shape[0], num_blocks + 1), -1)
    starting.scatter_reduce_(1, first // block, queries, "amax")
    return starting[:, :num_blocks].cummax(1).values.contiguous()


def _by_token(x: Tensor) -> tuple[int, int, int, int]:
    return x.shape[0], x.shape[2], x.shape[1], x.shape[3]


def _aligned(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x

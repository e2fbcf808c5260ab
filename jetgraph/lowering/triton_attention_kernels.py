"""Causal grouped-query attention on tensor cores whose every row depends on its own keys alone, dense and paged.

A tile has BLOCK_M rows: BLOCK_M // G neighbouring queries of the G heads that share one head of keys, in one sequence.
It walks the keys in blocks of BLOCK_N, counted from the first key of a row's own sequence, and keeps per row

    peak   running maximum of log2(e) · score       total   Σ 2^(log2(e) · score - peak)       acc   Σ 2^(…) · v

so a training step, a chunk of a prompt and one decoded token do the same operations on a row in the same order:

* a row of an MMA is the sum of its own products, maxima are exact in any order, and every other step is elementwise;
* a block that a row must not see leaves its state bit for bit: the maximum stays, 2^(peak - peak) = 1, and zeros are
  added.  So it does not matter which blocks a tile visits for its other rows, and blocks no row sees are skipped;
* decode has the tile, the number of warps and thus the instructions of a whole prompt; its other rows are padding;
* dense and paged kernels share `_attend` and differ in where a key lies; no product is contracted by the compiler.

The arithmetic: scores and their sums in FP32; exponentials by one instruction, ``ex2.approx.ftz.f32`` (2 ulp); weights
rounded to BF16 for the second product but not in total; one rounding of acc · (1 / total) to BF16.  The definition
(`reference.attention`) has float64 instead; docs/kernels.md has the distance.

Shapes: B sequences, H and Hkv heads, G = H / Hkv, head size D, n queries, L keys, T tokens of all sequences.
"""

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))
MINUS_INF = tl.constexpr(float("-inf"))


# -------------------------------------------------------------------------------------------------------- one block


@triton.jit
def wide(x):
    return x.to(tl.int64)


@triton.jit
def exp2(x, NATIVE: tl.constexpr):
    """2^x; 2^0 is 1 and 2^-inf is 0, exactly."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.math.exp2(x)


@triton.jit
def product(a, b, acc, NATIVE: tl.constexpr):
    if NATIVE:
        return tl.dot(a, b, acc)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def soft_cap(score, cap, NATIVE: tl.constexpr):
    """cap · tanh(score / cap), tanh x = 1 - 2 / (e^2x + 1): right within 2^-22 of cap."""
    power = exp2(tl.math.div_rn(score, score * 0 + cap) * (2 * LOG2E), NATIVE)
    return (1.0 - tl.math.div_rn(power * 0 + 2.0, power + 1.0)) * cap


@triton.jit
def _block(
    peak,
    total,
    acc,
    q,
    k,
    v,
    visible,
    scale,
    softcap,
    MASKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """State after one block of keys: q [M, D], k and v [N, D], visible [M, N] if MASKED."""
    score = product(q, tl.trans(k), tl.zeros((q.shape[0], k.shape[0]), tl.float32), NATIVE)
    factor = scale * LOG2E
    if SOFTCAP:
        score = soft_cap(score * scale, softcap, NATIVE)
        factor = scale * 0 + LOG2E
    if MASKED:
        score = tl.where(visible, score, MINUS_INF)
    new_peak = tl.maximum(peak, tl.max(score, 1) * factor)
    shift = tl.where(new_peak == MINUS_INF, 0.0, new_peak)  # a row that has seen nothing: 2^(-inf - 0) = 0, not NaN
    weight = exp2(tl.fma(score, factor, (shift * -1.0)[:, None]), NATIVE)
    decay = exp2(peak - shift, NATIVE)
    total = tl.fma(total, decay, tl.sum(weight, 1))
    acc = acc * decay[:, None]
    if NATIVE:
        weight = weight.to(v.dtype)
    return new_peak, total, product(weight, v, acc, NATIVE)


@triton.jit
def _walk(
    peak,
    total,
    acc,
    q,
    k,
    v,
    table,
    positions,
    mine,
    origin,
    low,
    high,
    num_keys,
    key_row,
    page_row,
    window,
    scale,
    softcap,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Visit blocks low … high - 1, counted from key ``origin``, for the rows ``mine``.  PAGE 0: keys lie densely.

    Without MASKED every row sees every key of them.
    """
    d = tl.arange(0, BLOCK_D)
    for block in range(low, high):
        keys = origin + block * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = keys < num_keys
        if PAGE:
            if MASKED:
                page = tl.load(table + keys // PAGE, mask=inside, other=0)
            else:
                page = tl.load(table + keys // PAGE)
            at = wide(page) * page_row + wide(keys % PAGE) * key_row
        else:
            at = wide(keys) * key_row
        at = at[:, None] + d[None, :]
        if MASKED or D != BLOCK_D:  # V behind the last key must be a number: 0 · NaN is NaN
            here = inside[:, None] & (d < D)[None, :]
            key, value = tl.load(k + at, mask=here, other=0.0), tl.load(v + at, mask=here, other=0.0)
        else:
            key, value = tl.load(k + at), tl.load(v + at)
        visible = (keys[None, :] <= positions[:, None]) & mine[:, None]
        if WINDOWED:
            visible = visible & (keys[None, :] > positions[:, None] - window)
        peak, total, acc = _block(peak, total, acc, q, key, value, visible, scale, softcap, MASKED, SOFTCAP, NATIVE)
    return peak, total, acc


# --------------------------------------------------------------------------------------------------------- one tile


@triton.jit
def _attend(
    tile,
    q,
    k,
    v,
    out,
    lse,
    first,
    table,
    num_queries,
    num_keys,
    q_token,
    q_head,
    key_row,
    page_row,
    out_token,
    lse_head,
    window,
    scale,
    softcap,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    FIRST: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Queries tile · (BLOCK_M // G) … of one sequence; pointers are at its start and at the first of its G heads."""
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    row = tl.arange(0, BLOCK_M)
    query, head = tile * BLOCK_Q + row // G, row % G
    valid = (row < BLOCK_Q * G) & (query < num_queries)
    positions = tl.where(valid, num_keys - num_queries + query, -1)
    d = tl.arange(0, BLOCK_D)
    stored = valid[:, None] & (d < D)[None, :]
    q_tile = tl.load(
        q + wide(query)[:, None] * q_token + wide(head)[:, None] * q_head + d[None, :], mask=stored, other=0.0
    )
    peak = tl.full((BLOCK_M,), MINUS_INF, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    lowest = num_keys - num_queries + tile * BLOCK_Q
    highest = num_keys - num_queries + tl.minimum((tile + 1) * BLOCK_Q, num_queries) - 1
    if FIRST:
        # Blocks are counted from a row's first key.  Rows of one tile may belong to several sequences: one after the
        # other is walked, and the rows of the others see nothing of it.
        starts = tl.load(first + query, mask=valid, other=num_keys)
        starts = tl.minimum(tl.maximum(starts, 0), num_keys).to(tl.int32)
        origin = tl.min(starts, 0)
        while origin < num_keys:
            mine = starts == origin
            high = tl.cdiv(tl.max(tl.where(mine, positions, -1), 0) + 1 - origin, BLOCK_N)
            low = 0
            if WINDOWED:
                least = tl.min(tl.where(mine & valid, positions, num_keys), 0)
                low = tl.maximum(least - window + 1 - origin, 0) // BLOCK_N
            peak, total, acc = _walk(
                peak, total, acc, q_tile, k, v, table, positions, mine, origin, low, high, num_keys, key_row, page_row,
                window, scale, softcap, D, BLOCK_N, BLOCK_D, PAGE, True, WINDOWED, SOFTCAP, NATIVE,
            )  # fmt: skip
            origin = tl.min(tl.where(starts > origin, starts, num_keys), 0)
    else:
        if WINDOWED:
            low = tl.maximum(lowest - window + 1, 0) // BLOCK_N
            whole = low
        else:
            low = 0
            whole = (lowest + 1) // BLOCK_N
            peak, total, acc = _walk(
                peak, total, acc, q_tile, k, v, table, positions, valid, 0, low, whole, num_keys, key_row, page_row,
                window, scale, softcap, D, BLOCK_N, BLOCK_D, PAGE, False, WINDOWED, SOFTCAP, NATIVE,
            )  # fmt: skip
        peak, total, acc = _walk(
            peak, total, acc, q_tile, k, v, table, positions, valid, 0, whole, tl.cdiv(highest + 1, BLOCK_N), num_keys,
            key_row, page_row, window, scale, softcap, D, BLOCK_N, BLOCK_D, PAGE, True, WINDOWED, SOFTCAP, NATIVE,
        )  # fmt: skip
    positive = tl.where(total == 0, 1.0, total)  # a query that sees no key gives zeros
    factor = tl.math.div_rn(positive * 0 + 1.0, positive)
    result = acc * factor[:, None] + 0.0  # -0 becomes +0, as it would by zeros of blocks that a row does not see
    at = wide(query)[:, None] * out_token + wide(head)[:, None] * D + d[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=stored)
    tl.store(
        lse + wide(head) * lse_head + query,
        tl.where(total == 0, MINUS_INF, (peak + tl.math.log2(positive)) * LN2),
        mask=valid,
    )


# Numbers and addresses that differ from call to call are not specialised: one binary, so one order of sums, for all.
# Strides of tensors come in units of 8 numbers, which tells the compiler that rows start at multiples of 16 bytes.

_DENSE_INTEGERS = ["first", "num_queries", "num_keys", "q_batch", "q_head", "q_token", "k_batch", "k_head", "k_token"]
_DENSE_INTEGERS += ["v_batch", "v_head", "num_heads", "window"]


@triton.jit(do_not_specialize=_DENSE_INTEGERS)
def attention_kernel(
    q,
    k,
    v,
    out,
    lse,
    first,
    num_queries,
    num_keys,
    num_heads,
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
    """q [B, H, n, D], k and v [B, Hkv, L, D], the latter two with one distance between keys → out [B, n, H, D] and
    lse [B, H, n]."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those with most keys first
    group, batch = wide(tl.program_id(1)), wide(tl.program_id(2))
    head = group * G
    _attend(
        tile,
        q + batch * q_batch * 8 + head * q_head * 8,
        k + batch * k_batch * 8 + group * k_head * 8,
        v + batch * v_batch * 8 + group * v_head * 8,
        out + (batch * num_queries * num_heads + head) * D,
        lse + (batch * num_heads + head) * num_queries,
        first + batch * num_queries,
        first,
        num_queries, num_keys, wide(q_token) * 8, wide(q_head) * 8, wide(k_token) * 8, 0, num_heads * D,
        num_queries, window, scale, softcap,
        G, D, BLOCK_M, BLOCK_N, BLOCK_D, 0, FIRST, WINDOWED, SOFTCAP, NATIVE,
    )  # fmt: skip


_PAGED_INTEGERS = ["table", "seq_lens", "starts", "num_sequences", "num_tokens", "num_heads", "q_token", "q_head"]
_PAGED_INTEGERS += ["out_token", "page_row", "key_row", "k_head", "table_row", "window"]


@triton.jit(do_not_specialize=_PAGED_INTEGERS)
def paged_attention_kernel(
    q,
    k,
    v,
    out,
    lse,
    table,
    seq_lens,
    starts,
    num_sequences,
    num_tokens,
    q_token,
    q_head,
    out_token,
    page_row,
    key_row,
    k_head,
    table_row,
    window,
    scale,
    softcap,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """q and out [T, H, D], k and v [pages, PAGE, Hkv, D]; sequence s has the rows starts[s] … starts[s + 1] of q.

    A sequence gets ⌊starts[s + 1] / BLOCK_Q⌋ - ⌊starts[s] / BLOCK_Q⌋ + 1 programs, enough for its queries, so that the
    grid follows from T and the number of sequences and nothing is read back to the host.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // G
    program = tl.program_id(0)
    low, high = 0, num_sequences
    while low < high:  # the last sequence whose programs begin at or before this one
        middle = (low + high) // 2
        if tl.load(starts + middle) // BLOCK_Q + middle <= program:
            low = middle + 1
        else:
            high = middle
    sequence = wide(low - 1)
    start = tl.load(starts + sequence)
    num_queries = tl.load(starts + sequence + 1) - start
    tile = program - (start // BLOCK_Q + low - 1)
    if tile * BLOCK_Q >= num_queries:
        return
    group = wide(tl.program_id(1))
    head = group * G
    _attend(
        tile,
        q + wide(start) * q_token * 8 + head * q_head * 8,
        k + group * k_head * 8,
        v + group * k_head * 8,
        out + wide(start) * out_token * 8 + head * D,
        lse + head * num_tokens + start,
        table,
        table + sequence * table_row,
        num_queries, tl.load(seq_lens + sequence), wide(q_token) * 8, wide(q_head) * 8, wide(key_row) * 8,
        wide(page_row) * 8, wide(out_token) * 8, num_tokens, window, scale, softcap,
        G, D, BLOCK_M, BLOCK_N, BLOCK_D, PAGE, False, WINDOWED, SOFTCAP, NATIVE,
    )  # fmt: skip

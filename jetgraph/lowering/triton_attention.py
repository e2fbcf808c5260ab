"""Row-invariant attention on a GPU: `attention` of dense keys, `paged_attention` of an engine's cache, the same bits.

The kernels and why a row depends on its own keys alone are in `triton_attention_kernels`.

Shapes: B sequences, H and Hkv heads, head size D, n queries, L keys, T tokens of all sequences.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from jetgraph.lowering.reference import num_blocks
from jetgraph.lowering.triton_attention_kernels import attention_kernel, paged_attention_kernel
from jetgraph.lowering.triton_launch import launch

ATTENTION_TILE = (64, 64, 4, 3)
"""BLOCK_M, BLOCK_N, warps, stages, the same in training and rollout.  `python -m benchmarks.exact --sweep`: others.

Of a decoded token only the G heads of a group are rows, so the smallest tile of a tensor core's instruction wins.
"""
WIDE_TILE = (128, 64, 8, 2)
"""For head sizes above 128, or more than 64 heads on one."""
MAX_HEAD_SIZE, HEAD_MULTIPLE = 256, 8


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    first: Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    native: bool = True,
    tile: tuple[int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """`reference.attention` of BF16 q [B, H, n, D], k and v [B, Hkv, L, D], first int64 [B, n].

    Returns BF16 [B, n, H, D] and the log-sum-exp of each query's scores, FP32 [B, H, n] (-inf if it sees no key).

    Raises:
        ValueError: dtypes, sizes or options that `refused` names.
    """
    reason = refused(q, k, v, scale, window, softcap, first)
    if reason:
        raise ValueError(f"attention got {reason}")
    (batch, num_heads, num_queries, size), (num_groups, num_keys) = q.shape, k.shape[1:3]
    out = q.new_empty((batch, num_queries, num_heads, size), dtype=out_dtype)
    per_group = num_heads // num_groups
    lse = q.new_empty((batch, num_heads, num_queries), dtype=torch.float32)
    if not out.numel():
        return out, lse
    q, k, v = (in_units(t) for t in (q, k, v))
    if k.stride(2) != v.stride(2):
        k, v = k.contiguous(), v.contiguous()
    block_m, block_n, warps, stages = tile or tile_of(size, per_group)
    grid = (num_blocks(num_queries, block_m // per_group), num_groups, batch)
    launch(
        attention_kernel,
        grid,
        q,
        k,
        v,
        out,
        lse,
        lse if first is None else first.contiguous(),
        num_queries,
        num_keys,
        num_heads,
        *(s // 8 for s in q.stride()[:3]),
        *(s // 8 for s in k.stride()[:3]),
        *(s // 8 for s in v.stride()[:2]),
        window,
        float(scale),
        float(softcap),
        G=per_group,
        D=size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=padded(size),
        FIRST=first is not None,
        WINDOWED=window > 0,
        SOFTCAP=softcap > 0,
        NATIVE=native,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,  # said, because triton's default changes with its version and the bits with it
    )
    return out, lse


def paged_attention(
    q: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    *,
    out: Tensor | None = None,
    native: bool = True,
    tile: tuple[int, int, int, int] | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` of each sequence of a batch, keys in pages; the bits are those of the dense call.

    q BF16 [T, H, D]: sequence s has the rows query_start_loc[s] … query_start_loc[s + 1] (int32 [S + 1]), the last of
    its seq_lens[s] positions (int32 [S]).  key_cache and value_cache [pages, page size, Hkv, D], any strides alike in
    both; position p lies in page block_table[s, p // page size] (int32 [S, most pages]) at p mod page size.  Nothing is
    read back to the host, so the call can be captured in a CUDA graph; rows of q behind the last sequence are skipped.

    Returns out [T, H, D] (the given one, or BF16) and the log-sum-exp FP32 [H, T].

    Raises:
        ValueError: dtypes, sizes or strides that the kernel does not serve.
    """
    (num_tokens, num_heads, size), (page, num_groups) = q.shape, key_cache.shape[1:3]
    reason = _refused_sizes(num_heads, num_groups, size, scale, window, softcap)
    if q.dtype is not torch.bfloat16 or key_cache.dtype is not q.dtype or value_cache.dtype is not q.dtype:
        reason = f"{q.dtype}, caches {key_cache.dtype} and {value_cache.dtype}; expected torch.bfloat16"
    if key_cache.stride() != value_cache.stride() or not (_is_in_units(key_cache) and _is_in_units(value_cache)):
        reason = (
            f"caches with strides {key_cache.stride()} and {value_cache.stride()}; expected equal multiples of 8 and 1"
        )
    if any(t.dtype is not torch.int32 or t.stride(-1) != 1 for t in (block_table, seq_lens, query_start_loc)):
        reason = "a block table, lengths or starts that are not int32 in a row"
    if reason:
        raise ValueError(f"paged attention got {reason}")
    q = in_units(q)
    target = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    if target.shape != q.shape or target.stride()[1:] != (size, 1) or target.stride(0) % 8:
        raise ValueError(f"paged attention got an output {list(target.shape)} with strides {target.stride()}")
    lse = q.new_empty((num_heads, num_tokens), dtype=torch.float32)
    if not num_tokens or not len(seq_lens):
        return target, lse
    per_group = num_heads // num_groups
    block_m, block_n, warps, stages = tile or tile_of(size, per_group)
    grid = (num_tokens // (block_m // per_group) + len(seq_lens), num_groups)
    launch(
        paged_attention_kernel,
        grid,
        q,
        key_cache,
        value_cache,
        target,
        lse,
        block_table,
        seq_lens,
        query_start_loc,
        len(seq_lens),
        num_tokens,
        q.stride(0) // 8,
        q.stride(1) // 8,
        target.stride(0) // 8,
        *(s // 8 for s in key_cache.stride()[:3]),
        block_table.stride(0),
        window,
        float(scale),
        float(softcap),
        G=per_group,
        D=size,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_D=padded(size),
        PAGE=page,
        WINDOWED=window > 0,
        SOFTCAP=softcap > 0,
        NATIVE=native,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=False,
    )
    return target, lse


def refused(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, first: Tensor | None
) -> str | None:
    """Why `attention` cannot serve these arguments, in a few words; None if it can."""
    if any(t.dtype is not torch.bfloat16 for t in (q, k, v)):
        return f"{q.dtype}, {k.dtype}, {v.dtype}; expected torch.bfloat16"
    if q.ndim != 4 or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        return (
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}; expected [B, H, n, D] and twice [B, Hkv, L, D]"
        )
    if q.shape[2] > k.shape[2]:
        return f"{q.shape[2]} queries of {k.shape[2]} positions"
    if first is not None and (first.dtype is not torch.int64 or first.shape != (q.shape[0], q.shape[2])):
        return f"first {first.dtype} {list(first.shape)}; expected int64 {[q.shape[0], q.shape[2]]}"
    return _refused_sizes(q.shape[1], k.shape[1], q.shape[3], scale, window, softcap)


def _refused_sizes(num_heads: int, num_groups: int, size: int, scale: float, window: int, softcap: float) -> str | None:
    if size % HEAD_MULTIPLE or size > MAX_HEAD_SIZE:
        return f"a head size of {size}; expected a multiple of {HEAD_MULTIPLE} up to {MAX_HEAD_SIZE}"
    if num_heads % num_groups or num_heads // num_groups > WIDE_TILE[0]:
        return f"{num_heads} heads on {num_groups}; expected 1 … {WIDE_TILE[0]} for each"
    if not scale > 0 or window < 0 or softcap < 0:
        return f"scale={scale}, window={window}, softcap={softcap}; expected a positive scale and 0 or more"
    return None


def tile_of(head_size: int, per_group: int) -> tuple[int, int, int, int]:
    return ATTENTION_TILE if head_size <= 128 and per_group <= ATTENTION_TILE[0] else WIDE_TILE


def padded(head_size: int) -> int:
    return max(triton.next_power_of_2(head_size), 16)


def _is_in_units(x: Tensor) -> bool:
    """Every row starts at a multiple of 16 bytes: one binary serves it."""
    distances = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return x.stride(-1) == 1 and all(n == 1 or s % 8 == 0 for n, s in distances) and x.data_ptr() % 16 == 0


def in_units(x: Tensor) -> Tensor:
    return x if _is_in_units(x) else x.clone(memory_format=torch.contiguous_format)

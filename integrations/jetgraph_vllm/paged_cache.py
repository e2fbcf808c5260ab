"""Where K and V lie in vLLM's paged cache for our attention.  No vLLM in here.

    kv_cache [num_blocks, Hkv, block_size, 2·D]: features 0 … D-1 of a slot are K, D … 2D-1 are V

on the CPU and in newer vLLM on a GPU; older ones have an axis of two, first or second, before [block_size, Hkv, D].
A slot is block · block_size + offset.  T new tokens, L tokens of one sequence, Hkv heads, head size D.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def write_tokens(kv_cache: Tensor, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
    """Write key and value [T, Hkv, D], one token a slot; a negative slot is padding, and so is a token without slot."""
    block_size = kv_cache.shape[2]
    num_tokens = min(slot_mapping.shape[0], key.shape[0])
    slots = slot_mapping[:num_tokens].long()
    used = slots >= 0
    slots = slots[used]
    both = torch.cat((key[:num_tokens][used], value[:num_tokens][used]), -1)
    kv_cache[slots // block_size, :, slots % block_size] = both.to(kv_cache.dtype)


def read_sequence(kv_cache: Tensor, block_table: Tensor, length: int, head_size: int) -> tuple[Tensor, Tensor]:
    """K and V [1, Hkv, L, D] of one sequence; block_table lists its blocks in order."""
    block_size = kv_cache.shape[2]
    blocks = block_table[: -(-length // block_size)].long()
    both = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[None, :, :length]
    return both[..., :head_size], both[..., head_size:]


def pair_axis(cache_shape: Callable[[int, int, int, int], tuple[int, ...]]) -> int | None:
    """The axis of a backend's cache that tells K from V; None if both lie side by side in a slot.

    ``cache_shape`` is `AttentionBackend.get_kv_cache_shape` (num_blocks, block_size, Hkv, D).

    Raises:
        ValueError: a layout that is none of the three above.
    """
    shape = tuple(cache_shape(5, 16, 3, 64))
    known: dict[tuple[int, ...], int | None] = {(5, 3, 16, 128): None, (2, 5, 16, 3, 64): 0, (5, 2, 16, 3, 64): 1}
    if shape not in known:
        raise ValueError(
            f"a K/V cache of shape {list(shape)} for 5 blocks of 16 tokens, 3 heads of 64: expected one of "
            f"{', '.join(str(list(s)) for s in known)}"
        )
    return known[shape]


def keys_and_values(kv_cache: Tensor, head_size: int, axis: int | None) -> tuple[Tensor, Tensor]:
    """Views [num_blocks, block_size, Hkv, D] of K and of V; ``axis`` from `pair_axis`."""
    if axis is not None:
        return kv_cache.unbind(axis)  # type: ignore[return-value]
    return kv_cache.transpose(1, 2).split(head_size, -1)  # type: ignore[return-value]

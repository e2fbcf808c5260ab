"""Where K and V lie in vLLM's paged cache for our attention.  No vLLM in here.

    kv_cache [num_blocks, Hkv, block_size, 2·D]: features 0 … D-1 of a slot are K, D … 2D-1 are V

A slot is block · block_size + offset.  T new tokens, L tokens of one sequence, Hkv heads, head size D.
"""

from __future__ import annotations

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

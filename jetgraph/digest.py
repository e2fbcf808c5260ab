"""Digests of tensors in one canonical layout, the same for trainer, exporter and engine."""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

HASHING = min(16, os.cpu_count() or 1)
"""Tensors that are hashed at a time: sha256 reads about 1.5 GB/s on a core, and leaves Python to others meanwhile."""


def tensor_digest(*tensors: Tensor) -> str:
    """sha256 of shape, dtype and row-major bytes of one tensor, or of codes followed by their scales."""
    digest = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.detach().contiguous().cpu()
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(_memory(tensor))
    return digest.hexdigest()


def tensor_digests(tensors: Iterable[Tensor]) -> list[str]:
    """`tensor_digest` of each tensor."""
    with ThreadPoolExecutor(HASHING) as pool:
        return list(pool.map(tensor_digest, tensors))


def _memory(tensor: Tensor) -> ctypes.Array:
    """The bytes of a contiguous CPU tensor in place.  `Tensor.numpy` would forbid FSDP2 to free its storage."""
    return (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())


def row_digests(x: Tensor) -> list[str]:
    """A digest of each token's numbers in x [T, C]: of the row in FP32, so BF16 and FP32 of equal numbers agree."""
    rows = x.detach().float().contiguous().cpu().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows]

"""Digests of tensors in one canonical layout, the same for trainer, exporter and engine."""

from __future__ import annotations

import ctypes
import hashlib

from torch import Tensor


def tensor_digest(*tensors: Tensor) -> str:
    """sha256 of shape, dtype and row-major bytes of one tensor, or of codes followed by their scales."""
    digest = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.detach().contiguous().cpu()
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(_memory(tensor))
    return digest.hexdigest()


def _memory(tensor: Tensor) -> ctypes.Array:
    """The bytes of a contiguous CPU tensor in place.  `Tensor.numpy` would forbid FSDP2 to free its storage."""
    return (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())


def row_digests(x: Tensor) -> list[str]:
    """A digest of each token's numbers in x [T, C]: of the row in FP32, so BF16 and FP32 of equal numbers agree."""
    rows = x.detach().float().contiguous().cpu().numpy()
    return [hashlib.blake2b(row.tobytes(), digest_size=8).hexdigest() for row in rows]

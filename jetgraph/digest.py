"""Digests of tensors in one canonical layout, the same for trainer, exporter and engine."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def tensor_digest(*tensors: Tensor) -> str:
    """sha256 of shape, dtype and row-major bytes of one tensor, or of codes followed by their scales."""
    digest = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.detach().contiguous().cpu()
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

"""Digests of tensors: what they depend on, and what taking one does to the tensor."""

from __future__ import annotations

import hashlib

import pytest
import torch

from jetgraph.digest import tensor_digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_digest_is_of_dtype_shape_and_row_major_bytes(dtype):
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4).to(dtype)
    content = f"{dtype} (4, 3);".encode() + bytes(x.T.contiguous().view(torch.uint8).flatten().tolist())
    assert tensor_digest(x.T) == hashlib.sha256(content).hexdigest()


def test_nothing_is_a_digest_of_its_own():
    assert len({tensor_digest(torch.empty(shape)) for shape in ((0,), (0, 3), (1,))}) == 3


def test_the_storage_can_be_freed_afterwards():
    """As FSDP2 frees gathered parameters; a view by numpy would forbid it."""
    x = torch.zeros(8)
    tensor_digest(x)
    x.untyped_storage().resize_(0)

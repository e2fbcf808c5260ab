"""torch's own defaults, where vLLM has set others: it builds a model under a default device and a default dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def plain_defaults() -> Iterator[None]:
    """Default device CPU and default dtype FP32 inside the block.

    A provider's self-test that runs while vLLM builds a model would else draw its numbers on the GPU, from a CPU
    generator, which is an error and would read as a refusal.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)

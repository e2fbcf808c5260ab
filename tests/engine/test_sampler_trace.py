"""The sampler's chain is traced where its axes can be told apart."""

from __future__ import annotations

import pytest
import torch
from jetgraph_vllm.sampler_trace import tracing

pytestmark = pytest.mark.slow


def test_a_computation_of_one_row_is_passed_over():
    """A serving engine may put the first request into a step of its own: [1, V] does not say which axis is which."""
    from vllm.v1.sample.sampler import Sampler

    sampler = Sampler()
    with tracing(sampler) as record:
        for rows in (1, 2, 3):
            logprobs = sampler.compute_logprobs(torch.randn(rows, 11, generator=torch.Generator().manual_seed(rows)))
            sampler.gather_logprobs(logprobs, 0, torch.arange(rows))
    assert [op.value.shape for op in record if op.target == "logits"] == [(2, 11)]
    assert record[-1].kind == "output"

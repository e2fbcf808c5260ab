"""The exact attention backend for CUDA without a GPU: what it hands to the kernel, and what it refuses.

The kernel is replaced by the definition; its own bits are in tests/gpu/test_exact_ops.py.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from jetgraph.lowering import reference
from tests.core.test_exact_kernels import Definitions

pytestmark = pytest.mark.slow  # imports vLLM
HEADS, GROUPS, SIZE, PAGE = 4, 2, 32, 16
LENGTHS, COUNTS = (40, 17, 16), (1, 17, 5)


@pytest.fixture
def backend():
    pytest.importorskip("vllm")
    from jetgraph_vllm import attention_cuda

    return attention_cuda


@pytest.fixture
def serving(backend, monkeypatch):
    monkeypatch.setattr(backend.registry, "refusal", lambda *_: None)
    return backend


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_a_step_of_the_engine(serving, axis):
    """A decoded token, a prompt and a chunk; three layouts of the cache; rows behind the step's tokens stay."""
    shape = {None: (9, GROUPS, PAGE, 2 * SIZE), 0: (2, 9, PAGE, GROUPS, SIZE), 1: (9, 2, PAGE, GROUPS, SIZE)}[axis]
    cache = torch.full(shape, float("nan")).bfloat16()
    if axis is None:
        key, value = cache[..., :SIZE].transpose(1, 2), cache[..., SIZE:].transpose(1, 2)
    else:
        key, value = cache.select(axis, 0), cache.select(axis, 1)
    tables = torch.tensor([[7, 2, 8], [0, 5, 0], [4, 0, 0]], dtype=torch.int32)
    expected, queries = [], []
    for row, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        q, k, v = bf16(HEADS, count, SIZE), bf16(GROUPS, length, SIZE), bf16(GROUPS, length + 1, SIZE)[:, 1:]
        for position in range(length):
            key[tables[row, position // PAGE], position % PAGE] = k[:, position]
            value[tables[row, position // PAGE], position % PAGE] = v[:, position]
        expected.append(reference.attention(q[None], k[None], v[None], 0.2)[0][0])
        queries.append(q.transpose(0, 1))
    implementation = serving.ExactFlashAttentionImpl(HEADS, SIZE, 0.2, GROUPS, None, None, "auto")
    implementation.provider, implementation.pair_axis = Definitions(), axis
    total = sum(COUNTS)
    metadata = SimpleNamespace(
        causal=True,
        num_actual_tokens=total,
        block_table=tables,
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        query_start_loc=torch.tensor([0, *COUNTS]).cumsum(0).int(),
    )
    query, output = torch.cat((*queries, bf16(3, HEADS, SIZE))), torch.full((total + 3, HEADS, SIZE), -7.0).bfloat16()
    got = implementation.forward(None, query, None, None, cache, metadata, output)
    assert got is output
    assert torch.equal(got[:total], torch.cat(expected))
    assert (got[total:] == -7).all()
    with pytest.raises(ValueError, match="only causal attention"):
        implementation.forward(None, query, None, None, cache, SimpleNamespace(causal=False), output)
    with pytest.raises(ValueError, match="fused quantisation"):
        implementation.forward(None, query, None, None, cache, metadata, output, torch.ones(1))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sliding_window": 128}, "sliding window"),
        ({"logits_soft_cap": 5.0}, "logits soft cap"),
        ({"alibi_slopes": [0.1] * HEADS}, "ALiBi slopes"),
        ({"kv_sharing_target_layer_name": "model.layers.0.attn"}, "K/V shared between layers"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only"),
        ({"kv_cache_dtype": "float16"}, "K/V cache of dtype float16"),
    ],
)
def test_what_has_no_exact_attention(serving, changes, named):
    arguments = {
        "num_heads": HEADS,
        "head_size": SIZE,
        "scale": 0.2,
        "num_kv_heads": GROUPS,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    assert serving.ExactFlashAttentionImpl(**arguments).provider.name == "triton_exact"
    with pytest.raises(ValueError, match=f"the reference attention has no {named}"):
        serving.ExactFlashAttentionImpl(**arguments | changes)


def test_a_device_without_the_kernels_is_refused_when_the_model_is_built(backend):
    with pytest.raises(ValueError, match="triton_exact cannot run attention of torch.bfloat16, heads of 32"):
        backend.ExactFlashAttentionImpl(HEADS, SIZE, 0.2, GROUPS, None, None, "auto")


def test_only_exact_models_get_it(backend, monkeypatch):
    stock = backend.FlashAttentionImpl
    for exact in (False, True):
        monkeypatch.setattr(backend, "exact_ops_requested", lambda exact=exact: exact)
        chosen = backend.JetgraphFlashAttentionBackend.get_impl_cls()
        assert chosen is (backend.ExactFlashAttentionImpl if exact else stock)
        assert getattr(chosen, "is_exact", False) == exact
    assert backend.JetgraphFlashAttentionBackend.get_name() == "FLASH_ATTN"


def test_vllms_own_layout_is_known(backend):
    from jetgraph_vllm import paged_cache

    assert paged_cache.pair_axis(backend.FlashAttentionBackend.get_kv_cache_shape) in (None, 0, 1)

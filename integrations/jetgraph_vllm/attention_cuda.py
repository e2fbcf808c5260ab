"""The trainer's attention inside vLLM's paged engine (CUDA).

Registered in place of vLLM's FlashAttention backend, which hands out our implementation for models that declare
``ops: exact`` and vLLM's own for all others.  The cache, its layout, its writes (vLLM's `reshape_and_cache`) and the
metadata are FlashAttention's; ours is the product: `jetgraph.lowering.triton_attention`, whose paged kernel gives a
token the bits that the trainer's dense kernel gives it.  A call reads nothing back to the host and its grid follows
from the number of rows and of sequences, so it can be captured in a CUDA graph.

n new tokens and L tokens in all of one sequence, H and Hkv heads, head size D, T rows of a step.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from jetgraph.lowering import registry, torch_ops  # noqa: F401  (defines torch.ops.jetgraph)
from jetgraph.lowering.provider import Exact
from jetgraph_vllm import paged_cache
from jetgraph_vllm.attention import refuse_unsupported
from jetgraph_vllm.defaults import plain_defaults
from jetgraph_vllm.quantization import exact_ops_requested

PROVIDER = "triton_exact"


class ExactFlashAttentionImpl(FlashAttentionImpl):
    """Causal grouped-query attention of all sequences in one kernel, K and V from vLLM's cache."""

    is_exact = True

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        refuse_unsupported(
            {
                "sliding window": tuple(self.sliding_window) != (-1, -1),
                "logits soft cap": self.logits_soft_cap != 0,
                "ALiBi slopes": self.alibi_slopes is not None,
                "attention sinks": self.sinks is not None,
                f"K/V cache of dtype {self.kv_cache_dtype}": self.kv_cache_dtype not in ("auto", "bfloat16"),
                "K/V shared between layers": self.kv_sharing_target_layer_name is not None,
                f"attention type {self.attn_type}": self.attn_type != AttentionType.DECODER,
                "decode context parallelism": getattr(self, "dcp_world_size", 1) > 1,
            }
        )
        self.pair_axis = paged_cache.pair_axis(FlashAttentionBackend.get_kv_cache_shape)
        self.provider = kernels(self.head_size, self.num_heads // self.num_kv_heads)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query and output [T, H, D]; sequence i owns the rows query_start_loc[i] … query_start_loc[i + 1].

        vLLM has written key and value to the cache.  A prefix that sequences share (``use_cascade``) is in every block
        table as well, and is read from there.
        """
        if attn_metadata is None:  # vLLM's memory profiling
            return output.fill_(0)
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("ops exact: fused quantisation of the attention output is not the trainer's arithmetic")
        if attn_metadata.causal is not True:
            raise ValueError("ops exact: only causal attention")
        rows = slice(0, attn_metadata.num_actual_tokens)
        self.provider.paged_attention(
            query[rows],
            *paged_cache.keys_and_values(kv_cache, self.head_size, self.pair_axis),
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            attn_metadata.query_start_loc,
            self.scale,
            out=output[rows],
        )
        return output


class JetgraphFlashAttentionBackend(FlashAttentionBackend):
    """vLLM's FlashAttention; which implementation a layer gets depends on the model that is being built."""

    @staticmethod
    def get_impl_cls() -> type[FlashAttentionImpl]:
        return ExactFlashAttentionImpl if exact_ops_requested() else FlashAttentionImpl


def kernels(head_size: int, heads_per_group: int):
    """The provider of exact kernels on this device, its self-test passed.

    It runs now, before anything is captured in a CUDA graph.

    Raises:
        ValueError: it cannot serve such heads here.
    """
    request = Exact("attention", torch.bfloat16, head_size, heads_per_group)
    with plain_defaults():
        reason = registry.refusal(PROVIDER, request, registry.this_device())
    if reason:
        raise ValueError(f"ops exact: provider {PROVIDER} cannot run {request}: {reason}")
    return registry.PROVIDERS[PROVIDER]


def register() -> None:
    """Put our backend in FlashAttention's place, which is what vLLM selects for dense models on a Hopper."""
    register_backend(AttentionBackendEnum.FLASH_ATTN, f"{__name__}.{JetgraphFlashAttentionBackend.__name__}")
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()

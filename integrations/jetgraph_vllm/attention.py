"""The trainer's attention inside vLLM's paged engine (CPU).

Registered as vLLM's CPU attention backend through `register_backend`; the backend hands out our implementation for
models that declare ``ops: exact`` and vLLM's own for all others.  The cache is vLLM's: same tensor, same blocks, same
bookkeeping, so chunks, mixed batches, the prefix cache and preemption are the scheduler's business and need nothing
here.  Only the order of numbers inside a block is ours (`jetgraph_vllm.paged_cache`), plain instead of packed.

n new tokens and L tokens in all of one sequence, H and Hkv heads, head size D.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from jetgraph.lowering import torch_ops  # noqa: F401  (defines torch.ops.jetgraph)
from jetgraph_vllm import paged_cache
from jetgraph_vllm.quantization import exact_ops_requested


class ExactAttentionImpl(CPUAttentionBackendImpl):
    """Causal grouped-query attention, one `torch.ops.jetgraph.attention` call per sequence, K and V from the cache."""

    is_exact = True

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        refuse_unsupported(
            {
                "sliding window": self.sliding_window != -1,
                "logits soft cap": self.logits_soft_cap != 0,
                "ALiBi slopes": self.alibi_slopes is not None,
                "attention sinks": self.sinks is not None,
                f"K/V cache of dtype {self.kv_cache_dtype}": self.kv_cache_dtype not in ("auto", "bfloat16"),
                "K/V shared between layers": self.kv_sharing_target_layer_name is not None,
                f"attention type {self.attn_type}": self.attn_type != AttentionType.DECODER,
            }
        )

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        paged_cache.write_tokens(kv_cache, key, value, slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """query and output [T, H, D]; sequence i owns the rows query_start_loc[i] … query_start_loc[i + 1]."""
        if attn_metadata is None:  # vLLM's memory profiling
            return output
        if output_scale is not None or output_block_scale is not None:
            raise ValueError("ops exact: fused quantisation of the attention output is not the trainer's arithmetic")
        if not attn_metadata.causal or attn_metadata.dynamic_causal is not None:
            raise ValueError("ops exact: only causal attention")
        starts = attn_metadata.query_start_loc.tolist()
        lengths = attn_metadata.seq_lens.tolist()
        for row, (start, stop) in enumerate(itertools.pairwise(starts)):
            if start == stop:
                continue
            k, v = paged_cache.read_sequence(kv_cache, attn_metadata.block_table[row], lengths[row], self.head_size)
            q = query[start:stop].transpose(0, 1)[None]
            output[start:stop] = torch.ops.jetgraph.attention(q, k, v, self.scale)[0][0]
        return output


class JetgraphCPUAttentionBackend(CPUAttentionBackend):
    """vLLM's CPU backend; which implementation a layer gets depends on the model that is being built."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        return ExactAttentionImpl if exact_ops_requested() else CPUAttentionBackendImpl


def refuse_unsupported(unsupported: dict[str, bool]) -> None:
    """Raise ValueError for what of the names' features is present."""
    found = [name for name, present in unsupported.items() if present]
    if found:
        raise ValueError(f"ops exact: the reference attention has no {', '.join(found)}")


def check_is_exact(layer: torch.nn.Module, prefix: str) -> None:
    """Refuse an exact model whose attention is some other backend's, as on a platform that has none of ours."""
    if not getattr(layer.impl, "is_exact", False):
        raise ValueError(
            f"{prefix} runs {type(layer.impl).__name__}: ops exact needs our attention, which stands in for the "
            "backends CPU_ATTN and FLASH_ATTN; choose that one"
        )


def register() -> None:
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.{JetgraphCPUAttentionBackend.__name__}")
    from vllm.v1.attention import selector

    selector._cached_get_attn_backend.cache_clear()

"""The ``jetgraph`` quantisation of vLLM: reads what a checkpoint declares and gives each layer its method.

`jetgraph_vllm.declaration` has the format.  Exact models get the trainer's formulas everywhere; with
``ops: stock`` only the linears are ours.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from jetgraph_vllm.declaration import NAME, Declaration


class JetgraphConfig(QuantizationConfig):
    """vLLM's handle on a `Declaration`.  Module level and plain, because vLLM pickles it to its workers."""

    def __init__(self, declaration: Declaration) -> None:
        super().__init__()
        self.declaration = declaration
        self.unconverted = declaration.unconverted

    @classmethod
    def get_name(cls) -> str:
        return NAME

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> JetgraphConfig:
        return cls(Declaration.parse(config))

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Claim every checkpoint that declares jetgraph, whatever its ``quant_method`` says to other readers."""
        return NAME if hf_quant_cfg is not None and NAME in hf_quant_cfg else None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        """Follow a model that renames its modules; parts of merged modules keep their names in the checkpoint."""
        if hasattr(hf_to_vllm_mapper, "get_unstacked_mapper"):
            hf_to_vllm_mapper = hf_to_vllm_mapper.get_unstacked_mapper()
        self.unconverted = tuple(hf_to_vllm_mapper.apply_list(list(self.unconverted)))

    def part_names(self, prefix: str) -> tuple[str, ...]:
        """Dotted paths of the checkpoint's weights behind one vLLM module.

        ``….self_attn.qkv_proj`` → ``….self_attn.q_proj``, ``….k_proj``, ``….v_proj``; an unmerged module is itself.
        """
        parent, _, leaf = prefix.rpartition(".")
        stem = f"{parent}." if parent else ""
        return tuple(stem + part for part in self.packed_modules_mapping.get(leaf, (leaf,)))

    def keeps_bf16(self, prefix: str) -> bool:
        names = self.part_names(prefix)
        kept = [name for name in names if name in self.unconverted]
        if kept and len(kept) < len(names):
            raise ValueError(
                f"{prefix}: modules_to_not_convert names {', '.join(kept)} but not all of {', '.join(names)}, "
                "which run as one module: list all of them or none"
            )
        return bool(kept) or prefix in self.unconverted

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> QuantizeMethodBase | None:
        from jetgraph_vllm import attention, linear

        exact = self.declaration.ops == "exact"
        if isinstance(layer, LinearBase):
            if self.declaration.is_fp8 and not self.keeps_bf16(prefix):
                return linear.Fp8BlockLinearMethod(self.declaration, prefix, self.part_names(prefix))
            return linear.RowTileLinearMethod(prefix, self.part_names(prefix)) if exact else UnquantizedLinearMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return linear.RowTileEmbeddingMethod() if exact else None
        if isinstance(layer, Attention) and exact:
            attention.check_is_exact(layer, prefix)
        return None


def exact_ops_requested() -> bool:
    """Is the model that vLLM builds at this moment one that declares ``ops: exact``?"""
    config = get_current_vllm_config_or_none()
    return config is not None and declares_exact(config.quant_config)


def declares_exact(quantization: QuantizationConfig | None) -> bool:
    """Does a model of this quantisation declare ``ops: exact``?"""
    return isinstance(quantization, JetgraphConfig) and quantization.declaration.ops == "exact"


def register() -> None:
    register_quantization_config(NAME)(JetgraphConfig)

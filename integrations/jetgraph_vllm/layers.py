"""The trainer's norm, activation and rotary embedding inside vLLM, in the formulas of Hugging Face transformers.

Replacement is vLLM's own out-of-tree mechanism (`CustomOp.register_oot`).  vLLM then builds our class for every model
in the process, so each of our instances looks at the model under construction and, unless that one declares
``ops: exact``, turns back into the stock class before it is initialised.

T tokens, H heads, D head size; the formulas are in `jetgraph_vllm.formulas`.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers import rotary_embedding
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from jetgraph_vllm.formulas import rms_norm, rotate, silu_and_mul
from jetgraph_vllm.quantization import exact_ops_requested


class _OnlyInExactModels:
    """Mixin of the replacements below: the stock class again, unless the model under construction is exact."""

    stock: ClassVar[type[CustomOp]]

    def __init__(self, *args, **kwargs) -> None:
        stock = self.stock
        if not exact_ops_requested():
            self.__class__ = stock  # type: ignore[assignment]
        stock.__init__(self, *args, **kwargs)

    def dispatch_forward(self, compile_native: bool):
        """One formula on every platform; neither vLLM's kernels nor a nested compile."""
        return self.forward_native  # type: ignore[attr-defined]


class ExactRMSNorm(_OnlyInExactModels, RMSNorm):
    stock = RMSNorm

    def forward_native(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if self.variance_size_override is not None or not self.has_weight:
            raise ValueError("RMSNorm without weight or over part of the features: ops exact has no formula for it")
        if residual is None:
            return rms_norm(x, self.weight, self.variance_epsilon)
        residual = x + residual
        return rms_norm(residual, self.weight, self.variance_epsilon), residual


class ExactSiluAndMul(_OnlyInExactModels, SiluAndMul):
    stock = SiluAndMul

    def forward_native(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return silu_and_mul(x)


class ExactRotaryEmbedding(_OnlyInExactModels, RotaryEmbedding):
    stock = RotaryEmbedding

    def _compute_inv_freq(self, base: float) -> Tensor:
        """On the CPU, where transformers builds a model; what follows happens on the device, there as here."""
        with torch.device("cpu"):
            frequencies = super()._compute_inv_freq(base)
        return frequencies.to(torch.get_default_device())

    def forward_native(
        self, positions: Tensor, query: Tensor, key: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """positions [T]; query [T, H·D], key [T, Hkv·D]; the table row of a position is cos | sin of half the size."""
        if not self.is_neox_style:
            raise ValueError("interleaved rotary embedding: ops exact has no formula for it")
        rows = self.cos_sin_cache.index_select(0, positions.flatten()).to(query.dtype)
        half = self.rotary_dim // 2
        cos, sin = (torch.cat((part, part), -1) for part in (rows[..., :half], rows[..., half:]))
        return self._turn(query, cos, sin), None if key is None else self._turn(key, cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """cos and sin [T, R].  Written as transformers does for one sequence: the trainer's fusion looks for that."""
        heads = x.view(1, x.shape[0], -1, self.head_size).transpose(1, 2)
        cos, sin = (angle.unsqueeze(0).unsqueeze(1) for angle in (cos, sin))
        return rotate(heads, cos, sin).transpose(1, 2).reshape(x.shape)


# -------------------------------------------------------------------------------------------------- registration


class RopesByKind(dict):
    """vLLM's table of shared rotary embeddings, kept apart for exact and stock models, which may share all parameters.

    It also refuses, in an exact model, a kind of rotary embedding that has no exact formula here.
    """

    def __contains__(self, key) -> bool:
        return super().__contains__((exact_ops_requested(), key))

    def __getitem__(self, key):
        return super().__getitem__((exact_ops_requested(), key))

    def __setitem__(self, key, rope) -> None:
        exact = exact_ops_requested()
        if exact and not isinstance(rope, ExactRotaryEmbedding):
            raise ValueError(f"rotary embedding {type(rope).__name__}: ops exact has no formula for it")
        super().__setitem__((exact, key), rope)


def register() -> None:
    """Once per process (see `jetgraph_vllm.register`)."""
    for replacement in (ExactRMSNorm, ExactSiluAndMul, ExactRotaryEmbedding):
        stock = replacement.stock
        CustomOp.register_oot(name=stock.__name__)(replacement)
        replacement.name = stock.name  # what `custom_ops=["+rms_norm"]` refers to
    rotary_embedding._ROPE_DICT = RopesByKind()

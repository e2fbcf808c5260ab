"""Rows of the layers that are not linears: head, embedding, norms, activations, rotary tables, attention.

Their weights are BF16 in every policy; what tells engines apart is where they round.  Each statement about a stock
layer's arithmetic is one that `jetgraph attest` measured, with its number in docs/findings.md; a layer of which nothing
was measured has unknown arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from jetgraph.audit import UNKNOWN, Quantiser, Role, Row
from jetgraph.audit.rows import TRAINING

MEASURED = {
    ("RMSNorm", "cuda"): "rounds once, after the weight [F1]",
    ("RMSNorm", "native"): "rounds as Hugging Face, but norms the unrounded sum [F2]",
    ("RMSNorm", "cpu"): "truncates to BF16 on AVX2 [F12]",
    ("SiluAndMul", "cuda"): TRAINING,  # [F11]
    ("SiluAndMul", "cpu"): "truncates to BF16 on AVX2 [F12]",
    ("RotaryEmbedding", "cuda"): "rounds once [F3]",
    ("RotaryEmbedding", "cpu"): "truncates to BF16 on AVX2 [F12]",
}
"""(class, way it runs) → what its arithmetic was found to be, against Hugging Face's."""


def other_rows(model: torch.nn.Module) -> Iterator[Row]:
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    for fqn, module in model.named_modules(remove_duplicate=False):  # a tied head may be the embedding itself
        if isinstance(module, ParallelLMHead) or (fqn == "lm_head" and isinstance(module, VocabParallelEmbedding)):
            yield _table(fqn, module, Role.HEAD)
        elif isinstance(module, VocabParallelEmbedding):
            yield _table(fqn, module, Role.EMBEDDING)
        elif isinstance(module, Attention):
            yield _attention(fqn, module)
        elif isinstance(module, CustomOp) and (role := _role(module)) is not None:
            yield _operator(fqn, module, role)


def _table(fqn: str, module: Any, role: Role) -> Row:
    weight = module.weight
    dtype = str(weight.dtype).removeprefix("torch.")
    quantiser = Quantiser({"bfloat16": "bf16", "float32": "f32", "float16": "f16"}.get(dtype, dtype))
    return Row(
        fqn,
        role,
        fqn,
        type(module.quant_method).__name__,
        quantiser,
        quantiser if role is Role.HEAD else None,
        layout=f"{list(weight.shape)} {dtype} strides {list(weight.stride())}",
    )


def _attention(fqn: str, module: Any) -> Row:
    declared = str(getattr(module, "kv_cache_dtype", "auto"))
    dtype = str(getattr(module, "kv_cache_torch_dtype", torch.bfloat16)).removeprefix("torch.")
    kv_cache = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}.get(dtype, dtype)
    exact = type(module.impl).__module__.startswith("jetgraph_vllm.")
    return Row(
        fqn,
        Role.ATTENTION,
        fqn,
        type(module.impl).__name__,
        kv_cache=kv_cache if declared in ("auto", "bfloat16") else declared,
        arithmetic=TRAINING if exact else UNKNOWN,
    )


def _role(module: torch.nn.Module) -> Role | None:
    names = [cls.__name__ for cls in type(module).__mro__]
    if any(name.endswith("RMSNorm") for name in names):
        return Role.NORM
    if any(name.endswith("AndMul") for name in names):
        return Role.ACTIVATION
    if any(name.endswith("RotaryEmbedding") for name in names):
        return Role.ROTARY
    return None


def _operator(fqn: str, module: Any, role: Role) -> Row:
    exact = type(module).__module__.startswith("jetgraph_vllm.")
    way = _way(module)
    weight = getattr(module, "weight", None)
    arithmetic = TRAINING if exact else MEASURED.get((type(module).__name__, way), UNKNOWN)
    return Row(
        fqn,
        role,
        fqn,
        type(module).__name__ + ("" if exact else f" ({way})"),
        Quantiser({torch.bfloat16: "bf16", torch.float32: "f32"}.get(weight.dtype, str(weight.dtype)))
        if isinstance(weight, torch.Tensor)
        else None,
        arithmetic=arithmetic,
    )


def _way(module: Any) -> str:
    """Which of a custom op's implementations it dispatches to: cuda, native, cpu …"""
    method = getattr(module, "_forward_method", None)
    name = getattr(method, "__name__", "") or getattr(getattr(method, "__wrapped__", None), "__name__", "")
    return name.removeprefix("forward_") or UNKNOWN

"""Put the records of a live engine together into one `EngineCapture`."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform

from jetgraph.record import Op
from jetgraph.versions import versions
from jetgraph_vllm import capture
from jetgraph_vllm.capture_format import AttentionAttributes, EngineCapture, LinearPart

_RECORDED_ENVIRONMENT = (
    "OMP_NUM_THREADS", "JETGRAPH_PLAIN_LINEAR", "JETGRAPH_PIECES", "VLLM_CPU_KVCACHE_SPACE", "VLLM_BATCH_INVARIANT",
    "VLLM_USE_V2_MODEL_RUNNER",
)  # fmt: skip


def collect(
    engine: Any,
    bodies: list[capture.LiveGraph],
    heads: list[capture.LiveGraph],
    recorder: capture.Recorder,
    sampler: list[Op],
    *,
    with_values: bool,
) -> EngineCapture:
    """``engine`` is a `jetgraph_vllm.engine.Engine`, or has its live parts; ``bodies``, ``heads``: what it compiled."""
    model = engine.model
    if len(bodies) != 1:
        raise RuntimeError(f"the engine compiled {len(bodies)} body graphs, expected exactly one without graph breaks")
    tensors, aliases, names = live_tensors(model)
    return EngineCapture(
        model=str(engine.model_dir),
        config=engine.checkpoint_config,
        body=capture.describe_graph(bodies[0], names),
        heads=[capture.describe_graph(head, names) for head in heads],
        attention=attention_attributes(model),
        linears=linear_parts(model),
        tensors={name: tensor.detach().clone() for name, tensor in tensors.items()} if with_values else {},
        aliases=aliases,
        sampler=sampler,
        settings={**settings(engine), "executed_by": bodies[0].executed_by},
        body_calls=list(recorder.body_calls),
        head_calls=list(recorder.head_calls),
    )


def live_tensors(
    model: torch.nn.Module,
) -> tuple[dict[str, Tensor], dict[str, str], dict[tuple[int, tuple[int, ...]], tuple[str, str]]]:
    """Parameters and buffers by first name; further names; and (address, shape) → (kind, first name)."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[tuple[int, tuple[int, ...]], tuple[str, str]] = {}
    named = [("parameter", *item) for item in model.named_parameters(remove_duplicate=False)]
    named += [("buffer", *item) for item in model.named_buffers(remove_duplicate=False)]
    for kind, name, tensor in named:
        key = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and key in names:
            aliases[name] = names[key][1]
            continue
        names[key] = (kind, name)
        tensors[name] = tensor
    return tensors, aliases, names


def attention_attributes(model: torch.nn.Module) -> list[AttentionAttributes]:
    fqns = {id(module): name for name, module in model.named_modules()}
    return [
        AttentionAttributes(
            fqn=fqns[id(layer)],
            layer_name=layer.layer_name,
            impl=f"{type(layer.impl).__module__}.{type(layer.impl).__qualname__}",
            scale=float(layer.impl.scale),
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_size=layer.head_size,
            sliding_window=layer.sliding_window,
            logits_soft_cap=layer.impl.logits_soft_cap or None,
            kv_cache_dtype=layer.kv_cache_dtype,
        )
        for layer in capture.attention_layers(model)
    ]


def linear_parts(model: torch.nn.Module) -> dict[str, list[LinearPart]]:
    """Every linear's parts; ours know them, of stock ones the sizes are live and the names the model's mapping."""
    from vllm.model_executor.layers.linear import LinearBase

    packed = getattr(model, "packed_modules_mapping", {})
    parts: dict[str, list[LinearPart]] = {}
    for fqn, module in model.named_modules():
        if not isinstance(module, LinearBase):
            continue
        own = getattr(module.quant_method, "parts", None)
        if own is not None:
            has_scales = hasattr(module, "weight_scale_inv")
            parts[fqn] = [LinearPart(p.name, p.rows, p.scale_rows if has_scales else None) for p in own]
            continue
        sizes = getattr(module, "output_partition_sizes", None) or [module.output_size]
        parent, _, leaf = fqn.rpartition(".")
        names = packed.get(leaf, [leaf])
        parts[fqn] = _stack([f"{parent}.{name}" for name in names], sizes)
    return parts


def _stack(names: list[str], sizes: list[int]) -> list[LinearPart]:
    parts, row = [], 0
    for name, size in zip(names, sizes, strict=True):
        parts.append(LinearPart(name, (row, row + size), None))
        row += size
    return parts


def settings(engine: Any) -> dict[str, Any]:
    """The configuration under which the capture holds."""

    config = engine.config
    compilation = config.compilation_config
    return {
        "device_type": current_platform.device_type,
        "compilation_mode": int(compilation.mode),
        "compilation_backend": str(compilation.backend),
        "custom_ops": list(compilation.custom_ops),
        "enforce_eager": bool(config.model_config.enforce_eager),
        "quantization": config.model_config.quantization,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_model_len": config.model_config.max_model_len,
        "block_size": config.cache_config.block_size,
        "num_blocks": config.cache_config.num_gpu_blocks,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "enable_prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "logprobs_mode": str(config.model_config.logprobs_mode),
        "versions": versions("vllm", "torch", "transformers"),
        "num_threads": torch.get_num_threads(),
        "device": platform.machine(),
        "environment": {name: os.environ[name] for name in _RECORDED_ENVIRONMENT if name in os.environ},
    }

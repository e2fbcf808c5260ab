"""What no graph shows, read from a live stock engine: tensor digests, kernels, attention, rotary table, settings.

Part of `jetgraph_vllm.stock_capture`; everything here is plain data for its JSON file.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

import torch

from jetgraph.digest import tensor_digest
from jetgraph.versions import versions


def live_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    from jetgraph_vllm.collect import live_tensors as collected

    return collected(model)[0]


def live_names(model: torch.nn.Module) -> dict[Any, tuple[str, str]]:
    from jetgraph_vllm.collect import live_tensors as collected

    return collected(model)[2]


def attention(model: torch.nn.Module) -> list[dict[str, Any]]:
    from jetgraph_vllm.collect import attention_attributes

    return [dataclasses.asdict(layer) for layer in attention_attributes(model)]


def fact(tensor: torch.Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"shape": list(tensor.shape), "dtype": dtype, "digest": tensor_digest(tensor)}


def linears(model: torch.nn.Module, folder: Path) -> dict[str, Any]:
    """Per vLLM module: its checkpoint parts, the kernel chosen at load, and the digest of each part as stored.

    ``codes_changed`` counts codes that are not the checkpoint's any more: the engine quantised again at load.
    """
    from jetgraph.export import read_tensors
    from jetgraph_vllm.collect import linear_parts

    found = {}
    given = dict(read_tensors(folder))
    modules = dict(model.named_modules())
    for fqn, parts in linear_parts(model).items():
        module = modules[fqn]
        method = module.quant_method
        kernel = getattr(method, "fp8_linear", None) or getattr(method, "kernel", None)
        weight = module.weight.detach()
        scales = getattr(module, "weight_scale_inv", None)
        if scales is None:
            scales = getattr(module, "weight_scale", None)
        described, scale_row = [], 0
        for part in parts:
            start, stop = part.rows
            entry: dict[str, Any] = {"name": part.name, "rows": [start, stop]}
            plain = weight.ndim == 2 and weight.shape[0] == parts[-1].rows[1]
            if plain and scales is None:
                entry["digest"] = tensor_digest(weight[start:stop])
            elif plain and scales is not None and scales.ndim == 2 and weight.dtype == torch.float8_e4m3fn:
                rows = -(-(stop - start) // 128)
                part_scales = scales[scale_row : scale_row + rows]
                entry |= {
                    "scale_rows": [scale_row, scale_row + rows],
                    "digest": tensor_digest(weight[start:stop], part_scales),
                    "codes_digest": tensor_digest(weight[start:stop]),
                    "powers_of_two": bool((torch.frexp(part_scales.float().cpu())[0] == 0.5).all()),
                }
                scale_row += rows
                entry |= _changes(given, part.name, weight[start:stop], part_scales)
            described.append(entry)
        found[fqn] = {
            "method": type(method).__name__,
            "kernel": type(kernel).__name__ if kernel is not None else "",
            "weight": [list(weight.shape), str(weight.dtype)],
            "scales": None if scales is None else [list(scales.shape), str(scales.dtype), list(scales.stride())],
            "block": list(getattr(module, "weight_block_size", None) or []),
            "parts": described,
        }
    return found


def _changes(given: dict[str, torch.Tensor], name: str, codes: torch.Tensor, scales: torch.Tensor) -> dict[str, Any]:
    """What loading changed, and the digest of what the checkpoint holds."""
    was, was_scales = given.get(f"{name}.weight"), given.get(f"{name}.weight_scale_inv")
    if was is None or was_scales is None or was.dtype != codes.dtype or was.shape != codes.shape:
        return {}
    changed = was.view(torch.uint8) != codes.cpu().view(torch.uint8)
    return {
        "checkpoint_digest": tensor_digest(was, was_scales),
        "codes_changed": int(changed.sum()),
        "scales_changed": int((was_scales != scales.float().cpu()).sum()),
    }


def rotary(model: torch.nn.Module, config: dict[str, Any]) -> dict[str, Any]:
    """How many entries of the live tables differ from cos/sin(position · inv_freq), by where that is evaluated.

    The engine's own device comes first: of a short table several formulas are true, and that one is what was done.
    """
    tables = {n: b for n, b in model.named_buffers() if n.endswith("cos_sin_cache")}
    found = {}
    for name, live in tables.items():
        size = live.shape[1]
        entry: dict[str, Any] = {"shape": list(live.shape), "dtype": str(live.dtype), "device": str(live.device)}
        entry["digest"] = tensor_digest(live)
        entry["formulas"] = []
        places = list(dict.fromkeys((live.device.type, "cpu")))
        for of_frequency in places:
            inv_freq = inverse_frequencies(config, size, of_frequency)
            for of_table in places:
                positions = torch.arange(live.shape[0], device=of_table).float()
                angle = positions[:, None] * inv_freq.to(of_table)[None]
                table = torch.cat((angle.cos(), angle.sin()), 1).to(live.dtype)
                differing = int((table.to(live.device) != live).sum())
                entry["formulas"].append(
                    {
                        "inv_freq": of_frequency,
                        "table": of_table,
                        "differing": differing,
                        "inv_freq_digest": tensor_digest(inv_freq),
                    }
                )
        found[name] = entry
    return found


def inverse_frequencies(config: dict[str, Any], size: int, device: str) -> torch.Tensor:
    """FP32 [size/2]: 1/θ^(2i/size), evaluated on ``device`` (``pow`` has other bits on the GPU)."""
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    exponent = torch.arange(0, size, 2, dtype=torch.int64, device=device).to(torch.float) / size
    return 1.0 / (rope["rope_theta"] ** exponent)


def settings(config: Any) -> dict[str, Any]:
    """The configuration under which the capture holds."""

    compilation = config.compilation_config
    cuda = torch.cuda.is_available()
    return {
        "mode": int(compilation.mode),
        "backend": str(compilation.backend),
        "custom_ops": list(compilation.custom_ops),
        "cudagraph_mode": str(compilation.cudagraph_mode),
        "splitting_ops": list(compilation.splitting_ops or []),
        "pass_config": {k: v for k, v in dataclasses.asdict(compilation.pass_config).items() if v is not None},
        "ir_op_priority": _priorities(config),
        "enabled_custom_ops": dict(compilation.enabled_custom_ops),
        "disabled_custom_ops": dict(compilation.disabled_custom_ops),
        "enforce_eager": bool(config.model_config.enforce_eager),
        "quantization": str(config.model_config.quantization),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "block_size": config.cache_config.block_size,
        "max_model_len": config.model_config.max_model_len,
        "logprobs_mode": str(config.model_config.logprobs_mode),
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "device": torch.cuda.get_device_name() if cuda else platform.machine(),
        "capability": list(torch.cuda.get_device_capability()) if cuda else None,
        "versions": versions("vllm", "torch"),
        "environment": {n: v for n, v in sorted(os.environ.items()) if n.startswith("VLLM_") and "PATH" not in n},
    }


def _priorities(config: Any) -> dict[str, list[str]]:
    priority = getattr(getattr(config, "kernel_config", None), "ir_op_priority", None)
    return {} if priority is None else {k: list(v) for k, v in vars(priority).items() if isinstance(v, (list, tuple))}

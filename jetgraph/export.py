"""Write the checkpoint that a rollout engine loads: the trainer's codes and scales, and the declaration of both.

    export_checkpoint("SmolLM2-135M-Instruct", "out", policy="jet")

The codes come from `torch.ops.jetgraph.quantize`, the operator that training runs, so the engine's weights are
training's quantised weights bit for bit.  The folder is also what vLLM and transformers know as block FP8
(``weight_scale_inv`` holds the dequantising scale), with one more entry, ``quantization_config["jetgraph"]``.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetgraph.lowering import torch_ops
from jetgraph.policy import LinearPrecision, Policy, get_policy
from jetgraph.precision import BF16

_NOT_LINEAR = re.compile(r".*(embed|norm).*")


def export_checkpoint(
    model_dir: str | Path, out_dir: str | Path, policy: str | Policy = "jet", ops: str = "exact"
) -> Path:
    """Export a Hugging Face folder for the rollout of ``policy``; returns ``out_dir``.

    Args:
        ops: ``exact`` asks the plugin for the trainer's operators (norm, rotary, activation, attention, head).

    Raises:
        ValueError: the folder has no safetensors, is quantised already, has a weight that is not BF16, or the policy
            wants more than one FP8 recipe (the checkpoint format declares one).
    """
    chosen = get_policy(policy)
    source, target = Path(model_dir), Path(out_dir)
    config = json.loads((source / "config.json").read_text())
    if "quantization_config" in config:
        raise ValueError(f"{source} is already quantised: export from the bf16 folder")
    if target.resolve() == source.resolve():
        raise ValueError(f"exporting {source} onto itself would destroy the BF16 masters: choose another folder")
    tensors: dict[str, Tensor] = {}
    linears: dict[str, LinearPrecision] = {}
    for name, value in read_tensors(source):
        module, _, leaf = name.rpartition(".")
        precision = chosen.linear(module, rollout=True)
        if leaf != "weight" or value.ndim != 2 or _NOT_LINEAR.fullmatch(module):
            tensors[name] = value.contiguous()
            continue
        linears[module] = precision
        tensors |= export_linear(name, value, precision)
    config["quantization_config"] = declare(chosen, ops, linears)
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    copy_other_files(source, target)
    return target


def declare(policy: Policy, ops: str, linears: dict[str, LinearPrecision]) -> dict[str, Any]:
    """The ``quantization_config`` that says what the folder holds and how the engine is to compute."""
    recipes = {(p.activation, p.weight) for p in linears.values() if p.quantized}
    if len(recipes) > 1:
        raise ValueError(f"policy {policy.name!r} has {len(recipes)} FP8 recipes; a checkpoint declares one")
    activation, weight = recipes.pop() if recipes else (BF16, BF16)
    own = {"policy": policy.name, "ops": ops, "activation": str(activation), "weight": str(weight)}
    if weight.scale is None:
        return {"quant_method": "jetgraph", "jetgraph": own}
    block = weight.scale.granularity
    kept = [name for name, p in linears.items() if not p.quantized]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block.rows, block.cols],
        "modules_to_not_convert": sorted({*kept, "lm_head"}),
        "jetgraph": own,
    }


def export_linear(name: str, value: Tensor, precision: LinearPrecision) -> dict[str, Tensor]:
    """A linear's weight, or its codes and scales."""
    if precision.weight.scale is None:
        return {name: value.contiguous()}
    if value.dtype != torch.bfloat16:
        raise ValueError(f"{name} is {value.dtype}, expected bfloat16: training quantises the bf16 weight")
    codes, scale = torch.ops.jetgraph.quantize(value, *torch_ops.scale_arguments(precision.weight.scale))
    return {name: codes, f"{name}_scale_inv": scale}


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder's safetensors files, sharded or not."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no *.safetensors files")
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  (a safetensors handle is not a dict)
                yield name, handle.get_tensor(name)


def copy_other_files(source: Path, target: Path) -> None:
    """Tokenizer, chat template and generation settings; not weights, their index, or the config."""
    for file in source.iterdir():
        is_weight = ".safetensors" in file.name or file.suffix in (".bin", ".pt", ".pth")
        if file.is_file() and not is_weight and file.name != "config.json":
            shutil.copy2(file, target / file.name)

"""Write the checkpoint that a rollout engine loads: the trainer's codes and scales, and the declaration of both.

    export_checkpoint("SmolLM2-135M-Instruct", "out", policy="jet")

The folder's tensors are matched to the model's linears by name, and a linear that the policy quantises but the folder
does not have is an error: nothing is FP8 in training and BF16 in the rollout because of a prefix.

The codes come from `torch.ops.jetgraph.quantize`, the operator that training runs, so the engine's weights are
training's quantised weights bit for bit.  The folder is also what vLLM and transformers know as block FP8
(``weight_scale_inv`` holds the dequantising scale), with one more entry, ``quantization_config["jetgraph"]``: the two
precisions and the whole policy.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetgraph.engines import check_merged
from jetgraph.followed import get_followed
from jetgraph.lowering import torch_ops
from jetgraph.model_linears import ModelLinears, linears_of_config
from jetgraph.policy import LinearPrecision, Policy, PolicyError, check_matches, get_policy, nearest
from jetgraph.precision import BF16, Granularity


def export_checkpoint(
    model_dir: str | Path,
    out_dir: str | Path,
    policy: str | Policy = "jet",
    ops: str = "exact",
    device: torch.device | str = "cpu",
    engine: str | None = None,
) -> Path:
    """Export a Hugging Face folder for the rollout of ``policy``; returns ``out_dir``.

    Args:
        ops: ``exact`` asks the plugin for the trainer's operators (norm, rotary, activation, attention, head).
        device: where weights are quantised; the codes are the same everywhere.
        engine: as of `jetgraph.compile`: an engine whose own kernels training follows.  The folder then says no word of
            jetgraph, so our plugin leaves it alone, and ``ops`` decides nothing.

    Raises:
        ValueError: the folder is no causal LM's, has no safetensors, is quantised already, or has a weight to quantise
            that is not BF16.
        PolicyError: the policy does not fit the model or what engines can load: a rule decides nothing, a linear to
            quantise is not in the folder under its name, parts of a merged module differ, the head is quantised, or
            there is more than one FP8 recipe (the checkpoint format declares one).
    """
    chosen = get_policy(policy) if engine is None else get_followed(engine).policy(get_policy(policy))
    source, target = Path(model_dir), Path(out_dir)
    config = json.loads((source / "config.json").read_text())
    if "quantization_config" in config:
        raise ValueError(f"{source} is already quantised: export from the bf16 folder")
    if target.resolve() == source.resolve():
        raise ValueError(f"exporting {source} onto itself would destroy the BF16 masters: choose another folder")
    linears = rollout_linears(chosen, linears_of_config(source))
    config["quantization_config"] = declare(chosen, ops, linears)
    if engine is not None:
        _for_other_readers(config, chosen)
    tensors: dict[str, Tensor] = {}
    for name, value in read_tensors(source):
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module in linears:
            exported = export_linear(name, value.to(device), linears[module])
            tensors |= {each: tensor.cpu() for each, tensor in exported.items()}
        else:
            tensors |= export_linear(name, value, LinearPrecision())
    missing = [f"{name}.weight" for name, p in linears.items() if p.quantized and f"{name}.weight" not in tensors]
    if missing:
        raise PolicyError(
            f"policy {chosen.name!r} quantises {missing[0]} ({len(missing)} such), which {source} does not have under "
            f"that name; nearest: {', '.join(nearest(missing[0], list(tensors)))}"
        )
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    copy_other_files(source, target)
    return target


def rollout_linears(policy: Policy, model: ModelLinears) -> dict[str, LinearPrecision]:
    """Every linear of the model and what the rollout of ``policy`` makes of it.

    Raises:
        PolicyError: see `export_checkpoint`.
    """
    check_matches(policy, model.shapes)
    check_merged(policy, model.shapes)
    linears = {name: policy.linear(name, rollout=True) for name in model.shapes}
    if model.head is not None and linears[model.head].quantized:
        raise PolicyError(f"policy {policy.name!r} quantises {model.head}, the output head: engines keep it in BF16")
    return linears


def declare(policy: Policy, ops: str, linears: dict[str, LinearPrecision]) -> dict[str, Any]:
    """The ``quantization_config`` that says what the folder holds and how the engine is to compute."""
    recipes = {(p.activation, p.weight) for p in linears.values() if p.quantized}
    if len(recipes) > 1:
        raise PolicyError(f"policy {policy.name!r} has {len(recipes)} FP8 recipes; a checkpoint declares one")
    activation, weight = recipes.pop() if recipes else (BF16, BF16)
    own = {
        "policy": policy.name,
        "ops": ops,
        "activation": str(activation),
        "weight": str(weight),
        "rules": policy.to_plain(),
    }
    if weight.scale is None or weight.scale.granularity == Granularity.per_tensor():
        return {"quant_method": "jetgraph", "jetgraph": own}  # no other reader must take it for block FP8
    block = weight.scale.granularity
    kept = [name for name, p in linears.items() if not p.quantized]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [block.rows, block.cols],
        "modules_to_not_convert": sorted({*kept, "lm_head"}),
        "jetgraph": own,
    }


def _for_other_readers(config: dict[str, Any], policy: Policy) -> None:
    """Take our own words out of ``config``; what is left is block FP8 as engines know it, or plain BF16."""
    quantization = config["quantization_config"]
    del quantization["jetgraph"]
    if "weight_block_size" not in quantization:
        del config["quantization_config"]
        if any(rule.fp8 for rule in policy.rollout):
            raise PolicyError(f"policy {policy.name!r} has no block scales, which no other reader of the folder knows")


def declared_policy(declaration: dict[str, Any]) -> Policy:
    """The policy that an exported folder's ``quantization_config["jetgraph"]`` was written for.

    Raises:
        ValueError: it holds none, or one that cannot be read.
    """
    if "rules" in declaration:
        return Policy.from_plain(declaration["rules"])
    return get_policy(declaration.get("policy", "bf16"))


def policy_of_folder(folder: Path) -> Policy | None:
    """The policy that a model folder declares; None if jetgraph did not export it."""
    quantization = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    return declared_policy(quantization["jetgraph"]) if "jetgraph" in quantization else None


def export_linear(name: str, value: Tensor, precision: LinearPrecision) -> dict[str, Tensor]:
    """A tensor as it is, or a linear's weight as codes and scales."""
    if value.dtype.itemsize == 1 and value.is_floating_point():
        raise ValueError(f"{name} is {value.dtype} already: export from the bf16 folder")
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

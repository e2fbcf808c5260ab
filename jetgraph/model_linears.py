"""The linears of a Hugging Face model, known from its config alone: no weights are read, none are allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class ModelLinears:
    """FQN → (out, in) of every `nn.Linear`, in the order of the model, and which of them is the output head."""

    architecture: str
    shapes: dict[str, tuple[int, int]]
    head: str | None


def linears_of_model(model: torch.nn.Module) -> ModelLinears:
    """What a live model, or one on the meta device, has."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None  # type: ignore[operator]
    shapes = {name: (module.out_features, module.in_features) for name, module in found.items()}
    return ModelLinears(
        type(model).__name__, shapes, next((name for name, module in found.items() if module is head), None)
    )


def linears_of_config(path: str | Path) -> ModelLinears:
    """The linears that the causal LM of a model folder, or of a ``config.json``, has in transformers.

    Raises:
        ValueError: there is no config, or transformers has no causal LM for it.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} is neither a model folder with a config.json nor such a file")
    try:
        config = AutoConfig.from_pretrained(file)
        config.__dict__.pop("quantization_config", None)  # its linears would be of other classes, by the same names
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise ValueError(f"{file}: no causal LM can be made from it: {str(error).splitlines()[0][:200]}") from error
    return linears_of_model(model)

"""What a model may hold to be compiled: dense decoders of `nn.Linear`, refused by name and reason otherwise.

The compiler knows no model family.  It relies on a few properties, and this module checks each of them on the live
model: every weight that is multiplied is an `nn.Linear`'s (or an embedding table), attention is looked up in
transformers' registry under a mask of a known class, and no layer is random.  What cannot be seen on modules, a mask or
an attention option, is refused where it appears (`jetgraph.lowering.masks`, `jetgraph.lowering.attention`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from jetgraph.errors import CompileError

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class UnsupportedModel(CompileError):
    """The model holds something whose precision flow the compiler cannot state: names it, says why and what to do."""


def check_supported(model: nn.Module, *, reference_attention: bool = True) -> None:
    """Refuse a model with a construct that is not supported; collects all, then raises once.

    Args:
        reference_attention: whether the model will run `jetgraph::attention` (provider ``reference``).

    Raises:
        UnsupportedModel: the FQN, the construct and the reason of each (the first eight are printed).
    """
    found = [*_architecture(model), *_modules(model)]
    if reference_attention:
        found += _attention(model)
    if found:
        more = f"\n  … and {len(found) - 8} more" if len(found) > 8 else ""
        lines = "".join(f"\n  {fqn}: {reason}" for fqn, reason in found[:8])
        raise UnsupportedModel(f"{type(model).__name__} is not supported:{lines}{more}")


def _architecture(model: nn.Module) -> Iterator[tuple[str, str]]:
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        yield "config.is_encoder_decoder", "True; expected a decoder: cross attention is not supported"
    if not getattr(config, "is_causal", True):
        yield "config.is_causal", "False; expected causal attention"
    if getattr(config, "use_bidirectional_attention", None):
        yield "config.use_bidirectional_attention", f"{config.use_bidirectional_attention!r}; expected causal attention"
    if config is not None and config.get_text_config() is not config:
        yield "config", "a composite of several models; load its text model alone, as in AutoModelForCausalLM"
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in LAYER_TYPES:
            yield f"config.layer_types[{index}]", f"{kind}; expected {' or '.join(sorted(LAYER_TYPES))}"


def _modules(model: nn.Module) -> Iterator[tuple[str, str]]:
    experts: str | None = None
    for fqn, module in model.named_modules():
        if experts is not None and fqn.startswith(experts):
            continue
        kind = type(module).__name__
        if _routes(module):
            experts = f"{fqn}."
            yield fqn, f"{kind} routes tokens to experts; mixtures of experts are not supported, use a dense model"
        elif kind == "Conv1D":
            yield fqn, "Conv1D stores its weight as [in, out]; expected nn.Linear: use a family that is built of it"
        elif isinstance(module, nn.Linear):
            if nn.utils.parametrize.is_parametrized(module):
                yield fqn, "its weight is parametrized; expected a plain parameter: remove the parametrization"
            elif "forward" in module.__dict__:
                yield fqn, "its forward is replaced on the instance; expected nn.Linear's: compile before patching"
        elif not isinstance(module, nn.Embedding):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.ndim >= 2:
                    shape = list(parameter.shape)
                    yield (
                        f"{fqn}.{name}",
                        f"a weight {shape} of {kind}; expected every weight in nn.Linear or nn.Embedding",
                    )
        for name, chance in _dropouts(module):
            yield fqn, f"{name} of {chance}; expected 0, because a rollout drops nothing: set it in the configuration"


def _routes(module: nn.Module) -> bool:
    """Whether a module chooses experts: its own name says so, or it holds the experts or the router."""
    if type(module).__name__.endswith(("MoE", "Moe", "MoeBlock")):
        return True
    return any(type(child).__name__.endswith(("Experts", "Router")) for child in module.children())


def _dropouts(module: nn.Module) -> Iterator[tuple[str, float]]:
    """Chances above 0 that a module holds: `nn.Dropout`'s, and those that its forward gives to a function."""
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        yield "dropout", module.p
    for name, value in vars(module).items():
        if "drop" in name and isinstance(value, float) and value > 0:
            yield name, value


def _attention(model: nn.Module) -> Iterator[tuple[str, str]]:
    if not getattr(type(model), "_supports_attention_backend", False):
        yield (
            "model",
            f"{type(model).__name__} does not look its attention up in transformers' registry "
            "(_supports_attention_backend), so its attention and masks cannot be known",
        )
    config = getattr(model, "config", None)
    if getattr(config, "kv_lora_rank", None):
        yield "config.kv_lora_rank", "multi-head latent attention has values of another size than its keys"
    for fqn, module in model.named_modules():
        if isinstance(getattr(module, "sinks", None), torch.Tensor):
            yield f"{fqn}.sinks", "attention sinks: the reference attention has none"

"""Give a Hugging Face model the row-invariant attention that the rollout also runs.

transformers looks attention and masks up by name, so registering `jetgraph` and setting the model's configuration is
enough.  Masks are made once per forward, outside the compiled blocks, by `jetgraph.lowering.masks`; what a layer then
receives is a proven `Mask`.

Compiles: a `Mask` without ``first`` and one with it are two variants of a block (a graph without and with that input);
lengths and batches add none.  A model with sliding and full layers has both kinds of block.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

from jetgraph.lowering import masks
from jetgraph.lowering.masks import Mask, UnknownMask, check_call, classify

NAME = "jetgraph"

_WITHOUT_EFFECT = frozenset(
    {
        "position_ids",
        "cache_position",
        "past_key_values",
        "use_cache",
        "return_dict",
        "output_hidden_states",
        "num_items_in_batch",
        "is_causal",
    }
)
"""Options that reach the attention function and say nothing about it.  Whether it is causal, the `Mask` says."""


def register() -> None:
    """Tell transformers what the attention implementation `jetgraph` is; a model that names it may come by pickle."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, classify)


def use_reference_attention(model: PreTrainedModel) -> None:
    """Switch ``model`` to `jetgraph::attention`."""
    register()
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = model.config  # the model's own copy, so that no other model is switched
    model.config._attn_implementation = NAME
    decoder = model.base_model
    if _read_call not in decoder._forward_pre_hooks.values():  # a deep copy brings the hook along
        decoder.register_forward_pre_hook(_read_call, with_kwargs=True)


def proven_plain(model: torch.nn.Module) -> Callable[..., contextlib.AbstractContextManager]:
    """For a model traced whole: a context that checks a call of ``model`` and vouches for its masks meanwhile."""
    signature = inspect.signature(model.forward)

    def prove(*args: Any, **kwargs: Any) -> contextlib.AbstractContextManager:
        named = signature.bind_partial(*args, **kwargs).arguments
        if not getattr(model.config, "is_causal", True):
            raise UnknownMask("config.is_causal is False", "the reference attention is causal")
        return masks.proven_plain(named | named.pop("kwargs", {}))

    return prove


def _read_call(decoder: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Check the sequences that a call describes; cu_seq_lens then has done its work and stays out of the graphs."""
    if masks.traced_whole():
        return args, kwargs
    named = inspect.signature(decoder.forward).bind_partial(*args, **kwargs).arguments
    check_call(named | named.pop("kwargs", {}))
    return args, {n: v for n, v in kwargs.items() if not n.startswith(("cu_seq_lens_", "max_length_"))}


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface of transformers; every argument is read or refused.

    Raises:
        UnknownMask: the mask was not made by `classify`, or its window is not the layer's.
        NotImplementedError: dropout, a value size that is not the key size, or an option not known here.
    """
    if not isinstance(attention_mask, Mask):
        raise UnknownMask(
            f"{type(module).__name__} got a mask of type {type(attention_mask).__name__}",
            "pass attention_mask as [batch, length] of 0 and 1, or None",
        )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise UnknownMask(f"{type(module).__name__} has is_causal=False", "the reference attention is causal")
    window = sliding_window or 0
    if window != int(attention_mask.window):
        raise UnknownMask(
            f"{type(module).__name__} has sliding_window={window}, its mask {attention_mask.window}",
            "layer and mask must agree",
        )
    if dropout:
        raise NotImplementedError(f"{type(module).__name__} has dropout={dropout}; expected 0: set attention_dropout=0")
    if value.shape[-1] != key.shape[-1]:
        raise NotImplementedError(f"{type(module).__name__} has values of another head size than its keys")
    # Names first: Dynamo guards on what is looked at, and nobody needs another compile for another position_ids.
    unread = [n for n, v in options.items() if n not in _WITHOUT_EFFECT and v is not None and v is not False]
    if unread:
        raise NotImplementedError(f"{type(module).__name__} passes {', '.join(unread)}: no such reference attention")
    if getattr(module, "rounds_rotary", False):  # an engine is followed whose rotary embedding rounds once
        query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    first = attention_mask.first
    return torch.ops.jetgraph.attention(query, key, value, scale, window, softcap or 0.0, first)[0], None

"""Give a Hugging Face model the row-invariant attention that the rollout also runs.

transformers looks attention up by name, so registering `jetgraph` and setting the model's configuration is enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel

NAME = "jetgraph"


def use_reference_attention(model: PreTrainedModel) -> None:
    """Switch ``model`` to `jetgraph::attention`."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config = model.config  # the model's own copy, so that no other model is switched
    model.config._attn_implementation = NAME


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    window = options.get("sliding_window")
    for name, got in [("dropout", dropout), ("softcap", options.get("softcap")), ("sliding_window", window)]:
        if got and not (name == "sliding_window" and key.shape[2] <= got):
            raise NotImplementedError(f"attention {name}={got}: the reference attention is causal and full")
    if attention_mask is not None:
        raise NotImplementedError("the reference attention takes no mask tensor; see jetgraph.lowering.attention")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return torch.ops.jetgraph.attention(query, key, value, scale), None


def _mask(
    *args: Any,
    attention_mask: torch.Tensor | None = None,
    mask_function: Callable = causal_mask_function,
    **kwargs: Any,
) -> None:
    """Causal attention needs no mask tensor; padding on the right changes only rows that nobody reads.

    Raises:
        ValueError: a sequence is padded on the left or masked inside, or the mask is not causal (a sliding window,
            several sequences packed into one row).
    """
    if mask_function is not causal_mask_function:
        raise ValueError("this batch needs a mask that is not plain causal (packed sequences or a sliding window)")
    if attention_mask is None:
        return
    if attention_mask.ndim != 2:
        raise ValueError(f"attention_mask has {attention_mask.ndim} dimensions; expected [batch, length] of 0 and 1")
    if (attention_mask[:, 1:] > attention_mask[:, :-1]).any():
        raise ValueError("attention_mask: a token follows padding; pad on the right (left padding is not supported)")

"""Which keys a query sees: the class of a transformers mask, proven from what it is built of.

transformers describes a mask by a function of (batch, head, query, key) that it composes from a few of its own, and
hands it to the attention implementation's mask interface.  `classify` takes that function apart.  A part counts as
causal, window or packed when it runs *the very code object* of transformers' function of that meaning; its closure then
holds the parameters.  Anything else is UNKNOWN and raises: no mask is taken for causal because nothing else fits.

| class          | comes from                                          | what the operator gets                  |
|----------------|-----------------------------------------------------|-----------------------------------------|
| causal         | no mask, or padding on the right of every row       | nothing                                 |
| sliding window | `sliding_window` of the configuration or layer      | ``window``, a constant of the layer     |
| packed         | position_ids that restart, no attention_mask        | ``first`` = start of the own sequence   |
| left padding   | attention_mask of zeros, then ones (then zeros)     | ``first`` = number of pads              |

B sequences in a call, n queries, L keys; the queries are the last n of the L positions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    packed_sequence_mask_function,
    sliding_window_overlay,
)


class UnknownMask(ValueError):
    """UNKNOWN mask class: the reference attention cannot say which keys a query sees, so it does not run.

    Arguments: what was found, what to do.  (No `__init__`: Dynamo could not trace it and would report that instead.)
    """

    def __str__(self) -> str:
        what, remedy = self.args
        return f"UNKNOWN mask class: {what}; expected causal, a sliding window, packed sequences or padding; {remedy}"


class Mask(NamedTuple):
    """A proven mask, on its way through the model from where masks are made to the attention of every layer.

    It takes the place of the mask tensor, so a layer that gets none was never proven.
    """

    window: str
    """Number of visible keys, the query's own among them; ``0`` for all.  A string, because Dynamo would turn an int
    that differs between two models into a symbol, and a window is a constant of the layer."""
    first: Tensor | None
    """First visible key of each query, int64 [B, n]; None where every query sees from key 0 on."""


_proven_plain = False
"""Set by `proven_plain` while a whole model is traced: Dynamo cannot take functions apart."""


def traced_whole() -> bool:
    """Whether `proven_plain` has checked the call that is being traced (by this thread: others trace nothing now)."""
    return torch.compiler.is_dynamo_compiling() and _proven_plain


def classify(*args: Any, **kwargs: Any) -> Mask:
    """The mask interface of transformers (`ALL_MASK_ATTENTION_FUNCTIONS`) for `jetgraph::attention`; see `prove`."""
    if traced_whole():
        return Mask(str(kwargs.get("local_size") or 0), None)
    return prove(*args, **kwargs)


@torch.compiler.disable
def prove(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    **_unused: Any,
) -> Mask:
    """The class of one of transformers' masks.

    Args:
        attention_mask: bool [B, kv_offset + L], True for tokens that are no padding.

    Raises:
        UnknownMask: the mask is none of the classes above.
    """
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise UnknownMask(
            f"queries {q_offset} … +{q_length} are not the last positions of keys {kv_offset} … +{kv_length}",
            "use the default (dynamic) cache and an attention_mask as long as the tokens seen so far",
        )
    causal, window, first = False, 0, None
    for part in _conjuncts(mask_function):
        code = getattr(part, "__code__", None)
        if code is _CAUSAL:
            causal = True
        elif code is _WINDOW:
            window = _closure(part)["sliding_window"]
        elif code is _PACKED:
            first = sequence_starts(_closure(part)["packed_sequence_mask"])
        else:
            name = getattr(part, "__qualname__", repr(part)).removesuffix(".<locals>.inner_mask")
            raise UnknownMask(f"the mask is built with {name}", "the reference attention has no such mask")
    if not causal:
        raise UnknownMask("the mask lets a query see keys after it", "use a causal model and mask")
    padding = _left_padding(attention_mask, kv_offset, kv_length)
    if padding is not None:
        padding = padding[:, None].expand(batch_size, q_length)
        first = padding.contiguous() if first is None else torch.maximum(first, padding)
    return Mask(str(window), first)


_CAUSAL = causal_mask_function.__code__
_CONJUNCTION = and_masks().__code__
_WINDOW = sliding_window_overlay(1).__code__
_PACKED = packed_sequence_mask_function(torch.zeros(0)).__code__


def _conjuncts(mask_function: Callable) -> Iterator[Callable]:
    if getattr(mask_function, "__code__", None) is not _CONJUNCTION:
        yield mask_function
        return
    for part in _closure(mask_function)["mask_functions"]:
        yield from _conjuncts(part)


def _closure(function: Any) -> dict[str, Any]:
    return {n: c.cell_contents for n, c in zip(function.__code__.co_freevars, function.__closure__, strict=True)}


def sequence_starts(sequence: Tensor) -> Tensor:
    """First position of the own sequence of every token: [[0, 0, 1, 1, 1, 2]] → [[0, 0, 2, 2, 2, 5]], int64 [B, n].

    Raises:
        UnknownMask: the tokens of a sequence do not lie next to each other.
    """
    step = torch.diff(sequence.to(torch.int64), dim=1)
    if not torch.compiler.is_exporting() and (step < 0).any():  # an export has no values; transformers' never fall
        raise UnknownMask("packed sequences alternate within a row", "lay the tokens of each sequence side by side")
    position = torch.arange(sequence.shape[1], device=sequence.device)
    starts = torch.nn.functional.pad(step != 0, (1, 0), value=True)
    return torch.where(starts, position, 0).cummax(1).values


def _left_padding(attention_mask: Tensor | None, kv_offset: int, kv_length: int) -> Tensor | None:
    """Number of keys [B] to skip in each row, or None if it is 0 in all: right padding follows every real query."""
    if attention_mask is None:
        return None
    if attention_mask.ndim != 2 or attention_mask.shape[1] != kv_offset + kv_length:
        raise UnknownMask(
            f"attention_mask has shape {list(attention_mask.shape)}", f"pass [batch, {kv_offset + kv_length}]"
        )
    real = attention_mask != 0
    begins = real & ~torch.nn.functional.pad(real, (1, 0))[:, :-1]
    if (begins.sum(1) > 1).any():
        raise UnknownMask("attention_mask has padding between real tokens", "pad at the ends of a row only")
    pads = (begins.to(torch.int64).argmax(1) - kv_offset).clamp_min(0)  # 0 where a row holds no real token at all
    return pads if pads.any() else None


@contextlib.contextmanager
def proven_plain(arguments: dict[str, Any]) -> Iterator[None]:
    """While a call with these arguments is traced whole, its masks are plain causal (a layer's window aside).

    Raises:
        UnknownMask: the call has padding, a cache, or positions that restart; only a model compiled block by block
            can tell those masks apart.
    """
    global _proven_plain
    positions = arguments.get("position_ids")
    known = ("attention_mask", "past_key_values", "cu_seq_lens_q", "is_causal")
    odd = [name for name in known if arguments.get(name) is not None]
    if positions is not None and (torch.diff(positions, dim=1) != 1).any():
        odd.append("position_ids that restart")
    if odd:
        raise UnknownMask(f"a model compiled whole got {' and '.join(odd)}", "compile it with scope='blocks'")
    _proven_plain = True
    try:
        yield
    finally:
        _proven_plain = False


def check_call(arguments: dict[str, Any]) -> None:
    """Refuse a mask of the caller's own, and positions that say `packed` beside arguments that say otherwise.

    transformers reads restarting position_ids as packed sequences only without attention_mask and without a cache, and
    reads cu_seq_lens in some attention implementations only.  ``arguments`` are those of the decoder's forward.

    Raises:
        UnknownMask: the arguments contradict each other, or the mask is a custom one of four dimensions.
    """
    positions, padding = arguments.get("position_ids"), arguments.get("attention_mask")
    lengths = arguments.get("cu_seq_lens_q")
    if isinstance(padding, Tensor) and padding.ndim != 2:
        raise UnknownMask(
            f"attention_mask has shape {list(padding.shape)}", "pass [batch, length] of 0 and 1, or position_ids alone"
        )
    if positions is None:
        if lengths is not None:
            raise UnknownMask("cu_seq_lens_q without position_ids", "pass position_ids that restart in every sequence")
        return
    if positions.ndim != 2:
        raise UnknownMask(f"position_ids has shape {list(positions.shape)}", "pass [batch, length]")
    restarts = torch.diff(positions, dim=1) != 1
    if lengths is not None:
        declared = torch.zeros_like(restarts)
        inner = lengths[1:-1].to(torch.int64)
        declared[0, inner[(inner > 0) & (inner < positions.shape[1])] - 1] = True
        if len(positions) != 1 or not torch.equal(declared, restarts):
            raise UnknownMask("cu_seq_lens_q and position_ids name different sequences", "pass position_ids alone")
    cached = arguments.get("past_key_values") is not None or arguments.get("use_cache")
    if isinstance(padding, Tensor):
        real = padding[:, -positions.shape[1] :] != 0
        restarts = restarts & (real[:, 1:] & real[:, :-1])
        cached = True
    if cached and restarts.any():
        raise UnknownMask(
            "position_ids restart among real tokens, beside an attention_mask or a cache",
            "pass packed sequences with position_ids alone and use_cache=False",
        )

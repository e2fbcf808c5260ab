"""Where each checkpoint tensor lives in a loaded vLLM model: one view of the engine's storage per name.

q, k, v (and gate, up) are rows of one parameter, each with its own grid of scales; the embedding's padding rows belong
to no checkpoint tensor; a tied head is another name of the embedding.  Only storage that *is* the checkpoint's layout
can be written in place: a weight that a kernel packed for itself is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from jetgraph.precision import BF16
from jetgraph.sync import Slot, SyncRefused
from jetgraph_vllm.collect import linear_parts


def slots_of(model: torch.nn.Module) -> tuple[dict[str, Slot], dict[str, str]]:
    """Slots by checkpoint name, and further names of tied tensors.

    Raises:
        SyncRefused: a layer's weight is not stored as the checkpoint has it; says which kernel holds it.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    slots: dict[str, Slot] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    parts = linear_parts(model)
    for fqn, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, LinearBase):
            found = list(linear_slots(fqn, module, parts[fqn])) if fqn in parts else []
        elif isinstance(module, VocabParallelEmbedding):
            _refuse_packed_copy(fqn, module)
            found = [(f"{fqn}.{n}", p.data[: module.org_vocab_size], str(BF16)) for n, p in _own(module)]
        else:
            found = [(f"{fqn}.{n}".removeprefix("."), p.data, _plain(p)) for n, p in _own(module)]
        for name, live, precision in found:
            key = (live.data_ptr(), tuple(live.shape))
            if (known := first.setdefault(key, name)) != name:
                aliases[name] = known
            else:
                slots[name] = Slot(name, live, precision)
    return slots, aliases


def _own(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    return module.named_parameters(recurse=False, remove_duplicate=False)


def _plain(tensor: Tensor) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "f32"}.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def _refuse_packed_copy(fqn: str, module: torch.nn.Module) -> None:
    """Stock CPU linears and heads multiply by what their handle holds: a copy packed at load, unless it holds nothing.

    Raises:
        SyncRefused: it holds a copy, which a write to the weight would not reach.
    """
    handle = getattr(module, "cpu_linear", None)
    held = getattr(getattr(handle, "__code__", None), "co_freevars", ())
    if held:
        raise SyncRefused(
            f"{fqn}: its kernel multiplies by a packed copy ({', '.join(held)}), which a write to the weight does not "
            "reach; serve a checkpoint that jetgraph exported, or on CPU set JETGRAPH_PLAIN_LINEAR=1"
        )


def linear_slots(fqn: str, module: torch.nn.Module, parts: list) -> Iterator[tuple[str, Tensor, str]]:
    """A linear's weights, scales and biases, part by part."""
    _refuse_packed_copy(fqn, module)
    method = module.quant_method
    declared = getattr(method, "weight_precision", None)
    parameters = dict(_own(module))
    weight = parameters.pop("weight", None)
    scales = parameters.pop("weight_scale_inv", None)
    bias = parameters.pop("bias", None)
    num_rows = parts[-1].rows[1]
    kernel = getattr(method, "fp8_linear", None) or getattr(method, "kernel", None) or method
    if weight is None or weight.ndim != 2 or weight.shape[0] != num_rows:
        got = "nothing" if weight is None else f"{list(weight.shape)} {_plain(weight)}"
        raise SyncRefused(
            f"{fqn}: {type(kernel).__name__} holds its weight as {got}, expected {num_rows} rows: it is packed and "
            "cannot be written in place; serve a checkpoint that jetgraph exported, or on CPU set "
            "JETGRAPH_PLAIN_LINEAR=1"
        )
    if parameters or (declared is None and weight.dtype != torch.bfloat16):
        others = ", ".join(parameters) or f"{_plain(weight)} weights without a declared scale rule"
        raise SyncRefused(
            f"{fqn}: {type(kernel).__name__} has {others}: nobody can tell by which rule its codes are made; serve a "
            "checkpoint that jetgraph exported"
        )
    for part in parts:
        rows = slice(*part.rows)
        yield f"{part.name}.weight", weight.data[rows], str(declared or BF16)
        if scales is not None:
            yield f"{part.name}.weight_scale_inv", scales.data[slice(*part.scale_rows)], "f32"
        if bias is not None:
            yield f"{part.name}.bias", bias.data[rows], str(BF16)

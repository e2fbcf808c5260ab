"""What a capture of a running engine contains: plain data, no vLLM needed to read it.

    capture = EngineCapture.load("capture.pt")
    capture.body.aten          # the decoder as it executes, functionalised ATen, list[jetgraph.record.Op]
    capture.head(num_rows=1)   # the lm_head graph that one-row calls execute

The engine executes three things one after another: the *body* (embedding to final norm, one Dynamo graph), the *head*
(hidden rows to logits) and the *sampler* (logits to logprobs).  Between body and head it picks the rows whose logits it
needs, outside every graph.

T tokens of a step (all requests' new tokens, one after another), V vocabulary, B requests of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetgraph.record import Op

FORMAT = 1


@dataclass
class GraphInput:
    """One placeholder of a captured graph; ``CapturedGraph.inputs[i]`` is the i-th placeholder of both records."""

    name: str
    """Placeholder in ``aten``."""
    dynamo_name: str
    """Placeholder in ``dynamo``."""
    source: str
    """Where Dynamo found it: ``L['self']._modules['norm']._parameters['weight']`` or ``L['positions']``."""
    kind: str
    """``parameter``, ``buffer``, ``input`` (tensor argument), ``size`` (symbolic int) or ``object`` (a layer name)."""
    fqn: str
    """Live name in the model, found by address and shape at run time (``model.layers.0.mlp.down_proj.weight``); of
    tied weights the first name in ``named_parameters``.  For ``object`` its text, for ``input`` the argument's name."""
    shape: tuple[int, ...] | None
    """Shape in the first real call (None unless a tensor)."""
    dtype: str
    """``bfloat16`` …, empty unless a tensor."""


@dataclass
class CapturedGraph:
    """One graph that Dynamo gave to the engine.  The engine executes exactly this graph (``GraphModule.forward``)."""

    label: str
    """``body`` or ``head``."""
    dynamo: list[Op]
    """Torch-level ops, with in-place and out= ops as they run.  FQNs, also in ``aten``, are the model's live names."""
    aten: list[Op]
    """The same graph through AOTAutograd under no_grad: functional ATen, ``auto_functionalized`` version 1."""
    inputs: list[GraphInput]
    num_rows: int | None
    """Rows of the first tensor input if the graph is specialised to them (a one-row head), None if symbolic."""
    functionalise_seconds: float


@dataclass
class AttentionAttributes:
    """The live attention layers in the order of the model; graphs call them by ``layer_name``."""

    fqn: str
    layer_name: str
    impl: str
    scale: float
    num_heads: int
    num_kv_heads: int
    head_size: int
    sliding_window: int | None
    logits_soft_cap: float | None
    kv_cache_dtype: str


@dataclass
class LinearPart:
    """One checkpoint weight inside a merged module's ``weight`` (and ``weight_scale_inv``): half-open row ranges."""

    name: str
    """FQN of the checkpoint module, e.g. ``model.layers.0.self_attn.k_proj``."""
    rows: tuple[int, int]
    scale_rows: tuple[int, int] | None
    """None for a bf16 weight."""


@dataclass
class BatchFacts:
    """How the T rows of a body call divide into requests; taken from the attention metadata of that call."""

    num_actual_tokens: int
    """Rows beyond it are padding."""
    query_start_loc: list[int]
    """B + 1 offsets: request i owns the rows [i] … [i + 1]."""
    seq_lens: list[int]
    """Length of each request after this step; its new tokens are the last ones."""
    block_table: list[list[int]]
    """Cache blocks of each request up to its length; the first block names the request while it runs."""
    slot_mapping: list[int]
    """Cache slot (block · block size + offset) of each new token."""


@dataclass
class BodyCall:
    """One execution of the body on real requests (calls without attention metadata, i.e. profiling, are left out)."""

    inputs: dict[str, Tensor]
    """Tensor arguments by ``GraphInput.fqn``, copied before the call: ``input_ids`` [T] and ``positions`` [T]."""
    output: Tensor
    """Final-norm output [T, hidden]."""
    batch: BatchFacts
    attention_outputs: dict[str, Tensor]
    """Layer name → what the attention wrote, [T, H, D]: to inject where the engine's kernel has no reference here."""


@dataclass
class HeadCall:
    """One execution of the head."""

    graph: int
    """Index into ``EngineCapture.heads``."""
    hidden: Tensor
    logits: Tensor


@dataclass
class EngineCapture:
    """Everything the lifter and the replay gate need about one engine in one configuration."""

    model: str
    """Folder that was loaded."""
    config: dict[str, Any]
    """The folder's config.json (with ``quantization_config`` if it has one)."""
    body: CapturedGraph
    heads: list[CapturedGraph]
    """In order of capture; usually one for a single row and one for n rows."""
    attention: list[AttentionAttributes]
    linears: dict[str, list[LinearPart]]
    """vLLM module FQN → its parts in row order, for every linear (also unmerged and stock ones)."""
    tensors: dict[str, Tensor]
    """Live parameters and buffers by FQN, first name of each; empty if captured without values."""
    aliases: dict[str, str]
    """Further names of shared tensors → the name in ``tensors``: ``lm_head.weight`` → ``model.embed_tokens.weight``."""
    sampler: list[Op]
    """Dispatch trace of one real logprob computation: logits [B, V] and token ids in, returned logprobs out."""
    settings: dict[str, Any]
    """Compilation mode, backend, custom ops, enforce_eager, block size, batch limits, versions, environment."""
    body_calls: list[BodyCall] = field(default_factory=list)
    head_calls: list[HeadCall] = field(default_factory=list)
    format: int = FORMAT

    def head(self, num_rows: int) -> CapturedGraph:
        """The head graph that a call with ``num_rows`` rows executes."""
        fixed = [graph for graph in self.heads if graph.num_rows == num_rows]
        symbolic = [graph for graph in self.heads if graph.num_rows is None]
        if not fixed + symbolic:
            raise ValueError(f"no head graph was captured for {num_rows} rows")
        return (fixed + symbolic)[0]

    def save(self, path: str | Path) -> None:
        torch.save(self, path)

    @classmethod
    def load(cls, path: str | Path) -> EngineCapture:
        capture = torch.load(path, weights_only=False)
        if getattr(capture, "format", None) != FORMAT:
            raise ValueError(
                f"{path}: capture format {getattr(capture, 'format', None)}, expected {FORMAT}: capture again"
            )
        return capture

"""The replay gate of the engine's lifter: interpreting the lifted graph reproduces every recorded call bit for bit.

It runs the *normal form*, so the lifter and the rewrites are tested at once, on each recorded step (prefill, chunk,
decode, mixed batch) with the KV cache that those steps build up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jetgraph.graph import Node, PrecisionGraph
from jetgraph.interpret import InterpretError, Quantized, attention, interpret
from jetgraph.lowering import reference
from jetgraph_vllm.capture_format import BatchFacts, EngineCapture
from jetgraph_vllm.lift import LiftedEngine


@dataclass(frozen=True)
class ReplayCase:
    """One recorded call: what it was, and whether every number came out the same."""

    name: str
    equal: bool
    max_difference: float


class CachedAttention:
    """Attention over a KV cache held by slot, as the engine addresses it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.cache: dict[int, tuple[dict[int, Tensor], dict[int, Tensor]]] = {}
        self.batch: BatchFacts | None = None
        self.recorded: dict[int, Tensor] = {}

    def __call__(self, node: Node, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch = self.batch
        assert batch is not None
        keys, values = self.cache.setdefault(index, ({}, {}))
        for row, slot in enumerate(batch.slot_mapping[: batch.num_actual_tokens]):
            keys[slot], values[slot] = k[row], v[row]
        if index in self.recorded:
            return self.recorded[index].reshape(q.shape)
        out = torch.zeros_like(q)
        bounds = batch.query_start_loc
        for request, length in enumerate(batch.seq_lens):
            rows = slice(bounds[request], bounds[request + 1])
            blocks = batch.block_table[request]
            slots = [blocks[p // self.block_size] * self.block_size + p % self.block_size for p in range(length)]
            past = torch.stack([keys[s] for s in slots]), torch.stack([values[s] for s in slots])
            out[rows] = attention(node, q[rows], *past).to(q.dtype)
        return out


@torch.no_grad()
def replay(capture: EngineCapture, lifted: LiftedEngine, *, inject_attention: bool = False) -> list[ReplayCase]:
    """Run every recorded body and head call through the lifted graphs.

    ``inject_attention`` feeds the recorded attention outputs back, for engines whose attention kernel has no
    implementation here; attention then rests on attestation alone, and the verdict's report says so.
    """
    stored = [leaf.codes for leaf in lifted.leaves.values() if isinstance(leaf, Quantized) and not leaf.codes.is_cuda]
    for codes in stored:  # each call multiplies by every weight
        reference.pin_weight(codes)
    try:
        return _replay(capture, lifted, inject_attention)
    finally:
        for codes in stored:
            reference.unpin_weight(codes)


def _replay(capture: EngineCapture, lifted: LiftedEngine, inject_attention: bool) -> list[ReplayCase]:
    attend = CachedAttention(capture.settings["block_size"])
    names = [a.layer_name for a in capture.attention]
    cases = []
    for call in capture.body_calls:
        attend.batch = call.batch
        attend.recorded = {i: call.attention_outputs[n] for i, n in enumerate(names)} if inject_attention else {}
        leaves = {**lifted.leaves, "input_ids": call.inputs["input_ids"].long(), "positions": call.inputs["positions"]}
        got = interpret(lifted.body, leaves, attend=attend)["hidden"]
        rows = call.batch.num_actual_tokens
        queries = [b - a for a, b in zip(call.batch.query_start_loc, call.batch.query_start_loc[1:], strict=False)]
        name = f"body, {rows} rows, (new, length) {list(zip(queries, call.batch.seq_lens, strict=True))}"
        cases.append(_case(name, got[:rows], call.output[:rows]))
    for head in capture.head_calls:
        got = interpret(lifted.head, {**lifted.leaves, "hidden": head.hidden})["logits"]
        cases.append(_case(f"head, {head.hidden.shape[0]} rows", got, head.logits))
    return cases


def replay_capture(capture: EngineCapture, lift: Callable[[EngineCapture], LiftedEngine]) -> PrecisionGraph:
    """Lift a capture and put the outcome of the gate into ``meta["replay"]``.  A failure is recorded, never raised.

    Attention outputs are injected where the engine's kernel has no implementation here, and named as injected.
    """
    lifted = lift(capture)
    foreign = sorted({n.kernel for n in lifted.graph.nodes if n.op == "attention"} - {"jetgraph::attention"})
    try:
        cases = replay(capture, lifted, inject_attention=bool(foreign))
        passed = bool(cases) and all(case.equal for case in cases)
        texts = [f"{case.name}: {'equal' if case.equal else f'off by {case.max_difference:g}'}" for case in cases]
    except InterpretError as error:
        passed, texts = False, [f"not run: {error}"]
    outcome = {"passed": passed, "cases": texts, "injected": foreign}
    return dataclasses.replace(lifted.graph, meta={**lifted.graph.meta, "replay": outcome})


def _case(name: str, got: Tensor, want: Tensor) -> ReplayCase:
    difference = (got.float() - want.float()).abs().max().item() if got.numel() else 0.0
    return ReplayCase(name, torch.equal(got.to(want.dtype), want), difference)

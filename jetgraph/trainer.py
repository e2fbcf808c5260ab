"""One live training step → the precision graph of what it executed, forward and backward.

`capture_step` runs the compiled model on real inputs under a `Recorder`; `lift_step` expands the record.  The graph's
observables are the logits, the logprob of each target token, K and V of every layer, and the gradient of every
parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import jetgraph.lift.all  # noqa: F401  (registers the handlers)
from jetgraph.batch import Batch, Sequences
from jetgraph.capture import Recorder, RegionCall, Step, recording
from jetgraph.compiler import Compiled
from jetgraph.digest import tensor_digest
from jetgraph.fx_record import record_graph
from jetgraph.graph import Node, Phase, PrecisionGraph
from jetgraph.layout import Value
from jetgraph.lift.lifter import Frame, Lifter, SequenceMask, SequenceStarts, live_names
from jetgraph.lowering import reference
from jetgraph.lowering.torch_ops import scale_arguments
from jetgraph.normal_form import TermBuilder
from jetgraph.precision import F32
from jetgraph.record import Op, Ref, evaluate_size, references
from jetgraph.versions import versions
from jetgraph.whole import is_sharded, leaves_of

CAPTURE_LENGTH = 53
"""Tokens in a capture by default: a number that no dimension of a model has, which makes records easy to read."""


@dataclass
class CapturedStep:
    """A recorded step with the values it produced; ``graph`` is what it executed, ``batch`` how its tokens lay.

    logits [B, S, V] bf16, logprob [B, S] f32, gradients by parameter name.
    """

    graph: PrecisionGraph
    inputs: dict[str, Tensor]
    logits: Tensor
    logprob: Tensor
    gradients: dict[str, Tensor]
    batch: Batch


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """FP32 log p(targets[b, t]) from BF16 logits [B, T, V]; targets [B, T]."""
    logprobs = torch.nn.functional.log_softmax(logits.float(), dim=-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def capture_step(
    compiled: Compiled,
    input_ids: Tensor | None = None,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    backward: bool = True,
    grad_mode: bool | None = None,
) -> CapturedStep:
    """Record and lift one step on ``input_ids`` [B, S]; the graph does not depend on B and S.

    ``attention_mask`` [B, S] is 0 at padding, on either side.  ``position_ids`` [B, S] count within each sequence;
    several sequences packed into one row are told apart by them.  By default positions count the tokens that are no
    padding.

    The step's loss is Σ d_logprob · logprob with a fixed, non-uniform d_logprob, so that every token's gradient counts
    (padding excepted).  Gradients that the model held before are kept.

    Without ``backward`` the forward is the one that runs under ``no_grad``, or, with ``grad_mode``, the one that a
    training step runs.  Under FSDP2 every rank must call this; sharded parameters appear as the forward reads them,
    and only the forward is captured.

    Raises:
        ValueError: fewer than two tokens in all, shapes that differ, or a backward over sharded parameters.
    """
    model = compiled.model
    device = next(model.parameters()).device
    if input_ids is None:
        vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator, union-attr]
        generator = torch.Generator().manual_seed(0)
        input_ids = torch.randint(0, vocabulary, (1, CAPTURE_LENGTH), generator=generator).to(device)
    if input_ids.ndim != 2 or input_ids.numel() < 2:
        raise ValueError(f"capture needs input_ids [B, S] of at least two tokens; got {tuple(input_ids.shape)}")
    for name, given in (("attention_mask", attention_mask), ("position_ids", position_ids)):
        if given is not None and given.shape != input_ids.shape:
            raise ValueError(
                f"{name} is {tuple(given.shape)}; expected the shape of input_ids, {tuple(input_ids.shape)}"
            )
    real = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    weights = torch.linspace(-1.0, 1.0, input_ids.numel()).to(input_ids.device).view(input_ids.shape)
    inputs = {
        "input_ids": input_ids,
        "positions": (real.cumsum(1) - 1).clamp_min(0) if position_ids is None else position_ids,
        "targets": input_ids.roll(-1, 1),
        "d_logprob": torch.where(real, weights, 0.0),
    }
    options = {} if attention_mask is None else {"attention_mask": attention_mask}
    sequences = Sequences.of(inputs["positions"], real)
    held = {name: parameter.grad for name, parameter in model.named_parameters()}
    if backward and any(is_sharded(parameter) for parameter in model.parameters()):
        raise ValueError("gradients of an FSDP2 model are sharded and reduced outside the graph: use backward=False")
    model.zero_grad(set_to_none=True)
    grad_mode = backward if grad_mode is None else grad_mode
    try:
        with torch.set_grad_enabled(grad_mode), recording(model, inputs) as recorder:
            logits = model(input_ids=input_ids, position_ids=inputs["positions"], use_cache=False, **options).logits
            logprob = token_logprobs(logits, inputs["targets"])
            recorder.step.results |= {"logits": recorder.name_of(logits), "logprob": recorder.name_of(logprob)}
            if backward:
                recorder.start_backward()
                logprob.backward(inputs["d_logprob"])
                recorder.step.results |= {
                    f"grad.{name}": recorder.name_of(parameter.grad)
                    for name, parameter in model.named_parameters()
                    if parameter.grad is not None
                }
        gradients = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
    finally:
        for name, parameter in model.named_parameters():
            parameter.grad = held[name]
    evidence, batch = _evidence(recorder, sequences)
    lifting = _StepLifter(recorder.step, model, tuple(input_ids.shape), evidence, sequences.rows_are_sequences)
    graph = lift_step(lifting, compiled, executed_by(recorder.step))
    return CapturedStep(graph, inputs, logits.detach(), logprob.detach(), gradients, batch)


def _evidence(recorder: Recorder, sequences: Sequences) -> tuple[dict[str, SequenceStarts | SequenceMask], Batch]:
    """By op name, the masks that the step gave to its regions and its attention, as their values prove them."""
    tensors = recorder.live_tensors()
    inputs = {op.name for op in recorder.step.ops if op.kind == "placeholder"}
    found: dict[str, SequenceStarts | SequenceMask] = {}
    first, masks = None, {}
    readers = (op for op in recorder.step.ops if op.target.startswith("region.") or "attention" in op.target)
    for name in dict.fromkeys(n for op in readers for n in (*references(op.args), *references(op.kwargs))):
        if name not in tensors or name in inputs:
            continue
        fact = sequences.recognise(tensors[name])
        if isinstance(fact, SequenceStarts):
            first = tensors[name]
        elif isinstance(fact, SequenceMask):
            masks[fact.window] = tensors[name]
        if fact is not None:
            found[name] = fact
    return found, Batch(sequences.starts.shape[0], first, masks)


# ---------------------------------------------------------------------------------------------------------- lifting


class _StepLifter:
    """Lifts the outer trace; a region call in it lifts the region's own graph."""

    def __init__(
        self,
        step: Step,
        model: torch.nn.Module,
        token_shape: tuple[int, ...],
        evidence: Mapping[str, Any],
        rows_are_sequences: bool,
    ) -> None:
        self.step = step
        self.evidence = evidence
        self.builder = TermBuilder()
        self.recorded: dict[int, list[Op]] = {}
        kinds = ("forward", "backward", "inference")
        self.lifter = Lifter(self.builder, token_shape, {f"region.{kind}": self._region for kind in kinds})
        self.lifter.rows_are_sequences = rows_are_sequences
        self.tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}

    def run(self) -> dict[str, int]:
        """Terms of the step's results by name."""
        output = Op("output", "output", "output", (tuple(map(Ref, self.step.results.values())),))
        ops = [*self.step.ops, output]
        live = live_names(ops, (), self.evidence)
        leaves = {op.name: self._leaf(op) for op in self.step.ops if op.kind == "placeholder" and op.name in live}
        env = self.lifter.run(ops, {**leaves, **self.evidence})
        layouts = self.lifter.layouts
        terms = {}
        for name, op_name in self.step.results.items():
            terms[name] = layouts.read(env[op_name])
        for index, (k, v) in enumerate(self.lifter.keys_values):
            terms |= {f"k.{index}": k, f"v.{index}": v}
        return terms

    def _leaf(self, op: Op) -> Any:
        name = op.target
        if name.startswith("constant:"):
            return Value(self.builder.const(float(name.split(":", 1)[1])), (), ())
        if name == "d_logprob":
            return self.lifter.token_input(name, 2, F32)
        if name in ("input_ids", "positions", "targets"):
            return self.lifter.token_input(name, 2)
        if name in self.tensors:
            return self.lifter.parameter(name, op.value.shape, op.value.dtype)
        self.lifter.unknown.append(f"tensor {name} that nothing in the step made")
        term = self.builder.intern("unknown", (), {"name": name}, op.value.shape, F32)
        return self.lifter.layouts.value(term, op.value.shape)

    def _region(self, lifter: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        call: RegionCall = self.step.regions[op.name]
        key = id(call.graph)
        if key not in self.recorded:
            self.recorded[key] = record_graph(call.graph, "backward" if call.kind == "backward" else "forward")
        ops = self.recorded[key]
        names = [o.name for o in ops if o.kind == "placeholder"]
        env = lifter.run(
            ops,
            dict(zip(names, args, strict=True)),
            prefix=call.prefix,
            sizes=lambda size: evaluate_size(size, call.sizes),
        )
        return lifter.outputs(ops, env)


def executed_by(step: Step) -> str:
    """Who ran the forward graphs of a recorded step: ``fx``, ``inductor-exact``, ``inductor``; the least exact one."""
    ran = {c.region.executions[c.kind].by for c in step.regions.values() if c.kind != "backward"}
    return next((by for by in ("inductor", "inductor-exact") if by in ran), "fx")


def lift_step(lifting: _StepLifter, compiled: Compiled, executed: str) -> PrecisionGraph:
    """The precision graph of a recorded step, with everything the verifier needs to know in ``meta``."""
    outputs = lifting.run()
    _state_reasons(lifting.builder, compiled)
    graph = lifting.builder.graph("train", outputs, {})
    meta = _meta(graph, compiled, lifting.lifter)
    return dataclasses.replace(graph, meta={**graph.meta, **meta, "compiler": executed})


def _state_reasons(builder: TermBuilder, compiled: Compiled) -> None:
    """Write on each GEMM of a linear, and on what quantises for it, the policy rule that decided."""
    linears = compiled.linears()
    for index, node in enumerate(builder.nodes):
        if node.op != "gemm" or node.fqn not in linears:
            continue
        reason = linears[node.fqn].reason
        for i in (index, *(j for j in node.inputs if builder.nodes[j].op == "quantize")):
            builder.nodes[i] = dataclasses.replace(builder.nodes[i], reason=reason)


def _meta(graph: PrecisionGraph, compiled: Compiled, lifter: Lifter) -> dict[str, Any]:
    model = compiled.model
    tensors = leaves_of(graph, model)
    used = {str(n.attr("name")) for n in graph.nodes if n.op == "parameter"}
    return {
        "side": "train",
        "model": type(model).__name__,
        "policy": compiled.policy.name,
        "provider": compiled.provider,
        "device": next(model.parameters()).device.type,
        "versions": versions("torch", "transformers"),
        "capture": {"regions": len(compiled.regions), "token_shape": list(lifter.layouts.token_shape)},
        "parameters": {
            name: {
                "digest": tensor_digest(tensors[name]),
                "shape": list(tensors[name].shape),
                "format": {torch.bfloat16: "bf16", torch.float32: "f32"}[tensors[name].dtype],
            }
            for name in sorted(used)
        },
        "dead": [],
        "operands": weight_operands(graph, tensors),
        "scope": {
            name: {"activation": str(p.activation), "weight": str(p.weight)} for name, p in compiled.linears().items()
        },
        "kernels": {
            k: {"row_invariant": k in reference.ROW_INVARIANT}
            for k in sorted({n.kernel for n in graph.nodes if n.kernel})
        },
        "unknown": sorted(set(lifter.unknown)),
    }


def weight_operands(graph: PrecisionGraph, tensors: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    """Per quantised parameter: λ, and the digest of the codes and scales that the next forward will use."""
    operands = {}
    for node in graph.nodes:
        if node.op != "quantize" or node.phase is not Phase.FORWARD:
            continue
        source: Node = graph.nodes[node.inputs[0]]
        if source.op != "parameter":
            continue
        name, scale = str(source.attr("name")), node.type.precision.scale
        assert scale is not None
        codes, scales = reference.quantize(tensors[name].detach(), *scale_arguments(scale))
        operands[name] = {"precision": str(node.type.precision), "digest": tensor_digest(codes, scales)}
    return dict(sorted(operands.items()))

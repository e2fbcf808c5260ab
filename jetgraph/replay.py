"""The replay gate of the trainer's lifter: interpreting the graph reproduces the captured step bit for bit."""

from __future__ import annotations

import dataclasses

import torch

from jetgraph.graph import PrecisionGraph
from jetgraph.interpret import InterpretError, interpret
from jetgraph.trainer import CapturedStep
from jetgraph.whole import leaves_of


@torch.no_grad()
def replay_step(model: torch.nn.Module, step: CapturedStep) -> PrecisionGraph:
    """The step's graph with ``meta["replay"]``: which values came out equal.  A failure is recorded, never raised."""
    leaves = {**step.inputs, **leaves_of(step.graph, model)}
    cases: list[str] = []
    passed = True
    try:
        values = interpret(step.graph, leaves, batch=step.batch)
    except InterpretError as error:
        passed, cases = False, [f"not run: {error}"]
    else:
        wrong = [n for n, g in step.gradients.items() if not torch.equal(values[f"grad.{n}"].reshape(g.shape), g)]
        checks = {
            f"logits of {step.logprob.numel()} tokens": torch.equal(values["logits"], step.logits.flatten(0, 1)),
            "logprobs": torch.equal(values["logprob"][:, 0], step.logprob.flatten()),
        }
        if step.gradients:
            checks[f"{len(step.gradients)} gradients"] = not wrong
        passed = all(checks.values())
        cases = [f"{name}: {'equal' if ok else 'DIFFERENT'}" for name, ok in checks.items()] + wrong[:5]
    replay = {"passed": passed, "cases": cases, "injected": []}
    return dataclasses.replace(step.graph, meta={**step.graph.meta, "replay": replay})


def in_words(graph: PrecisionGraph) -> str:
    """The outcome of the gate on a replayed graph, for its reader: what differs, not what is equal."""
    outcome = graph.meta["replay"]
    wrong = [case for case in outcome["cases"] if not case.endswith(": equal")]
    return "its replay is equal" if outcome["passed"] else f"its REPLAY FAILED ({', '.join(wrong)})"

"""Compare a rollout's own logprobs with those of training's forward on the same tokens.

The numbers users know as train–inference mismatch: |Δlogprob| per token, its mean, its maximum, the fraction that is
exactly 0, and the k3 estimate of the KL divergence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from jetgraph.trainer import token_logprobs


@dataclass(frozen=True)
class Rollout:
    """One finished request: prompt and sampled token ids, and the engine's own logprob of each sampled token.

    ``prompt_logprobs`` are of prompt[1:], if the engine returned them.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Mismatch:
    """|Δlogprob| of the rollout's tokens against training's forward."""

    num_tokens: int
    num_exact: int
    mean: float
    max: float
    k3: float

    @property
    def fraction_exact(self) -> float:
        return self.num_exact / self.num_tokens if self.num_tokens else 0.0


Scores = dict[tuple[int, ...], list[float]]
"""Trainer logprobs of ids[1:] by token ids: one sequence that several rollouts share is scored once."""


def mismatch(
    model: torch.nn.Module, rollouts: Sequence[Rollout], *, gradients: bool = True, scores: Scores | None = None
) -> Mismatch:
    """Score every token that has an engine logprob with one training forward per distinct sequence.

    Args:
        model: a compiled (or plain) causal LM.
        gradients: run the forward that a training step runs; False runs it under `no_grad`.
        scores: kept between calls, if given.

    Raises:
        ValueError: an engine logprob is positive or not finite.
    """
    scores = {} if scores is None else scores
    pairs = [pair for rollout in rollouts for pair in _pairs(model, rollout, gradients, scores)]
    for engine, _ in pairs:
        if not engine <= 0.0 or math.isinf(engine):
            raise ValueError(f"the engine returned a logprob of {engine}; expected a finite number ≤ 0")
    differences = [abs(engine - trainer) for engine, trainer in pairs]
    ratios = [trainer - engine for engine, trainer in pairs]
    k3 = [math.exp(min(r, 50.0)) - 1 - r for r in ratios]
    count = len(pairs)
    return Mismatch(
        count,
        sum(d == 0.0 for d in differences),
        sum(differences) / max(count, 1),
        max(differences, default=0.0),
        sum(k3) / max(count, 1),
    )


def _pairs(model: torch.nn.Module, rollout: Rollout, gradients: bool, scores: Scores) -> list[tuple[float, float]]:
    """(engine, trainer) logprob of each token for which the engine returned one."""
    sequence = (*rollout.prompt, *rollout.tokens)
    if sequence not in scores:
        ids = torch.tensor([sequence])
        with torch.set_grad_enabled(gradients):
            logits = model(input_ids=ids, use_cache=False).logits
        scores[sequence] = token_logprobs(logits.detach()[:, :-1], ids[:, 1:])[0].tolist()
    trainer = scores[sequence]
    start = len(rollout.prompt) - 1
    pairs = list(zip(rollout.logprobs, trainer[start:], strict=True))
    if rollout.prompt_logprobs is not None:
        pairs += zip(rollout.prompt_logprobs, trainer[:start], strict=True)
    return pairs

"""Compare a rollout's own logprobs with those of training's forward on the same tokens.

The statistics are those of `jetgraph.mismatch`; here is the trainer's half, one forward per distinct sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jetgraph.mismatch import Difference, join, pair
from jetgraph.sampling import Sampling, require_alike, sampled_logprobs


@dataclass(frozen=True)
class Rollout:
    """One finished request: prompt and sampled token ids, and the engine's own logprob of each sampled token.

    ``prompt_logprobs`` are of prompt[1:], if the engine returned them; they are always of the raw logits, also where
    ``sampling`` says that those of the tokens are of the processed ones.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float, ...] | None = None
    sampling: Sampling = Sampling()

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Rollout:
        return cls(**{**data, "sampling": Sampling.from_plain(data.get("sampling", {}))})


Scores = dict[tuple[tuple[int, ...], Sampling], tuple[list[float], list[float]]]
"""Trainer logprobs of ids[1:], raw and as sampled, by token ids: what several rollouts share is scored once."""


def mismatch(
    model: torch.nn.Module,
    rollouts: Sequence[Rollout],
    *,
    gradients: bool = True,
    scores: Scores | None = None,
    trainer: Sampling | None = None,
) -> Difference:
    """Score every token that has an engine logprob with one training forward per distinct sequence.

    Args:
        model: a compiled (or plain) causal LM.
        gradients: run the forward that a training step runs; False runs it under `no_grad`.
        scores: kept between calls, if given.
        trainer: of which distribution the trainer's own loss takes logprobs; by default of the one that each rollout
            reports.

    Raises:
        ValueError: an engine logprob is positive or not finite, or there is none.
        UnlikeLogprobs: ``trainer`` is another distribution than a rollout reports (JG020).
    """
    scores = {} if scores is None else scores
    for rollout in rollouts if trainer is not None else ():
        require_alike(trainer, rollout.sampling)
    rows = []
    for pairs in (_pairs(model, rollout, gradients, scores) for rollout in rollouts):
        for engine, _ in pairs:
            if not engine <= 0.0 or math.isinf(engine):
                raise ValueError(f"the engine returned a logprob of {engine}; expected a finite number ≤ 0")
        of_engine, of_trainer = torch.tensor(pairs, dtype=torch.float64).reshape(1, -1, 2).unbind(-1)
        rows.append(pair(of_trainer, of_engine, torch.ones(of_engine.shape, dtype=torch.bool)))
    whole = join(rows).measure(by_position=False).whole if rows else None
    if whole is None:
        raise ValueError("no rollout has a token: there is nothing to compare")
    return whole.total


def _pairs(model: torch.nn.Module, rollout: Rollout, gradients: bool, scores: Scores) -> list[tuple[float, float]]:
    """(engine, trainer) logprob of each token for which the engine returned one."""
    key = (*rollout.prompt, *rollout.tokens), rollout.sampling
    if key not in scores:
        scores[key] = score(model, *key, gradients=gradients)
    raw, sampled = scores[key]
    start = len(rollout.prompt) - 1
    pairs = list(zip(rollout.logprobs, sampled[start:], strict=True))
    if rollout.prompt_logprobs is not None:
        pairs += zip(rollout.prompt_logprobs, raw[:start], strict=True)
    return pairs


def sampled_scores(scores: Scores, rollout: Rollout) -> list[float]:
    """The trainer's logprobs of ``rollout.tokens`` that `mismatch` left in ``scores``."""
    _, sampled = scores[(*rollout.prompt, *rollout.tokens), rollout.sampling]
    return sampled[len(rollout.prompt) - 1 :]


def score(
    model: torch.nn.Module, sequence: Sequence[int], sampling: Sampling, *, gradients: bool = True
) -> tuple[list[float], list[float]]:
    """The model's logprobs of sequence[1:]: of the raw logits, and of the distribution that ``sampling`` reports."""
    ids = torch.tensor([sequence], device=next(model.parameters()).device)
    with torch.set_grad_enabled(gradients):
        logits = model(input_ids=ids, use_cache=False).logits
    logits, targets = logits.detach()[:, :-1], ids[:, 1:]
    raw = sampled_logprobs(logits, targets, Sampling())[0].tolist()
    if sampling.reported == Sampling().reported:
        return raw, raw
    return raw, sampled_logprobs(logits, targets, sampling)[0].tolist()

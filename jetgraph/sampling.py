"""Of which distribution is a logprob?  Like is compared with like, or not at all (JG020).

An engine draws tokens from *processed* logits: divided by the temperature, cut to the top-k and top-p.  The logprobs
that it returns are of the raw logits (vLLM's default, ``raw_logprobs``) or of the processed ones
(``processed_logprobs``).  A trainer that scores the same tokens must use the same of the two: at temperature 0.6 the
other one is off by a factor of 1.26 on likely tokens and 0.17 on unlikely ones, with identical weights (N14a).

`sampled_logprobs` computes either, in the operations of vLLM's own sampler and in their order, so that equal logits
give equal bits; it is differentiable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
GREEDY_BELOW = 1e-5
"""Temperatures below are greedy decoding, which reports the distribution at temperature 1 (vLLM's own threshold)."""


class UnlikeLogprobs(ValueError):
    """JG020: two logprobs are of different distributions, so their difference says nothing of the two models."""


@dataclass(frozen=True)
class Sampling:
    """How tokens were drawn, and what ``logprobs`` report: ``raw_logprobs`` or ``processed_logprobs``.

    ``top_k`` 0 and ``top_p`` 1 cut nothing off.

    Raises:
        ValueError: a value outside its range, or a mode that returns no logprobs (vLLM's ``raw_logits`` …).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    logprobs: str = RAW

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}: expected 0 (greedy) or more")
        if self.top_k < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"top_k is {self.top_k} and top_p {self.top_p}: expected top_k ≥ 0 and 0 < top_p ≤ 1")
        if self.logprobs not in (RAW, PROCESSED):
            raise ValueError(f"logprobs are {self.logprobs!r}: expected {RAW!r} or {PROCESSED!r}")

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Sampling:
        return cls(**data)

    @property
    def reported(self) -> tuple[float, int, float]:
        """(temperature, top_k, top_p) of the distribution that the logprobs are of."""
        if self.logprobs == RAW or self.temperature < GREEDY_BELOW:
            return 1.0, 0, 1.0
        return self.temperature, self.top_k, self.top_p

    def words(self) -> str:
        temperature, top_k, top_p = self.reported
        parts = [f"temperature {temperature:g}"] if temperature != 1 else []
        parts += [f"top-k {top_k}"] if top_k else []
        parts += [f"top-p {top_p:g}"] if top_p < 1 else []
        return "the logits after " + ", ".join(parts) if parts else "the raw logits"


def require_alike(trainer: Sampling, rollout: Sampling) -> None:
    """
    Raises:
        UnlikeLogprobs: the two sides' logprobs are of different distributions.
    """
    if trainer.reported != rollout.reported:
        raise UnlikeLogprobs(
            f"JG020: the rollout's logprobs are of {rollout.words()} ({rollout.logprobs}), the trainer's of "
            f"{trainer.words()}: set the engine's logprobs_mode or score with the rollout's own Sampling"
        )


def sampled_logprobs(logits: Tensor, targets: Tensor, sampling: Sampling) -> Tensor:
    """FP32 log p(targets[b, t]) [B, T] from logits [B, T, V], of the distribution that ``sampling`` reports.

    A target that top-k or top-p cuts off has −inf.
    """
    x = processed_logits(logits, *sampling.reported)
    return x.log_softmax(dim=-1, dtype=torch.float32).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def processed_logits(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """FP32 logits [..., V] as vLLM's sampler draws from them; what is cut off is −inf.

    vllm/v1/sample/sampler.py (`apply_temperature`) and ops/topk_topp_sampler.py (`apply_top_k_top_p_pytorch`).
    """
    x = logits.float()
    # a tensor, as the engine has it: CUDA multiplies by the reciprocal of a Python number, which rounds otherwise
    x = x / torch.full((1,), temperature, dtype=torch.float32, device=x.device)
    if not top_k and top_p >= 1:
        return x
    with torch.no_grad():
        hidden = _cut_off(x.detach().flatten(0, -2), top_k, top_p).view(x.shape)
    return x.masked_fill(hidden, -torch.inf)


def _cut_off(x: Tensor, top_k: int, top_p: float) -> Tensor:
    """Bool [N, V]: outside the top-k, or in the tail of the rest whose probabilities sum to 1 − top_p or less."""
    ordered, index = x.sort(dim=-1, descending=False)
    if 0 < top_k < x.shape[-1]:
        ordered = ordered.masked_fill(ordered < ordered[:, -top_k, None], -torch.inf)
    hidden = ordered == -torch.inf
    if top_p < 1:
        # 1 − p in FP32, as the engine computes it from its tensor of top-p
        rest = 1 - torch.full((1,), top_p, dtype=torch.float32, device=x.device)
        tail = ordered.softmax(dim=-1).cumsum(dim=-1) <= rest
        tail[:, -1] = False  # at least one token stays
        hidden |= tail
    return torch.empty_like(hidden).scatter_(-1, index, hidden)

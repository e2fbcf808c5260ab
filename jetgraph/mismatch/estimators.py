"""The formulas: what a set of log ratios says about how far two policies are apart.

Shapes: B sequences, T positions, N = tokens that the mask keeps.  Δ = log p_trainer − log p_rollout of the sampled
token, r = exp(Δ).  Tokens were sampled by the rollout, so its policy q is the one that expectations are over, and p is
the trainer's.  Everything is computed in float64 on values in sorted order, so that no result depends on the order of
the sequences, not in its last bit.

Δ saturates at ±`SATURATION` before anything is computed, and how often is counted: exp(2 · 40) is 5.5e34, below
float32's largest number, so that no logger that narrows turns a metric into inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SATURATION = 40.0
"""Nats.  A ratio of 2e17 between two probabilities of one token is a fault, whatever its exact size."""


@dataclass(frozen=True)
class Difference:
    """One series of log-probabilities against another, over the same tokens.  docs/mismatch.md says what each is for.

    ``mean``, ``p99``, ``p999`` and ``max`` are of |Δ| in nats; a percentile is the smallest observed value that at
    least that share of tokens does not exceed.  ``k1``, ``k3`` and ``chi2`` estimate divergences from tokens; ``ess_*``
    are shares in (0, 1] of the samples that importance weights leave; ``sequence_*`` are of S = Σ Δ over a sequence.
    """

    num_tokens: int
    num_sequences: int
    num_saturated: int
    """Tokens with |Δ| above `SATURATION`, −inf on one side included; every statistic reads them as ±`SATURATION`."""
    mean: float
    p99: float
    p999: float
    max: float
    k1: float
    k3: float
    chi2: float
    ess_token: float
    ess_sequence: float
    sequence_log_ratio_mean: float
    """Mean of S."""
    sequence_log_ratio_max: float
    """Largest |S|."""
    sequence_log_mean_ratio: float
    """log mean exp(S): 0 in expectation, whatever the policies are, if the samples are really the rollout's."""
    clip_fraction: float
    fraction_exact: float
    mult_prob_error: float

    @property
    def num_exact(self) -> int:
        return round(self.fraction_exact * self.num_tokens)


def k3(log_ratio: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(q ‖ p) per token, exp(Δ) − 1 − Δ ≥ 0, any shape; gradients are finite.

    Saturates *before* the exponential: clamped afterwards, the value is finite and its gradient is 0 · inf = NaN.
    Where Δ saturates the gradient is 0.  http://joschu.net/blog/kl-approx.html
    """
    x = log_ratio.clamp(-SATURATION, SATURATION)
    return (torch.expm1(x) - x).clamp(min=0.0)


def importance_weights(old: Tensor, rollout: Tensor, mask: Tensor, *, cap: float = 2.0) -> Tensor:
    """Truncated importance weights min(exp(old − rollout), cap) of tokens [B, T], 0 where masked; no gradient.

    ``old`` is the trainer's logprob *before* the first update on this batch, not the current one: the current policy's
    ratio to the old one is the business of PPO's clipping, and counting it here too would count it twice.

    Raises:
        ValueError: ``cap`` is not positive and finite.
    """
    if not 0 < cap < math.inf:
        raise ValueError(f"cap is {cap}: expected a positive, finite number such as 2.0")
    with torch.no_grad():
        return torch.where(mask.bool(), log_ratios(old, rollout).clamp(max=math.log(cap)).exp(), 0.0)


def log_ratios(trainer: Tensor, rollout: Tensor) -> Tensor:
    """Δ; 0 where both say −inf, which is agreement."""
    same = torch.isneginf(trainer) & torch.isneginf(rollout)
    return torch.where(same, 0.0, trainer - rollout)


def difference(delta: Tensor, mask: Tensor, clip: tuple[float, float]) -> Difference | None:
    """All statistics of Δ [B, T] (float64) where ``mask`` [B, T] holds; None if it holds nowhere.

    ``clip`` = (low, high) is PPO's range [1 − low, 1 + high].
    """
    tokens = delta[mask]
    count = tokens.numel()
    if not count:
        return None
    num_saturated, num_exact = (tokens.abs() > SATURATION).sum(), (tokens == 0).sum()
    x = tokens.clamp(-SATURATION, SATURATION).sort().values
    size = x.abs()
    sums = torch.where(mask, delta.clamp(-SATURATION, SATURATION), 0.0).sum(1)[mask.any(1)].sort().values
    low, high = clip
    below = x < (math.log1p(-low) if low < 1 else -math.inf)
    statistics = {
        "num_saturated": num_saturated,
        "mean": size.mean(),
        "p99": size.kthvalue(_rank(0.99, count)).values,
        "p999": size.kthvalue(_rank(0.999, count)).values,
        "max": size.max(),
        "k1": -x.mean(),
        "k3": k3(x).mean(),
        "chi2": torch.expm1(x).square().mean(),
        "ess_token": _effective_share(x),
        "ess_sequence": _effective_share(sums),
        "sequence_log_ratio_mean": sums.mean(),
        "sequence_log_ratio_max": sums.abs().max(),
        "sequence_log_mean_ratio": (sums - sums[-1]).exp().mean().log() + sums[-1],
        "clip_fraction": (below | (x > math.log1p(high))).double().mean(),
        "fraction_exact": num_exact.double() / count,
        "mult_prob_error": size.exp().mean(),
    }
    # one transfer from the device; + 0.0 turns −0 into 0
    values = [value + 0.0 for value in torch.stack([s.double() for s in statistics.values()]).tolist()]
    found = dict(zip(statistics, values, strict=True))
    return Difference(num_tokens=count, num_sequences=sums.numel(), **found | {"num_saturated": int(values[0])})  # type: ignore[arg-type]


def _rank(share: float, count: int) -> int:
    """The percentile's place among sorted values, from 1: the nearest rank, ⌈share · count⌉."""
    return math.ceil(share * count)


def _effective_share(log_weights: Tensor) -> Tensor:
    """Kish's effective sample size as a share: (Σ w)² / (n Σ w²); scaled so that the largest weight is 1."""
    w = (log_weights - log_weights.max()).exp()
    return w.sum().square() / (len(w) * w.square().sum())

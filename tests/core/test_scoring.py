"""A rollout's logprobs against training's forward: whose tokens are compared with which, and what is no logprob."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from jetgraph.scoring import Rollout, Scores, mismatch, sampled_scores

LN2 = math.log(2.0)


class Bigram(torch.nn.Module):
    """P(next = previous + 1 mod 4) = 1/2, every other token 1/6; counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(()))
        self.num_forwards = 0

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert use_cache is False
        self.num_forwards += 1
        nxt = torch.nn.functional.one_hot((input_ids + 1) % 4, 4)
        return SimpleNamespace(logits=torch.where(nxt.bool(), math.log(1 / 2), math.log(1 / 6)) + self.bias)


def test_every_token_with_an_engine_logprob_is_compared():
    half, sixth = -LN2, math.log(1 / 6)
    # 0 → 1 is likely; 1 → 1, sampled, is not; 1 → 2 is: the engine agrees but for a factor of 2 at the last
    rollouts = [
        Rollout((0, 1), (1, 2), (sixth, half - LN2), (half,)),
        Rollout((3,), (0,), (half,)),  # without prompt logprobs
    ]
    scores: Scores = {}
    model = Bigram()
    found = mismatch(model, rollouts, scores=scores)
    assert (found.num_tokens, found.num_sequences) == (4, 2)
    assert found.mean == pytest.approx(LN2 / 4, rel=1e-6)
    assert found.max == pytest.approx(LN2, rel=1e-6)
    assert found.k3 == pytest.approx((2 - 1 - LN2) / 4, rel=1e-6)  # e^Δ − 1 − Δ at Δ = ln 2
    assert sampled_scores(scores, rollouts[0]) == pytest.approx([sixth, half])
    mismatch(model, rollouts, scores=scores)
    assert model.num_forwards == 2  # each sequence once


def test_exact_is_bit_for_bit():
    scores: Scores = {}
    model, rollout = Bigram(), Rollout((0,), (1, 1), (-1.0, -1.0))
    mismatch(model, [rollout], scores=scores)
    served = sampled_scores(scores, rollout)
    found = mismatch(model, [Rollout((0,), (1, 1), tuple(served))])
    assert (found.num_exact, found.num_tokens, found.max, found.k3) == (2, 2, 0.0, 0.0)
    off = math.nextafter(served[1], -math.inf)
    found = mismatch(model, [Rollout((0,), (1, 1), (served[0], off))])
    assert (found.num_exact, found.fraction_exact) == (1, 0.5)


@pytest.mark.parametrize("value", [0.5, 1e-9, math.inf, -math.inf, math.nan])
def test_what_is_no_logprob_is_refused(value):
    with pytest.raises(ValueError, match="the engine returned a logprob of"):
        mismatch(Bigram(), [Rollout((0,), (1,), (value,))])


@pytest.mark.parametrize("rollouts", [[], [Rollout((0, 1), (), ())]])
def test_nothing_to_compare_is_no_agreement(rollouts):
    with pytest.raises(ValueError, match="no rollout has a token"):
        mismatch(Bigram(), rollouts)

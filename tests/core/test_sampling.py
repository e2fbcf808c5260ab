"""Logprobs under temperature, top-k and top-p: values by their definition, and refusal to compare unlike ones."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import Tensor

from jetgraph.sampling import PROCESSED, RAW, Sampling, UnlikeLogprobs, require_alike, sampled_logprobs
from jetgraph.scoring import Rollout, mismatch
from jetgraph.trainer import token_logprobs
from jetgraph.verify import Verdict, verify
from tests.verify.toy_transformer import build, with_meta


def every_logprob(logits: Tensor, sampling: Sampling) -> list[float]:
    """Of each token of one row of logits [V]."""
    targets = torch.arange(logits.numel())[None]
    return sampled_logprobs(logits.expand(1, logits.numel(), -1), targets, sampling)[0].tolist()


def test_temperature_on_four_logits():  # [N14a, R1]
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    warm = every_logprob(logits, Sampling(0.6, logprobs=PROCESSED))
    raw = every_logprob(logits, Sampling(0.6, logprobs=RAW))
    assert warm == pytest.approx([-0.20806, -1.87473, -3.54139, -5.20806], abs=1e-5)
    assert raw == pytest.approx([-0.44019, -1.44019, -2.44019, -3.44019], abs=1e-5)
    assert math.exp(warm[0] - raw[0]) == pytest.approx(1.2613, abs=1e-4)
    assert math.exp(warm[3] - raw[3]) == pytest.approx(0.1707, abs=1e-4)
    assert raw[0] / 0.6 == pytest.approx(-0.73365, abs=1e-5)  # the wrong remedy
    assert abs(warm[0] - raw[0] / 0.6) > 0.5


def by_definition(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """In doubles: the k largest; of those the fewest whose probability exceeds p; renormalised."""
    kept = sorted(range(len(logits)), key=lambda i: -logits[i])[: top_k or len(logits)]
    weight = {i: math.exp((logits[i] - max(logits)) / temperature) for i in kept}
    total, chosen, mass = sum(weight.values()), [], 0.0
    for i in kept:
        chosen.append(i)
        mass += weight[i] / total
        if mass >= top_p:
            break
    total = sum(weight[i] for i in chosen)
    return [math.log(weight[i] / total) if i in chosen else -math.inf for i in range(len(logits))]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.7), (20, 0.9), (1, 1.0), (1000, 0.05)])
def test_the_processed_distribution_is_its_definition(temperature, top_k, top_p):
    logits = torch.randn(64, generator=torch.Generator().manual_seed(3)) * 3
    got = every_logprob(logits, Sampling(temperature, top_k, top_p, PROCESSED))
    want = by_definition(logits.double().tolist(), temperature, top_k, top_p)
    assert [math.isinf(x) for x in got] == [math.isinf(x) for x in want]
    assert [x for x in got if x > -math.inf] == pytest.approx([x for x in want if x > -math.inf], abs=3e-6)


def test_raw_is_what_training_always_scored():
    logits = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(10).view(2, 5)
    for sampling in (Sampling(), Sampling(0.6, 3, 0.5, RAW), Sampling(0.0, logprobs=PROCESSED)):
        assert torch.equal(sampled_logprobs(logits, targets, sampling), token_logprobs(logits, targets))


def test_gradients_reach_what_is_kept_and_are_finite():
    logits = torch.tensor([[[2.0, 1.0, 0.0, -1.0]]], requires_grad=True)
    sampling = Sampling(0.5, top_k=2, logprobs=PROCESSED)
    sampled_logprobs(logits, torch.tensor([[1]]), sampling).sum().backward()
    p = 1 / (1 + math.exp(-(2.0 - 1.0) / 0.5))
    assert logits.grad[0, 0].tolist() == pytest.approx([-p / 0.5, p / 0.5, 0.0, 0.0], abs=1e-6)


# ---------------------------------------------------------------------------------------------------------- refusal


@pytest.mark.parametrize(
    ("trainer", "rollout"),
    [
        (Sampling(0.6, logprobs=PROCESSED), Sampling(0.6)),
        (Sampling(), Sampling(1.0, top_k=20, logprobs=PROCESSED)),
        (Sampling(0.6, logprobs=PROCESSED), Sampling(0.6, top_p=0.9, logprobs=PROCESSED)),
        (Sampling(0.6, logprobs=PROCESSED), Sampling(0.7, logprobs=PROCESSED)),
    ],
)
def test_unlike_is_refused_by_rule(trainer, rollout):  # [N14a, JG020]
    with pytest.raises(
        UnlikeLogprobs, match=r"^JG020: the rollout's logprobs are of .* set the engine's logprobs_mode"
    ):
        require_alike(trainer, rollout)
    sampled = Rollout((1, 2), (3,), (-1.0,), None, rollout)
    with pytest.raises(UnlikeLogprobs, match="JG020"):
        mismatch(torch.nn.Identity(), [sampled], trainer=trainer)


@pytest.mark.parametrize(
    ("trainer", "rollout"),
    [
        (Sampling(), Sampling(1.0, logprobs=PROCESSED)),
        (Sampling(), Sampling(0.6, 20, 0.9, RAW)),
        (Sampling(), Sampling(0.0, logprobs=PROCESSED)),
        (Sampling(0.6, 20, 0.9, PROCESSED), Sampling(0.6, 20, 0.9, PROCESSED)),
    ],
)
def test_the_same_distribution_under_two_names_is_alike(trainer, rollout):
    require_alike(trainer, rollout)


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"logprobs": "raw_logits"}])
def test_values_outside_their_range_are_refused(wrong):
    with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
        Sampling(**wrong)


def test_a_rollout_keeps_its_sampling_through_a_file():
    rollout = Rollout((1,), (2,), (-1.0,), None, Sampling(0.6, 20, 0.9, PROCESSED))

    assert Rollout.from_plain(json.loads(json.dumps(dataclasses.asdict(rollout)))).sampling == rollout.sampling


def test_an_engine_that_returns_processed_logprobs_is_not_contained():  # [JG020]
    """Its sampler is traced at temperature 0, where both modes compute the same: only the setting tells them apart."""
    train, infer = build("train"), build("infer")
    for mode, verdict in (("processed_logprobs", Verdict.VIOLATED), ("raw_logprobs", Verdict.CONTAINED)):
        result = verify(train, with_meta(infer, capture={"logprobs_mode": mode}))
        assert result.verdict is verdict
        assert [f.rule for f in result.faults] == ["JG020"] * (verdict is Verdict.VIOLATED)

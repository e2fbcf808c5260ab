"""Logprobs of the distribution that vLLM really draws from equal the trainer's bit for bit, and unlike ones are told.

One engine returns processed logprobs, one raw ones; both sample the same requests at several temperatures and cuts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import jetgraph
from jetgraph.engines import RolloutPlan, get_engine
from jetgraph.sampling import PROCESSED, RAW, Sampling, UnlikeLogprobs
from jetgraph.scoring import Rollout, mismatch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

PROMPTS = [[*range(11, 24)], [*range(31, 36)], [*range(100, 140)]]
SAMPLED = 24
SETTINGS = {
    "temperature 0.6": Sampling(0.6),
    "temperature 1.3": Sampling(1.3),
    "temperature 1": Sampling(1.0),
    "top-k": Sampling(1.0, top_k=12),
    "top-p": Sampling(1.0, top_p=0.8),
    "all three": Sampling(0.6, 40, 0.9),
    "greedy": Sampling(0.0),
}


def plans(mode: str) -> list[RolloutPlan]:
    """Steps of at most 29 tokens: chunks and decoding share batches."""
    return [
        RolloutPlan(
            name, PROMPTS, [1000 + i for i in range(len(PROMPTS))], SAMPLED, s.temperature, tokens=29, sequences=8,
            top_k=s.top_k, top_p=s.top_p, logprobs=mode,
        )
        for name, s in SETTINGS.items()
    ]  # fmt: skip


@pytest.fixture(scope="module")
def trainer(bf16_model: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bf16_model, dtype=torch.bfloat16).train()
    return jetgraph.compile(model, "jet")


@pytest.fixture(scope="module")
def processed(jet_model: Path) -> dict[str, list[Rollout]]:
    return get_engine("vllm").run(jet_model, plans=plans(PROCESSED)).rollouts


@pytest.fixture(scope="module")
def raw(jet_model: Path) -> dict[str, list[Rollout]]:
    return get_engine("vllm").run(jet_model, plans=plans(RAW)).rollouts


@pytest.mark.parametrize("name", SETTINGS)
def test_processed_logprobs_are_trainings_bit_for_bit(name, processed, trainer):  # [N14a, R1]
    rollouts = processed[name]
    assert all(r.sampling.logprobs == PROCESSED for r in rollouts)
    m = mismatch(trainer, rollouts)
    assert m.num_tokens == len(PROMPTS) * SAMPLED + sum(len(p) - 1 for p in PROMPTS)  # prompts are raw in both modes
    assert (m.num_exact, m.max) == (m.num_tokens, 0.0)


@pytest.mark.parametrize("name", SETTINGS)
def test_raw_logprobs_are_trainings_raw_ones_at_any_temperature(name, raw, trainer):
    m = mismatch(trainer, raw[name], trainer=Sampling())
    assert (m.num_exact, m.max) == (m.num_tokens, 0.0)


def test_the_setting_changes_what_is_returned_and_nothing_that_is_drawn(processed, raw):
    """The negative control: with identical weights the two are far apart wherever anything is processed."""
    for name, sampling in SETTINGS.items():
        ours, theirs = processed[name], raw[name]
        assert [r.tokens for r in ours] == [r.tokens for r in theirs], name
        apart = [
            abs(a - b) for x, y in zip(ours, theirs, strict=True) for a, b in zip(x.logprobs, y.logprobs, strict=True)
        ]
        same = Sampling(sampling.temperature, sampling.top_k, sampling.top_p, PROCESSED).reported == (1.0, 0, 1.0)
        assert (max(apart) == 0) if same else (sum(apart) / len(apart) > 0.1), name


def test_unlike_is_refused_on_a_live_engines_rollouts(processed, raw, trainer):  # [JG020]
    warm = Sampling(0.6, logprobs=PROCESSED)
    with pytest.raises(UnlikeLogprobs, match="JG020"):
        mismatch(trainer, raw["temperature 0.6"], trainer=warm)
    with pytest.raises(UnlikeLogprobs, match="JG020"):
        mismatch(trainer, processed["all three"], trainer=warm)
    assert mismatch(trainer, processed["temperature 0.6"], trainer=warm).max == 0


def test_an_engine_has_one_mode(jet_model):
    mixed = [plans(RAW)[0], plans(PROCESSED)[1]]
    with pytest.raises(ValueError, match="run it once for each"):
        get_engine("vllm").run(jet_model, plans=mixed)

"""The trainer's replay gate says what it saw."""

from __future__ import annotations

import torch

import jetgraph
from jetgraph.replay import in_words, replay_step
from jetgraph.trainer import capture_step
from tests.core.small_models import random_model


def test_a_step_of_other_weights_fails_and_is_said_to():
    model = jetgraph.compile(random_model(layers=1), "jet", provider="reference")
    step = capture_step(model.jetgraph, backward=False)
    assert in_words(replay_step(model, step)) == "its replay is equal"
    with torch.no_grad():
        model.model.norm.weight[0] *= 2
    failed = replay_step(model, step)
    assert failed.meta["replay"]["passed"] is False
    assert in_words(failed) == "its REPLAY FAILED (logits of 53 tokens: DIFFERENT, logprobs: DIFFERENT)"

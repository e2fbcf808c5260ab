"""Patterns match whole paths, never parts of one."""

from __future__ import annotations

import pytest

from jetgraph.policy import FP8Recipe, Policy, Rule, get_policy


def policy(*rules: Rule) -> Policy:
    return Policy("test", "", rules, rules)


def test_a_dotted_path_is_not_a_substring():  # [N1, W11, W12]
    chosen = policy(Rule("lm_head", None), Rule("model.layers.0.mlp.gate", None), Rule("*", FP8Recipe()))
    assert chosen.linear("model.layers.0.mlp.gate_proj").quantized
    assert chosen.linear("model.layers.0.mlp.up_proj").quantized
    assert not chosen.linear("model.layers.0.mlp.gate").quantized
    assert not chosen.linear("lm_head").quantized


def test_layer_1_is_not_layer_10():  # [N1]
    chosen = policy(Rule(r"re:model\.layers\.1\..*", None), Rule("*", FP8Recipe()))
    assert not chosen.linear("model.layers.1.mlp.up_proj").quantized
    assert chosen.linear("model.layers.10.mlp.up_proj").quantized


def test_first_match_wins_and_the_reason_is_kept():
    decided = get_policy("jet").linear("model.layers.3.self_attn.q_proj")
    assert decided.quantized
    assert decided.reason.startswith("jet: re:")
    assert str(decided.activation.scale.granularity) == "1x128"
    assert str(decided.weight.scale.granularity) == "128x128"
    assert str(decided.gradient.scale.granularity) == "1x128"
    assert str(decided.wgrad.scale.granularity) == "128x1"
    assert get_policy("jet").linear("lm_head").reason == "jet: lm_head"


def test_the_negative_control_differs_between_its_sides():
    control = get_policy("bf16_train_fp8_rollout")
    name = "model.layers.0.mlp.up_proj"
    assert not control.same_on_both_sides
    assert not control.linear(name).quantized
    assert (
        control.linear(name, rollout=True) == get_policy("jet").linear(name)
        or control.linear(name, rollout=True).quantized
    )
    assert get_policy("jet").same_on_both_sides


def test_unknown_policies_are_named():
    with pytest.raises(
        ValueError, match="policy 'fp8' does not exist; choose one of bf16, bf16_train_fp8_rollout, jet"
    ):
        get_policy("fp8")

"""Train–inference mismatch: values worked out by hand, the public bugs R* and V1, properties, alarms."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetgraph.mismatch import (
    FIELD_LIMITS,
    POSITIVE_ROUNDING,
    SATURATION,
    Alarms,
    Limit,
    Mismatch,
    importance_weights,
    join,
    judge,
    k3,
    limits_from_baseline,
    measure,
    pair,
    stored_baseline,
)
from jetgraph.mismatch.baselines import Baseline, stored_baselines

LN2 = math.log(2.0)


def of(delta, mask=None, *, level=-50.0, **options) -> Mismatch:
    """The mismatch of Δ [B, T]: the rollout says ``level`` everywhere."""
    delta = torch.tensor(delta, dtype=torch.float64)
    mask = torch.ones(delta.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return measure(level + delta, torch.full_like(delta, level), mask, **options)


def total(*arguments, **options):
    return of(*arguments, **options).whole.total


def near(value: float):
    return pytest.approx(value, rel=1e-12, abs=1e-13)


def test_ratios_of_two_one_and_a_half():
    """Ratios [[2, 1], [1/2, 1]], so every statistic is a fraction."""
    found = total([[LN2, 0.0], [-LN2, 0.0]])
    assert (found.num_tokens, found.num_sequences, found.num_saturated) == (4, 2, 0)
    assert found.mean == near(LN2 / 2)
    assert found.max == found.p99 == near(LN2)
    assert found.k1 == near(0.0)
    assert found.k3 == near((1.0 - 0.5) / 4)  # Σ (r − 1) = 1/2, Σ log r = 0
    assert found.chi2 == near((1 + 1 / 4) / 4)  # (r − 1)²
    assert found.ess_token == near(4.5**2 / (4 * 6.25))
    assert found.ess_sequence == near(2.5**2 / (2 * 4.25))
    assert found.sequence_log_ratio_mean == near(0.0)
    assert found.sequence_log_ratio_max == near(LN2)
    assert found.sequence_log_mean_ratio == near(math.log(1.25))
    assert found.clip_fraction == 0.5
    assert found.fraction_exact == 0.5
    assert found.mult_prob_error == near((2 + 1 + 2 + 1) / 4)


def test_signs():
    """Where the trainer says less than the rollout, KL(rollout ‖ trainer) is positive."""
    found = total([[-LN2, -LN2]])
    assert found.k1 == near(LN2)
    assert found.k3 == near(0.5 - 1 + LN2)
    assert found.sequence_log_ratio_mean == near(-2 * LN2)
    assert found.sequence_log_ratio_max == near(2 * LN2)
    assert found.sequence_log_mean_ratio == near(-2 * LN2)
    assert found.ess_sequence == 1.0


def test_percentiles_are_observed_values():
    steps = torch.arange(1, 1001, dtype=torch.float64) / 1024
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    found = total((steps * (-1) ** torch.arange(1000))[order].reshape(4, 250).tolist(), level=-64.0)
    assert (found.p99, found.p999, found.max) == (990 / 1024, 999 / 1024, 1000 / 1024)
    assert found.mean == near(1001 / 2 / 1024)


def test_k3_keeps_tiny_differences():
    """Δ = 2^-20 gives 2^-41; exp(Δ) − 1 − Δ in float64 keeps 4 digits of it, in float32 none."""
    assert total([[2.0**-20]], level=-1.0).k3 == pytest.approx(2.0**-41, rel=1e-3)


@pytest.mark.parametrize(("ratio", "outside"), [(1.1999, 0), (1.2001, 1), (0.8001, 0), (0.7999, 1)])
def test_clip_range(ratio, outside):
    assert total([[math.log(ratio)]]).clip_fraction == outside
    assert total([[math.log(ratio)]], clip=(1.0, 0.3)).clip_fraction == 0
    assert of([[0.0]], clip=(0.2, 0.28)).clip == (0.2, 0.28)


@pytest.mark.parametrize("clip", [(-0.1, 0.2), (1.1, 0.2), (0.2, -1.0), (0.2, math.inf), (math.nan, 0.2)])
def test_clip_range_that_is_none(clip):
    with pytest.raises(ValueError, match="expected .low, high."):
        of([[0.0]], clip=clip)


def test_positions():
    delta = torch.zeros(2, 4200)
    for number, (start, end) in enumerate([(0, 64), (64, 256), (256, 1024), (1024, 4096), (4096, 4200)], 1):
        delta[0, start:end] = number
    found = of(delta.tolist(), [[True] * 4200, [True] * 30 + [False] * 4170])
    assert [name for name, _ in found.by_position] == ["0-63", "64-255", "256-1023", "1024-4095", "4096+"]
    assert [split.total.max for _, split in found.by_position] == [1, 2, 3, 4, 5]
    assert [split.total.num_tokens for _, split in found.by_position] == [64 + 30, 192, 768, 3072, 104]
    assert [split.total.num_sequences for _, split in found.by_position] == [2, 1, 1, 1, 1]
    assert found.by_position[1][1].total.sequence_log_ratio_mean == 192 * 2
    assert found.by_position[0][1].total.mean == near(64 / 94)


def test_positions_count_from_the_answers_first_token():
    """A whole sequence, prompt included, has the buckets of its answer; holes (tools) take up positions."""
    mask = torch.zeros(1, 400, dtype=torch.bool)
    mask[0, 300:320] = mask[0, 370:380] = True
    found = of(torch.zeros(1, 400).tolist(), mask.tolist())
    assert [(n, s.total.num_tokens) for n, s in found.by_position] == [("0-63", 20), ("64-255", 10)]


def test_numeric_mismatch_is_told_from_staleness():
    """The trainer moved by ln 2 since the token was sampled, and the two stacks differ by ln 3."""
    rollout = torch.tensor([[-9.0, -9.0]], dtype=torch.float64)
    shadow, trainer = rollout + math.log(3), rollout + math.log(3) - LN2
    found = measure(trainer, rollout, torch.ones(1, 2), shadow=shadow).whole
    assert found.numeric.mult_prob_error == near(3)
    assert found.staleness.mult_prob_error == near(2)
    assert found.total.mult_prob_error == near(1.5)
    assert found.staleness.k1 == near(LN2)


def test_versions():
    """Without shadow the whole difference is numeric exactly if no token is stale."""
    logprobs, mask = torch.full((2, 3), -1.0), torch.tensor([[1, 1, 1], [1, 1, 0]])
    versions = torch.tensor([[7, 7, 7], [7, 7, 99]])
    fresh = measure(logprobs, logprobs, mask, versions=versions, trainer_version=7)
    assert (fresh.whole.numeric, fresh.whole.staleness) == (fresh.whole.total, None)
    assert (fresh.lag_mean, fresh.lag_max) == (0.0, 0)
    stale = measure(logprobs, logprobs, mask, versions=torch.tensor([[7, 7, 6], [5, 5, 0]]), trainer_version=7)
    assert stale.whole.numeric is None
    assert (stale.lag_mean, stale.lag_max) == (1.0, 2)
    with pytest.raises(ValueError, match="sampled by version 7, the trainer is at 6"):
        measure(logprobs, logprobs, mask, versions=versions, trainer_version=6)
    counted = measure(logprobs, logprobs, mask, versions=versions, trainer_version=6, illegal="count")
    assert (counted.counts.num_illegal, counted.whole) == (5, None)
    with pytest.raises(ValueError, match="give both or neither"):
        measure(logprobs, logprobs, mask, versions=versions)


# ---- public bugs


SCALED = {0.6: [-0.20806, -1.87473, -3.54139, -5.20806], 1.0: [-0.44019, -1.44019, -2.44019, -3.44019]}


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_r1_both_sides_at_the_sampling_temperature(temperature):  # [R1, N14a: ratio exactly 1]
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    trainer = torch.log_softmax(logits / temperature, -1)[None]
    shifted = [math.exp(value / temperature) for value in (2, 1, 0, -1)]
    rollout = torch.tensor([[math.log(value / sum(shifted)) for value in shifted]], dtype=torch.float64)
    if temperature in SCALED:
        assert rollout[0].tolist() == pytest.approx(SCALED[temperature], abs=1e-5)
    found = measure(trainer, rollout, torch.ones(1, 4)).whole.total
    assert found.mult_prob_error == pytest.approx(1.0, abs=1e-6)


def test_r1_raw_logprobs_are_seen():  # [R1, N14a: 1.2613 and 0.1707]
    trainer, raw = torch.tensor([SCALED[0.6]]), torch.tensor([SCALED[1.0]])
    for token, ratio in ((0, 1.2613), (3, 0.1707)):
        mask = torch.arange(4)[None] == token
        found = measure(trainer, raw, mask)
        assert math.exp(found.whole.total.sequence_log_mean_ratio) == pytest.approx(ratio, abs=1e-4)
        assert any("sampling temperature" in alarm.remedy for alarm in judge(found))


def test_r4_tokens_of_tools_do_not_count():  # [R4: dummy logprob 0 of an observation]
    trainer = torch.tensor([[-1.0, -8.0, -9.0, -2.0]])
    rollout = torch.tensor([[-1.0, 0.0, 0.0, -2.0]])
    assert measure(trainer, rollout, torch.tensor([[1, 0, 0, 1]])).whole.total.fraction_exact == 1.0
    assert measure(trainer, rollout, torch.ones(1, 4)).whole.total.max == 9.0


def test_r6_weights_are_of_the_old_policy():  # [R6: exp(old − rollout), detached, in every epoch]
    rollout = torch.tensor([[-1.0, -2.0, -3.0]])
    old = rollout + torch.tensor([[math.log(1.5), math.log(0.5), math.log(8.0)]])
    mask = torch.tensor([[1, 1, 1]])
    current = old.clone().requires_grad_()
    for _ in range(2):  # two epochs: the current policy moves, the weights do not
        weights = importance_weights(old, rollout, mask)
        assert weights.tolist()[0] == pytest.approx([1.5, 0.5, 2.0])
        (weights * (current - old).exp()).sum().backward()
        current = (current.detach() - 0.1 * current.grad).requires_grad_()
    assert not importance_weights(current, rollout, mask).requires_grad
    assert importance_weights(old, rollout, torch.tensor([[1, 0, 1]]))[0, 1] == 0
    with pytest.raises(ValueError, match="expected a positive, finite number"):
        importance_weights(old, rollout, mask, cap=0.0)


def test_r7_k3_saturates_before_the_exponential():  # [R7: log-ratio 100 in FP32: finite value, gradient 0, not NaN]
    x = torch.tensor([100.0, 0.5, -200.0], requires_grad=True)
    value = k3(x)
    value.sum().backward()
    assert value.isfinite().all()
    assert value[1].item() == pytest.approx(math.exp(0.5) - 1.5, rel=1e-6)
    assert x.grad.tolist() == pytest.approx([0.0, math.exp(0.5) - 1, 0.0])


def test_r8_the_split_into_micro_batches_decides_nothing():  # [R8: 100 tokens at 2.0 and 900 at 0.5: 0.65, not 1.25]
    delta = torch.full((10, 100), -0.5, dtype=torch.float64)
    delta[3] = -2.0
    rollout, mask = torch.full((10, 100), -5.0, dtype=torch.float64), torch.ones(10, 100)
    for sizes in ([10], [4, 6], [1] * 10, [3, 1, 6]):
        cut = zip(*(t.split(sizes) for t in (rollout + delta, rollout, mask)), strict=True)
        found = join([pair(*part) for part in cut]).measure()
        assert found.whole.total.mean == near(0.65)
        assert found.whole.total.p99 == 2.0
        assert found.counts.num_sequences == 10


def test_r8_parts_of_other_lengths_join():
    a, b = torch.full((1, 3), -1.0), torch.full((2, 5), -1.0)
    joined = join([pair(a - 0.5, a, torch.ones(1, 3)), pair(b, b, torch.tensor([[1] * 5, [1, 0, 0, 0, 0]]))])
    found = joined.measure().whole.total
    assert (found.num_tokens, found.num_sequences) == (9, 3)
    assert found.mean == near(1.5 / 9)
    with pytest.raises(ValueError, match="only some parts"):
        join([pair(a, a, torch.ones(1, 3)), pair(a, a, torch.ones(1, 3), shadow=a)])
    with pytest.raises(ValueError, match="nothing to join"):
        join([])


def test_r10_positive_logprobs_are_no_logprobs():  # [R10: +123.7 is refused or counted; a rounding is told apart]
    good = torch.full((1, 3), -1.0)
    for fault in (123.7, 0.0078125, 2 * POSITIVE_ROUNDING):
        bad = torch.tensor([[-1.0, fault, -1.0]])
        for arguments in ((bad, good), (good, bad)):
            with pytest.raises(ValueError, match=r"holds 1 tokens .* at sequence 0, position 1"):
                measure(*arguments, torch.ones(1, 3))
        found = measure(bad, good, torch.ones(1, 3), illegal="count")
        assert (found.counts.num_illegal, found.counts.num_positive, found.counts.num_tokens) == (1, 1, 2)
        assert found.whole.total.fraction_exact == 1.0
        assert "1 positive values" in str(judge(found)[0])
    rounded = measure(torch.tensor([[-1.0, 7.6e-6, -1.0]]), good, torch.ones(1, 3))
    assert (rounded.counts.num_illegal, rounded.counts.num_rounded_positive) == (0, 1)
    assert measure(torch.tensor([[POSITIVE_ROUNDING]]), torch.zeros(1, 1), torch.ones(1, 1)).counts.num_illegal == 0


def test_v1_other_kernels_without_an_update_are_reported():  # [V1: log_prob != old_log_prob is never hidden]
    """Recomputed by other kernels two of four tokens moved, one of them over the clipping range."""
    old = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    again = old + torch.tensor([[0.0, 2**-10], [0.25, 0.0]])
    found = measure(again, old, torch.ones(2, 2), versions=torch.ones(2, 2, dtype=torch.long), trainer_version=1)
    assert found.whole.numeric.fraction_exact == 0.5
    assert found.whole.numeric.clip_fraction == 0.25
    assert [alarm.metric for alarm in judge(found)] == ["numeric/k3", "numeric/mult_prob_error"]


@pytest.mark.slow
def test_v1_jet_does_not_depend_on_the_micro_batch():  # [V1: batch-invariant: max difference 0, nothing clipped]
    import jetgraph
    from jetgraph.trainer import token_logprobs
    from tests.core.small_models import random_ids, random_model

    model = jetgraph.compile(random_model(), "jet")
    ids = random_ids(model, 4, 24)

    def logprobs(size):
        with torch.no_grad():
            parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(size)]
        return token_logprobs(torch.cat(parts)[:, :-1], ids[:, 1:])

    old, mask = logprobs(2), torch.ones(4, 23)
    for size in (1, 4):
        found = measure(logprobs(size), old, mask, clip=(0.0, 0.0)).whole.total
        assert (found.max, found.fraction_exact, found.clip_fraction) == (0.0, 1.0, 0.0)


# ---- legal extremes, illegal input


def finite(found: Mismatch) -> bool:
    """In float32 too, which loggers narrow to."""
    return all(math.isfinite(v) and torch.tensor(v, dtype=torch.float32).isfinite() for v in found.scalars().values())


def test_huge_and_infinite_differences_saturate_and_are_counted():
    infinity = math.inf
    trainer = torch.tensor([[-1e30, -1.0, -infinity, -1.0, -infinity]])
    rollout = torch.tensor([[-1.0, -1e30, -1.0, -infinity, -infinity]])
    found = measure(trainer, rollout, torch.ones(1, 5))
    assert found.whole.total.num_saturated == 4
    assert found.whole.total.max == SATURATION
    assert found.whole.total.mean == near(SATURATION * 4 / 5)
    assert found.whole.total.fraction_exact == pytest.approx(1 / 5)
    assert found.counts.num_impossible == 1
    assert finite(found)
    assert {alarm.metric for alarm in judge(found)} >= {"num_impossible", "total/num_saturated"}
    edge = torch.tensor([[-SATURATION, -SATURATION - 1e-5]])
    assert measure(edge, torch.zeros(1, 2), torch.ones(1, 2)).whole.total.num_saturated == 1


def test_long_sequences_do_not_overflow():
    """10,000 tokens that each differ by 30 nats: S = 300,000, far over what exp takes."""
    found = of(torch.full((2, 10_000), 30.0).tolist())
    assert found.whole.total.sequence_log_ratio_max == 300_000
    assert found.whole.total.sequence_log_mean_ratio == 300_000
    assert found.whole.total.ess_sequence == 1.0
    assert finite(found)


def test_a_batch_of_padding_has_counts_and_no_statistics():
    nothing = of([[0.0, 1.0]], [[0, 0]])
    assert nothing.whole is None
    assert nothing.by_position == ()
    assert nothing.scalars()["jetgraph/num_tokens"] == 0.0
    assert not any("/mean" in name for name in nothing.scalars())
    assert [a.metric for a in judge(nothing)] == ["num_tokens"]
    assert measure(*[torch.zeros(0, 4)] * 3).whole is None
    assert measure(*[torch.zeros(3, 0)] * 3).whole is None


def test_a_sequence_without_a_token_has_no_weight():
    found = of([[LN2, LN2], [5.0, 5.0]], [[1, 1], [0, 0]])
    assert (found.counts.num_sequences, found.counts.num_empty_sequences) == (1, 1)
    assert found.whole.total.sequence_log_ratio_mean == near(2 * LN2)
    assert found.whole.total.ess_sequence == 1.0


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"trainer": torch.full((2, 3), math.nan)}, ValueError, "trainer holds 6 tokens"),
        ({"rollout": torch.full((2, 3), math.inf)}, ValueError, "rollout holds 6 tokens"),
        ({"shadow": torch.full((2, 3), math.nan)}, ValueError, "shadow holds 6 tokens"),
        ({"rollout": torch.zeros(2, 4)}, ValueError, r"rollout has shape \[2, 4\], trainer \[2, 3\]"),
        ({"rollout": torch.zeros(3)}, ValueError, "rollout has shape"),
        ({"trainer": torch.zeros(3)}, ValueError, r"expected \[B, T\]"),
        ({"mask": torch.ones(2, 4)}, ValueError, r"the mask has shape \[2, 4\]"),
        ({"mask": torch.full((2, 3), 0.5)}, ValueError, "the mask holds 0.5"),
        ({"mask": torch.full((2, 3), 2)}, ValueError, "the mask holds 2"),
        ({"mask": torch.full((2, 3), math.nan)}, ValueError, "the mask holds nan"),
        ({"trainer": torch.zeros(2, 3).bfloat16()}, TypeError, "expected float32 or float64"),
        ({"rollout": torch.zeros(2, 3, dtype=torch.long)}, TypeError, "rollout is torch.int64"),
        ({"versions": torch.zeros(2, 3), "trainer_version": 1}, TypeError, "expected integers"),
        ({"versions": torch.zeros(2, dtype=torch.long), "trainer_version": 1}, ValueError, "expected one a token"),
        ({"illegal": "ignore"}, ValueError, "expected 'raise' or 'count'"),
    ],
)
def test_illegal_input_is_named(change, error, says):
    logprobs = torch.full((2, 3), -1.0)
    with pytest.raises(error, match=says):
        measure(**{"trainer": logprobs, "rollout": logprobs, "mask": torch.ones(2, 3)} | change)


def test_illegal_tokens_are_left_out_of_every_series():
    good = torch.full((1, 4), -1.0)
    bad = torch.tensor([[math.nan, -1.0, 3.0, -1.0]])
    found = measure(good, bad, torch.ones(1, 4), shadow=torch.tensor([[-1.0, math.nan, 5.0, -1.0]]), illegal="count")
    assert (found.counts.num_illegal, found.counts.num_nan, found.counts.num_positive) == (3, 2, 2)
    assert [series.num_tokens for _, series in found.whole.series()] == [1, 1, 1]
    assert finite(found)


# ---- properties


@st.composite
def batches(draw):
    """Log-probabilities of two policies and a mask; sometimes absurd, always legal where the mask holds."""
    num_sequences, length = draw(st.integers(1, 5)), draw(st.integers(1, 90))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([1e-9, 1e-3, 1.0, 30.0, 1e4]))
    rollout = -torch.rand(num_sequences, length, generator=generator, dtype=torch.float64) * 20
    trainer = rollout + spread * torch.randn(num_sequences, length, generator=generator, dtype=torch.float64)
    trainer, shape = trainer.clamp(max=0.0), rollout.shape
    for logprobs in (trainer, rollout):
        logprobs[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.1]))] = -math.inf
    mask = torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.05, 0.7, 1.0]))
    if draw(st.booleans()):
        trainer, rollout = trainer.float(), rollout.float()
    return trainer, rollout, mask


@settings(max_examples=30)
@given(batches(), st.randoms())
def test_order_of_sequences_and_masked_values_decide_nothing(batch, random):
    trainer, rollout, mask = batch
    found = measure(*batch)
    order = torch.tensor(random.sample(range(len(mask)), len(mask)))
    assert measure(trainer[order], rollout[order], mask[order]) == found
    garbage = torch.tensor(random.choices([math.nan, math.inf, 5.0, -math.inf], k=mask.numel())).reshape(mask.shape)
    poisoned = [torch.where(mask, t, garbage.to(t.dtype)) for t in (trainer, rollout)]
    assert measure(*poisoned, mask.int(), illegal="raise") == found


@settings(max_examples=30)
@given(batches())
def test_everything_is_finite_and_in_its_range(batch):
    found = measure(*batch, shadow=batch[1] - 0.25)
    assert finite(found)
    for _, split in [("", found.whole), *found.by_position] if found.whole else []:
        for _, series in split.series():
            assert 0 <= series.mean <= series.max
            assert series.p99 <= series.p999 <= series.max <= SATURATION
            assert series.k3 >= 0
            assert series.chi2 >= 0
            assert 0 < series.ess_token <= 1 + 1e-12
            assert 0 < series.ess_sequence <= 1 + 1e-12
            assert 0 <= series.clip_fraction <= 1
            assert series.mult_prob_error >= 1
    assert Mismatch.from_plain(json.loads(json.dumps(found.to_plain()))) == found


@settings(max_examples=25)
@given(batches())
def test_equal_policies_are_exactly_equal(batch):
    _, rollout, mask = batch
    found = measure(rollout, rollout.clone(), mask, clip=(0.0, 0.0))
    if found.whole is None:
        assert not mask.any()
        return
    for _, split in [("", found.whole), *found.by_position]:
        d = split.total
        zeros = (d.mean, d.p99, d.p999, d.max, d.k1, d.k3, d.chi2, d.clip_fraction, d.num_saturated)
        assert {*zeros, d.sequence_log_ratio_mean, d.sequence_log_ratio_max, d.sequence_log_mean_ratio} == {0}
        assert (d.fraction_exact, d.ess_token, d.ess_sequence, d.mult_prob_error) == (1, 1, 1, 1)


@settings(max_examples=30)
@given(batches(), st.integers(0, 5))
def test_joined_parts_are_the_whole(batch, cut):
    parts = [pair(*(t[rows] for t in batch)) for rows in (slice(0, cut), slice(cut, None))]
    whole, joined = measure(*batch), join(parts).measure()
    assert joined.counts == whole.counts
    assert joined.scalars() == pytest.approx(whole.scalars(), rel=1e-12, abs=1e-15)


# ---- alarms


@pytest.mark.parametrize(
    ("delta", "broken"),
    [
        (0.0440, set()),  # k3 ≈ Δ²/2 + Δ³/6 = 0.982e-3
        (0.0445, {"total/k3"}),  # 1.005e-3
        (0.0487, {"total/k3"}),  # exp = 1.0499
        (0.0489, {"total/k3", "total/mult_prob_error"}),  # 1.0501
    ],
)
def test_field_limits(delta, broken):
    alarms = judge(of([[delta]]))
    assert {alarm.metric for alarm in alarms} == broken
    for alarm in alarms:
        assert alarm.source in str(alarm)
        assert alarm.remedy in str(alarm)


def test_limits_look_at_numerics_where_they_are_known():
    """A stale trainer on exact numerics is no numeric alarm; without shadow the same batch is one."""
    rollout = torch.full((1, 4), -3.0)
    assert judge(measure(rollout - 0.5, rollout, torch.ones(1, 4), shadow=rollout)) == ()
    assert {a.metric for a in judge(measure(rollout - 0.5, rollout, torch.ones(1, 4)))} == {
        "total/k3",
        "total/mult_prob_error",
    }


def steady(size: float, tokens: int = 2000) -> Mismatch:
    """Half the tokens differ by +size, half by −size."""
    return of([[size, -size] * (tokens // 2)])


def test_limits_of_a_baseline():
    limits = {limit.metric: limit for limit in limits_from_baseline([steady(0.008), steady(0.01)])}
    assert limits["mean"].threshold == near(0.015)
    assert limits["p999"].threshold == near(0.02)
    assert limits["mult_prob_error"].threshold == near(1 + 1.5 * (math.exp(0.01) - 1))
    assert "worst of 2 batches" in limits["mean"].source
    assert "fraction_exact" not in limits  # no token was exact, so none can stop being so
    assert not judge(steady(0.0149), limits.values())
    assert [a.metric for a in judge(steady(0.0151), limits.values())] == ["total/mean", "total/mult_prob_error"]
    few = {limit.metric for limit in limits_from_baseline([steady(0.01, tokens=998)])}
    assert "p99" in few
    assert "p999" not in few


def test_after_an_exact_baseline_only_exact_passes():
    limits = limits_from_baseline([steady(0.0)])
    assert judge(steady(0.0), limits) == ()
    broken = {alarm.metric: alarm for alarm in judge(of([[0.0] * 1999 + [1e-6]]), limits)}
    assert {"total/mean", "total/k3", "total/fraction_exact"} <= set(broken)
    assert "below" in str(broken["total/fraction_exact"])


@pytest.mark.parametrize("batches", [[], [of([[0.0]], [[0]])]])
def test_no_baseline(batches):
    with pytest.raises(ValueError, match="baseline"):
        limits_from_baseline(batches)


def test_a_run_learns_its_baseline_and_keeps_it_when_resumed():
    alarms = Alarms(warmup=2)
    assert alarms.observe(of([[0.0]], [[0]]))  # judged, and no part of the baseline
    assert alarms.observe(steady(0.008)) == ()
    assert alarms.derived == ()
    assert alarms.observe(steady(0.01)) == ()
    assert alarms.derived != ()
    resumed = Alarms(warmup=2)
    resumed.load_state_dict(json.loads(json.dumps(alarms.state_dict())))
    for run in (alarms, resumed):
        (alarm,) = [a for a in run.observe(steady(0.018)) if a.metric == "total/mean"]
        assert alarm.threshold == near(0.015)
        assert "this run's first steps" in str(alarm)
        assert run.limits == FIELD_LIMITS
    assert Alarms(limits=(Limit("mean", 0.5, "a test", "do nothing"),)).observe(steady(0.4)) == ()


@pytest.mark.parametrize("name", stored_baselines())
def test_stored_baselines(name, tmp_path):
    stored = stored_baseline(name)
    assert (stored.name, len(stored.versions) > 0, len(stored.batches) > 1) == (name, True, True)
    limits = stored.limits()
    assert {"mean", "k3", "mult_prob_error"} <= {limit.metric for limit in limits}
    for batch in stored.batches:
        assert judge(batch, limits) == ()
    stored.save(tmp_path / "again.json")
    assert Baseline.load(tmp_path / "again.json") == stored


def test_a_baseline_that_is_not_stored():
    with pytest.raises(ValueError, match="no stored baseline 'x'; there are: "):
        stored_baseline("x")

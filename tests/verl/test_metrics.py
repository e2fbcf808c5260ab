"""Numbers for VeRL's logger, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from jetgraph_verl.metrics import of_batch, of_sync

LN2 = math.log(2.0)


def batch(old, rollout, mask) -> dict[str, torch.Tensor]:
    return {
        "old_log_probs": torch.tensor(old),
        "rollout_log_probs": torch.tensor(rollout),
        "response_mask": torch.tensor(mask),
    }


def measured(data, versions=(4, 4), trainer=4):
    return of_batch(data, versions, trainer, (0.2, 0.3))


def test_of_batch_by_hand():
    # ratios p_train / p_rollout: 1, 2 | 1/2 and a masked token that would be e^99
    data = batch([[-1.0, -1.0], [-1.0 - LN2, 0.0]], [[-1.0, -1.0 - LN2], [-1.0, -99.0]], [[1, 1], [1, 0]])
    found = measured(data).scalars()
    assert found["jetgraph/num_tokens"] == 3
    assert found["jetgraph/num_sequences"] == 2
    assert found["jetgraph/total/mean"] == pytest.approx(2 * LN2 / 3)
    assert found["jetgraph/total/max"] == pytest.approx(LN2)
    assert found["jetgraph/total/fraction_exact"] == pytest.approx(1 / 3)
    assert found["jetgraph/total/k1"] == pytest.approx(0.0, abs=1e-7)
    # k3 = r − 1 − log r: 0, 1 − ln 2, ln 2 − 1/2
    assert found["jetgraph/total/k3"] == pytest.approx(0.5 / 3)
    assert found["jetgraph/total/chi2"] == pytest.approx((0 + 1 + 0.25) / 3)
    assert found["jetgraph/total/ess_token"] == pytest.approx(3.5**2 / (3 * (1 + 4 + 0.25)))
    assert found["jetgraph/total/clip_fraction"] == pytest.approx(2 / 3)  # 2 > 1.3 and 0.5 < 0.8
    assert found["jetgraph/total/sequence_log_ratio_max"] == pytest.approx(LN2)
    assert all(math.isfinite(value) for value in found.values())


def test_clip_is_low_then_high():
    data = batch([[-1.0 + math.log(1.25)]], [[-1.0]], [[1]])
    assert of_batch(data, [0], 0, (0.1, 0.3)).whole.total.clip_fraction == 0.0
    assert of_batch(data, [0], 0, (0.3, 0.1)).whole.total.clip_fraction == 1.0


def test_on_policy_the_whole_difference_is_numeric():
    found = measured(batch([[-1.0], [-2.0]], [[-1.5], [-2.0]], [[1], [1]])).scalars()
    assert found["jetgraph/numeric/max"] == found["jetgraph/total/max"] == 0.5
    assert (found["jetgraph/lag_mean"], found["jetgraph/lag_max"]) == (0.0, 0.0)


def test_one_stale_sequence_and_nothing_is_called_numeric():
    found = measured(batch([[-1.0], [-2.0]], [[-1.5], [-2.0]], [[1], [1]]), versions=(4, 2)).scalars()
    assert not [name for name in found if "/numeric/" in name]
    assert (found["jetgraph/lag_mean"], found["jetgraph/lag_max"]) == (1.0, 2.0)


def test_a_padding_row_counts_nothing_whatever_its_version():
    """VeRL fills a batch up with copies of a row whose mask is 0 and whose tag is the copied one's."""
    found = measured(batch([[-1.0], [-7.0]], [[-1.0], [0.0]], [[1], [0]]), versions=(4, 0)).scalars()
    assert (found["jetgraph/num_tokens"], found["jetgraph/num_empty_sequences"]) == (1, 1)
    assert (found["jetgraph/total/max"], found["jetgraph/lag_max"]) == (0.0, 0.0)


def test_what_is_no_logprob_is_counted_and_never_averaged():
    data = batch([[math.nan, 0.5, -1.0]], [[-1.0, -1.0, -1.0]], [[1, 1, 1]])
    found = measured(data, versions=(4,)).scalars()
    assert (found["jetgraph/num_illegal"], found["jetgraph/num_nan"], found["jetgraph/num_positive"]) == (2, 1, 1)
    assert found["jetgraph/total/max"] == 0.0
    assert all(math.isfinite(value) for value in found.values())


def test_tokens_from_the_future_are_counted_as_illegal():
    found = measured(batch([[-1.0], [-1.0]], [[-1.0], [-1.0]], [[1], [1]]), versions=(4, 5)).scalars()
    assert (found["jetgraph/num_tokens"], found["jetgraph/num_illegal"]) == (1, 1)


def test_an_empty_batch_has_no_statistics():
    found = measured(batch([[-1.0]], [[-1.0]], [[0]]), versions=(4,))
    assert found.whole is None
    assert not [name for name in found.scalars() if "/total/" in name]


def report(**changes) -> dict:
    return {
        "version": 3,
        "bytes": 1000,
        "seconds": 2.0,
        "stall_seconds": 0.25,
        "changed": {"bfloat16": [1, 4], "float8_e4m3fn": [0, 16], "float32": [0, 0]},
    } | changes


def test_of_sync_by_hand():
    """The slowest replica decides; what changed is the same bytes on all."""
    assert of_sync([report(), report(seconds=5.0, stall_seconds=0.125)]) == {
        "jetgraph/sync/version": 3.0,
        "jetgraph/sync/bytes": 1000.0,
        "jetgraph/sync/seconds": 5.0,
        "jetgraph/sync/stall_seconds": 0.25,
        "jetgraph/sync/changed/bfloat16": 0.25,
        "jetgraph/sync/changed/float8_e4m3fn": 0.0,
        "jetgraph/sync/changed/float32": 0.0,
    }

"""Train–inference mismatch of one batch: measured, split into numerics and staleness, and judged against limits.

    found = measure(old_log_probs, rollout_log_probs, response_mask, shadow=scored_at_the_rollouts_version)
    logger.log(found.scalars(), step)
    for alarm in alarms.observe(found): print(alarm)

`batch` checks what is compared and joins micro-batches, `estimators` are the formulas, `report` the values that come
out, `alarms` judge them, `baselines` holds measured BF16/BF16 runs.  No trainer and no engine is imported here; what
each number is for stands in docs/mismatch.md.
"""

from __future__ import annotations

from torch import Tensor

from jetgraph.mismatch.alarms import FIELD_LIMITS, Alarm, Alarms, Limit, judge, limits_from_baseline
from jetgraph.mismatch.baselines import Baseline, stored_baseline
from jetgraph.mismatch.batch import POSITIVE_ROUNDING, Illegal, Pairs, join, pair
from jetgraph.mismatch.estimators import SATURATION, Difference, importance_weights, k3
from jetgraph.mismatch.report import Counts, Mismatch, Split

__all__ = [
    "FIELD_LIMITS",
    "POSITIVE_ROUNDING",
    "SATURATION",
    "Alarm",
    "Alarms",
    "Baseline",
    "Counts",
    "Difference",
    "Limit",
    "Mismatch",
    "Pairs",
    "Split",
    "importance_weights",
    "join",
    "judge",
    "k3",
    "limits_from_baseline",
    "measure",
    "pair",
    "stored_baseline",
]


def measure(
    trainer: Tensor,
    rollout: Tensor,
    mask: Tensor,
    *,
    shadow: Tensor | None = None,
    versions: Tensor | None = None,
    trainer_version: int | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
    illegal: Illegal = "raise",
    by_position: bool = True,
) -> Mismatch:
    """Every mismatch statistic of one batch.  For a batch in parts: `pair` each, `join`, then ``.measure()``.

    Args:
        trainer: [B, T] FP32 or FP64, the trainer's logprobs of the sampled tokens before its update, at the sampling
            temperature.
        rollout: [B, T] the engine's own, of the distribution that it sampled from (not the raw one before temperature).
        mask: [B, T] bool or 0/1, true where the policy wrote the token: not padding, not a tool's output.  Nothing
            under a false mask is read, not even NaN.
        shadow: [B, T] the trainer's logprobs at the weights version that sampled the token.  Numeric mismatch is
            shadow − rollout, staleness trainer − shadow.
        versions: [B, T] integers, the weights version that sampled each token, with ``trainer_version``, the trainer's.
        clip: PPO's (low, high), for `Difference.clip_fraction`.
        illegal: a NaN, a logprob above `POSITIVE_ROUNDING` or a version from the future raises, or (``"count"``, for a
            run that must not die for a metric) its token is left out and counted.
        by_position: also by position in the answer: 0–63, 64–255, 256–1023, 1024–4095, 4096 and on.

    Raises:
        TypeError, ValueError: see `pair` and `Pairs.measure`.
    """
    pairs = pair(
        trainer, rollout, mask, shadow=shadow, versions=versions, trainer_version=trainer_version, illegal=illegal
    )
    return pairs.measure(clip=clip, by_position=by_position)

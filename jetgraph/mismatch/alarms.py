"""When is a mismatch too large?  Limits with their source, and alarms that say what to do.

Two sources.  `FIELD_LIMITS` are what the field calls acceptable, for any pair of stacks.  `limits_from_baseline` takes
what *this* model on *this* machine shows when both sides are BF16, and allows a factor over it: `FACTORS`, which also
says why.  From a pair that is exact (jet on row-invariant kernels) the same rule gives limits that nothing but exact
passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetgraph.mismatch.estimators import SATURATION, Difference
from jetgraph.mismatch.report import Mismatch


@dataclass(frozen=True)
class Limit:
    """``metric`` names a field of `Difference`; a value above ``threshold`` (or below it) is an alarm."""

    metric: str
    threshold: float
    source: str
    remedy: str
    below: bool = False

    def broken_by(self, value: float) -> bool:
        return value < self.threshold if self.below else value > self.threshold


@dataclass(frozen=True)
class Alarm:
    """One limit that one batch broke; prints as one sentence."""

    metric: str
    value: float
    threshold: float
    source: str
    remedy: str
    below: bool = False

    def __str__(self) -> str:
        side = "below" if self.below else "above"
        return f"{self.metric} is {self.value:.3g}, {side} {self.threshold:.3g} ({self.source}): {self.remedy}"


_NUMERICS = (
    "prove the pair contained (jetgraph verify), look where it diverges (jetgraph diverge), "
    "and check that both sides use the sampling temperature and the same weights version"
)
_TAIL = "few tokens differ much: look at them by position; a kernel bug, a stale cache or a mask that keeps tool tokens"

FIELD_LIMITS = (
    Limit("k3", 1e-3, "the field calls KL < 1e-3 acceptable", _NUMERICS),
    Limit("mult_prob_error", 1.05, "NeMo-RL's gate on mean exp|Δ|", _NUMERICS),
)
"""Of the pair's numerics.  Staleness has no such limit: how much is healthy is the algorithm's choice."""


@dataclass(frozen=True)
class Factor:
    """How far over a baseline's worst batch a metric may go; ``rest`` is its value when nothing differs."""

    metric: str
    factor: float
    remedy: str
    rest: float = 0.0
    below: bool = False
    tokens: int = 1
    """Needed in every batch of the baseline: with fewer, the percentile is the maximum."""


FACTORS = (
    # means of |Δ| repeat from batch to batch: within a few per cent over some thousand tokens
    Factor("mean", 1.5, _NUMERICS),
    Factor("mult_prob_error", 1.5, _NUMERICS, rest=1.0),
    # quadratic in Δ, so the rarest tokens decide: k3 was seen to move 3.7-fold at equal mean |Δ|
    Factor("k3", 4.0, _NUMERICS),
    Factor("p99", 2.0, _TAIL, tokens=100),
    Factor("p999", 2.0, _TAIL, tokens=1000),
    # lost exactness, as a share of the tokens that were not exact anyway
    Factor("fraction_exact", 1.5, _NUMERICS, rest=1.0, below=True),
    Factor("ess_token", 4.0, "importance weights are uneven: lower the lag or the learning rate, or cap the weights",
           rest=1.0, below=True),
)  # fmt: skip


def limits_from_baseline(
    batches: Sequence[Mismatch], *, source: str = "baseline", factors: Sequence[Factor] = FACTORS
) -> tuple[Limit, ...]:
    """Limits such that each metric may depart from its value at rest ``factor`` times as far as in the worst batch.

    A limit that no value can break (a share below 0) is left out.

    Raises:
        ValueError: no batch, or one without tokens or with illegal ones: that is no baseline.
    """
    series: list[Difference] = []
    for number, batch in enumerate(batches):
        if batch.decisive is None or batch.counts.num_illegal:
            raise ValueError(
                f"batch {number} of the baseline has {batch.counts.num_tokens} tokens and {batch.counts.num_illegal} "
                "illegal ones: expected tokens, all of them legal; measure the baseline again"
            )
        series.append(batch.decisive[1])
    if not series:
        raise ValueError("the baseline is empty: give the Mismatch of at least one BF16/BF16 batch")
    fewest = min(d.num_tokens for d in series)
    limits = []
    for f in factors:
        values = [getattr(d, f.metric) for d in series]
        worst = max(abs(value - f.rest) for value in values)
        threshold = f.rest - f.factor * worst if f.below else f.rest + f.factor * worst
        if fewest >= f.tokens and not (f.below and threshold <= 0):
            told = f"{f.factor:g} times the worst of {len(series)} batches of {source}"
            limits.append(Limit(f.metric, threshold, told, f.remedy, f.below))
    return tuple(limits)


def judge(mismatch: Mismatch, limits: Iterable[Limit] = FIELD_LIMITS) -> tuple[Alarm, ...]:
    """The alarms of one batch: what is wrong with its data first, then broken limits, on `Mismatch.decisive`."""
    alarms = list(_data_alarms(mismatch))
    if mismatch.decisive is not None:
        series, found = mismatch.decisive
        for limit in limits:
            value = getattr(found, limit.metric)
            if limit.broken_by(value):
                alarms.append(
                    Alarm(
                        f"{series}/{limit.metric}",
                        value,
                        limit.threshold,
                        limit.source,
                        limit.remedy,
                        below=limit.below,
                    )
                )
    return tuple(alarms)


def _data_alarms(mismatch: Mismatch) -> Iterable[Alarm]:
    counts = mismatch.counts
    if counts.num_illegal:
        yield Alarm(
            "num_illegal", counts.num_illegal, 0, "a logprob is a number ≤ 0",
            f"{counts.num_nan} NaN and {counts.num_positive} positive values, left out of every statistic: find the "
            "kernel that made them before trusting the loss",
        )  # fmt: skip
    if counts.num_impossible:
        yield Alarm(
            "num_impossible", counts.num_impossible, 0, "a sampled token has a probability",
            "both sides say −inf: token ids and logprobs belong to different positions, or a vocabulary mask is wrong",
        )  # fmt: skip
    if mismatch.whole is None:
        yield Alarm("num_tokens", 0, 1, "nothing was compared", "look at the response mask", below=True)
        return
    for name, series in mismatch.whole.series():
        if series.num_saturated:
            yield Alarm(
                f"{name}/num_saturated", series.num_saturated, 0, f"|Δ| above {SATURATION:g} is a fault", _TAIL
            )  # fmt: skip


@dataclass
class Alarms:
    """Judges a run batch by batch; with ``warmup`` its first batches become the baseline of further limits.

    During warm-up only ``limits`` apply.  A warm-up batch with illegal tokens or none is judged but is no baseline.
    """

    limits: tuple[Limit, ...] = FIELD_LIMITS
    warmup: int = 0
    baseline: list[Mismatch] = field(default_factory=list)

    def observe(self, mismatch: Mismatch) -> tuple[Alarm, ...]:
        """The alarms of the next batch; pure but for the warm-up."""
        if len(self.baseline) < self.warmup:
            if mismatch.decisive is not None and not mismatch.counts.num_illegal:
                self.baseline.append(mismatch)
            return judge(mismatch, self.limits)
        return judge(mismatch, (*self.limits, *self.derived))

    @property
    def derived(self) -> tuple[Limit, ...]:
        """Limits from the warm-up; none before it is complete."""
        if not self.baseline or len(self.baseline) < self.warmup:
            return ()
        return limits_from_baseline(self.baseline, source="this run's first steps")

    def state_dict(self) -> dict[str, Any]:
        """Of JSON's types: the warm-up, so that a resumed run keeps its limits."""
        return {"baseline": [m.to_plain() for m in self.baseline]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.baseline = [Mismatch.from_plain(m) for m in state["baseline"]]

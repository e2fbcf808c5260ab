"""What is compared, checked: log-probabilities of the same tokens by trainer and rollout, and which of them count.

    pairs = pair(old_log_probs, rollout_log_probs, response_mask)   # one micro-batch, or one rank's part
    mismatch = join([pairs, …]).measure()                           # statistics once, over all tokens

Percentiles and sequence weights have no mean over micro-batches, and a mean of means weighs tokens by how a batch was
cut; so parts are joined first and measured once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jetgraph.mismatch.estimators import difference, log_ratios
from jetgraph.mismatch.report import Counts, Mismatch, Split

POSITIVE_ROUNDING = 2.0**-16
"""A logprob up to here (1.5e-5) is a rounding, above it a fault.  One made as logit − logsumexp in FP32 is off by about
one unit in the last place of logsumexp, 2^-16 where logits reach 128 to 256; 1e-6 would refuse correct trainers."""

POSITION_EDGES = (0, 64, 256, 1024, 4096)
"""First position of each bucket; the last one is open."""

Illegal = Literal["raise", "count"]


@dataclass(frozen=True)
class Pairs:
    """Checked log-probabilities [B, T] in float64, 0 where ``mask`` [B, T] does not hold; made by `pair`."""

    trainer: Tensor
    rollout: Tensor
    mask: Tensor
    shadow: Tensor | None
    lag: Tensor | None
    """Versions by which the trainer is ahead of the weights that sampled the token, int64; anything where masked."""
    counts: Counts

    def measure(self, *, clip: tuple[float, float] = (0.2, 0.2), by_position: bool = True) -> Mismatch:
        """Every statistic, whole and by position; see `jetgraph.mismatch.measure`.

        Raises:
            ValueError: ``clip`` is not (low, high) with 0 ≤ low ≤ 1 and 0 ≤ high.
        """
        low, high = clip
        if not (0 <= low <= 1 and 0 <= high < float("inf")):
            raise ValueError(f"clip is {clip}: expected (low, high) as of PPO's range [1 − low, 1 + high]")
        buckets: list[tuple[str, Split]] = []
        if by_position and self.mask.any():
            first = self.mask.int().argmax(1, keepdim=True)
            position = torch.arange(self.mask.shape[1], device=self.mask.device) - first
            for start, end in zip(POSITION_EDGES, (*POSITION_EDGES[1:], None), strict=True):
                inside = (position >= start) & (position < end) if end else position >= start
                split = self._split(self.mask & inside, clip)
                if split is not None:
                    buckets.append((f"{start}-{end - 1}" if end else f"{start}+", split))
        lags = None if self.lag is None else self.lag[self.mask].double()
        has_lag = lags is not None and lags.numel() > 0
        return Mismatch(
            whole=self._split(self.mask, clip),
            by_position=tuple(buckets),
            counts=self.counts,
            clip=(float(low), float(high)),
            lag_mean=lags.mean().item() if has_lag else None,  # type: ignore[union-attr]
            lag_max=int(lags.max().item()) if has_lag else None,  # type: ignore[union-attr]
        )

    def _split(self, mask: Tensor, clip: tuple[float, float]) -> Split | None:
        total = difference(log_ratios(self.trainer, self.rollout), mask, clip)
        if total is None:
            return None
        if self.shadow is not None:
            return Split(
                total,
                difference(log_ratios(self.shadow, self.rollout), mask, clip),
                difference(log_ratios(self.trainer, self.shadow), mask, clip),
            )
        on_policy = self.lag is not None and not self.lag[mask].any()
        return Split(total, total if on_policy else None, None)


def pair(
    trainer: Tensor,
    rollout: Tensor,
    mask: Tensor,
    *,
    shadow: Tensor | None = None,
    versions: Tensor | None = None,
    trainer_version: int | None = None,
    illegal: Illegal = "raise",
) -> Pairs:
    """Check one batch; arguments as of `jetgraph.mismatch.measure`.

    Raises:
        TypeError: log-probabilities are neither FP32 nor FP64 (rounded to BF16 they differ by up to 0.4 %), versions no
            integers.
        ValueError: shapes differ or are not [B, T], the mask holds other values than 0 and 1, ``versions`` comes
            without ``trainer_version`` or the reverse; with ``illegal="raise"`` also: NaN, a logprob above
            `POSITIVE_ROUNDING`, a version that the trainer has not reached.
    """
    if illegal not in ("raise", "count"):
        raise ValueError(f"illegal is {illegal!r}: expected 'raise' or 'count'")
    if (versions is None) != (trainer_version is None):
        raise ValueError("versions and trainer_version say together how stale a token is: give both or neither")
    given = {"trainer": trainer, "rollout": rollout} | ({} if shadow is None else {"shadow": shadow})
    keep = _checked_mask(mask, trainer)
    bad = torch.zeros_like(keep)
    num_nan = num_positive = num_rounded = 0
    series: dict[str, Tensor] = {}
    for name, value in given.items():
        value = _checked_series(name, value, keep)
        is_nan, is_positive = value.isnan() & keep, (value > POSITIVE_ROUNDING) & keep
        _report(illegal, name, value, is_nan | is_positive)
        num_nan, num_positive = num_nan + int(is_nan.sum()), num_positive + int(is_positive.sum())
        num_rounded += int(((value > 0) & keep & ~is_positive).sum())
        bad |= is_nan | is_positive
        series[name] = value
    lag = None
    if versions is not None and trainer_version is not None:
        lag = _checked_lag(versions, trainer_version, keep)
        if illegal == "raise" and (lag[keep] < 0).any():
            newest = int(versions.to(keep.device)[keep].max())
            raise ValueError(
                f"a token was sampled by version {newest}, the trainer is at {trainer_version}: expected no version "
                "from its future; count versions on both sides by weight syncs"
            )
        bad |= (lag < 0) & keep
    used = keep & ~bad
    counts = Counts(
        num_tokens=int(used.sum()),
        num_illegal=int(bad.sum()),
        num_nan=num_nan,
        num_positive=num_positive,
        num_rounded_positive=num_rounded,
        num_impossible=int((torch.isneginf(series["trainer"]) & torch.isneginf(series["rollout"]) & used).sum()),
        num_sequences=int(used.any(1).sum()),
        num_empty_sequences=int((~used.any(1)).sum()),
    )
    zeroed = {name: torch.where(used, value, 0.0) for name, value in series.items()}
    return Pairs(zeroed["trainer"], zeroed["rollout"], used, zeroed.get("shadow"), lag, counts)


def join(parts: Sequence[Pairs]) -> Pairs:
    """Micro-batches, or the parts of several ranks, as one batch; T may differ.

    Raises:
        ValueError: no parts; or only some have shadow log-probabilities, or versions.
    """
    if not parts:
        raise ValueError("nothing to join: give at least one Pairs")
    if len({(p.shadow is None, p.lag is None) for p in parts}) > 1:
        raise ValueError("only some parts have shadow log-probabilities or versions: give them for all or for none")
    length, device = max(p.mask.shape[1] for p in parts), parts[0].mask.device

    def rows(tensors: list[Tensor]) -> Tensor:
        padded = [torch.nn.functional.pad(t.to(device), (0, length - t.shape[1])) for t in tensors]
        return torch.cat(padded)

    optional = {
        name: None if getattr(parts[0], name) is None else rows([getattr(p, name) for p in parts])
        for name in ("shadow", "lag")
    }
    counts = [dataclasses.astuple(p.counts) for p in parts]
    return Pairs(
        trainer=rows([p.trainer for p in parts]),
        rollout=rows([p.rollout for p in parts]),
        mask=rows([p.mask for p in parts]),
        counts=Counts(*map(sum, zip(*counts, strict=True))),
        **optional,
    )


def _checked_mask(mask: Tensor, like: Tensor) -> Tensor:
    if like.dim() != 2:
        raise ValueError(f"trainer has shape {list(like.shape)}: expected [B, T], one row a sequence")
    if mask.shape != like.shape:
        raise ValueError(f"the mask has shape {list(mask.shape)}, trainer {list(like.shape)}: expected the same [B, T]")
    keep = mask.detach().to(like.device).bool()
    if mask.dtype != torch.bool and not torch.equal(keep.to(mask), mask.detach().to(keep.device)):
        strange = mask[(mask != 0) & (mask != 1)].flatten()[0].item()
        raise ValueError(f"the mask holds {strange}: expected booleans, or 0 and 1; weights do not belong in a mask")
    return keep


def _checked_series(name: str, value: Tensor, keep: Tensor) -> Tensor:
    if value.shape != keep.shape:
        raise ValueError(f"{name} has shape {list(value.shape)}, trainer {list(keep.shape)}: expected the same [B, T]")
    if value.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"{name} is {value.dtype}: expected float32 or float64 log-probabilities; cast the logits first"
        )
    return value.detach().to(keep.device, torch.float64)


def _checked_lag(versions: Tensor, trainer_version: int, keep: Tensor) -> Tensor:
    if versions.shape != keep.shape:
        raise ValueError(f"versions has shape {list(versions.shape)}, trainer {list(keep.shape)}: expected one a token")
    if versions.dtype.is_floating_point or versions.dtype == torch.bool:
        raise TypeError(f"versions are {versions.dtype}: expected integers")
    return trainer_version - versions.detach().to(keep.device, torch.int64)


def _report(illegal: Illegal, name: str, value: Tensor, bad: Tensor) -> None:
    if illegal == "count" or not bad.any():
        return
    row, column = bad.nonzero()[0].tolist()
    raise ValueError(
        f"{name} holds {int(bad.sum())} tokens that are no log-probabilities, the first {value[row, column].item()} at "
        f"sequence {row}, position {column}: expected numbers ≤ 0 where the mask holds; look at the kernel that made "
        "them, or pass illegal='count' to leave them out and count them"
    )

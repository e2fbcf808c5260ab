"""jetgraph's numbers in VeRL's own logger, under ``jetgraph/``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jetgraph.mismatch import Mismatch, measure


def of_batch(
    data: Mapping[str, Tensor], versions: Sequence[int], trainer_version: int, clip: tuple[float, float]
) -> Mismatch:
    """Train–inference mismatch of one batch.

    Args:
        data: ``old_log_probs``, ``rollout_log_probs`` and ``response_mask``, [B, T].  In the synchronous trainer the
            first are scored by the weights that sampled the tokens, so the whole difference is numeric mismatch.
        versions: the oldest weight version that sampled a token of each sequence.
        trainer_version: of the weights that scored ``old_log_probs``.
        clip: PPO's (low, high).
    """
    mask = data["response_mask"]
    sampled_by = torch.as_tensor(versions, dtype=torch.int64).unsqueeze(1).expand(mask.shape)
    return measure(
        data["old_log_probs"].float(),
        data["rollout_log_probs"].float(),
        mask,
        versions=sampled_by,
        trainer_version=trainer_version,
        clip=clip,
        illegal="count",
    )


def of_sync(reports: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One report a replica → what a sync cost and how much it changed.

    ``changed/bfloat16`` and ``changed/float8_e4m3fn`` are fractions of the engine's elements that differ from the
    version before: at a learning rate of 1e-6 BF16 masters swallow most updates, and then nothing changes.
    """
    first = reports[0]
    values = {
        "jetgraph/sync/version": float(first["version"]),
        "jetgraph/sync/bytes": float(first["bytes"]),
        "jetgraph/sync/seconds": max(float(report["seconds"]) for report in reports),
        "jetgraph/sync/stall_seconds": max(float(report["stall_seconds"]) for report in reports),
    }
    for dtype, (changed, total) in first["changed"].items():
        values[f"jetgraph/sync/changed/{dtype}"] = changed / total if total else 0.0
    return values

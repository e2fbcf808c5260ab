"""Masters that an optimizer steps: rounding rules for BF16 ones, and how much a step changes.

`optimizer` wraps any torch optimizer, `rounding` are its rules, `changes` counts changed weights and FP8 codes.  What a
rollout receives of the masters is `jetgraph.sync.masters`.
"""

from __future__ import annotations

from jetgraph.masters.changes import Changes, Snapshot, snapshot
from jetgraph.masters.optimizer import Mode, RoundedMasters

__all__ = ["Changes", "Mode", "RoundedMasters", "Snapshot", "snapshot"]

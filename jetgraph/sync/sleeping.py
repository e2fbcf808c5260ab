"""Sleep, level 1 (weights go to the host and come back) and level 2 (they are thrown away), without silent garbage.

Engines restore what they know of.  What a level-2 sleep leaves in tensors that no update writes (rotary tables, scales
of the KV cache) is read before it, written back after it and compared; the weights themselves are lost until the next
complete update, and an engine without weights refuses to generate instead of answering "!!!!".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from jetgraph.sync.receiver import Receiver, same_bytes

LEVELS = (1, 2)


class SleepGuard:
    """Stands before an engine's own ``suspend(level)`` and ``resume(tags)``.

    ``rest`` are its live tensors that no slot covers, by name.  An engine may wake in parts; the weights are awake if
    ``tags`` is None or has "weights".
    """

    def __init__(
        self,
        receiver: Receiver,
        rest: Mapping[str, Tensor],
        suspend: Callable[[int], None],
        resume: Callable[[Sequence[str] | None], None],
    ) -> None:
        self.receiver = receiver
        self.rest = rest
        self._suspend, self._resume = suspend, resume
        self._saved: dict[str, Tensor] = {}

    def sleep(self, level: int = 1) -> None:
        """Raises:
        ValueError: there is no such level, or the engine sleeps already.
        """
        if level not in LEVELS:
            raise ValueError(f"sleep level {level}: expected 1 (weights come back) or 2 (weights are discarded)")
        if self.receiver.asleep:
            raise ValueError(f"the engine sleeps at level {self.receiver.asleep} already: wake it first")
        self._saved = {name: tensor.detach().cpu().clone() for name, tensor in self.rest.items()}
        self.receiver.asleep = level  # before: a sleep that fails half-way must not serve; waking finds out
        self._suspend(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Afterwards a level-1 sleeper serves what it served; a level-2 sleeper waits for an update.

        Raises:
            WeightsLost: level 1 did not bring the weights back as they were.
        """
        level = self.receiver.asleep
        self._resume(tags)
        if not level or (tags is not None and "weights" not in tags):
            return
        if level == 2:
            self.receiver.lose_weights()
        with torch.inference_mode():
            for name, saved in self._saved.items():
                if not same_bytes(self.rest[name].cpu(), saved):
                    self.rest[name].copy_(saved)
        self._saved = {}
        self.receiver.asleep = 0
        if level == 1:
            self.receiver.require_values()

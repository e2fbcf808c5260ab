"""Device time of a call: median over many, from CUDA events, with the caches emptied in between."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

FLUSH_BYTES = 256 * 2**20
"""More than any L2 cache holds."""


def milliseconds(call: Callable[[], object], repeats: int = 30, warm_up: int = 5) -> float:
    """Median device milliseconds of ``call``.

    Emptying the cache also keeps the queue full, so that the host's launch time does not count.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(warm_up):
        call()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events)


def device_name() -> str:
    return torch.cuda.get_device_name()

"""Device time of a call: median over many, from CUDA events, with the caches emptied in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

FLUSH_BYTES = 256 * 2**20
"""More than any L2 cache holds."""


def milliseconds(call: Callable[[], object], repeats: int = 30, warm_up: int = 5, settle_seconds: float = 0.0) -> float:
    """Median milliseconds of ``call`` on the device's clock, the cache emptied before each.

    Emptying it takes a tenth of a millisecond, which hides a host that is so far behind; a host that launches more
    slowly than the device computes counts.  ``settle_seconds``: run so long before, because a loaded GPU lowers its
    clocks by a tenth, and would be measured with those that the call before it left.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    start_time = time.perf_counter()
    while time.perf_counter() - start_time < settle_seconds:
        for _ in range(4):
            call()
        torch.cuda.synchronize()
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

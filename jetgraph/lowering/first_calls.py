"""MKL's vector functions, each called once by one thread before several threads can.

torch hands FP32 and FP64 tensors on a CPU to MKL's vector functions, a part to each thread.  MKL 2024.2, which torch's
wheels hold, chooses a function's kernel when it is first called, and if several threads make that call at once, one of
them may run a kernel of low accuracy on its part, that one time (pytorch/pytorch#188792).  Measured on two cores, in 4
of 285 new processes: half of a first `torch.cos` of 3,392 numbers up to 1.5e-4 wrong, the next call right.  The first
step of a training process would hold other rotary angles than its second, and than the rollout.
"""

from __future__ import annotations

import torch

BY_MKL = (
    *(torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan, torch.tanh),
    *(torch.exp, torch.log, torch.log2, torch.log10, torch.log1p, torch.sqrt, torch.trunc),
    *(torch.erf, torch.erfc, torch.erfinv),
)
"""What ATen's vml.h may give to MKL."""


@torch.no_grad()
def make_first_calls() -> None:
    """Call each function of `BY_MKL` on one FP32 and one FP64 number: no thread helps with so few."""
    for dtype in (torch.float32, torch.float64):
        number = torch.full((1,), 0.5, dtype=dtype, device="cpu")
        for function in BY_MKL:
            function(number)

"""FP32 → BF16 and back without loss of small updates, elementwise on any shape.

BF16 is the upper half of FP32's bits, so its neighbours below and above (in magnitude) are those bits cut off, and cut
off after a carry into them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def stochastic(value: Tensor, generator: torch.Generator) -> Tensor:
    """FP32 → BF16, up or down with the probabilities that make the expected result ``value``; exact values stay.

    Adding a uniform integer below 2^16 to the bits and cutting the lower half off carries with probability
    (lower half) / 2^16.  ±inf and NaN are cast as usual.  ``generator`` lives on the device of ``value``.
    """
    noise = torch.randint(0, 1 << 16, value.shape, generator=generator, device=value.device, dtype=torch.int32)
    bits = value.view(torch.int32).add(noise).bitwise_and_(-(1 << 16))
    return torch.where(value.isfinite(), bits.view(torch.float32), value).to(torch.bfloat16)


def compensated(value: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 → nearest BF16 and what the rounding lost, itself in BF16; their sum is ``value`` to 2^-18 of it.

    The loss is exact in FP32 (both are multiples of the last place of ``value``) and then rounded once more.
    """
    rounded = value.to(torch.bfloat16)
    lost = (value - rounded.float()).to(torch.bfloat16)
    return rounded, torch.where(lost.isfinite(), lost, 0.0)


def split(value: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 → nearest BF16 and the distance in FP32's last places, int16; `joined` gives ``value`` back.

    A distance is −2^15 … 2^15, one more than int16 has numbers: a value exactly half-way above an even BF16 (1 in 2^17)
    comes back one last place smaller.
    """
    rounded = value.to(torch.bfloat16)
    distance = value.view(torch.int32) - rounded.float().view(torch.int32)
    kept = torch.where(value.isfinite(), distance.clamp(max=(1 << 15) - 1), 0)
    return rounded, kept.to(torch.int16)


def joined(rounded: Tensor, distance: Tensor) -> Tensor:
    """The FP32 numbers that `split` took apart."""
    return (rounded.float().view(torch.int32) + distance).view(torch.float32)

"""Two values of one place, bit for bit: how many elements differ, the first of them, and how far apart they are.

A value is a tensor [T, C] or FP8 codes with their scales.  Values of one dtype are compared as bits.  Where the two
sides hold different formats the numbers are compared, as FP64, which holds every BF16, FP32 and code times scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jetgraph.interpret import Quantized
from jetgraph.precision import Precision

_BITS = {
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.float8_e4m3fn: torch.int8,
}
_MANTISSA = {torch.bfloat16: 7, torch.float32: 23, torch.float64: 52, torch.float8_e4m3fn: 3}


@dataclass(frozen=True)
class Difference:
    """``what`` was compared: "values", "codes", "scales" (numbers as they are stored), or "numbers" across formats.

    ``ulps`` is the distance at ``index``: for equal dtypes the number of representable steps between the two, across
    formats a fraction of the coarser one's step; infinite if one of the two is not finite.
    """

    what: str
    num_elements: int
    num_different: int
    index: tuple[int, ...]
    train: float
    infer: float
    ulps: float


def difference(
    train: Tensor | Quantized, infer: Tensor | Quantized, precisions: tuple[Precision, Precision]
) -> Difference | None:
    """How the two values differ; None if no bit does.  ``precisions`` are training's λ and the rollout's.

    Raises:
        ValueError: the two have different numbers of elements, so there is nothing to compare element by element.
    """
    if isinstance(train, Quantized) and isinstance(infer, Quantized) and precisions[0] == precisions[1]:
        # a scale decides the codes under it, so it is the earlier of the two
        return _of("scales", train.scales, infer.scales) or _of("codes", train.codes, infer.codes)
    if isinstance(train, Quantized) or isinstance(infer, Quantized):
        numbers = [_numbers(x, p) for x, p in zip((train, infer), precisions, strict=True)]
        return _of("numbers", *numbers, coarse=torch.float8_e4m3fn)
    if train.dtype != infer.dtype:
        coarse = min(train.dtype, infer.dtype, key=lambda dtype: _MANTISSA.get(dtype, 52))
        return _of("numbers", train.double(), infer.double(), coarse=coarse)
    return _of("values", train, infer)


def _numbers(x: Tensor | Quantized, precision: Precision) -> Tensor:
    """FP64 [R, C]; a code times its scale has at most 28 bits, so this is exact."""
    if isinstance(x, Tensor):
        return x.double()
    assert precision.scale is not None
    granularity = precision.scale.granularity
    scales = x.scales.double()
    for dim, size in enumerate((granularity.rows, granularity.cols)):
        length = x.codes.shape[dim]
        scales = scales.repeat_interleave(size or max(length, 1), dim).narrow(dim, 0, length)
    return x.codes.double() * scales


def _of(what: str, train: Tensor, infer: Tensor, coarse: torch.dtype | None = None) -> Difference | None:
    if train.numel() != infer.numel():
        raise ValueError(f"training's value has shape {tuple(train.shape)}, the rollout's {tuple(infer.shape)}")
    infer = infer.reshape(train.shape)
    differ = _as_bits(train) != _as_bits(infer)
    if not differ.any():
        return None
    flat = int(differ.flatten().to(torch.uint8).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), train.shape))
    pair = train[index], infer[index]
    return Difference(
        what, train.numel(), int(differ.sum()), index, pair[0].item(), pair[1].item(), _ulps(*pair, coarse)
    )


def _as_bits(x: Tensor) -> Tensor:
    return x.contiguous().view(_BITS[x.dtype]) if x.dtype in _BITS else x


def _ulps(a: Tensor, b: Tensor, coarse: torch.dtype | None) -> float:
    left, right = float(a), float(b)
    if not (math.isfinite(left) and math.isfinite(right)):
        return math.inf
    if coarse is None and a.dtype in _BITS:
        return abs(_ordinal(a) - _ordinal(b))
    if left == right:
        return 0.0
    exponent = math.frexp(max(abs(left), abs(right)))[1] - 1
    return abs(left - right) / 2.0 ** (exponent - _MANTISSA.get(coarse or a.dtype, 52))


def _ordinal(x: Tensor) -> int:
    """Neighbouring numbers have neighbouring ordinals; both zeros are 0."""
    bits = int(x.reshape(1).view(_BITS[x.dtype]))
    size = 8 * x.dtype.itemsize
    return bits if bits >= 0 else -(bits + (1 << (size - 1)))

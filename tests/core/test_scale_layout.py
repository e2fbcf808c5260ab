"""Scales lie in memory as the libraries' GEMMs read them, and every result lies as its fake says.

A compiled graph reads strides off the fakes.  `tests/gpu` asks the same of the GPU's kernels.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import jetgraph.lowering.fused_ops  # noqa: F401  (defines the operators)
from jetgraph.lowering.scale_layout import lies_in_columns, row_scales, token_scales

JET = (448.0, 1e-12, "div", False)
SHAPES = [(130, 576), (17, 320), (1, 128)]


def calls(tokens: int, features: int, device: torch.device) -> dict[str, tuple]:
    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16().to(device)

    x, weight, blocks = numbers(tokens, features), numbers(features), (128, 128, *JET)
    heads, angles = numbers(1, tokens, 2, 64), numbers(1, tokens, 64)
    return {
        "quantize": (x, 1, 128, *JET),
        "quantize_weight": (x, *blocks),
        "quantize_transposed": (x, *blocks),
        "quantize_tokens": (x, 128, *JET),
        "quantize_rows_and_tokens": (x, 128, *JET),
        "rms_norm_quantize": (x, x, weight, 1e-6, True, True, 128, *JET),
        "inverse_rms": (x, 1e-6, True),
        "rms_norm_rotary": (heads, numbers(64), 1e-6, True, angles, angles),
        "silu_mul_quantize": (x, x, True, 128, *JET),
        "silu_mul_backward_quantize": (x, x, x, 128, *JET),
    }


def turned(x: Tensor) -> Tensor:
    """The same numbers, the first two axes the other way round in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1) if x.ndim > 1 else x


def apart_from_fakes(tokens: int, features: int, device: torch.device, lay: Callable = lambda x: x) -> list[str]:
    """Results whose shape, dtype or strides are not what the fake says, of operands that lie as ``lay`` does."""
    apart = []
    for name, given in calls(tokens, features, device).items():
        arguments = tuple(lay(a) if isinstance(a, Tensor) else a for a in given)
        operator = getattr(torch.ops.jetgraph, name)
        with FakeTensorMode() as mode:
            fakes = operator(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in arguments))
        results = operator(*arguments)
        for i, (r, f) in enumerate(zip(*map(_as_tuple, (results, fakes)), strict=True)):
            (shape, dtype, strides), fake = (_looks(t) for t in (r, f))
            if (shape, dtype, strides) != fake:
                apart.append(f"{name}, result {i}: {dtype} {shape}, strides {strides}, and its fake {fake}")
    return apart


def _looks(t: Tensor) -> tuple:
    """Shape, dtype and the strides that mean something."""
    return tuple(t.shape), t.dtype, [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1]


def _as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


@pytest.mark.parametrize("lay", [lambda x: x, turned], ids=["plain", "turned"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_lie_as_their_fakes_say(shape, lay):
    assert apart_from_fakes(*shape, torch.device("cpu"), lay) == []


@pytest.mark.parametrize(("rows", "between"), [(0, 0), (1, 4), (4, 4), (5, 8), (128, 128)])
def test_columns_of_row_scales_start_at_multiples_of_16_bytes(rows, between):
    scale = row_scales(torch.empty(0), rows, 3)
    assert (scale.shape, scale.stride(), scale.dtype) == ((rows, 3), (1, between), torch.float32)
    assert lies_in_columns(scale)


def test_what_does_not_lie_in_columns():
    assert not lies_in_columns(torch.empty(8, 3))
    assert not lies_in_columns(row_scales(torch.empty(0), 8, 3)[:4])  # its columns are 8 apart, not 4
    assert lies_in_columns(token_scales(torch.empty(0), 8, 3))
    assert not lies_in_columns(token_scales(torch.empty(0), 6, 3))  # 24 bytes

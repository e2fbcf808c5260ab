"""The fused Triton kernels in Triton's interpreter on the CPU: indexing, rounding, order.

Run by `test_fused_kernels.py`; not collected by name, like `triton_interpreted.py`.  Words are packed and cast by
integers here, so every step rounds as it must and bits can be compared; only the exponential is numpy's, and the
expected silu uses the same.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from jetgraph.lowering import reference, triton_fused, triton_rotary, triton_rows, triton_transpose
from jetgraph.lowering.triton_fused import Tile

JET = (448.0, 1e-12, "div", False)
RULES = [(448.0, 1e-4, d, p) for d, p in [("div", False), ("mul1/s", False), ("mulq/a", False), ("div", True)]] + [
    (240.0, 1e-10, "div", False)
]
SHAPES = [(1, 576), (130, 144), (144, 16)]
FEW = [(1, 576), (18, 144), (16, 16)]
"""One row; a ragged last group both ways, T not a multiple of 16; T a multiple of 16, so that codes go out as words."""
LOW = {"native": False}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """BF16 of many magnitudes, with zeros and -0."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-6, 6, shape[-1:], generator=generator))
    return torch.where(torch.rand(shape, generator=generator) < 0.05, -0.0, x).bfloat16()


def assert_same(got, expected) -> None:
    for g, e in zip(got, expected, strict=True):
        assert g.shape == e.shape
        assert g.dtype is e.dtype
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[e.element_size()]
        assert torch.equal(g.contiguous().view(bits), e.contiguous().view(bits))


def both(x: Tensor, rule: tuple = JET) -> tuple[Tensor, ...]:
    return *reference.quantize(x, 1, 128, *rule), *reference.quantize(x.t(), 1, 128, *rule)


def transposed_blocks(x: Tensor, rule: tuple = JET) -> tuple[Tensor, Tensor]:
    codes, scale = reference.quantize(x, 128, 128, *rule)
    return codes.t(), scale.t()


def numpy_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    """1 / (1 + exp(-x)) and x / (1 + exp(-x)) in FP32."""
    wide = x.float()
    below = torch.from_numpy(np.exp(-wide.numpy())) + 1.0
    return torch.ones_like(below) / below, wide / below


def poisoned(x: Tensor) -> Tensor:
    """x as a view that starts at 16 bytes, with NaN on all sides."""
    memory = torch.full((x.shape[0] + 2, x.shape[1] + 32), float("nan"), dtype=x.dtype)
    memory[1:-1, 16:-16] = x
    return memory[1:-1, 16:-16]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule(rule):
    x = numbers(6, 144)
    assert_same(triton_fused.quantize_rows_and_tokens(x, 128, *rule, **LOW), both(x, rule))
    assert_same(triton_fused.quantize_transposed(x, 128, *rule, **LOW), transposed_blocks(x, rule))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ways_of_any_view(shape):
    x = numbers(*shape)
    for view in (poisoned(x), x.t().contiguous().t()):
        assert_same(triton_fused.quantize_rows_and_tokens(view, 128, *JET, **LOW), both(x))
    assert_same(triton_fused.quantize_tokens(x, 128, *JET, **LOW), both(x)[2:])
    assert_same(triton_fused.quantize_transposed(poisoned(x), 128, *JET, **LOW), transposed_blocks(x))


@pytest.mark.parametrize("shape", FEW, ids=str)
@pytest.mark.parametrize("tokens", [False, True])
def test_gated_activation(shape, tokens):
    gate, up = numbers(*shape), numbers(*shape, seed=1)
    y = (numpy_sigmoid(gate)[1].bfloat16() * up).view(shape)
    got = triton_fused.silu_mul_quantize(poisoned(gate), poisoned(up), tokens, 128, *JET, **LOW)
    assert_same(got[:2], both(y)[:2])
    if tokens:
        assert_same(got[2:], both(y)[2:])
    else:
        assert all(t.numel() == 0 for t in got[2:])


@pytest.mark.parametrize("shape", FEW, ids=str)
def test_gradients_of_a_gated_activation(shape):
    dy, gate, up = (numbers(*shape, seed=s) for s in range(3))
    sigmoid, silu = numpy_sigmoid(gate)
    wide = gate.double()
    inner = (wide * (1.0 - sigmoid).double() + 1.0).float()  # one rounding, as fma has: exact in float64 before it
    d_gate = ((dy * up).float() * sigmoid * inner).bfloat16()
    got = triton_fused.silu_mul_backward_quantize(dy, gate, up, 128, *JET, tile=Tile(), **LOW)
    assert_same(triton_fused.silu_mul_backward_quantize(dy, gate, up, 128, *JET, tile=Tile(split=False), **LOW), got)
    d_up = dy * silu.bfloat16()
    assert_same(got[4:], both(d_up))
    # the interpreter's fma rounds twice, so a code in thousands may be another; scales follow
    expected = both(d_gate)
    for g, e in zip(got[:4], expected, strict=True):
        assert g.shape == e.shape
        assert (g.float() != e.float()).double().mean() < 0.01
        assert ((g.float() - e.float()).abs() <= 0.13 * e.float().abs() + 0.002).all()


@pytest.mark.parametrize("shape", FEW, ids=str)
@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_norm(shape, tokens, added):
    x, residual, weight = numbers(*shape), numbers(*shape, seed=1), numbers(shape[1], seed=2)
    given = poisoned(residual) if added else None
    s, r, *codes = triton_fused.rms_norm_quantize(poisoned(x), given, weight, 1e-6, True, tokens, 128, *JET, **LOW)
    total = x + residual if added else x
    if added:
        assert_same([s], [total])
    mean = triton_rows.row_mean(total.float().square())[:, None]
    exact = 1 / (mean.double() + torch.tensor(1e-6)).sqrt()
    assert ((r.double() - exact).abs() <= 2.0**-23 * exact).all()
    y = weight * (total.float() * r).bfloat16()
    assert_same(codes[:2], both(y)[:2])
    if tokens:
        assert_same(codes[2:], both(y)[2:])


@pytest.mark.parametrize("tile", [Tile(1, 1), Tile(4, 2)], ids=str)
def test_norms_of_several_blocks_of_tokens(tile):
    """130 tokens are two blocks, the last one ragged; 528 features are pieces of 512 and 256."""
    x, residual, weight = numbers(130, 528), numbers(130, 528, seed=1), numbers(528, seed=2)
    s, r, *codes = triton_fused.rms_norm_quantize(x, residual, weight, 1e-6, True, True, 128, *JET, tile=tile, **LOW)
    assert_same([s], [x + residual])
    assert_same([triton_fused.inverse_rms(x + residual, 1e-6, True, **LOW)], [r])
    mean = written_out((x + residual).float().square())[:, None]
    exact = 1 / (mean.double() + torch.tensor(1e-6)).sqrt()
    assert ((r.double() - exact).abs() <= 2.0**-23 * exact).all()
    assert_same(codes, both(weight * ((x + residual).float() * r).bfloat16()))


@pytest.mark.parametrize("size", [32, 64, 128, 256])
@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("wider", [0, 40, 3])
def test_rotation_of_heads(size, batched, wider):
    """2 x 13 tokens of 3 heads are 78 rows, more than two programs, the last one ragged; alone or in wider rows."""
    row = numbers(2, 13, 3 * size + wider)
    x, weight = row[..., wider:].unflatten(-1, (3, size)), numbers(size, seed=1)
    cos, sin = (numbers(2 if batched else 1, 13, size, seed=s) for s in (2, 3))

    def turned(h: Tensor) -> Tensor:
        other = torch.cat((-h[..., size // 2 :], h[..., : size // 2]), -1)
        return h * cos[:, :, None] + other * sin[:, :, None]

    out, none = triton_rotary.rms_norm_rotary(x, None, 0.0, True, cos, sin, **LOW)
    assert_same([out], [turned(x)])
    assert none.numel() == 0
    out, r = triton_rotary.rms_norm_rotary(x, weight, 1e-6, True, cos, sin, **LOW)
    assert_same([r], [triton_fused.inverse_rms(x, 1e-6, True, **LOW)])
    assert_same([out], [turned(weight * (x.float() * r).bfloat16())])


def written_out(x: Tensor) -> Tensor:
    """The order that `triton_rows` promises, in plain torch: pieces, halves, lanes, neighbours."""
    x, lanes, length = torch.nn.functional.pad(x, (0, -x.shape[1] % 256)), torch.zeros(len(x), 256), x.shape[1]
    while x.shape[1]:
        longest = min(8192, 256 << ((x.shape[1] // 256).bit_length() - 1))
        piece, x = x[:, :longest], x[:, longest:]
        while piece.shape[1] > 256:
            piece = piece[:, : piece.shape[1] // 2] + piece[:, piece.shape[1] // 2 :]
        lanes = lanes + piece
    while lanes.shape[1] > 1:
        lanes = lanes[:, 0::2] + lanes[:, 1::2]
    return lanes[:, 0] / torch.full_like(lanes[:, 0], length)


@pytest.mark.parametrize("length", [1, 100, 576, 2880, 4096, 20000])
def test_row_means_add_in_the_order_that_is_written(length):
    x = torch.randn(5, length, generator=torch.Generator().manual_seed(0))
    assert_same([triton_rows.row_mean(x)], [written_out(x)])
    assert_same([triton_rows.row_mean(x[3:4])], [written_out(x)[3:4]])


@pytest.mark.parametrize("added", [False, True])
def test_a_fused_norm_takes_the_mean_of_row_mean(added):
    """Seen through eps = 0: r is the same function of the same bits."""
    x, residual = numbers(9, 576, seed=5), numbers(9, 576, seed=6)
    r = triton_fused.rms_norm_quantize(
        x, residual if added else None, torch.ones(576).bfloat16(), 0.0, True, False, 128, *JET, **LOW
    )[1]
    square = ((x + residual) if added else x).float().square()
    assert_same([r[:, 0]], [torch.from_numpy(1 / np.sqrt(written_out(square).numpy()))])


@pytest.mark.parametrize("shape", [(16, 16), (144, 272), (128, 128), (1, 1), (130, 70), (65, 129), (1, 300), (300, 1)])
def test_transposed_codes(shape):
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    memory = torch.zeros(shape[0] + 2, shape[1] + 32, dtype=torch.uint8)
    memory[1:-1, 16:-16] = codes
    for given in (codes, memory[1:-1, 16:-16]):
        got = triton_transpose.transpose_codes(given.view(torch.float8_e4m3fn))
        assert got.is_contiguous()
        assert got.dtype is torch.float8_e4m3fn
        assert torch.equal(got.view(torch.uint8), codes.t())


def test_what_cannot_be_transposed():
    for given in (torch.zeros(4, 4), torch.zeros(4, 6, dtype=torch.uint8).t(), torch.zeros(4, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="expected a matrix of bytes, rows dense"):
            triton_transpose.transpose_codes(given)
    assert triton_transpose.transpose_codes(torch.zeros(0, 5, dtype=torch.uint8)).shape == (5, 0)


def test_nothing_to_do():
    x = numbers(0, 320)
    assert [tuple(t.shape) for t in triton_fused.quantize_rows_and_tokens(x, 128, *JET)] == [
        (0, 320), (0, 3), (320, 0), (320, 0),
    ]  # fmt: skip
    s, r, *codes = triton_fused.rms_norm_quantize(x, x, numbers(320), 1e-6, True, True, 128, *JET)
    assert [tuple(t.shape) for t in (s, r, *codes)] == [(0, 320), (0, 1), (0, 320), (0, 3), (320, 0), (320, 0)]


def test_non_finite_groups_are_loud():  # [N5]
    x = torch.ones(6, 256).bfloat16()
    x[0, 5], x[1, 130], x[2] = float("nan"), float("-inf"), 0.0
    codes, scales, codes_t, scales_t = triton_fused.quantize_rows_and_tokens(x, 128, *JET, **LOW)
    assert scales.isnan().tolist() == [[True, False], [False, True], *[[False, False]] * 4]
    assert (codes[0, :128].view(torch.uint8) & 0x7F == 0x7F).all()
    assert scales_t[:, 0].isnan().nonzero()[:, 0].tolist() == [5, 130]
    assert (codes_t[5].view(torch.uint8) & 0x7F == 0x7F).all()
    finite = torch.tensor([2, 3, 4, 5])
    assert_same((codes[finite], scales[finite]), reference.quantize(x[finite], 1, 128, *JET))

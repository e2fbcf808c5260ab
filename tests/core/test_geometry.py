"""The three GEMMs of an FP8 linear on awkward shapes, strides and memory, against integers (ids of public bugs in []).

The oracle shares nothing with the library: it quantises block by block, multiplies integers (an e4m3 number is a
multiple of 2^-9) and applies the scales in the order of the groups.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from jetgraph.lowering import linear_ops, reference
from jetgraph.policy import LinearPrecision, WgradSource, get_policy

assert linear_ops
ops = torch.ops.jetgraph
JET = get_policy("jet").linear("model.layers.0.mlp.up_proj")
NAMES = ("jet", "jet_ue8m0", "fp8_tensorwise")
POLICIES = {name: get_policy(name).linear("model.layers.0.mlp.up_proj") for name in NAMES}
POISON = [float("nan"), 1e7]
TOKENS = [0, 1, 17, 127, 129, 130]


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


# --------------------------------------------------------------------------------------------------------------- oracle


def oracle_codes(x: Tensor, rows: int, cols: int, name: str) -> tuple[Tensor, Tensor]:
    """Codes of x as float32, and the scale of every element; blocks of rows x cols, 0 for the whole axis."""
    codes, scales = torch.empty(x.shape), torch.empty(x.shape)
    for r in range(0, x.shape[0], rows or x.shape[0] or 1):
        for c in range(0, x.shape[1], cols or x.shape[1] or 1):
            place = (slice(r, r + (rows or x.shape[0])), slice(c, c + (cols or x.shape[1])))
            block = x[place].float()
            amax = block.abs().max().clamp(min=1e-12)
            scale = amax / 448.0
            if name == "jet_ue8m0":
                mantissa, exponent = math.frexp(scale.item())
                scale = torch.tensor(2.0 ** (exponent - (mantissa == 0.5)))
            code = block * (448.0 / amax) if name == "fp8_tensorwise" else block / scale
            codes[place] = code.clamp(-448, 448).to(torch.float8_e4m3fn).float()
            scales[place] = scale
    return codes, scales


def oracle_gemm(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], group: int) -> Tensor:
    """a [M, K] · b [N, K]ᵀ in BF16 from codes and their scales; the dot product of a group is an integer."""
    total = torch.zeros(a[0].shape[0], b[0].shape[0])
    left, right = ((codes * 512).to(torch.int64) for codes in (a[0], b[0]))
    for start in range(0, a[0].shape[1], group or a[0].shape[1] or 1):
        part = slice(start, start + (group or a[0].shape[1]))
        dot = ((left[:, part] @ right[:, part].T).double() / 512**2).float()
        total = total + dot * (a[1][:, start, None] * b[1][None, :, start])
    return total.bfloat16()


def oracle(name: str, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    g = 0 if name == "fp8_tensorwise" else 128
    row = 1 if g else 0
    weight = oracle_codes(w, g, g, name)
    across = (weight[0].T, weight[1].T)
    return {
        "fprop": oracle_gemm(oracle_codes(x, row, g, name), weight, g),
        "dgrad": oracle_gemm(oracle_codes(dy, row, g, name), across, g),
        "wgrad": oracle_gemm(oracle_codes(dy.T, row, g, name), oracle_codes(x.T, row, g, name), g),
    }


def ours(p: LinearPrecision, x: Tensor, w: Tensor, dy: Tensor) -> dict[str, Tensor]:
    text = str(p)
    return {
        "fprop": ops.linear(x, w, None, text),
        "dgrad": ops.linear_dgrad(dy, w, text),
        "wgrad": ops.linear_wgrad(dy, x, text),
    }


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for role, wanted in expected.items():
        assert got[role].dtype is torch.bfloat16
        assert got[role].isfinite().all(), role
        assert torch.equal(got[role], wanted), role


# ------------------------------------------------------------------------------------------------------------- geometry


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", POLICIES)
def test_three_gemms_equal_the_integers_at_any_number_of_tokens(name, tokens):  # [P9, K2, K7]
    x, w, dy = random(tokens, 192, seed=1), random(136, 192, seed=2) * 0.05, random(tokens, 136, seed=3)
    got = ours(POLICIES[name], x, w, dy)
    assert_same(got, oracle(name, x, w, dy))
    assert got["fprop"].shape == (tokens, 136)
    assert got["dgrad"].shape == (tokens, 192)
    assert (got["wgrad"].count_nonzero() > 0) == (tokens > 0)


@pytest.mark.parametrize(("num_out", "num_in"), [(130, 640), (384, 257), (1, 129), (127, 128), (257, 1)])
@pytest.mark.parametrize("name", POLICIES)
def test_three_gemms_equal_the_integers_at_any_size(name, num_out, num_in):  # [K5, K16]
    x, w, dy = random(17, num_in, seed=1), random(num_out, num_in, seed=2) * 0.05, random(17, num_out, seed=3)
    assert_same(ours(POLICIES[name], x, w, dy), oracle(name, x, w, dy))


@pytest.mark.parametrize("poison", POISON, ids=str)
@pytest.mark.parametrize("name", POLICIES)
def test_what_lies_behind_a_row_or_a_column_in_memory_is_never_read(name, poison):  # [K16, Q5]
    """K = 2880 is 22.5 groups: the last one of every operand and role ends inside a bigger buffer full of poison."""
    x, w, dy = random(130, 2880, seed=1), random(64, 2880, seed=2) * 0.05, random(130, 64, seed=3)

    def inside(clean: Tensor) -> Tensor:
        memory = torch.full((clean.shape[0] + 126, clean.shape[1] + 192), poison, dtype=clean.dtype)
        memory[: clean.shape[0], : clean.shape[1]] = clean
        return memory[: clean.shape[0], : clean.shape[1]]

    p = POLICIES[name]
    assert_same(ours(p, *map(inside, (x, w, dy))), ours(p, x, w, dy))
    wide = ours(p, inside(dy), inside(w.T.contiguous()), inside(x))  # 2880 is N: WGRAD's rows and DGRAD's contraction
    assert_same(wide, ours(p, dy, w.T.contiguous(), x))


def test_codes_and_scales_inside_poisoned_buffers_are_read_exactly():  # [K16]
    """The same of a GEMM's own operands: 0x7f is e4m3's NaN."""
    arguments = (448.0, 1e-12, "div", False)
    a, b = (reference.quantize(random(m, 2880, seed=m), 1, 128, *arguments) for m in (17, 64))
    expected = reference.fp8_gemm(*a, *b, 1, 128)
    hidden = []
    for codes, scale in (a, b):
        memory = torch.full((codes.shape[0] + 3, 3072), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        memory[: codes.shape[0], :2880] = codes
        scales = torch.full((codes.shape[0] + 3, 32), float("nan"))
        scales[: codes.shape[0], :23] = scale
        hidden += [memory[: codes.shape[0], :2880], scales[: codes.shape[0], :23]]
    assert torch.equal(reference.fp8_gemm(*hidden, 1, 128), expected)


@pytest.mark.slow
def test_k_of_2880_equals_the_integers():  # [K16]
    x, w, dy = random(130, 2880, seed=1), random(192, 2880, seed=2) * 0.05, random(130, 192, seed=3)
    assert_same(ours(JET, x, w, dy), oracle("jet", x, w, dy))


def relative_error(got: Tensor, left: Tensor, right: Tensor) -> float:
    exact = left.double() @ right.double().T
    return ((got.double() - exact).norm() / exact.norm()).item()


def test_errors_are_the_size_that_e4m3_gives():  # [P9, K16: 3.8 % at K = 2880, 3.56 % and 4.44 % for WGRAD at M = 130]
    x, w, dy = random(130, 2880, seed=1), random(256, 2880, seed=2), random(130, 256, seed=3)
    assert relative_error(ours(JET, x, w, dy)["fprop"], x, w) == pytest.approx(0.038, abs=0.002)
    twice = replace(JET, wgrad_source=WgradSource.REQUANTIZE)
    assert relative_error(ours(JET, x, w, dy)["wgrad"], dy.T, x.T) == pytest.approx(0.0356, abs=0.002)
    assert relative_error(ours(twice, x, w, dy)["wgrad"], dy.T, x.T) == pytest.approx(0.0444, abs=0.002)


# -------------------------------------------------------------------------------------------------------------- strides


def strided(clean: Tensor) -> dict[str, Tensor]:
    return {
        "column-major": clean.T.contiguous().T,
        "every second": torch.stack([clean, clean * 3], -1)[..., 0],
        "offset": torch.cat([clean[:1], clean])[1:],
        "backwards": clean.flip(0).contiguous().flip(0),
    }


@pytest.mark.parametrize("name", POLICIES)
def test_strides_never_reach_the_result(name):  # [A1, K14]
    x, w, dy = random(130, 192, seed=1), random(256, 192, seed=2) * 0.05, random(130, 256, seed=3)
    expected = ours(POLICIES[name], x, w, dy)
    for kind in strided(x):
        assert_same(ours(POLICIES[name], *(strided(t)[kind] for t in (x, w, dy))), expected)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("spread", ["one row for all tokens", "one number for all", "one token for all features"])
def test_an_expanded_gradient_is_like_its_copy(name, spread):  # [A1]
    x, w = random(130, 192, seed=1), random(256, 192, seed=2) * 0.05
    seed = {"one row for all tokens": (1, 256), "one number for all": (1, 1), "one token for all features": (130, 1)}
    dy = random(*seed[spread], seed=3).expand(130, 256)
    assert 0 in dy.stride()
    assert_same(ours(POLICIES[name], x, w, dy), oracle(name, x, w, dy.contiguous()))


@pytest.mark.parametrize("name", POLICIES)
def test_autograd_hands_over_transposed_and_expanded_gradients(name):  # [A1]
    """y.transpose(0, 1).sum(): the gradient that arrives is an expanded scalar behind a transpose."""
    x, w = random(17, 192, seed=1).requires_grad_(), (random(256, 192, seed=2) * 0.05).requires_grad_()
    text = str(POLICIES[name])
    ops.linear(x, w, None, text).transpose(0, 1).sum().backward()
    expected = ours(POLICIES[name], x.detach(), w.detach(), torch.ones(17, 256, dtype=torch.bfloat16))
    assert torch.equal(x.grad, expected["dgrad"])
    assert torch.equal(w.grad, expected["wgrad"])
    x.grad = w.grad = None
    (ops.linear(x, w, None, text).T * random(256, 17, seed=4)).sum().backward()
    expected = ours(POLICIES[name], x.detach(), w.detach(), random(256, 17, seed=4).T.contiguous())
    assert torch.equal(x.grad, expected["dgrad"])
    assert torch.equal(w.grad, expected["wgrad"])


def test_a_gradient_that_is_differentiated_again_is_an_error():
    """Codes have no derivative: the second gradient would be of other numbers."""
    x, w = random(17, 192, seed=1).requires_grad_(), (random(256, 192, seed=2) * 0.05).requires_grad_()
    q, k, v = (random(2, 5 * 64, seed=s).view(1, 2, 5, 64).requires_grad_() for s in (1, 2, 3))
    for of, inputs, name in (
        (ops.linear(x, w, None, str(JET)), x, "linear_dgrad"),
        (ops.linear(x, w, None, str(JET)), w, "linear_wgrad"),
        (ops.attention(q, k, v, 0.125)[0], q, "attention_backward"),
    ):
        (gradient,) = torch.autograd.grad(of.float().square().sum(), inputs, create_graph=True)
        with pytest.raises(NotImplementedError, match=f"jetgraph::{name} has no gradient"):
            gradient.float().square().sum().backward()


# ---------------------------------------------------------------------------------------------------- whole-axis groups


def test_the_bound_of_exact_dot_products_is_tight():
    """Up to `MAX_EXACT_CODES` products of the largest codes, and the smallest one, float64 loses nothing."""
    bound = reference.MAX_EXACT_CODES
    largest, step = 448**2 * 2**18, 1  # the largest and the smallest product in units of 2^-18
    assert bound * largest <= 2**53 < (bound + 1) * largest
    assert float((bound - 1) * largest + step) == (bound - 1) * largest + step
    assert bound == 171_196


def test_a_dot_product_over_a_long_axis_is_exact_and_beyond_the_bound_refused():
    k = 40_000
    codes = torch.full((2, k), 448.0)
    codes[:, 1::2] = -448.0
    codes[1, 7] = 2.0**-9  # everything but this and its neighbour cancels
    a = codes.to(torch.float8_e4m3fn)
    ones, scale = torch.full((1, k), 448.0).to(torch.float8_e4m3fn), torch.ones(1, 1)
    got = reference.fp8_gemm(a, scale, ones, scale, 0, 0)
    assert got.tolist() == [[0.0], [448.0 * 448 + 448 * 2.0**-9]]
    row = torch.zeros(1, reference.MAX_EXACT_CODES + 1).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="expected at most 171196, whose dot product is exact"):
        reference.fp8_gemm(row, scale, row, scale, 0, 0)
    reference.fp8_gemm(row[:, :-1], scale, row[:, :-1], scale, 0, 0)


def test_pinned_weights_of_whole_axis_groups_give_the_same_numbers():
    x, w, _ = random(3, 320, seed=1), random(64, 320, seed=2), None
    arguments = (0, 0, 448.0, 1e-12, "mulq/a", False)
    a, b = reference.quantize(x, *arguments), reference.quantize(w, *arguments)
    expected = reference.fp8_gemm(*a, *b, 0, 0)
    reference.pin_weight(b[0], 0)
    try:
        assert torch.equal(reference.fp8_gemm(*a, *b, 0, 0), expected)
    finally:
        reference.unpin_weight(b[0])


# ----------------------------------------------------------------------------------------------------- refused operands


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a_scale": torch.ones(17, 3).bfloat16()}, "a's scales are torch.bfloat16; expected torch.float32"),
        ({"b_scale": torch.ones(2, 3).half()}, "b's scales are torch.float16; expected torch.float32"),
        ({"a_scale": torch.ones(17, 1)}, r"a's scales are \[17, 1\]; expected \[17, 3\]"),
        ({"a_scale": torch.ones(16, 3)}, r"a's scales are \[16, 3\]; expected \[17, 3\]"),
        ({"b_scale": torch.ones(1, 3)}, r"b's scales are \[1, 3\]; expected \[2, 3\]"),
        ({"b_scale": torch.ones(2, 5)}, r"b's scales are \[2, 5\]; expected \[2, 3\]"),
        ({"group": 0}, r"a's scales are \[17, 3\]; expected \[17, 1\]"),
        ({"b_rows": 64}, r"b's scales are \[2, 3\]; expected \[3, 3\]"),
        ({"a": torch.zeros(17, 319).to(torch.float8_e4m3fn)}, "expected the same number of columns"),
    ],
)
def test_scales_that_would_broadcast_or_promote_are_refused(change, message):  # [Q14, W4]
    operands = {
        "a": torch.zeros(17, 320).to(torch.float8_e4m3fn),
        "a_scale": torch.ones(17, 3),
        "b": torch.zeros(192, 320).to(torch.float8_e4m3fn),
        "b_scale": torch.ones(2, 3),
        "b_rows": 128,
        "group": 128,
    }
    assert reference.fp8_gemm(**operands).shape == (17, 192)
    with pytest.raises(ValueError, match=message):
        reference.fp8_gemm(**{**operands, **change})

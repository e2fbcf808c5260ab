"""The provider of fused kernels without a GPU: what it refuses, that its short division is exact, that it compiles.

The kernels' bits on a GPU are in tests/gpu/test_fusions.py, their indexing in triton_fused_interpreted.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jetgraph.lowering import cuda_fused, fused_ops, fused_reference, reference, registry  # noqa: F401
from jetgraph.lowering.provider import Finding, Fused, Gemm
from jetgraph.lowering.triton_fused_provider import FUSED, TritonFused, exercises

JET = (448.0, 1e-12, "div", False)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


# ------------------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Fused("silu_mul_quantize", 12288, 128, JET), None),
        (Fused("rms_norm_quantize", 576, 128, JET), None),
        (Fused("silu_mul_quantize", 12288, 64, JET), "groups of 64; expected 128"),
        (Fused("silu_mul_quantize", 100, 128, JET), "100 features; expected a multiple of 16"),
        (Fused("rms_norm_rotary", 128, 128, None), None),
        (Fused("rms_norm_rotary", 96, 128, None), r"heads of 96; expected one of \(32, 64, 128, 256\)"),
        (Fused("rms_norm_quantize", 576, 128, JET, own_mean=False), "the mean is ATen's"),
        (Fused("silu_mul_quantize", 576, 128, (448.0, 1e-30, "div", False)), r"scales ≥ 2\^-60"),
        (Gemm(4096, 4096), "it runs fused operators alone"),
    ],
    ids=str,
)
def test_what_is_refused(request_, reason):
    found = TritonFused().refuses(request_)
    assert found is None if reason is None else re.search(reason, found or "")


def test_the_definition_runs_where_the_kernels_do_not(monkeypatch):
    found = {name: Finding(name, True, "fine", row_invariant=True) for name in registry.PROVIDERS}
    monkeypatch.setattr(registry, "probe", lambda name, device: found[name])
    registry._first.cache_clear()
    assert registry.choose(Fused("silu_mul_quantize", 576, 128, JET), CUDA).name == "triton_fused"
    assert registry.choose(Fused("silu_mul_quantize", 100, 128, JET), CUDA).name == "reference"
    assert registry.choose(Fused("silu_mul_quantize", 576, 128, JET), CPU).name == "reference"
    registry._first.cache_clear()
    found["triton_fused"] = Finding("triton_fused", False, "differs in bits")
    assert registry.choose(Fused("silu_mul_quantize", 576, 128, JET), CUDA).name == "reference"
    registry._first.cache_clear()


def test_the_self_test_visits_every_operator_and_sees_one_wrong_bit(monkeypatch):
    assert {kernel for kernel, _ in exercises(1, 32, JET, CPU)} == FUSED
    provider, definitions = TritonFused(), registry.PROVIDERS["reference"].fused

    def one_bit_off(self, kernel: str, *arguments) -> tuple[Tensor, ...]:
        out = definitions(kernel, *arguments)
        if kernel == wrong and out[-1].numel():
            out[-1].view(torch.int32).view(-1)[-1] ^= 1
        return out

    monkeypatch.setattr(TritonFused, "fused", one_bit_off)
    for wrong in ("", *sorted(FUSED)):
        assert wrong in provider._wrong(CPU)
        assert bool(provider._wrong(CPU)) == bool(wrong)


# ------------------------------------------------------------------------------------- a division in two operations

POSITIVE = torch.arange(1, 32640, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
"""Every finite positive BF16 number."""


def fma(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """FP32, one rounding: for the operands here (8, 24 and 24 bits, or a remainder) float64 holds x·y + z exactly."""
    return (x.double() * y.double() + z.double()).float()


@pytest.mark.parametrize("qmax", [448.0, 240.0])
def test_scales_of_every_bf16_number(qmax):  # [Q3, N3]
    """`triton_words._factors`: amax / qmax as a product with 1 / qmax and one correction."""
    for floor in (1e-12, 1e-10, 1e-4):
        amax = POSITIVE.clamp_min(floor)
        q, inverse = torch.full_like(amax, qmax), torch.full_like(amax, 1.0 / qmax)
        guess = amax * inverse
        assert torch.equal(fma(fma(guess, -q, amax), inverse, guess), amax / q)


@pytest.mark.parametrize("qmax", [448.0, 240.0])
@pytest.mark.parametrize("exponent", [-20, 0, 126])
@pytest.mark.parametrize("ulps_below", [0, 1, 2, 3])
def test_codes_of_every_bf16_number_by_every_scale(qmax, exponent, ulps_below):  # [Q3, N3]
    """`triton_words._quotient`: all numbers of a group, down to code 0, by every amax of a binade.

    The hardware's reciprocal is within one unit in the last place and two are taken off, so four neighbours are tried.
    """
    amax = torch.arange(128, 256).float()[:, None] / 128 * 2.0**exponent
    scale = amax / torch.full_like(amax, qmax)
    steps = torch.arange(-21, 1).float()[:, None] + exponent
    x = (torch.exp2(steps) * (torch.arange(128, 256) / 128.0)).view(1, -1)
    x = torch.where(x <= amax, x, amax)

    def codes(q: Tensor) -> Tensor:
        return q.clamp(-qmax, qmax).to(reference.E4M3).view(torch.uint8)

    one = torch.ones_like(scale)
    upper = one / scale
    bits = upper.view(torch.int32) - (fma(-scale, upper, one) < 0).int() - ulps_below
    upper = bits.view(torch.float32)
    lower = fma(-scale, upper, one) * upper
    assert (lower >= 0).all()
    assert torch.equal(codes(fma(x, upper, x * lower)), codes(x / scale))
    assert not torch.equal(codes(x * (one / scale)), codes(x / scale))  # one product alone would not do


# ------------------------------------------------------------------------------------------------ who runs


@pytest.mark.parametrize(
    ("cos", "sin", "dtype", "asked"),
    [
        ((1, 5, 64), (1, 5, 64), torch.bfloat16, True),
        ((2, 5, 64), (2, 5, 64), torch.bfloat16, True),
        ((1, 1, 64), (1, 1, 64), torch.bfloat16, False),  # one angle for all tokens: the kernel would read past it
        ((2, 5, 64), (1, 5, 64), torch.bfloat16, False),
        ((1, 5, 64), (1, 5, 64), torch.float32, False),
    ],
)
def test_only_one_angle_a_token_asks_for_a_kernel(cos, sin, dtype, asked, monkeypatch):
    requests = []

    def choose(request, device):
        requests.append(request.kernel)
        return registry.PROVIDERS["reference"]

    monkeypatch.setattr(registry, "choose", choose)
    x = torch.randn(2, 5, 3, 64).bfloat16()
    arguments = x, None, 0.0, True, torch.randn(cos).to(dtype), torch.randn(sin).to(dtype)
    out, _ = cuda_fused.rms_norm_rotary(*arguments)
    assert requests == ["rms_norm_rotary"] * asked
    assert torch.equal(out, fused_reference.rms_norm_rotary(*arguments)[0])


@pytest.mark.parametrize("size", [64, 1])
def test_only_one_weight_a_feature_asks_for_a_kernel(size, monkeypatch):
    """A norm may have one factor for all: the kernels would read past it."""
    requests = []

    def choose(request, device):
        requests.append(request.kernel)
        return registry.PROVIDERS["reference"]

    monkeypatch.setattr(registry, "choose", choose)
    x, weight, angles = torch.randn(2, 5, 3, 64).bfloat16(), torch.randn(size).bfloat16(), torch.randn(2, 5, 64)
    heads = x, weight, 1e-6, True, angles.bfloat16(), angles.bfloat16()
    rows = x, x, weight, 1e-6, True, True, 128, *JET
    for kernel, arguments in (("rms_norm_rotary", heads), ("rms_norm_quantize", rows)):
        got = getattr(cuda_fused, kernel)(*arguments)
        assert all(map(torch.equal, got[:2], getattr(fused_reference, kernel)(*arguments)[:2]))
    assert requests == ["rms_norm_rotary", "rms_norm_quantize"] * (size == 64)


# ------------------------------------------------------------------------------------------------ kernels, no GPU


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    pytest.importorskip("triton", reason="the kernels are written in triton")
    script = Path(__file__).with_name("triton_fused_interpreted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", str(script)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)


RULE = {"DIVISION": 0, "POWER_OF_TWO": False, "SATURATES": True, "NATIVE": True}
POINTERS = {"codes": "*i16", "codes_t": "*i32", "scales": "*fp32", "scales_t": "*fp32", "sums": "*i32"}
NUMBERS = dict.fromkeys(("a", "b", "x", "residual", "weight", "dy", "gate", "up"), "*i32")
NUMBERS |= {"r": "*fp32", "r_out": "*fp32"} | dict.fromkeys(("qmax", "qmax_inverse", "amax_floor", "eps"), "fp32")


def compiled(kernel, constants: dict, warps: int):
    """``kernel`` as compiled for Hopper; no GPU is needed."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {}
    for name in names:
        known = NUMBERS.get(name) or POINTERS.get(name.removeprefix("gate_").removeprefix("up_"), "i32")
        types[name] = "constexpr" if name in constants else known
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=aligned)
    options = {"num_warps": warps, "enable_fp_fusion": False}
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options).asm


@pytest.mark.slow
def test_what_the_kernels_compile_to():  # [K9]
    """64-bit offsets, loads and stores of 16 bytes, two casts at a time, and no product contracted by the compiler."""
    pytest.importorskip("triton", reason="the kernels are written in triton")
    from jetgraph.lowering import triton_fused_kernels as fused
    from jetgraph.lowering import triton_norm_kernels as norms

    edges = {"FOURTH": 32, "WHOLE": True, "EVEN": True}
    tile = {"ROWS": True, "TOKENS": True, "WAY": 0} | edges | RULE
    norm = {"RESIDUAL": True, "PIECES": (4096, 1024), "EVEN": True} | RULE
    kernels = {
        "plain": (fused.tile_kernel, tile | {"SOURCE": 0}, 4),
        "silu": (fused.tile_kernel, tile | {"SOURCE": 2, "WHOLE": False, "EVEN": False}, 8),
        "norm": (norms.norm_kernel, norm | {"ROWS": 1}, 1),
        "gradients": (fused.silu_mul_backward_kernel, edges | {"WAY": 3, "SPLIT": True} | RULE, 8),
    }
    for name, (kernel, constants, warps) in kernels.items():
        asm = compiled(kernel, constants, warps)
        at_tile = re.findall(r"tt\.addptr .*: !tt\.ptr<\w+>, (\w+)", asm["ttir"])
        assert at_tile.count("i64") >= 4, name  # where a tile starts; within it 32 bits do, and `LIMIT` sees to that
        ptx = asm["ptx"]
        assert re.search(r"(ld\.global|cp\.async\.cg\.shared\.global).*(v4\.b32|0x10)", ptx), name
        if name != "norm":
            assert ("st.global.v4.b32" in ptx) == (name != "silu"), name  # bytes where T is not a multiple of 16
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
        assert "max.u16x2" in ptx
        assert not re.search(r"\b(mul|add|sub)\.(f32|bf16x2)", ptx), name  # without .rn ptxas may contract them

"""Self-tests of providers: the values they must give, and what must never pass.  In brackets: public bug rows."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from jetgraph.lowering import provider, reference, registry, triton_provider
from jetgraph.lowering.provider import FPROP, WGRAD, Finding

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
JET = (448.0, 1e-12, "div", False)


def test_the_exact_product_is_the_product():
    """In float64 from dequantised codes: other code than the integers of `exact_product`."""
    for case in (FPROP, dataclasses.replace(FPROP, bias=True), WGRAD):
        a, a_scale, b, b_scale, bias = provider.exact_operands(case)
        left = reference.dequantize(a, a_scale, 1, 128).double()
        right = reference.dequantize(b, b_scale, case.b_rows, 128).double()
        expected = left @ right.t() + (0 if bias is None else bias.double())
        assert torch.equal(provider.exact_product(case), expected.float().to(torch.bfloat16))
    assert provider.checksum(provider.exact_product(FPROP)) == provider.EXPECTED_SELF_TEST


def test_the_reference_passes_and_prints_its_value():  # [C4]
    finding = registry.PROVIDERS["reference"].probe(CPU)
    assert finding.ok
    assert finding.self_test_value == provider.EXPECTED_SELF_TEST
    assert "self-test 863.4150 (expected 863.4150)" in str(finding)
    assert f"torch {torch.__version__}" in str(finding)
    assert provider.rows_are_independent(registry.PROVIDERS["reference"].fp8_gemm, CPU, (1, 63), (16, 512))


@pytest.mark.parametrize("pow2", [False, True])
def test_the_reference_is_loud_about_what_is_not_finite(pow2):  # [N5, Q6]
    """Rounding a NaN scale up to a power of two must not make it 1, and the inf 448."""
    x = torch.ones(3, 128)
    x[0, 5], x[1, 6] = float("nan"), float("inf")
    codes, scales = reference.quantize(x, 1, 128, 448.0, 1e-12, "div", pow2)
    assert scales.isnan().flatten().tolist() == [True, True, False]
    assert codes.float().isnan().all(1).tolist() == [True, True, False]


def _gemm(change):
    """A provider's fp8_gemm with one mistake of layout."""

    def fp8_gemm(a, a_scale, b, b_scale, bias, b_rows, group):
        a, a_scale, b, b_scale = change(a, a_scale, b, b_scale)
        return registry.Reference().fp8_gemm(a, a_scale, b, b_scale, bias, b_rows, group)

    return fp8_gemm


def _read_unpadded(scale):
    """What a library reads that expects rows of K/128 rounded up to 4 and is given the plain grid."""
    rows, groups = scale.shape
    padded = torch.zeros(rows * (groups + -groups % 4))
    padded[: scale.numel()] = scale.flatten()
    return padded.view(rows, -1)[:, :groups].contiguous()


@pytest.mark.parametrize(
    "change",
    [
        lambda a, sa, b, sb: (a, sa, b, _read_unpadded(sb)),  # [K5] an unpadded scale: finite, wrong, no error
        lambda a, sa, b, sb: (a, sa.t().contiguous().view(sa.shape), b, sb),
        lambda a, sa, b, sb: (a, sa.roll(1, 0), b, sb),
        lambda a, sa, b, sb: (a.view(torch.uint8).roll(1, 1).view(a.dtype), sa, b, sb),
        lambda a, sa, b, sb: (a, sa * (1 + 2**-7), b, sb),
    ],
    ids=["unpadded", "row-major", "shifted", "off-by-one", "one-ulp"],
)
def test_a_wrong_layout_never_passes(change):  # [C4, K5]
    finding = provider.self_test("wrong", _gemm(change), (FPROP, WGRAD), CPU)
    assert not finding.ok
    assert re.search(r"of 6,720 values of the self-test are wrong", finding.reason)


@pytest.mark.parametrize("case", [FPROP, WGRAD], ids=str)
def test_scales_are_tested_as_our_quantisers_lay_them_too(case):  # [K5]
    """Along the features and along the tokens they lie in columns; this provider takes memory for rows."""

    def fp8_gemm(a, a_scale, *operands):
        return registry.Reference().fp8_gemm(a, a_scale.as_strided(a_scale.shape, (a_scale.shape[1], 1)), *operands)

    finding = provider.self_test("rows", fp8_gemm, (case,), CPU)
    assert not finding.ok
    assert re.search(r", scales in columns: [\d,]+ of [\d,]+ values of the self-test are wrong", finding.reason)


@pytest.mark.parametrize("wrong", ["", "quantize", "quantize_tokens", "requantize_tokens", "raises"])
def test_a_quantiser_that_is_a_bit_off_is_a_refusal(monkeypatch, wrong):
    def definition_of(name):
        def run(self, *arguments):
            if wrong == "raises":
                raise RuntimeError("ptxas fatal\nsecond line")
            codes, scale = getattr(registry.Reference(), name)(*arguments)
            if name == wrong:
                codes.view(torch.uint8)[-1, -1] ^= 1
            return codes, scale

        return run

    for name in ("quantize", "quantize_tokens", "requantize_tokens"):
        monkeypatch.setattr(triton_provider.TritonKernels, name, definition_of(name))
    monkeypatch.setattr(triton_provider, "triton_version", lambda: "3.9.0")
    monkeypatch.setattr(triton_provider, "missing_hopper", lambda device, **least: None)
    monkeypatch.setattr(triton_provider, "self_test", lambda name, *_: Finding(name, True, "all exact"))
    monkeypatch.setattr(triton_provider, "words_refusal", lambda device: "")
    finding = triton_provider.TritonKernels().probe(CPU)
    assert finding.ok is (wrong == "")
    expected = {"": "all exact", "raises": "its quantiser failed with RuntimeError: ptxas fatal"}
    assert re.match(expected.get(wrong, r"its quantiser of \w+ differs in bits from the definition"), finding.reason)


def test_a_library_that_raises_is_a_refusal_of_one_line():
    def fp8_gemm(*arguments):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED\nsecond line")

    finding = provider.self_test("broken", fp8_gemm, (FPROP,), CPU)
    assert not finding.ok
    assert finding.reason.endswith("failed with RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED")


def test_a_library_that_raises_when_rows_are_compared_is_a_refusal_too():
    """Its kernel of that shape is compiled only then."""

    def fp8_gemm(a, *operands):
        if a.shape[1] > 10_000:
            raise RuntimeError("nvcc fatal: out of memory\nsecond line")
        return registry.Reference().fp8_gemm(a, *operands)

    finding = provider.self_test("broken", fp8_gemm, (FPROP,), CPU)
    assert not finding.ok
    assert finding.reason == "the comparison of rows failed with RuntimeError: nvcc fatal: out of memory"


def test_a_kernel_chosen_by_the_number_of_rows_is_found():  # [K12, N15]
    """Split K for few rows: the same sum in another order."""

    def fp8_gemm(a, a_scale, b, b_scale, bias, b_rows, group):
        values = [reference.dequantize(a, a_scale, 1, 128), reference.dequantize(b, b_scale, b_rows, 128)]
        half = a.shape[1] // 2 if a.shape[0] < 64 else a.shape[1]
        parts = [(values[0][:, s] @ values[1][:, s].t()) for s in (slice(half), slice(half, None))]
        return (parts[0] + parts[1]).to(torch.bfloat16)

    assert not provider.rows_are_independent(fp8_gemm, CPU, (1, 63), (64, 4096))

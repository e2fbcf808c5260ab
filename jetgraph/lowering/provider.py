"""What a kernel provider is: what it serves, a probe that finds out early, and the test of its GEMM's values.

A provider never decides late.  `Provider.probe` looks at the device and the tools once and multiplies matrices whose
product is known exactly; `Provider.refuses` answers for one GEMM or quantiser from its sizes alone.  The number of rows
M is no part of the question: kernels chosen by M would make a row's bits depend on how many other rows there are.

Next door: `registry` chooses, `reference` defines what every provider must compute.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import torch
from torch import Tensor

from jetgraph.lowering.scale_layout import row_scales, token_scales

E4M3 = torch.float8_e4m3fn
Rule = tuple[float, float, str, bool]
"""qmax, amax floor, division, power of two: the trailing arguments of `jetgraph::quantize`."""


class ProviderError(ValueError):
    """A provider that was asked for cannot serve; raised before anything is compiled or launched."""


@dataclass(frozen=True)
class Gemm:
    """One `jetgraph::fp8_gemm` by what decides who may run it: a [M, K] · b [N, K]ᵀ (+ bias).

    ``b_rows`` is 1 where both operands are grouped along the tokens (WGRAD, whose K is the number of tokens), else the
    rows of a weight's block.  0 for ``b_rows`` or ``group`` is the whole axis.  ``is_dgrad`` tells DGRAD from FPROP,
    which have the same operands: only the latter's rows must not depend on each other.
    """

    num_out: int
    depth: int
    b_rows: int = 128
    group: int = 128
    bias: bool = False
    is_dgrad: bool = False

    @property
    def role(self) -> str:
        if self.b_rows == 1:
            return "WGRAD"
        return "DGRAD" if self.is_dgrad else "FPROP"

    def __str__(self) -> str:
        depth = "tokens" if self.b_rows == 1 else self.depth
        scales = f"1x{self.group or '*'} · {self.b_rows or '*'}x{self.group or '*'}"
        return f"{self.role} GEMM N={self.num_out} K={depth}, scales {scales}{', bias' if self.bias else ''}"


@dataclass(frozen=True)
class Quantizer:
    """One quantiser by its block (0 is the whole axis) and its scale rule."""

    rows: int
    cols: int
    rule: Rule

    def __str__(self) -> str:
        return f"quantiser {self.rows or '*'}x{self.cols or '*'}"


@dataclass(frozen=True)
class Fused:
    """One fused operator by its name, the features of a token and what its quantisers do."""

    kernel: str
    num_features: int
    group: int
    rule: Rule | None
    """None of an operator that quantises nothing."""
    own_mean: bool = True
    """Of a norm: the mean is `jetgraph::row_mean`, not ATen's."""

    def __str__(self) -> str:
        return f"{self.kernel} of {self.num_features} features in groups of {self.group}"


@dataclass(frozen=True)
class Exact:
    """One row-invariant BF16 operator: `row_tile_gemm`, or attention with its head size and heads that share keys.

    Or attention's gradient, whose rows may depend on each other; ``is_plain`` if every query sees all keys up to its
    own, without window or soft cap, and the order of sums may differ from call to call.
    """

    kernel: str
    dtype: torch.dtype
    head_size: int = 0
    heads_per_group: int = 1
    is_plain: bool = False

    def __str__(self) -> str:
        heads = f", heads of {self.head_size}, {self.heads_per_group} on one of keys" if self.head_size else ""
        return f"{self.kernel} of {self.dtype}{heads}"


Request = Gemm | Quantizer | Fused | Exact


@dataclass(frozen=True)
class Finding:
    """What a probe found.  ``reason`` is one sentence; ``self_test_value`` must equal `EXPECTED_SELF_TEST`."""

    provider: str
    ok: bool
    reason: str
    versions: tuple[tuple[str, str], ...] = ()
    self_test_value: float | None = None
    row_invariant: bool = False

    def __str__(self) -> str:
        """One line: usable or refused, why, versions, and the value of the self-test."""
        parts = [f"{'usable' if self.ok else 'refused'}: {self.reason}"]
        if self.versions:
            parts.append(", ".join(f"{name} {version}" for name, version in self.versions))
        if self.self_test_value is not None:
            parts.append(f"self-test {self.self_test_value:.4f} (expected {EXPECTED_SELF_TEST:.4f})")
        return "; ".join(parts)


class Provider(Protocol):
    """One file, one frozen object.  ``kernels`` names the operators of `torch.ops.jetgraph` that it has methods for;
    each has the signature and the meaning of that operator."""

    @property
    def name(self) -> str: ...

    @property
    def kernels(self) -> frozenset[str]: ...

    def probe(self, device: torch.device) -> Finding: ...

    def refuses(self, request: Request) -> str | None:
        """Why it cannot serve ``request``, or None."""
        ...


def missing_hopper(device: torch.device, least: tuple[int, int] = (9, 0), exact: bool = False) -> str | None:
    """Why ``device`` cannot multiply FP8 codes, in one sentence; None if it can."""
    if device.type != "cuda":
        return f"runs on CUDA devices, and this one is {device.type}"
    if not torch.cuda.is_available():
        return "this machine has no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < least or (exact and capability[0] != least[0]):
        return (
            f"needs compute capability {least[0]}.{least[1]}{'' if exact else ' or higher'} for FP8, and this device "
            f"has {capability[0]}.{capability[1]}"
        )
    return None


NO_TRITON = "triton is not installed; install jetgraph[gpu]"
UNKNOWN_VERSION = "of unknown version"


def triton_version() -> str | None:
    """Of the triton that would be imported, or None if there is none; `UNKNOWN_VERSION` if no package owns it.

    torch's nightly builds bring the module in a package of another name.
    """
    if importlib.util.find_spec("triton") is None:
        return None
    for package in ("triton", "pytorch-triton"):
        with contextlib.suppress(PackageNotFoundError):
            return version(package)
    return UNKNOWN_VERSION


def triton_finding(name: str, device: torch.device, test: Callable[[torch.device], tuple[str, str]]) -> Finding:
    """What a provider of Triton kernels found; ``test`` gives what is wrong ("" if nothing is) and what is right."""
    triton = triton_version()
    if triton is None:
        return Finding(name, False, NO_TRITON)
    return tested_finding(name, device, (("triton", triton),), test)


def tested_finding(
    name: str,
    device: torch.device,
    versions: tuple[tuple[str, str], ...],
    test: Callable[[torch.device], tuple[str, str]],
) -> Finding:
    """As `triton_finding`, of whatever runs on a Hopper."""
    missing = missing_hopper(device)
    if missing:
        return Finding(name, False, missing, versions)
    try:
        with torch.cuda.device(device):
            wrong, right = test(device)
    except Exception as error:  # whatever a compiler or a library throws at its first use is a refusal, in one line
        return Finding(name, False, failed(error), versions)
    return Finding(name, not wrong, wrong or right, versions, row_invariant=not wrong)


def failed(error: Exception) -> str:
    """How something failed, in one line."""
    first_line = (str(error).strip() or "no message").splitlines()[0][:160]
    return f"failed with {type(error).__name__}: {first_line}"


def refuses_blocks(request: Gemm, out_multiple: int, group: int = 128) -> str | None:
    """Why a library of 1x128·128x128 and 1x128·1x128 GEMMs cannot serve ``request``; None if it can."""
    if request.group != group or request.b_rows not in (1, group):
        return f"scales {request.b_rows or '*'}x{request.group or '*'}; expected 1x{group} or {group}x{group}"
    if request.num_out % out_multiple:
        return f"N={request.num_out} is not a multiple of {out_multiple}"
    if request.b_rows != 1 and request.depth % group:
        return f"K={request.depth} is not a multiple of {group}"
    return None


# --------------------------------------------------------------------------------------------------------- self-test
#
# Small integers as codes and powers of two as scales: every partial sum is exact in any order and in the 14 bits that
# Hopper's FP8 units keep, so any difference is a wrong index, layout or scale, and equality is bitwise.

FPROP = Gemm(320, 640)
WGRAD = Gemm(192, 144, b_rows=1)
NUM_ROWS = 21
"""Neither 640 / 128 nor ⌈320 / 128⌉ is a multiple of 4, 21 rows are odd, 144 tokens end inside a group."""
EXPECTED_SELF_TEST = 863.4150390625
"""Σ out · ((31 m + 17 n) mod 97 - 48) / 64 of `FPROP` without bias, from integer arithmetic."""

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, int], Tensor]


def exact_operands(case: Gemm) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """a, a_scale, b, b_scale, bias on the CPU: codes in -2 … 2, scales 2^-2 … 2^1, bias in sixteenths."""

    def integers(rows: int, cols: int, seed: int, low: int, count: int) -> Tensor:
        """Integers low … low + count - 1 without a pattern, the same on every machine and version of torch."""
        index = torch.arange(rows * cols, dtype=torch.int64) + seed * 7919
        mixed = (index * 2654435761) % 2**32
        mixed = ((mixed ^ (mixed >> 15)) * 2246822519) % 2**32
        return ((mixed >> 13) % count + low).view(rows, cols)

    num_rows, groups = NUM_ROWS, -(-case.depth // case.group)
    a = integers(num_rows, case.depth, 1, -2, 5).float().to(E4M3)
    b = integers(case.num_out, case.depth, 2, -2, 5).float().to(E4M3)
    a_scale = 2.0 ** integers(num_rows, groups, 3, -2, 4)
    b_scale = 2.0 ** integers(-(-case.num_out // case.b_rows), groups, 4, -2, 4)
    bias = (integers(1, case.num_out, 5, -8, 16)[0].float() / 16).bfloat16() if case.bias else None
    return a, a_scale, b, b_scale, bias


def in_columns(case: Gemm, a_scale: Tensor, b_scale: Tensor) -> tuple[Tensor, Tensor]:
    """The same scales as our quantisers lay them (`scale_layout`): what a provider is given as a rule."""
    lay = token_scales if case.role == "WGRAD" else row_scales
    left = lay(a_scale, *a_scale.shape).copy_(a_scale)
    return left, lay(b_scale, *b_scale.shape).copy_(b_scale) if case.role == "WGRAD" else b_scale


def exact_product(case: Gemm) -> Tensor:
    """The BF16 product of `exact_operands`, from integers alone."""
    a, a_scale, b, b_scale, bias = exact_operands(case)
    left, right = (t.float().to(torch.int64) for t in (a, b))
    total = torch.zeros(left.shape[0], right.shape[0], dtype=torch.int64)  # in units of 2^-4
    for g in range(a_scale.shape[1]):
        part = slice(g * case.group, (g + 1) * case.group)
        scale_a, scale_b = (s[:, g].mul(4).to(torch.int64) for s in (a_scale, b_scale))
        scale = scale_a[:, None] * scale_b.repeat_interleave(case.b_rows)[: case.num_out][None]
        total += (left[:, part] @ right[:, part].t()) * scale
    if bias is not None:
        total += bias.float().mul(16).to(torch.int64)
    return (total.to(torch.float64) / 16).to(torch.bfloat16)


def checksum(out: Tensor) -> float:
    """Σ out · ((31 m + 17 n) mod 97 - 48) / 64: an exact number that two machines can compare by eye."""
    rows, cols = torch.arange(out.shape[0])[:, None], torch.arange(out.shape[1])[None]
    weight = ((rows * 31 + cols * 17) % 97 - 48).to(torch.float64) / 64
    return (out.to("cpu", torch.float64) * weight).sum().item()


def self_test(
    name: str,
    fp8_gemm: Kernel,
    cases: tuple[Gemm, ...],
    device: torch.device,
    versions: tuple[tuple[str, str], ...] = (),
    row_invariant: bool | None = None,
) -> Finding:
    """Multiply the exact cases; a finding for the registry.

    ``row_invariant`` says what is known about the provider's rows; None measures it.
    """
    value = None
    for case in cases:
        a, a_scale, b, b_scale, bias = (None if t is None else t.to(device) for t in exact_operands(case))
        scales = {"": (a_scale, b_scale), ", scales in columns": in_columns(case, a_scale, b_scale)}
        for lie, (left_scale, right_scale) in scales.items():
            try:
                got = fp8_gemm(a, left_scale, b, right_scale, bias, case.b_rows, case.group).cpu()
            except Exception as error:  # whatever a library throws at its first use is a refusal, told in one line
                return Finding(name, False, f"{case}{lie} {failed(error)}", versions)
            if case == FPROP and not lie:
                value = checksum(got)
            wrong = (got != exact_product(case)).sum().item()  # NaN differs from everything
            if wrong:
                reason = f"{case}{lie}: {wrong:,} of {got.numel():,} values of the self-test are wrong"
                return Finding(name, False, reason, versions, value)
    if row_invariant is None:
        try:
            row_invariant = rows_are_independent(fp8_gemm, device)
        except Exception as error:  # a kernel of another shape than the cases', compiled at its first use
            return Finding(name, False, f"the comparison of rows {failed(error)}", versions, value)
    rows = "do not depend" if row_invariant else "may depend"
    reason = f"all values of the self-test exact, rows {rows} on how many there are"
    return Finding(name, True, reason, versions, value, row_invariant)


def rows_are_independent(
    fp8_gemm: Kernel,
    device: torch.device,
    counts: tuple[int, ...] = (1, 2, 63, 128),
    shape: tuple[int, int] = (512, 16384),
) -> bool:
    """Whether leading rows keep their bits with any number of rows below them: 257 random rows against fewer.

    Few outputs and a long K is where a library splits K, and with it the order of the sum, when rows are few.
    """
    generator = torch.Generator().manual_seed(0)

    def codes(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=generator).mul(64).clamp(-448, 448).to(E4M3).to(device)

    (num_out, depth), most = shape, 257
    a, b = codes(most, depth), codes(num_out, depth)
    a_scale = torch.rand(most, depth // 128, generator=generator).to(device)
    b_scale = torch.rand(-(-num_out // 128), depth // 128, generator=generator).to(device)

    def product(rows: int) -> Tensor:
        few = row_scales(a_scale, rows, a_scale.shape[1]).copy_(a_scale[:rows])
        return fp8_gemm(a[:rows], few, b, b_scale, None, 128, 128)

    whole = product(most)
    return all(torch.equal(product(m), whole[:m]) for m in counts)

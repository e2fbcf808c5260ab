"""This library's own kernels against their definitions; code and oracle are written independently of each other."""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from jetgraph.attest import definitions, rows
from jetgraph.attest.compare import bounded, same_bits
from jetgraph.attest.report import Attestation, Check
from jetgraph.lowering import reference
from jetgraph.precision import Division, ScaleRule
from jetgraph.versions import versions

COLS = 512
GROUP = 128


def attest_trainer() -> Attestation:
    """The reference provider on the device that this process trains on."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"cpu {platform.machine()}"
    return Attestation("trainer", name, versions("torch"), trainer_checks(device))


def trainer_checks(device: str) -> list[Check]:
    return [*_quantize(device), *_fp8_gemm(device), *_row_tile_gemm(device), *_attention(device)]


def _quantize(device: str) -> list[Check]:
    checks = []
    inputs = rows.for_quantising(COLS, device)
    inputs["one ulp above a power of two (f32)"] = rows.one_ulp_above_powers_of_two(COLS, device)
    for rule in (ScaleRule(), ScaleRule(power_of_two=True), ScaleRule(448.0, 1e-4, Division.RECIPROCAL_OF_SCALE)):
        for name, x in inputs.items():
            codes, scale = reference.quantize(
                x, 1, GROUP, rule.qmax, rule.amax_floor, str(rule.division), rule.power_of_two
            )
            want, want_scale = definitions.quantize(
                x, floor=rule.amax_floor, division=str(rule.division), power_of_two=rule.power_of_two
            )
            checks.append(same_bits("jetgraph::quantize", f"codes: {rule}", name, codes, want))
            checks.append(same_bits("jetgraph::quantize", f"scales: {rule}", name, scale, want_scale))
    return checks


def _fp8_gemm(device: str) -> list[Check]:
    op, num_out = "jetgraph::fp8_gemm", 256
    ones = torch.ones(16, COLS // GROUP, device=device), torch.ones(num_out // GROUP, COLS // GROUP, device=device)
    a, b = (
        rows.small_integers(n, COLS, device, 16, seed).to(torch.float8_e4m3fn) for n, seed in ((16, 1), (num_out, 2))
    )
    got = reference.fp8_gemm(a, ones[0], b, ones[1], GROUP)
    checks = [same_bits(op, "Σ a·b", "exact sums, 20 bits", got, (a.double() @ b.double().T).float())]
    x, w = rows.ordinary(100, COLS, device), rows.ordinary(num_out, COLS, device, seed=3)
    a, sa = reference.quantize(x, 1, GROUP, 448.0, 1e-12, "div", False)
    b, sb = reference.quantize(w, GROUP, GROUP, 448.0, 1e-12, "div", False)
    out = reference.fp8_gemm(a, sa, b, sb, GROUP).to(torch.bfloat16)
    oracle = definitions.fp8_gemm_oracle(a, sa, b, sb, bits=23)
    checks.append(bounded(op, "float64 oracle, sums of 23 bits", "ordinary", out, oracle))
    alone = torch.cat([reference.fp8_gemm(a[i : i + 1], sa[i : i + 1], b, sb, GROUP) for i in range(4)])
    checks.append(same_bits(op, "a row alone = in the batch", "ordinary", alone.to(out.dtype), out[:4]))
    return checks


def _row_tile_gemm(device: str) -> list[Check]:
    op = "jetgraph::row_tile_gemm"
    x, w = rows.small_integers(33, COLS, device, 16, 4), rows.small_integers(64, COLS, device, 16, 5)
    want = (x.double() @ w.double().T).to(torch.bfloat16)
    checks = [same_bits(op, "r(Σ x·w)", "exact sums, 20 bits", reference.row_tile_gemm(x, w), want)]
    x, w = rows.ordinary(33, COLS, device), rows.ordinary(64, COLS, device, seed=6)
    magnitude = x.double().abs() @ w.double().abs().T
    exact = x.double() @ w.double().T
    bound = COLS * 2.0**-23 * magnitude
    oracle = (exact, bound + (exact.abs() + bound) * 2.0**-8)
    return [*checks, bounded(op, "float64 oracle, FP32 sums", "ordinary", reference.row_tile_gemm(x, w), oracle)]


def _attention(device: str) -> list[Check]:
    """Against a float64 softmax written for one query at a time; one BF16 rounding apart at most."""
    q, k, v = (rows.ordinary(24, heads * 64, device, seed) for heads, seed in ((4, 7), (2, 8), (2, 9)))
    by_head = [x.view(1, 24, -1, 64).transpose(1, 2) for x in (q, k, v)]
    got = reference.attention(*by_head, 0.125)[0][0].flatten(1)
    exact = _attention_oracle(*(x[0].double() for x in by_head), 0.125)
    values = by_head[2].double().abs().max()
    bound = exact.abs() * 2.0**-8 + values * 2.0**-40
    return [bounded("jetgraph::attention", "float64 oracle, one rounding", "ordinary", got, (exact, bound))]


def _attention_oracle(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    heads, length, size = q.shape
    shared = heads // k.shape[0]
    out = torch.zeros(length, heads, size, dtype=torch.float64, device=q.device)
    for head in range(heads):
        keys, values = k[head // shared], v[head // shared]
        for t in range(length):
            weights = torch.exp((keys[: t + 1] @ q[head, t]) * scale)
            out[t, head] = (weights[:, None] * values[: t + 1]).sum(0) / weights.sum()
    return out.flatten(1)

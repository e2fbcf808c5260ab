"""vLLM's FP8 CUDA operators against their definitions: quantisers, fused quantisers, GEMM; and what loading does."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from jetgraph.attest import Check, definitions, rows
from jetgraph.attest.compare import bounded, same_bits, tried
from jetgraph.lowering import reference
from jetgraph_vllm.attest_cuda import COLS, EPS, norm_weight

GROUP = 128
E4M3 = torch.float8_e4m3fn
VLLM_FLOOR = 1e-10
"""eps that vLLM passes to its group quantiser"""
SCALE_FLOOR = 1.0 / (448.0 * 512.0)
"""vLLM's smallest scale in its native and fused quantisers"""


# ------------------------------------------------------------------------------------------------------ quantising


def _rules(power_of_two: bool) -> dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Definitions of group quantisation; the first is what the lifter declares for `_C.per_token_group_fp8_quant`."""
    tail = " pow2" if power_of_two else ""
    define = functools.partial(functools.partial, definitions.quantize, power_of_two=power_of_two)
    made: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {}
    if power_of_two:  # eps bounds the scale, not amax: 448 · 1e-10
        made[f"div floor={448 * VLLM_FLOOR:g} pow2"] = define(floor=448.0 * VLLM_FLOOR)
        made["div floor=1e-10, scale floor 1e-10, pow2 by log2"] = define(floor=448.0 * VLLM_FLOOR, by_log2=True)
    for division in ("div", "mul1/s", "mulq/a"):
        for floor in (VLLM_FLOOR, 1e-12, 1e-4, 0.0):
            made[f"{division} floor={floor:g}{tail}"] = define(floor=floor, division=division)
    made[f"div floor of the scale 1e-10{tail}"] = define(floor=0.0, scale_floor=1e-10)
    made[f"div floor of the scale 1/(448·512){tail}"] = define(floor=0.0, scale_floor=SCALE_FLOOR)
    return made


def per_token_group_fp8_quant(device: str) -> list[Check]:
    op, checks = "_C.per_token_group_fp8_quant", []
    inputs = rows.for_quantising(COLS, device)
    inputs["one ulp above a power of two (f32)"] = rows.one_ulp_above_powers_of_two(COLS, device)
    inputs["non-finite"] = rows.non_finite(COLS, device)
    for ue8m0 in (False, True):
        for name, x in inputs.items():
            codes = torch.empty(x.shape, dtype=E4M3, device=device)
            scales = torch.empty(x.shape[0], x.shape[1] // GROUP, dtype=torch.float32, device=device)
            torch.ops._C.per_token_group_fp8_quant(x, codes, scales, GROUP, 1e-10, -448.0, 448.0, ue8m0, False, False)
            got = _codes_and_scales(codes, scales)
            made = {rule: _codes_and_scales(*define(x)) for rule, define in _rules(ue8m0).items()}
            made["= the trainer's jetgraph::quantize with that floor"] = _codes_and_scales(
                *reference.quantize(x, 1, GROUP, 448.0, 448.0 * VLLM_FLOOR if ue8m0 else VLLM_FLOOR, "div", ue8m0)
            )
            label = f"{op} ue8m0={ue8m0}"
            finite = name != "non-finite"
            if ue8m0 and x.dtype == torch.float32:  # rounds up by log2: see docs/findings.md; serving gives it BF16
                checks += tried(label, name, got, dict(reversed(list(made.items())[:2])), declared=True)
                continue
            checks += tried(label, name, got, made, declared=finite)
            if ue8m0:
                continue
            aligned = torch.empty_strided(
                scales.shape, (1, -(-x.shape[0] // 4) * 4), dtype=torch.float32, device=device
            )
            again = torch.empty_like(codes)
            torch.ops._C.per_token_group_fp8_quant(x, again, aligned, GROUP, 1e-10, -448.0, 448.0, ue8m0, True, True)
            if finite:
                same = same_bits(
                    label, "column-major TMA scales = row-major", name, _codes_and_scales(again, aligned), got
                )
                checks.append(same)
    return checks


def _codes_and_scales(codes: Tensor, scales: Tensor) -> Tensor:
    """One int32 vector of both, so that codes and scales are compared together and by their bits."""
    flat = codes.contiguous().view(torch.uint8).flatten().int()
    return torch.cat((flat, scales.contiguous().view(torch.int32).flatten()))


def rms_norm_per_block_quant(device: str) -> list[Check]:
    op, weight, checks = "_C.rms_norm_per_block_quant", norm_weight(device), []
    for with_residual in (False, True):
        for name, x in rows.for_norms(COLS, device).items():
            residual = x.roll(1, 1).contiguous() if with_residual else None
            given = None if residual is None else residual.clone()
            codes = torch.empty(x.shape, dtype=E4M3, device=device)
            scales = torch.empty(x.shape[0], COLS // GROUP, dtype=torch.float32, device=device)
            torch.ops._C.rms_norm_per_block_quant(codes, x, weight, scales, EPS, None, residual, GROUP, False)
            made = {}
            for norm_name, normed in _norms_before_quantising(x, given, weight).items():
                for rule in FUSED_RULES:
                    made[f"{norm_name}; {rule}"] = _codes_and_scales(*_by_rule(normed, rule))
            suffix = " with residual" if with_residual else ""
            checks += tried(op + suffix, name, _codes_and_scales(codes, scales), made)
            if residual is not None and given is not None:
                want = (x.float() + given.float()).to(torch.bfloat16)
                checks.append(same_bits(op + suffix, "residual' = r(x + residual)", name, residual, want))
    return checks


FUSED_RULES = ("div scale floor 1/(448·512)", "mul1/s scale floor", "div floor 1e-10", "div floor 0")


def _norms_before_quantising(x: Tensor, residual: Tensor | None, weight: Tensor) -> dict[str, Tensor]:
    """BF16 or FP32 norms by which roundings they have."""
    total = x.float() if residual is None else x.float() + residual.float()
    sums = {"": total} if residual is None else {"unrounded sum, ": total, "rounded sum, ": definitions.r(total)}
    made = {}
    for prefix, value in sums.items():
        wide = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + EPS)
        w = weight.float()
        made[f"{prefix}r(w · r(x̂))"] = definitions.r(w * definitions.r(wide))
        made[f"{prefix}w · r(x̂)"] = w * definitions.r(wide)
        made[f"{prefix}r(w · x̂)"] = definitions.r(w * wide)
        made[f"{prefix}w · x̂"] = w * wide
    return made


def _by_rule(x: Tensor, rule: str) -> tuple[Tensor, Tensor]:
    division = "mul1/s" if rule.startswith("mul1/s") else "div"
    floor = VLLM_FLOOR if rule.endswith("floor 1e-10") else 0.0
    return definitions.quantize(
        x, floor=floor, division=division, scale_floor=SCALE_FLOOR if "scale floor" in rule else 0.0
    )


def silu_and_mul_per_block_quant(device: str) -> list[Check]:
    op, checks = "_C.silu_and_mul_per_block_quant", []
    inputs = {
        "ordinary": rows.ordinary(64, 2 * COLS, device),
        "scale 1e-3": rows.scaled(16, 2 * COLS, device, 1e-3),
        "scale 1e-6": rows.scaled(16, 2 * COLS, device, 1e-6),
        "zeros": torch.zeros(4, 2 * COLS, dtype=torch.bfloat16, device=device),
    }
    for name, x in inputs.items():
        codes = torch.empty(x.shape[0], COLS, dtype=E4M3, device=device)
        scales = torch.empty(x.shape[0], COLS // GROUP, dtype=torch.float32, device=device)
        torch.ops._C.silu_and_mul_per_block_quant(codes, x, scales, GROUP, None, False)
        gate, up = x.float().chunk(2, -1)
        activated = torch.nn.functional.silu(gate)
        sigmoid = 1.0 / (1.0 + torch.exp(-gate))
        products = {
            "(gate · (1 / (1 + exp(−gate)))) · up": (gate * sigmoid) * up,
            "silu · up": activated * up,
            "r(silu · up)": definitions.r(activated * up),
            "r(silu) · up": definitions.r(activated) * up,
            "r(r(silu) · up)": definitions.r(definitions.r(activated) * up),
        }
        made = {}
        for product, value in products.items():
            for rule in FUSED_RULES:
                made[f"{product}; {rule}"] = _codes_and_scales(*_by_rule(value, rule))
        checks += tried(op, name, _codes_and_scales(codes, scales), made)
    return checks


# ------------------------------------------------------------------------------------------------------------ GEMM


def fp8_gemm_nt_op(device: str) -> list[Check]:
    import vllm.model_executor.kernels.linear.scaled_mm.deep_gemm  # noqa: F401  (registers the operator)
    from vllm.utils.deep_gemm import transform_sf_into_required_layout

    op, num_out, size, checks = "vllm.fp8_gemm_nt_op", 256, 1024, []

    def run(a: Tensor, sa: Tensor, b: Tensor, sb: Tensor) -> Tensor:
        out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=device)
        scales = transform_sf_into_required_layout(
            sf=sb[None], mn=b.shape[0], k=size, recipe=(1, 128, 128), num_groups=1, is_sfa=False
        )[0]
        aligned = torch.empty_strided(sa.shape, (1, -(-sa.shape[0] // 4) * 4), dtype=torch.float32, device=device)
        torch.ops.vllm.fp8_gemm_nt_op(a, aligned.copy_(sa), b, scales, out, False)
        return out

    def codes(num_rows: int, largest: int, seed: int) -> Tensor:
        return rows.small_integers(num_rows, size, device, largest, seed).to(E4M3)

    ones = torch.ones(64, size // GROUP, device=device), torch.ones(num_out // 128, size // GROUP, device=device)
    for name, largest in (("exact sums, 14 bits", 3), ("exact sums, 20 bits", 16)):
        a, b = codes(64, largest, 21), codes(num_out, largest, 22)
        want = (a.double() @ b.double().T).to(torch.bfloat16)
        checks.append(same_bits(op, "r(Σ a·b)", name, run(a, ones[0], b, ones[1]), want))
    for gap in range(8, 17):
        one = torch.ones(64, num_out, dtype=torch.bfloat16, device=device)
        for where, columns in (("within a group", (0, 1, 2)), ("over groups", (0, GROUP, 2 * GROUP))):
            out = run(*_cancelling(columns, gap, ones, num_out, size, device))
            row, within = f"2^{gap} + 1 - 2^{gap} {where}", where == "within a group"
            checks.append(same_bits(op, "FP32 sums", row, out, one, declared=not within))
    x, w = rows.ordinary(64, size, device), rows.ordinary(num_out, size, device, seed=23)
    for power_of_two in (False, True):
        a, sa = reference.quantize(x, 1, GROUP, 448.0, VLLM_FLOOR, "div", power_of_two)
        b, sb = reference.quantize(w, GROUP, GROUP, 448.0, VLLM_FLOOR, "div", power_of_two)
        out = run(a, sa, b, sb)
        label = "ordinary, powers of two" if power_of_two else "ordinary, FP32 scales"
        for bits in (13, 23):
            oracle = definitions.fp8_gemm_oracle(a, sa, b, sb, bits=bits)
            checks.append(bounded(op, f"float64 oracle, sums of {bits} bits", label, out, oracle, declared=bits == 13))
        ours = reference.fp8_gemm(a, sa, b, sb, GROUP).to(torch.bfloat16)
        checks.append(same_bits(op, "= the trainer's jetgraph::fp8_gemm", label, out, ours, declared=False))
        alone = torch.cat([run(a[i : i + 1].contiguous(), sa[i : i + 1], b, sb) for i in range(4)])
        checks.append(same_bits(op, "a row alone = in the batch", label, alone, out[:4], declared=False))
    return checks


def _cancelling(
    columns: tuple[int, int, int], gap: int, ones: tuple[Tensor, Tensor], num_out: int, size: int, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Operands whose sum is 2^gap + 1 − 2^gap: an accumulator of fewer than ``gap`` bits loses the 1."""
    a, b = torch.zeros(64, size, device=device), torch.zeros(num_out, size, device=device)
    high, low = 2.0 ** (gap // 2), 2.0 ** (gap - gap // 2)
    for column, left, right in zip(columns, (high, 1.0, -high), (low, 1.0, low), strict=True):
        a[:, column], b[:, column] = left, right
    return a.to(E4M3), ones[0], b.to(E4M3), ones[1]


# -------------------------------------------------------------------------------------- logprobs, weights at load


def compute_token_logprobs(device: str) -> list[Check]:
    """Triton, FP32: x − max − log Σ exp(x − max), within a bound of float64; exact where one logit towers."""
    from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs as run

    op, vocabulary, checks = "vllm.compute_token_logprobs", 5000, []
    ids = torch.arange(64, device=device)[:, None] * 7
    for name, scale in (("ordinary", 1.0), ("scale 10", 10.0), ("scale 1e-3", 1e-3)):
        logits = (rows.ordinary(64, vocabulary, device).float() * scale).to(torch.bfloat16)
        exact = logits.double().log_softmax(-1).gather(-1, ids)
        # exp and log: 2 units each of 2⁻²³; a sum of V terms: V units at most; the differences: their own size
        bound = 2.0**-23 * (vocabulary + 8 + 3 * exact.abs() + 2 * logits.double().abs().amax(-1, keepdim=True))
        checks.append(bounded(op, "float64 log_softmax, gather", name, run(logits, ids), (exact, bound)))
        torch_rows = logits.float().log_softmax(-1).gather(-1, ids)
        checks.append(same_bits(op, "= aten::_log_softmax", name, run(logits, ids), torch_rows, declared=False))
    towering = torch.full((4, vocabulary), -1e4, device=device).to(torch.bfloat16)
    towering[:, 3] = 0.0
    want = torch.zeros(4, 1, device=device)
    checks.append(
        same_bits(op, "0 where one logit towers", "towering", run(towering, torch.full((4, 1), 3, device=device)), want)
    )
    return checks


def requantise_at_load(device: str) -> list[Check]:
    """`requant_weight_ue8m0_inplace`: what vLLM does to FP8 weights unless VLLM_USE_DEEP_GEMM_E8M0=0."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import requant_weight_ue8m0_inplace

    op, checks = "vllm.requant_weight_ue8m0_inplace", []
    w = rows.ordinary(256, COLS, device, seed=31)
    for name, power_of_two in (("FP32 scales", False), ("power-of-two scales", True)):
        codes, scales = reference.quantize(w, GROUP, GROUP, 448.0, 1e-12, "div", power_of_two)
        got, got_scales = codes.clone(), scales.clone()
        requant_weight_ue8m0_inplace(got, got_scales)
        changed = _codes_and_scales(got, got_scales), _codes_and_scales(codes, scales)
        checks.append(same_bits(op, "keeps codes and scales", name, *changed, declared=False))
        value = reference.dequantize(codes, scales, GROUP, GROUP)
        again = reference.quantize(value, GROUP, GROUP, 448.0, 1e-4, "div", True)
        checks.append(same_bits(op, "quantise again, pow2, floor 1e-4", name, changed[0], _codes_and_scales(*again)))
        direct = reference.quantize(w, GROUP, GROUP, 448.0, 1e-4, "div", True)
        checks.append(
            same_bits(op, "= quantised once from BF16", name, changed[0], _codes_and_scales(*direct), declared=False)
        )
    return checks

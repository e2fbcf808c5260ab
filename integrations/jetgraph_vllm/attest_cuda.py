"""vLLM's BF16 CUDA operators against their definitions: norms, activation, rotary embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from jetgraph.attest import Check, definitions, rows
from jetgraph.attest.compare import bounded, same_bits, tried

EPS = 1e-6
COLS = 1024


# ------------------------------------------------------------------------------------------------------- norms


def norm_weight(device: str, cols: int = COLS) -> Tensor:
    return (rows.ordinary(1, cols, device, seed=9)[0].float() * 0.2 + 1.0).to(torch.bfloat16)


def rms_norm(device: str) -> list[Check]:
    weight = norm_weight(device)

    def run(x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, EPS)
        return out

    checks = []
    for name, x in rows.for_norms(COLS, device).items():
        checks += tried(
            "_C.rms_norm",
            name,
            run(x),
            {
                "r(w · x · rsqrt(mean + eps))": definitions.rms_norm(x, weight, EPS, inner=False),
                "r(w · r(x · rsqrt(mean + eps)))": definitions.rms_norm(x, weight, EPS),
            },
        )
    x = rows.ordinary(256, COLS, device)
    oracle = definitions.rms_norm_oracle(x, weight, EPS)
    checks.append(bounded("_C.rms_norm", "float64 oracle", "ordinary", run(x), oracle))
    hugging_face = {"torch's kernels, as Hugging Face": definitions.rms_norm(x, weight, EPS)}
    checks += tried("_C.rms_norm", "ordinary", run(x), hugging_face, declared=False)
    alone = torch.cat([run(x[i : i + 1]) for i in range(8)])
    checks.append(same_bits("_C.rms_norm", "a row alone = in the batch", "ordinary", alone, run(x)[:8]))
    return checks


def fused_add_rms_norm(device: str) -> list[Check]:
    weight = norm_weight(device)
    op, checks = "_C.fused_add_rms_norm", []

    def run(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        x, residual = x.clone(), residual.clone()
        torch.ops._C.fused_add_rms_norm(x, residual, weight, EPS)
        return x, residual

    inputs = dict(rows.for_norms(COLS, device))
    odd = (rows.small_integers(64, COLS, device, largest=255, seed=11), rows.small_integers(64, COLS, device, 255, 12))
    cases: dict[str, tuple[Tensor, Tensor]] = {n: (x, x.roll(1, 1)) for n, x in inputs.items()}
    cases["sum needs rounding"] = odd  # sums of 9 bits, which BF16 rounds
    for name, (x, residual) in cases.items():
        out, total = run(x, residual)
        made, want = {}, {}
        for rounded in (True, False):
            for inner in (False, True):
                norm = "r(w · r(x̂))" if inner else "r(w · x̂)"
                claim = f"{norm} of the {'rounded' if rounded else 'unrounded'} sum"
                made[claim], want = definitions.fused_add_rms_norm(
                    x, residual, weight, EPS, rounded=rounded, inner=inner
                )
        checks.append(same_bits(op, "residual' = r(x + residual)", name, total, want))
        checks += tried(op, name, out, made)
    x, residual = rows.ordinary(256, COLS, device), rows.ordinary(256, COLS, device, seed=13)
    out, total = run(x, residual)
    want = (x.float() + residual.float()).to(x.dtype)
    checks.append(same_bits(op, "residual' = r(x + residual)", "ordinary", total, want))
    oracle = definitions.rms_norm_oracle(total, weight, EPS)
    checks.append(bounded(op, "float64 oracle of the rounded sum", "ordinary", out, oracle))
    plain = torch.empty_like(total)
    torch.ops._C.rms_norm(plain, total, weight, EPS)
    checks.append(same_bits(op, "= _C.rms_norm of residual'", "ordinary", out, plain))
    return checks


# ------------------------------------------------------------------------------------------- activation and rotary


def silu_and_mul(device: str) -> list[Check]:
    op, checks = "_C.silu_and_mul", []
    every = rows.finite_bf16(COLS, device)
    inputs = {
        "every gate, up = 1": torch.cat((every, torch.ones_like(every)), -1),
        "ordinary": rows.ordinary(256, 2 * COLS, device),
        "scale 1e-3": rows.scaled(16, 2 * COLS, device, 1e-3),
        "subnormal": rows.scaled(16, 2 * COLS, device, 1e-39),
        "zeros": torch.zeros(4, 2 * COLS, dtype=torch.bfloat16, device=device),
    }
    for name, x in inputs.items():
        out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
        torch.ops._C.silu_and_mul(out, x)
        made = {
            "r(r(silu(gate)) · up)": definitions.silu_and_mul(x),
            "r(silu(gate) · up)": definitions.silu_and_mul(x, inner=False),
        }
        if name == "subnormal":  # up = −0 gives a zero of gate's sign: the same number, docs/findings.md
            out, made = out + 0.0, {claim: want + 0.0 for claim, want in made.items()}
            name = "subnormal, −0 = +0"
        checks += tried(op, name, out, made)
    return checks


def rotary_embedding(device: str) -> list[Check]:
    op, size, heads, length = "_C.rotary_embedding", 128, 4, 64
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, size, 2).float() / size)
    angle = torch.arange(length).float()[:, None] * inv_freq[None]
    table = torch.cat((angle.cos(), angle.sin()), -1).to(torch.bfloat16).to(device)
    positions = torch.arange(length, device=device)
    cos, sin = table.chunk(2, -1)
    checks = []
    for name, x in {
        "ordinary": rows.ordinary(length, heads * size, device),
        "small integers": rows.small_integers(length, heads * size, device),
        "subnormal": rows.scaled(length, heads * size, device, 1e-39),
    }.items():
        q, k = x.clone(), x.flip(0).contiguous()[:, : 2 * size].contiguous()
        given = k.clone()
        torch.ops._C.rotary_embedding(positions, q, k, size, table, True)
        for what, got, was in (("query", q, x), ("key", k, given)):
            by_head = was.view(length, -1, size)
            made = {
                "one rounding": definitions.rotary(by_head, cos, sin, roundings=1).flatten(1),
                "three roundings": definitions.rotary(by_head, cos, sin).flatten(1),
            }
            checks += tried(op, f"{name}, {what}", got, made)
    return checks

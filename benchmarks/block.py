"""One Qwen3-8B decoder block, ours beside its peers:  python -m benchmarks.block [--json FILE] [--profile FILE]

Needs a CUDA device (``--tiny`` runs a small block anywhere, without bars).  8,192 and 16,384 tokens in sequences of
2,048, BF16 parameters; all arms in one process, taking turns, medians of device time: forward+backward, and a forward
under no_grad with weights already quantised.

Bars: forward+backward ≥ 1.40x BF16 torch.compile and ≥ 1.15x torchao, forward ≥ 1.55x BF16, for ``jet``, whose forward
under no_grad and in training must be equal in every bit; ``jet`` with torch's attention stands beside it without bars.
The limit is what this machine did in this run: the FP8 GEMM of every linear and role, torch's attention, and the bytes
of `MOVED` at the bandwidth of a copy.
Exit status 1 if a figure misses its bar or a peer is missing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from benchmarks.decoder import ARMS, QWEN3_8B, TINY, Arm, NotAvailable, interleaved, make_arm, numbers, time_of
from benchmarks.gpu_time import device_name
from benchmarks.report import Row, report
from jetgraph.lowering import registry
from jetgraph.lowering.provider import Gemm, Quantizer

LENGTH = 2048
SETTLE_SECONDS = 0.3
"""Of each arm before it is measured, so that it has the clocks of its own load."""
RULE = (448.0, 1e-12, "div", False)
BARS = {("train", "bf16"): 1.40, ("train", "torchao"): 1.15, ("forward", "bf16"): 1.55}
PAPER = {("train", "bf16"): 1.54, ("forward", "bf16"): 1.80}
MOVED = {
    "forward": {"hidden": 2 + 1 + 2 + 1 + 6 + 1 + 6, "qkv": 4, "intermediate": 4 + 1},
    "train": {"hidden": 2 + 2 + 2 + 2 + 6 + 2 + 6 + 3 * 8, "qkv": 4 + 8, "intermediate": 4 + 2 + 6 + 4},
}
"""Bytes a token and feature that fused kernels must move beside GEMMs and attention.

Forward: norm reads 2 and writes codes 1; attention's result read 2, codes 1; residual + norm read 4, write 2 and codes
1; the last residual reads 4, writes 2; rotary and q/k norm read 2, write 2; silu·up reads 4, writes 1.  Training writes
codes both ways; backward reads and writes about 8 for each norm and residual, 8 for rotary, 6 + 4 for silu·up."""


def linears(sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """(N, K) of each linear of the block."""
    hidden, inner, head = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q, kv = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    return {
        "q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q),
        "gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner),
    }  # fmt: skip


def gemm_time(gemm: Gemm, num_rows: int, depth: int, device: torch.device, repeats: int) -> float:
    """Milliseconds of the provider that the registry chooses; `benchmarks.gemm` says whether it is the fastest."""

    def operand(rows: int, block: int):
        x = torch.randn(rows, depth, device=device, dtype=torch.bfloat16)
        quantizer = registry.choose(Quantizer(block, 128, RULE), device)
        return quantizer.quantize(x, block, 128, *RULE)

    a, b, provider = operand(num_rows, 1), operand(gemm.num_out, gemm.b_rows), registry.choose(gemm, device)
    return time_of(lambda: provider.fp8_gemm(*a, *b, None, gemm.b_rows, 128), device, repeats)


def limit(
    sizes: dict[str, int], batch: int, length: int, device: torch.device, repeats: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of GEMMs, attention and bytes, for a forward and for forward+backward."""
    tokens = batch * length
    forward = backward = 0.0
    for num_out, depth in linears(sizes).values():
        forward += gemm_time(Gemm(num_out, depth), tokens, depth, device, repeats)
        backward += gemm_time(Gemm(depth, num_out, is_dgrad=True), tokens, num_out, device, repeats)
        backward += gemm_time(Gemm(depth, 0, 1), num_out, tokens, device, repeats)
    heads, kv, head = sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"]
    q, k, v = (
        torch.randn(batch, n, length, head, device=device, dtype=torch.bfloat16).requires_grad_()
        for n in (heads, kv, kv)
    )

    def attend():
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def attend_both():
        attend().backward(torch.ones_like(q))

    with torch.no_grad():
        attention = time_of(attend, device, repeats)
    x = torch.empty(tokens, sizes["intermediate_size"], device=device, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    per_byte = time_of(lambda: y.copy_(x), device, repeats) / (4 * x.numel())
    widths = {
        "hidden": sizes["hidden_size"], "qkv": (heads + 2 * kv) * head, "intermediate": sizes["intermediate_size"],
    }  # fmt: skip
    moved = {kind: sum(per_byte * tokens * widths[w] * n for w, n in of.items()) for kind, of in MOVED.items()}
    return {
        "forward": {"GEMMs": forward, "attention": attention, "bytes": moved["forward"]},
        "train": {
            "GEMMs": forward + backward, "attention": time_of(attend_both, device, repeats), "bytes": moved["train"],
        },
    }  # fmt: skip


def made(
    names: list[str], sizes: dict[str, int], device: torch.device, compiler: str
) -> tuple[dict[str, Arm], list[Row]]:
    """The arms that can be made, and a row for each that cannot: it is not ok."""
    arms, missing = {}, []
    for name in names:
        try:
            arms[name] = make_arm(name, sizes, 1, device, compiler)
        except NotAvailable as reason:
            missing.append(Row(f"peer {name}: {reason}", 0, "", "measured", False))
    return arms, missing


def without_broken_peers(arms: dict[str, Arm], step: Callable[[Arm], object]) -> list[Row]:
    """Run every arm once; a peer that raises is taken out of ``arms`` and is a row that is not ok."""
    rows = []
    for name in list(arms):
        print(f"{time.perf_counter():.0f} s: {name}, first step", file=sys.stderr, flush=True)
        try:
            step(arms[name])
        except Exception as error:
            if name != "torchao":
                raise
            first_line = (str(error).strip() or "no message").splitlines()[0][:160]
            rows.append(Row(f"peer {name}: {type(error).__name__}: {first_line}", 0, "", "measured", False))
            del arms[name]
    return rows


def exactness(label: str, arm: Arm, x: torch.Tensor) -> Row:
    """How many numbers a forward under no_grad computes with other bits than a training step's."""
    trained = arm.forward(x.requires_grad_()).detach()
    with torch.no_grad():
        num_different = int((arm.forward(x) != trained).sum())
    return Row(f"{label}: numbers that no_grad computes otherwise", num_different, "", "= 0", num_different == 0)


def host_time(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Median milliseconds that the host takes to launch ``call``; above the device's time the device waits."""
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * median(times)


def figures(
    arms: dict[str, Arm], sizes: dict[str, int], batch: int, length: int, device: torch.device,
    turns: int, repeats: int, bars: bool,
) -> list[Row]:  # fmt: skip
    x, dy = numbers(batch, length, sizes, device)
    label = f"{batch * length:,} tokens"
    rows = without_broken_peers(arms, lambda arm: arm.step(x, dy))
    rows += [exactness(f"{label}, {arm.name}", arm, x) for name, arm in arms.items() if name.startswith("jet")]
    trained: dict[str, Callable[[], object]] = {n: lambda a=arm: a.step(x, dy) for n, arm in arms.items()}
    times = {"train": interleaved(trained, device, turns, repeats, SETTLE_SECONDS)}
    forward: dict[str, Callable[[], object]] = {n: lambda a=arm: a.forward(x) for n, arm in arms.items()}
    times["forward"] = {}
    ours = [n for n in arms if n.startswith("jet")]
    with torch.no_grad():
        peers = [n for n in arms if n not in ours]
        for name in ours:  # weights are held for one model at a time; its peers run in the same turns
            with ExitStack() as held:
                held.enter_context(arms[name].hold())
                times["forward"] |= interleaved(
                    {n: forward[n] for n in [*peers, name]}, device, turns, repeats, SETTLE_SECONDS
                )
    bound = limit(sizes, batch, length, device, max(2, repeats // 2))
    for kind, what in (("train", "forward+backward"), ("forward", "no_grad forward")):
        rows += [Row.fact(f"{label}, {what}: {arms[n].name}", t, "ms") for n, t in times[kind].items()]
        if kind == "train":
            rows += [
                Row.fact(f"{label}, {what}, launched by the host: {arms[n].name}", host_time(trained[n], device), "ms")
                for n in arms
            ]
        for name in ours:
            for peer in ("bf16", "torchao"):
                if peer not in arms:
                    continue
                ratio, metric = (
                    times[kind][peer] / times[kind][name],
                    f"{label}, {what}: {arms[name].name} over {arms[peer].name}",
                )
                bar = BARS.get((kind, peer)) if bars and name == "jet" else None
                rows.append(Row.fact(metric, ratio, "x") if bar is None else Row.above(metric, ratio, "x", bar))
        floor = sum(bound[kind].values())
        rows += [Row.fact(f"{label}, {what}, limit: {part}", t, "ms") for part, t in bound[kind].items()]
        rows += [Row.fact(f"{label}, {what}, {arms[n].name}: of the limit", floor / times[kind][n]) for n in ours]
        if (kind, "bf16") in PAPER and "bf16" in arms:
            rows.append(
                Row.fact(f"{label}, {what}, what the limit would be over BF16", times[kind]["bf16"] / floor, "x")
            )
    return rows


def profile(arm: Arm, sizes: dict[str, int], batch: int, length: int, device: torch.device) -> str:
    """Where one step's time goes, kernel by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    x, dy = numbers(batch, length, sizes, device)
    arm.step(x, dy)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with record(activities=activities) as found:
        arm.step(x, dy)
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return f"{arm.name}\n" + found.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=70)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--memory", type=Path, help="what `benchmarks.memory` measures of the same arms, into this file"
    )
    parser.add_argument("--profile", type=Path, help="where the time of a step goes, for each arm of ours")
    parser.add_argument("--arm", action="append", choices=list(ARMS), help="all by default; a peer left out is missing")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tiny", action="store_true", help="the program's own test: a small block on any machine")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.tiny:
        parser.error("a block of Qwen3-8B needs a CUDA device, and this machine has none; --tiny runs anywhere")
    sizes, shapes = (TINY, [(2, 16)]) if options.tiny else (QWEN3_8B, [(4, LENGTH), (8, LENGTH)])
    compiler = "aot_eager" if options.tiny else "inductor"
    arms, rows = made(options.arm or ["bf16", "torchao", "jet", "jet-sdpa"], sizes, device, compiler)
    missing = list(rows)
    for batch, length in shapes:
        rows += figures(arms, sizes, batch, length, device, options.turns, options.repeats, not options.tiny)
        report(rows, options.json, device_name() if device.type == "cuda" else "cpu")  # kept if a later size fails
    if options.profile is not None:
        tables = [profile(arm, sizes, *shapes[0], device) for name, arm in arms.items() if name.startswith("jet")]
        options.profile.write_text("\n\n".join(tables), encoding="utf-8")
    status = report(rows, options.json, device_name() if device.type == "cuda" else "cpu")
    if options.memory is not None:
        from benchmarks import memory

        others, more = made([n for n in memory.DEFAULT_ARMS if n not in arms], sizes, device, compiler)
        kept = memory.figures(arms | others, sizes, *shapes[0], device)
        status |= report([*missing, *more, *kept], options.memory, device_name() if device.type == "cuda" else "cpu")
    return status


if __name__ == "__main__":
    sys.exit(main())

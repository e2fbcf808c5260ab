"""FP8 GEMM providers beside BF16 cuBLAS, and whether the registry takes the fastest:  python -m benchmarks.gemm

Needs a CUDA device.  The shapes are the linears of Qwen3-0.6B, 1.7B, 8B and 32B, for each role, with 1 to 32,768
tokens; a time is the median of the provider's whole call, copies of scales included, providers taking turns.

Bar: the chosen provider is within 3 % of the fastest that the registry may choose.  In FPROP that excludes providers
whose rows depend on each other, and the choice may not depend on the number of tokens: a token decoded alone must have
the bits that it has in a batch.  Besides: linears that share an input as one GEMM over the same as several.
``--sweep``: whether other tiles of our kernel beat the libraries in WGRAD.

Exit status 1 if a figure misses its bar.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.decoder import interleaved
from benchmarks.gpu_time import device_name
from benchmarks.report import Row, report
from jetgraph.lowering import registry
from jetgraph.lowering.provider import Gemm, Quantizer

RULE = (448.0, 1e-12, "div", False)
MODELS = {
    "0.6B": {"hidden": 1024, "inner": 3072, "q": 2048, "kv": 1024},
    "1.7B": {"hidden": 2048, "inner": 6144, "q": 2048, "kv": 1024},
    "8B": {"hidden": 4096, "inner": 12288, "q": 4096, "kv": 1024},
    "32B": {"hidden": 5120, "inner": 25600, "q": 8192, "kv": 1024},
}
TOKENS = {"FPROP": (1, 64, 1024, 8192, 32768), "DGRAD": (64, 1024, 8192, 32768), "WGRAD": (1024, 8192, 32768)}
TOGETHER = (64, 8192)
ROLES = ("FPROP", "DGRAD", "WGRAD")
WITHIN = 0.97
WGRAD_TILES = ((64, 128, 4, 3), (64, 256, 8, 3), (128, 128, 8, 3))
"""Tiles that a Hopper's registers hold (compiled without spills); larger ones, which the L2 would want, do not fit."""
PROCESSES = 12


class Case(NamedTuple):
    """A GEMM [rows, depth] · [num_out, depth]ᵀ of ``tokens`` tokens, and what the registry is asked."""

    label: str
    tokens: int
    rows: int
    gemm: Gemm
    depth: int


def linears(sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    """(N, K) of each kind of linear."""
    hidden, inner, q, kv = sizes["hidden"], sizes["inner"], sizes["q"], sizes["kv"]
    return {
        "q": (q, hidden), "k, v": (kv, hidden), "o": (hidden, q), "gate, up": (inner, hidden), "down": (hidden, inner),
    }  # fmt: skip


def cases(models: list[str], tokens: dict[str, tuple[int, ...]] = TOKENS) -> Iterator[Case]:
    for model in models:
        for name, (n, k) in linears(MODELS[model]).items():
            label = f"{model} {name}"
            for count in tokens["FPROP"]:
                yield Case(label, count, count, Gemm(n, k), k)
            for count in tokens["DGRAD"]:
                yield Case(label, count, count, Gemm(k, n, is_dgrad=True), n)
            for count in tokens["WGRAD"]:
                yield Case(label, count, n, Gemm(k, 0, 1), count)


def quantized(rows: int, cols: int, block: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16)
    provider = registry.choose(Quantizer(block, 128, RULE), registry.this_device())
    return provider.quantize(x, block, 128, *RULE)


def available(gemm: Gemm) -> list[str]:
    """Providers that the registry may choose, the reference left out."""
    device = registry.this_device()
    return [n for n in registry.PROVIDERS if n != "reference" and registry.refusal(n, gemm, device) is None]


def compile_kernels(batch: list[Case]) -> int:
    """Let DeepGEMM compile what it needs for ``batch``, into the cache that all processes share."""
    device = registry.this_device()
    for case in batch:
        if registry.refusal("deep_gemm", case.gemm, device) is None:
            operands = quantized(case.rows, case.depth, 1), quantized(case.gemm.num_out, case.depth, case.gemm.b_rows)
            registry.PROVIDERS["deep_gemm"].fp8_gemm(*operands[0], *operands[1], None, case.gemm.b_rows, 128)
    torch.cuda.synchronize()
    return len(batch)


def figures(case: Case, repeats: int) -> list[Row]:
    gemm, device = case.gemm, registry.this_device()
    label = f"{gemm.role} {case.label}, {case.tokens:,} tokens"
    operations = 2 * case.rows * gemm.num_out * case.depth / 1e9
    x, w = (torch.randn(n, case.depth, device=device, dtype=torch.bfloat16) for n in (case.rows, gemm.num_out))
    a, b = quantized(case.rows, case.depth, 1), quantized(gemm.num_out, case.depth, gemm.b_rows)
    calls = {"BF16 cuBLAS": lambda: x @ w.t()}
    for name in available(gemm):
        calls[name] = lambda p=registry.PROVIDERS[name]: p.fp8_gemm(*a, *b, None, gemm.b_rows, 128)
    times = interleaved(calls, device, 2, repeats)
    rows = [Row.fact(f"{label}, {name}", operations / t, "TFLOP/s") for name, t in times.items()]
    chosen = registry.choose(gemm, device).name
    best = min(t for name, t in times.items() if name != "BF16 cuBLAS")
    rows.append(Row.above(f"{label}: {chosen} chosen, of the fastest", best / times[chosen], "", WITHIN))
    return rows


def sharing(model: str) -> dict[str, tuple[int, ...]]:
    """Linears that read one input, and the N of each."""
    sizes = MODELS[model]
    return {"q, k, v": (sizes["q"], sizes["kv"], sizes["kv"]), "gate, up": (sizes["inner"], sizes["inner"])}


def part(role: str, model: str, n: int, tokens: int) -> Case:
    """The GEMM of ``n`` output features of linears that read the hidden states."""
    hidden = MODELS[model]["hidden"]
    gemm, rows, depth = {
        "FPROP": (Gemm(n, hidden), tokens, hidden),
        "DGRAD": (Gemm(hidden, n, is_dgrad=True), tokens, n),
        "WGRAD": (Gemm(hidden, 0, 1), n, tokens),
    }[role]
    return Case(f"{model}, N={n}", tokens, rows, gemm, depth)


def together_cases(model: str, tokens: int) -> list[Case]:
    sizes = {n for parts in sharing(model).values() for n in (*parts, sum(parts))}
    return [part(role, model, n, tokens) for role in ROLES for n in sorted(sizes)]


def together(model: str, tokens: int, repeats: int) -> list[Row]:
    """q, k, v and gate, up: the time of one GEMM over the sum of several; DGRAD's sums of several are not counted."""
    device, rows = registry.this_device(), []

    def run(case: Case) -> Callable[[], object]:
        gemm = case.gemm
        a, b = quantized(case.rows, case.depth, 1), quantized(gemm.num_out, case.depth, gemm.b_rows)
        provider = registry.choose(gemm, device)
        return lambda: provider.fp8_gemm(*a, *b, None, gemm.b_rows, 128)

    for name, parts in sharing(model).items():
        for role in ROLES:
            several = [run(part(role, model, n, tokens)) for n in parts]
            one = run(part(role, model, sum(parts), tokens))
            calls = {"one": one, "several": lambda s=several: [call() for call in s]}
            times = interleaved(calls, device, 2, repeats)
            label = f"{role} {model} {name}, {tokens:,} tokens"
            rows.append(Row.fact(f"{label}: one GEMM over several", times["one"] / times["several"]))
            rows.append(Row.fact(f"{label}: saved by one GEMM", times["several"] - times["one"], "ms"))
    return rows


def sweep_wgrad(repeats: int) -> list[Row]:
    """Our Triton kernel with other tiles beside the libraries: WGRAD of Qwen3-8B, 8,192 tokens."""
    from jetgraph.lowering import triton_gemm

    tokens, rows = 8192, []
    for name, (n, k) in linears(MODELS["8B"]).items():
        operands = *quantized(n, tokens, 1), *quantized(k, tokens, 1), None, 1, 128
        calls = {p: partial(registry.PROVIDERS[p].fp8_gemm, *operands) for p in available(Gemm(k, 0, 1))}
        calls |= {f"triton {tile}": partial(triton_gemm.fp8_gemm, *operands, tile=tile) for tile in WGRAD_TILES}
        times = interleaved(calls, registry.this_device(), 2, repeats)
        operations = 2 * n * k * tokens / 1e9
        rows += [Row.fact(f"WGRAD 8B {name}, {call}", operations / t, "TFLOP/s") for call, t in times.items()]
    return rows


def compile_all(every: list[Case], say: Callable[[str], None]) -> None:
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        parts = [every[i :: 4 * PROCESSES] for i in range(4 * PROCESSES)]
        for done, _ in enumerate(pool.map(compile_kernels, parts), 1):
            say(f"compiled {done} of {len(parts)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", action="append", choices=list(MODELS), help="all by default")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--sweep", action="store_true", help="only WGRAD, by our Triton kernel with other tiles too")
    parser.add_argument("--only-together", action="store_true", help="only one GEMM against several")
    options = parser.parse_args()
    if options.sweep:
        return report(sweep_wgrad(options.repeats), options.json, device_name())
    models, start = options.model or list(MODELS), time.perf_counter()

    def say(text: str) -> None:
        print(f"{time.perf_counter() - start:.0f} s: {text}", file=sys.stderr, flush=True)

    every = [] if options.only_together else list(cases(models))
    shared = [(model, tokens) for model in models for tokens in TOGETHER]
    compile_all([*every, *(case for pair in shared for case in together_cases(*pair))], say)
    rows: list[Row] = []
    for done, case in enumerate(every, 1):
        rows += figures(case, options.repeats)
        if done % 20 == 0:
            say(f"{done} of {len(every)} GEMMs")
            torch.cuda.empty_cache()
    for model, tokens in shared:
        rows += together(model, tokens, options.repeats)
        say(f"{model}, {tokens} tokens: one GEMM against several")
    return report(rows, options.json, device_name())


if __name__ == "__main__":
    sys.exit(main())

"""The exact operators beside the libraries':  python -m benchmarks.exact [--sweep [PART …]] [--json FILE]

Needs a CUDA device.  The head and a linear of SmolLM2 and Qwen3-8B beside BF16 cuBLAS, attention forward and backward
(8 sequences of 2048, 32 query and 8 key heads of 128) beside torch's flash attention, decoding of 64 sequences at
length 2048 from pages beside SDPA on dense keys.  Times are medians of the whole call.  ``--sweep`` times other tiles;
those that give the default's bits are marked.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_time import device_name, milliseconds
from benchmarks.report import Row, report
from jetgraph.lowering import registry, triton_attention, triton_attention_backward, triton_bf16_gemm

GEMMS = {
    "SmolLM2 head": (49152, 576),
    "Qwen3-8B head": (151936, 4096),
    "Qwen3-8B qkv": (6144, 4096),
    "Qwen3-8B down": (4096, 12288),
}
ROWS = (1, 64, 8192)
BATCH, LENGTH, HEADS, GROUPS, SIZE = 8, 2048, 32, 8, 128
SEQUENCES, PAGE = 64, 16
SCALE = SIZE**-0.5

GEMM_TILES = (
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 128, 64, 4, 4),
    (128, 128, 64, 8, 3),
    (64, 256, 64, 4, 4),
    (64, 128, 64, 4, 5),
    (128, 128, 128, 8, 3),
)
ATTENTION_TILES = (
    (64, 64, 4, 2),
    (64, 64, 4, 4),
    (128, 64, 8, 3),
    (128, 64, 4, 3),
    (128, 128, 8, 2),
    (64, 128, 4, 2),
    (64, 32, 4, 4),
)
BACKWARD_TILES = (
    ((128, 64, 8, 3), (64, 128, 8, 1)),
    ((64, 64, 4, 2), (32, 128, 8, 2)),
    ((64, 64, 4, 3), (64, 64, 8, 2)),
    ((128, 128, 8, 2), (64, 64, 4, 1)),
    ((64, 128, 4, 2), (32, 64, 4, 2)),
)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def timed(label: str, call: Callable[[], object], operations: float | None = None) -> list[Row]:
    """Milliseconds, and TFLOP/s if ``operations`` (in units of 10^9) are given."""
    time = milliseconds(call)
    rows = [Row.fact(label, time, "ms")]
    return rows + ([Row.fact(label, operations / time, "TFLOP/s")] if operations else [])


def gemms() -> Iterable[Row]:
    for name, (num_out, depth) in GEMMS.items():
        weight = numbers(num_out, depth)
        for count in ROWS:
            x, operations = numbers(count, depth), 2 * count * num_out * depth / 1e9
            for library, product in (("cuBLAS", F.linear), ("exact", triton_bf16_gemm.row_tile_gemm)):
                call = functools.partial(product, x, weight)
                yield from timed(f"{name} M={count}, {library}", call, operations)


def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return numbers(BATCH, HEADS, LENGTH, SIZE), *(numbers(BATCH, GROUPS, LENGTH, SIZE) for _ in range(2))


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=SCALE, enable_gqa=True)


def attentions() -> Iterable[Row]:
    q, k, v = qkv()
    operations = 2 * BATCH * HEADS * LENGTH**2 * SIZE / 1e9  # a causal half of two products
    yield from timed("attention, SDPA flash", lambda: flash(q, k, v), operations)
    yield from timed("attention, exact", lambda: triton_attention.attention(q, k, v, SCALE), operations)
    first = (torch.arange(LENGTH, device="cuda") // 512 * 512).expand(BATCH, -1).contiguous()
    yield from timed(
        "attention, exact, 4 sequences packed in a row",
        lambda: triton_attention.attention(q, k, v, SCALE, 0, 0.0, first),
    )
    grad, leaves = numbers(BATCH, LENGTH, HEADS, SIZE), [t.clone().requires_grad_() for t in (q, k, v)]
    forward, packed = (triton_attention.attention(q, k, v, SCALE, 0, 0.0, f) for f in (None, first))
    out = flash(*leaves)
    yield from timed(
        "attention backward, SDPA flash",
        lambda: torch.autograd.grad(out, leaves, grad.transpose(1, 2), retain_graph=True),
        2.5 * operations,
    )
    yield from timed(
        "attention backward, cuDNN on the exact forward",
        lambda: registry.PROVIDERS["cudnn"].attention_backward(grad, q, k, v, *forward, SCALE),  # type: ignore[attr-defined]
        2.5 * operations,
    )
    yield from timed(
        "attention backward, ours",
        lambda: triton_attention_backward.attention_backward(grad, q, k, v, *forward, SCALE),
        2.5 * operations,
    )
    yield from timed(
        "attention backward, ours, packed",
        lambda: triton_attention_backward.attention_backward(grad, q, k, v, *packed, SCALE, 0, 0.0, first),
    )


def pages() -> tuple[tuple, Tensor, Tensor]:
    """The arguments of a decoding step from shuffled pages, and the same keys and values densely [64, Hkv, L, D]."""
    count = LENGTH // PAGE
    cache = numbers(SEQUENCES * count, PAGE, GROUPS, 2 * SIZE)
    table = torch.randperm(SEQUENCES * count, device="cuda").int().view(SEQUENCES, count)
    lengths = torch.full((SEQUENCES,), LENGTH, dtype=torch.int32, device="cuda")
    starts = torch.arange(SEQUENCES + 1, dtype=torch.int32, device="cuda")
    dense = cache[table.long()].flatten(1, 2).transpose(1, 2).split(SIZE, -1)
    arguments = numbers(SEQUENCES, HEADS, SIZE), *cache.split(SIZE, -1), table, lengths, starts, SCALE
    return arguments, *(t.contiguous() for t in dense)


def decoding() -> Iterable[Row]:
    arguments, k, v = pages()
    q = arguments[0].unsqueeze(2)
    yield from timed("decoding, SDPA flash on dense keys", lambda: flash(q, k, v, causal=False))
    yield from timed("decoding, exact", lambda: triton_attention.paged_attention(*arguments))
    gigabytes = 2 * k.numel() * k.element_size() / 1e9
    time = milliseconds(lambda: triton_attention.paged_attention(*arguments))
    yield Row.fact("decoding, exact, keys and values read", gigabytes / time, "TB/s")
    paged, dense = triton_attention.paged_attention(*arguments)[0], triton_attention.attention(q, k, v, SCALE)[0]
    yield Row.above("decoding: rows equal to the dense kernel's", (paged == dense[:, 0]).float().mean().item(), "", 1.0)


def sweep_gemm() -> Iterable[Row]:
    for name in ("SmolLM2 head", "Qwen3-8B qkv"):
        weight = numbers(*GEMMS[name])
        for count in (64, 8192):
            x = numbers(count, weight.shape[1])
            default = triton_bf16_gemm.row_tile_gemm(x, weight)
            for tile in (triton_bf16_gemm.GEMM_TILE, *GEMM_TILES):
                call = functools.partial(triton_bf16_gemm.row_tile_gemm, x, weight, tile=tile)
                yield from tried(f"{name} M={count}, tile {tile}", call, default)


def sweep_attention() -> Iterable[Row]:
    q, k, v = qkv()
    arguments, *_ = pages()
    dense, paged = triton_attention.attention(q, k, v, SCALE)[0], triton_attention.paged_attention(*arguments)[0]
    for tile in (triton_attention.ATTENTION_TILE, *ATTENTION_TILES):
        yield from tried(
            f"attention, tile {tile}", lambda t=tile: triton_attention.attention(q, k, v, SCALE, tile=t)[0], dense
        )
        yield from tried(
            f"decoding, tile {tile}", lambda t=tile: triton_attention.paged_attention(*arguments, tile=t)[0], paged
        )


def sweep_backward() -> Iterable[Row]:
    (q, k, v), grad = qkv(), numbers(BATCH, LENGTH, HEADS, SIZE)
    backward, forward = triton_attention_backward, triton_attention.attention(q, k, v, SCALE)
    for tiles in ((backward.QUERY_TILE, backward.KEY_TILE), *BACKWARD_TILES):
        call = functools.partial(backward.attention_backward, grad, q, k, v, *forward, SCALE, tiles=tiles)
        yield from tried(f"attention backward, tiles of dQ and of dK, dV {tiles}", lambda c=call: c()[0], None)


SWEEPS = {"gemm": sweep_gemm, "attention": sweep_attention, "backward": sweep_backward}


def tried(label: str, call: Callable[[], Tensor], default: Tensor | None) -> list[Row]:
    """A tile's time; one that does not fit the machine is named with its error's first line and left out."""
    try:
        same = " (same bits)" if default is not None and torch.equal(call(), default) else ""
        return [Row.fact(label + same, milliseconds(call, repeats=15), "ms")]
    except Exception as error:  # out of shared memory or registers: the next one
        print(f"{label}: {(str(error) or type(error).__name__).splitlines()[0][:120]}")
        return []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", choices=SWEEPS, nargs="*", help="time other tiles instead, of these or of all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.sweep is None:
        rows = [*gemms(), *attentions(), *decoding()]
    else:
        rows = [row for name in options.sweep or SWEEPS for row in SWEEPS[name]()]
    return report(rows, options.json, device_name())


if __name__ == "__main__":
    sys.exit(main())

"""The `triton_exact` provider: row-invariant BF16 GEMM and attention on tensor cores, tested before use.

Its self-test asks two things of every kernel: is it right (against float64), and does a row have the same bits in every
company (number of rows, chunks, pages).  A kernel that fails either is not used, and the definition runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jetgraph.lowering import reference
from jetgraph.lowering.provider import Exact, Finding, Request, triton_finding

EXACT = frozenset({"row_tile_gemm", "attention", "attention_backward"})
COUNTS = (1, 2, 3, 63, 64, 65, 127, 128, 129)
LONGEST = 257
MAX_HEAD_SIZE, HEAD_MULTIPLE, MAX_HEADS_PER_GROUP = 256, 8, 64

ROUNDING = 2.0**-8
"""BF16 keeps 8 bits: half a unit in the last place is at most this much of a number."""
TOLERANCE = 2.0**-12
"""FP32 sums of some hundred terms and two approximate instructions, relative to the sum of magnitudes."""
GRADIENT_TOLERANCE = 2.0**-7
"""Of norms: weights, score gradients and results are rounded to BF16 (2^-9 each, in the mean less), O before δ too."""


@dataclass(frozen=True)
class TritonExact:
    name: str = "triton_exact"
    kernels: frozenset[str] = EXACT

    def probe(self, device: torch.device) -> Finding:
        reason = "right within the roundings of BF16, and a row has the same bits in every batch, chunk and page"
        return triton_finding(self.name, device, lambda d: (self._wrong(d), reason))

    def refuses(self, request: Request) -> str | None:
        if not isinstance(request, Exact):
            return "it runs row-invariant BF16 operators alone"
        if request.dtype is not torch.bfloat16:
            return f"{request.dtype}; expected torch.bfloat16"
        if request.head_size % HEAD_MULTIPLE or request.head_size > MAX_HEAD_SIZE:
            return f"a head size of {request.head_size}; expected a multiple of {HEAD_MULTIPLE} up to {MAX_HEAD_SIZE}"
        if request.heads_per_group > MAX_HEADS_PER_GROUP:
            return f"{request.heads_per_group} heads on one of keys; expected at most {MAX_HEADS_PER_GROUP}"
        return None

    def row_tile_gemm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from jetgraph.lowering import triton_bf16_gemm

        return triton_bf16_gemm.row_tile_gemm(x, weight, bias)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *options) -> tuple[Tensor, Tensor]:
        from jetgraph.lowering import triton_attention

        return triton_attention.attention(q, k, v, *options)

    def attention_backward(self, *arguments) -> tuple[Tensor, ...]:
        from jetgraph.lowering import triton_attention_backward

        return triton_attention_backward.attention_backward(*arguments)

    def paged_attention(self, q: Tensor, *arguments, out: Tensor | None = None) -> Tensor:
        """`triton_attention.paged_attention` without the log-sum-exp: what an engine calls."""
        from jetgraph.lowering import triton_attention

        return triton_attention.paged_attention(q, *arguments, out=out)[0]

    def _wrong(self, device: torch.device) -> str:
        """What is wrong, in one sentence; "" if nothing is."""
        return self._wrong_gemm(device) or self._wrong_attention(device) or self._wrong_paging(device)

    def _wrong_gemm(self, device: torch.device) -> str:
        for num_out, depth in ((321, 100), (512, 2880)):
            x, weight, bias = (integers(shape, device) for shape in ((21, depth), (num_out, depth), (num_out,)))
            exact = (x.double() @ weight.double().t() + bias.double()).bfloat16()
            num_wrong = (self.row_tile_gemm(x, weight, bias) != exact).sum().item()  # exact in FP32 in any order
            if num_wrong:
                return f"row_tile_gemm: {num_wrong:,} of {exact.numel():,} exact sums are wrong (N={num_out} K={depth})"
        x, weight = numbers((LONGEST, 2880), device), numbers((512, 2880), device)
        whole = self.row_tile_gemm(x, weight, None)
        for count in COUNTS:
            if not torch.equal(self.row_tile_gemm(x[:count], weight, None), whole[:count]):
                return f"row_tile_gemm: rows of {count} differ from the same rows of {LONGEST}"
        return ""

    def _wrong_attention(self, device: torch.device) -> str:
        packed = torch.tensor([[0] * 70 + [70] * 100 + [170] * (LONGEST - 170)], device=device)
        for size, window, softcap, first in ((64, 0, 0.0, None), (128, 0, 0.0, None), (80, 50, 5.0, packed)):
            shape, options = f"attention, heads of {size}", (size**-0.5, window, softcap)
            q, k, v = attention_inputs(size, device)
            whole, lse = self.attention(q, k, v, *options, first)
            if not excess(whole, q, k, v, *options, first) <= TOLERANCE:
                return f"{shape}: further from float64 than the roundings of BF16"
            for count in COUNTS:
                last = None if first is None else first[:, -count:]
                if not torch.equal(self.attention(q[:, :, -count:], k, v, *options, last)[0], whole[:, -count:]):
                    return f"{shape}: the last {count} queries differ alone and in the whole"
                few, begin = (t[:, :, :count] for t in (q, k, v)), None if first is None else first[:, :count]
                if not torch.equal(self.attention(*few, *options, begin)[0], whole[:, :count]):
                    return f"{shape}: the first {count} positions differ alone and in the whole"
            if first is not None:
                alone, _ = self.attention(*(t[:, :, 70:170] for t in (q, k, v)), *options, None)
                if not torch.equal(alone, whole[:, 70:170]):
                    return f"{shape}: a packed sequence differs from itself alone"
            grad = numbers((1, LONGEST, 6, size), device)
            exact = reference.attention_backward(*(t.double() for t in (grad, q, k, v)), *options, first)
            wrong = wrong_gradient(self.attention_backward(grad, q, k, v, whole, lse, *options, first), exact)
            if wrong:
                return f"{shape}: {wrong}"
        return ""

    def _wrong_paging(self, device: torch.device) -> str:
        for size in (64, 128):
            q, k, v = attention_inputs(size, device)
            for page, lengths in ((16, (LONGEST, 1, 64, 130)), (32, (65, LONGEST))):
                dense = [self.attention(*(t[:, :, :n] for t in (q, k, v)), size**-0.5)[0][0] for n in lengths]
                for chunk in (LONGEST, 1, 37):
                    counts = [min(chunk, n) for n in lengths]
                    cache, table = paged((k[0], v[0]), lengths, page)
                    rows = torch.cat([q[0, :, n - c : n].transpose(0, 1) for n, c in zip(lengths, counts, strict=True)])
                    starts = torch.tensor([0, *counts], device=device).cumsum(0).int()
                    seq_lens = torch.tensor(lengths, device=device, dtype=torch.int32)
                    got = self.paged_attention(rows, *cache, table, seq_lens, starts, size**-0.5)
                    if not torch.equal(got, torch.cat([d[-c:] for d, c in zip(dense, counts, strict=True)])):
                        return f"paged attention, heads of {size}, chunks of {chunk}: differs from dense attention"
        return ""


# ------------------------------------------------------------------------------------------ operands and tolerances


def integers(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """BF16 integers -2 … 2: sums of their products are exact in FP32 in any order."""
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-2, 3, shape, generator=generator).bfloat16().to(device)


def numbers(shape: tuple[int, ...], device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).bfloat16().to(device)


def attention_inputs(size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q of 6 heads, k and v of 2, `LONGEST` positions."""
    q, k = numbers((1, 6, LONGEST, size), device), numbers((1, 2, LONGEST, size), device)
    return q, k, numbers((1, 2, LONGEST + 1, size), device)[:, :, 1:]


def excess(out: Tensor, q: Tensor, k: Tensor, v: Tensor, *options) -> float:
    """The worst error beyond BF16's roundings of the weights and of the result, relative to Σ p |v|."""
    wide = [t.double() for t in (q, k, v)]
    exact, _ = reference.attention(*wide, *options)
    magnitude, _ = reference.attention(*wide[:2], wide[2].abs(), *options)
    beyond = (out.double() - exact).abs() - ROUNDING * (exact.abs() + magnitude)
    return (beyond / magnitude.clamp_min(1e-30)).max().item()


def wrong_gradient(got: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> str:
    """Which of dq, dk and dv is wrong, in a few words; "" if none is."""
    for name, ours, want in zip("qkv", got, exact, strict=True):
        if not (ours.double() - want).norm() <= GRADIENT_TOLERANCE * want.norm():
            return f"the gradient of {name} is further from float64 than the roundings of BF16"
    return ""


def paged(
    keys_and_values: tuple[Tensor, Tensor], lengths: tuple[int, ...], page: int
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """The caches [pages, page, Hkv, D] of sequences that share k and v [Hkv, L, D], and their block table, shuffled.

    Slots that no sequence owns hold NaN.
    """
    k, v = keys_and_values
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(page)).tolist()
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    both = torch.full((len(order), page, k.shape[0], 2 * k.shape[2]), float("nan"), dtype=k.dtype, device=k.device)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for i in range(count):
            table[row, i] = order.pop()
            part = slice(i * page, min((i + 1) * page, length))
            slots = both[table[row, i], : part.stop - part.start]
            slots.copy_(torch.cat((k[:, part], v[:, part]), -1).transpose(0, 1))
    key_cache, value_cache = both.split(k.shape[2], -1)
    return (key_cache, value_cache), table.to(k.device)

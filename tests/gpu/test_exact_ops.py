"""The exact operators on a GPU: against float64, and a row's bits in every company.

Oracles are written here, in float64.  Numbers in brackets are rows of the public bug reports.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import jetgraph.lowering.cuda_ops  # noqa: F401  (registers the kernels)
from jetgraph.lowering import reference, registry
from jetgraph.lowering.provider import Exact
from tests.gpu.served import provider_or_skip

DEVICE = torch.device("cuda:0")
COUNTS = (1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256)
LONGEST = 257
ROUNDING = 2.0**-8
"""BF16 keeps 8 bits: half a unit in the last place is at most this much of a number."""
SUMS = 2.0**-14
"""Sums in the tensor core, relative to Σ|a·b|: products are aligned and cut some bits below FP32's 24 (measured for FP8
in docs/kernels.md: 13 bits; BF16 keeps more).  A wrong index costs more than 2^-4 in these tests."""
WEIGHTS = ROUNDING + 2.0**-12
"""Attention, relative to Σ p|v|: weights are rounded to BF16; scores and exponentials are FP32."""
GRADIENTS = 2.0**-7
"""Of the norm: weights, score gradients and results are rounded to BF16 each (about 2^-10 in the mean), O before δ."""

STARTS = torch.tensor([0] * 70 + [70] * 100 + [170] * (LONGEST - 170))
PADS = torch.tensor([[0] * LONGEST, [37] * LONGEST, [256] * LONGEST])


@pytest.fixture(scope="module", autouse=True)
def provider():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return provider_or_skip("triton_exact", DEVICE)


@pytest.fixture(params=["one", "any"])
def order_of_sums(request):
    """One order of the sums of a gradient, as a user may ask, or any, where cuDNN may run."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(request.param == "one")
    yield request.param
    torch.use_deterministic_algorithms(before)


def attention(*arguments) -> Tensor:
    return torch.ops.jetgraph.attention(*arguments)[0]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(shape, device=DEVICE, generator=generator).bfloat16()


def poisoned(x: Tensor) -> Tensor:
    """``x`` as a view in the middle of NaN, rows at multiples of 16 bytes."""
    memory = torch.full((*x.shape[:-2], x.shape[-2] + 8, x.shape[-1] + 16), float("nan"), dtype=x.dtype, device=DEVICE)
    view = memory[..., 4:-4, 8:-8]
    view.copy_(x)
    return view


def test_the_kernels_are_used(provider):
    assert registry.choose(Exact("row_tile_gemm", torch.bfloat16), DEVICE) is provider
    assert registry.choose(Exact("attention", torch.bfloat16, 64, 3), DEVICE) is provider


# ---------------------------------------------------------------------------------------------------------- GEMM


def gemm_excess(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> float:
    exact = x.double() @ weight.double().t()
    magnitude = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    worst = (((got.double() - exact).abs() - ROUNDING * exact.abs()) / magnitude.clamp_min(1e-300)).max().item()
    print(f"worst error beyond the rounding 2^{math.log2(max(worst, 1e-30)):.1f} of Σ|ab|")
    return worst


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(576, 576), (49152, 576), (2880, 2880), (151936, 1024), (321, 100), (1, 8), (40, 1)])
def test_gemm_against_float64(shape, bias):
    num_out, depth = shape
    x, weight = poisoned(numbers(130, depth)), poisoned(numbers(num_out, depth, seed=1))
    shift = numbers(num_out, seed=2) if bias else None
    got = torch.ops.jetgraph.row_tile_gemm(x, weight, shift)
    assert got.dtype is torch.bfloat16
    assert gemm_excess(got, x, weight, shift) <= SUMS


@pytest.mark.parametrize("shape", [(576, 576), (49152, 576), (4096, 4096), (2880, 2880), (512, 16384), (321, 100)])
def test_a_row_of_a_gemm_does_not_depend_on_the_others(shape):  # [N15, K12]
    num_out, depth = shape
    x, weight, bias = numbers(LONGEST, depth), numbers(num_out, depth, seed=1), numbers(num_out, seed=2)
    run = torch.ops.jetgraph.row_tile_gemm
    for shift in (None, bias):
        whole = run(x, weight, shift)
        for count in COUNTS:
            assert torch.equal(run(x[:count], weight, shift), whole[:count]), count
            assert torch.equal(run(x[-count:], weight, shift), whole[-count:]), count
        order = torch.randperm(LONGEST, device=DEVICE)
        assert torch.equal(run(x[order], weight, shift), whole[order])
        assert torch.equal(run(poisoned(x[:65]), weight, shift), whole[:65])


def test_thirty_two_thousand_rows():  # [N15]
    x, weight = numbers(32768, 576), numbers(49152, 576, seed=1)
    whole = torch.ops.jetgraph.row_tile_gemm(x, weight)
    for rows in (slice(0, 1), slice(300, 316), slice(32767, 32768), slice(1000, 3048)):
        assert torch.equal(torch.ops.jetgraph.row_tile_gemm(x[rows], weight), whole[rows]), rows


def test_parts_of_a_merged_weight_have_the_bits_of_the_whole():
    """An engine multiplies by rows of a merged weight, a trainer by each weight."""
    x, merged = numbers(65, 576), numbers(576 + 192 + 192, 576, seed=1)
    whole = torch.ops.jetgraph.row_tile_gemm(x, merged)
    for part in (slice(0, 576), slice(576, 768), slice(768, 960)):
        assert torch.equal(torch.ops.jetgraph.row_tile_gemm(x, merged[part]), whole[:, part])


def test_gemm_offsets_past_two_to_the_thirty_one():  # [K9, N15 b]
    """15,000 rows of 151,936 results: the last lie beyond 2^31."""
    x, weight = numbers(15000, 64), numbers(151936, 64, seed=1)
    whole = torch.ops.jetgraph.row_tile_gemm(x, weight)
    assert gemm_excess(whole[-70:], x[-70:], weight) <= SUMS


def test_gemm_without_rows():  # [K7]
    assert torch.ops.jetgraph.row_tile_gemm(numbers(3, 16)[:0], numbers(24, 16)).shape == (0, 24)


def test_gemm_gradients():
    x, weight, bias = (numbers(*s, seed=i).requires_grad_() for i, s in enumerate([(2, 65, 320), (576, 320), (576,)]))
    grad = numbers(2, 65, 576, seed=9)
    torch.ops.jetgraph.row_tile_gemm(x, weight, bias).backward(grad)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    (wide[0] @ wide[1].t() + wide[2]).backward(grad.double())
    for got, exact in zip((x, weight, bias), wide, strict=True):
        assert (got.grad.double() - exact.grad).norm() <= ROUNDING * exact.grad.norm()


# ----------------------------------------------------------------------------------------------------- attention

HEADS = {
    "3 heads of 64 on one": (9, 3, 64),
    "4 heads of 128 on one": (8, 2, 128),
    "one on one": (2, 2, 64),
    "heads of 80": (4, 2, 80),
    "heads of 256": (4, 2, 256),
    "heads of 16": (4, 1, 16),
}
OPTIONS = {
    "causal": (0, 0.0, None),
    "window": (50, 0.0, None),
    "window of one": (1, 0.0, None),
    "softcap": (0, 5.0, None),
    "packed": (0, 0.0, STARTS.expand(3, -1)),
    "left padding, window, softcap": (30, 5.0, PADS),
}


def qkv(heads: int, groups: int, size: int, batch: int = 3, length: int = LONGEST) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(numbers(batch, n, length, size, seed=i) for i, n in enumerate((heads, groups, groups)))  # type: ignore


def oracle(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, softcap: float, first: Tensor | None):
    """float64 by a mask written out: output and log-sum-exp."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    key, position = (torch.arange(n, device=DEVICE) for n in (k.shape[2], k.shape[2]))
    position = position[-q.shape[2] :, None]
    seen = ((key <= position) & ((key > position - window) if window else True))[None]
    if first is not None:
        seen = seen & (key >= first[:, :, None])
    scores = torch.where(seen[:, None], scores, float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2), scores.logsumexp(-1)


def options_of(case: tuple) -> tuple:
    window, softcap, first = case
    return window, softcap, None if first is None else first.to(DEVICE)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_attention_against_float64(heads, options):
    from jetgraph.lowering import triton_attention

    q, k, v = (poisoned(t) for t in qkv(*heads))
    arguments = heads[2] ** -0.5, *options_of(options)
    out, lse = triton_attention.attention(q, k, v, *arguments)
    assert torch.equal(out, attention(q, k, v, *arguments))
    exact, exact_lse = oracle(q, k, v, *arguments)
    magnitude, _ = oracle(q, k, v.abs(), *arguments)
    assert ((out.double() - exact).abs() <= ROUNDING * exact.abs() + WEIGHTS * magnitude).all()
    unseen = exact_lse.isinf()
    assert torch.equal(lse.isinf(), unseen)
    assert (lse.double() - exact_lse)[~unseen].abs().max() < 1e-5  # scores up to 6, FP32 sums, log2 within 2^-22


def test_attention_counts_keys():
    """All scores are 0 and v counts keys by their place: one key too many or too few shows at any length."""
    q, k, v = torch.zeros_like(qkv(8, 2, 64)[0]), *qkv(8, 2, 64)[1:]
    places = torch.arange(LONGEST, device=DEVICE) % 64
    v = torch.zeros_like(v)
    v[:, :, torch.arange(LONGEST, device=DEVICE), places] = 1
    got = attention(q, k, v, 0.125)
    length = torch.arange(1, LONGEST + 1, device=DEVICE, dtype=torch.float64)[:, None]
    count = ((length - torch.arange(64, device=DEVICE) + 63) // 64).clamp_min(0)
    exact = (count / length)[None, :, None]
    assert ((got.double() - exact).abs() <= ROUNDING * exact + 1e-12).all()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128), (4, 2, 80)], ids=str)
def test_a_query_does_not_depend_on_the_others(heads, options):  # [N15, K12]
    q, k, v = qkv(*heads)
    window, softcap, first = options_of(options)
    scale = heads[2] ** -0.5
    run = attention

    def rows(part: slice) -> Tensor | None:
        return None if first is None else first[:, part]

    whole = run(q, k, v, scale, window, softcap, first)
    for count in COUNTS:
        chunk = slice(LONGEST - count, LONGEST)
        assert torch.equal(run(q[:, :, chunk], k, v, scale, window, softcap, rows(chunk)), whole[:, chunk]), count
        begin = slice(0, count)
        few = run(*(t[:, :, begin] for t in (q, k, v)), scale, window, softcap, rows(begin))
        assert torch.equal(few, whole[:, begin]), count
    for batch in range(3):
        one = slice(batch, batch + 1)
        alone = run(q[one], k[one], v[one], scale, window, softcap, None if first is None else first[one])
        assert torch.equal(alone, whole[one])


def test_packed_and_padded_sequences_have_the_bits_of_lone_ones():  # [N15]
    q, k, v = qkv(9, 3, 64)
    run = attention
    packed = run(q, k, v, 0.125, 0, 0.0, STARTS.to(DEVICE).expand(3, -1))
    for part in (slice(0, 70), slice(70, 170), slice(170, LONGEST)):
        assert torch.equal(run(*(t[:, :, part] for t in (q, k, v)), 0.125), packed[:, part])
    padded = run(q, k, v, 0.125, 0, 0.0, PADS.to(DEVICE))
    for row, pads in enumerate((0, 37, 256)):
        alone = run(*(t[row : row + 1, :, pads:] for t in (q, k, v)), 0.125)
        assert torch.equal(alone, padded[row : row + 1, pads:])
        assert (padded[row, :pads] == 0).all()


def test_many_heads_and_sequences_do_not_matter():  # [N15]
    """More tiles than the machine has places, against one sequence and one group of heads."""
    q, k, v = qkv(32, 8, 128, batch=8, length=1030)
    whole = attention(q, k, v, 128**-0.5)
    one = attention(q[5:6, 12:16], k[5:6, 3:4], v[5:6, 3:4], 128**-0.5)
    assert torch.equal(one, whole[5:6, :, 12:16])


def test_strides_do_not_matter():  # [K14]
    """The layouts that models make: tokens first, one merged projection, shared keys expanded."""
    q, k, v = qkv(8, 2, 64)
    whole = attention(q, k, v, 0.125)
    merged = torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k, v)], -1)
    parts = merged.split((512, 128, 128), -1)
    views = [p.unflatten(2, (-1, 64)).transpose(1, 2) for p in parts]
    assert torch.equal(attention(*views, 0.125), whole)
    odd = [torch.cat((t[..., :1], t), -1)[..., 1:] for t in (q, k, v)]  # rows of 65 numbers
    assert torch.equal(attention(*odd, 0.125), whole)


def test_attention_past_two_to_the_thirty_one():  # [K9]
    """33 sequences of 8192 tokens and 64 heads of 128: the last rows lie beyond 2^31 numbers."""
    q, k, v = numbers(33, 64, 8192, 128), numbers(33, 2, 8192, 128, seed=1), numbers(33, 2, 8192, 128, seed=2)
    assert q.numel() > 2**31
    whole = attention(q, k, v, 128**-0.5)
    last = attention(*(t[-1:].clone() for t in (q, k, v)), 128**-0.5)
    assert torch.equal(whole[-1:], last)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_attention_gradients(heads, options, order_of_sums):
    ours = [poisoned(t).requires_grad_() for t in qkv(*heads)]
    wide = [t.detach().double().requires_grad_() for t in ours]
    arguments = heads[2] ** -0.5, *options_of(options)
    grad = numbers(3, LONGEST, heads[0], heads[2], seed=9)
    out, lse = torch.ops.jetgraph.attention(*ours, *arguments)
    out.backward(grad)
    oracle(*wide, *arguments)[0].backward(grad.double())
    operands = (t.detach() for t in (*ours, out, lse))
    again = torch.ops.jetgraph.attention_backward(grad, *operands, *arguments)
    for name, got, exact, twice in zip("qkv", ours, wide, again, strict=True):
        want = exact.grad.nan_to_num(0.0)  # autograd of a query that sees nothing
        worst = ((got.grad.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
        print(f"gradient of {name}: {worst:.2e} of its norm")
        assert worst <= GRADIENTS or want.norm() < 1e-9  # a window of one: the weights are constant
        if order_of_sums == "one":
            assert torch.equal(got.grad, twice)  # a replay may compare bits
        assert twice.transpose(1, 2).is_contiguous()  # as the operator's fake says


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("length", [2, 127, 2048])
def test_cudnn_computes_plain_gradients(size, length):
    """From our output and log-sum-exp; heads 4 to one of keys, as models share them."""
    provider_or_skip("cudnn", DEVICE)
    request = Exact("attention_backward", torch.bfloat16, size, 4, is_plain=True)
    assert registry.choose(request, DEVICE).name == "cudnn"
    q, k, v = (t.transpose(1, 2) for t in (numbers(2, length, h, size, seed=h) for h in (8, 2, 3)))
    v = v[:, :2]
    out, lse = torch.ops.jetgraph.attention(q, k, v, size**-0.5)
    grad = numbers(2, length, 8, size, seed=9)
    got = torch.ops.jetgraph.attention_backward(grad, q, k, v, out, lse, size**-0.5)
    exact = reference.attention_backward(*(t.double() for t in (grad, q, k, v)), size**-0.5)
    for ours, want in zip(got, exact, strict=True):
        assert ours.transpose(1, 2).is_contiguous()
        assert (ours.double() - want).norm() <= GRADIENTS * want.norm()


def test_gradients_of_a_chunk():
    q, k, v = qkv(9, 3, 64)
    ours = [t.requires_grad_() for t in (q[:, :, -65:].clone(), k, v)]
    wide = [t.detach().double().requires_grad_() for t in ours]
    grad = numbers(3, 65, 9, 64, seed=9)
    attention(*ours, 0.125).backward(grad)
    oracle(*wide, 0.125, 0, 0.0, None)[0].backward(grad.double())
    for got, exact in zip(ours, wide, strict=True):
        assert (got.grad.double() - exact.grad).norm() <= GRADIENTS * exact.grad.norm()


def test_the_definition_runs_for_other_dtypes():
    q, k, v = (t.float() for t in qkv(4, 2, 64, batch=1, length=33))
    assert torch.equal(attention(q, k, v, 0.125), reference.attention(q, k, v, 0.125)[0])


# --------------------------------------------------------------------------------------------------------- paged


class Cache:
    """Pages of some sequences in a shuffled order; what no token owns is NaN.  ``layout``: how an engine keeps them."""

    def __init__(self, sequences: list[tuple[Tensor, Tensor]], page: int, layout: str, seed: int = 0) -> None:
        groups, _, size = sequences[0][0].shape
        lengths = [k.shape[1] for k, _ in sequences]
        counts = [-(-n // page) for n in lengths]
        order = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(seed)).int().tolist()
        shape = {
            "tokens, heads, K|V": (len(order), page, groups, 2 * size),
            "heads, tokens, K|V": (len(order), groups, page, 2 * size),
            "K and V, pages": (2, len(order), page, groups, size),
            "pages, K and V": (len(order), 2, page, groups, size),
        }[layout]
        memory = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=DEVICE)
        if layout == "K and V, pages":
            self.key, self.value = memory.unbind(0)
        elif layout == "pages, K and V":
            self.key, self.value = memory.unbind(1)
        else:
            tokens_first = memory if layout == "tokens, heads, K|V" else memory.transpose(1, 2)
            self.key, self.value = tokens_first.split(size, -1)
        self.table = torch.full((len(sequences), max(counts) + 2), 10**6, dtype=torch.int32, device=DEVICE)
        for row, (k, v) in enumerate(sequences):
            for i in range(counts[row]):
                number = order.pop()
                self.table[row, i] = number
                part = slice(i * page, min((i + 1) * page, lengths[row]))
                self.key[number, : part.stop - part.start] = k[:, part].transpose(0, 1)
                self.value[number, : part.stop - part.start] = v[:, part].transpose(0, 1)

    def attend(self, rows: list[Tensor], lengths: list[int], scale: float, pad: int = 0, **options) -> Tensor:
        """rows[i] [n, H, D] are the last queries of the first lengths[i] positions of sequence i."""
        from jetgraph.lowering import triton_attention

        starts = torch.tensor([0, *itertools.accumulate(map(len, rows))], dtype=torch.int32, device=DEVICE)
        lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        q = torch.cat((*rows, rows[0].new_full((pad, *rows[0].shape[1:]), float("nan"))))
        arguments = self.key, self.value, self.table, lens, starts, scale
        return triton_attention.paged_attention(q, *arguments, **options)[0][: starts[-1]]


LAYOUTS = ("tokens, heads, K|V", "heads, tokens, K|V", "K and V, pages", "pages, K and V")
LENGTHS = (257, 1, 64, 65, 130, 16)


def sequences(heads: int, groups: int, size: int, lengths=LENGTHS) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [tuple(numbers(h, n, size, seed=n + i) for i, h in enumerate((heads, groups, groups))) for n in lengths]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("heads", "page"), [((9, 3, 64), 16), ((32, 8, 128), 16), ((8, 2, 128), 256), ((4, 2, 80), 48)]
)
def test_pages_have_the_bits_of_dense_keys(heads, page, layout):  # [N15, K12]
    """Whole prompts, decoded tokens and chunks in one batch, pages anywhere."""
    inputs = sequences(*heads)
    scale = heads[2] ** -0.5
    dense = [attention(*(t[None] for t in s), scale)[0] for s in inputs]
    cache = Cache([s[1:] for s in inputs], page, layout)
    for counts in ([257, 1, 64, 65, 130, 16], [1] * 6, [37, 1, 1, 64, 2, 15], [0, 0, 1, 0, 129, 0]):
        rows = [s[0][:, n - c :].transpose(0, 1) for s, n, c in zip(inputs, LENGTHS, counts, strict=True)]
        got = cache.attend(rows, list(LENGTHS), scale, pad=5)
        assert torch.equal(got, torch.cat([d[n - c :] for d, n, c in zip(dense, LENGTHS, counts, strict=True)])), counts


def test_pages_with_window_and_soft_cap():
    inputs = sequences(8, 2, 64)
    cache = Cache([s[1:] for s in inputs], 16, LAYOUTS[0])
    rows = [s[0].transpose(0, 1) for s in inputs]
    got = cache.attend(rows, list(LENGTHS), 0.125, window=50, softcap=5.0)
    dense = [attention(*(t[None] for t in s), 0.125, 50, 5.0)[0] for s in inputs]
    assert torch.equal(got, torch.cat(dense))


def test_a_prompt_in_chunks_then_token_by_token():  # [N15, K12]
    """As an engine runs a sequence: chunks of a prompt, then one token a step, beside changing neighbours."""
    (q, k, v), other = sequences(9, 3, 64, lengths=(200, 130))
    whole = attention(q[None], k[None], v[None], 0.125)[0]
    for seed, chunk in ((1, 29), (2, 64), (3, 150)):
        cache = Cache([(k, v), other[1:]], 16, LAYOUTS[seed % 4], seed)
        position = 0
        while position < 200:
            count = min(chunk, 150 - position) if position < 150 else 1
            position += count
            mine = q[:, position - count : position].transpose(0, 1)
            beside = other[0][:, -(position % 5) - 1 :].transpose(0, 1)
            got = cache.attend([mine, beside], [position, 130], 0.125)
            assert torch.equal(got[:count], whole[position - count : position]), (chunk, position)


def test_a_captured_graph_serves_other_lengths():
    """Decoding in a CUDA graph: lengths, pages and rows change in place, nothing is read by the host."""
    from jetgraph.lowering import triton_attention

    inputs = sequences(8, 2, 128)
    cache = Cache([s[1:] for s in inputs], 16, LAYOUTS[0])
    count = len(inputs)
    q = torch.stack([s[0][:, 0] for s in inputs])
    out, lens = torch.zeros_like(q), torch.ones(count, dtype=torch.int32, device=DEVICE)
    starts = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    arguments = q, cache.key, cache.value, cache.table, lens, starts, 128**-0.5
    triton_attention.paged_attention(*arguments, out=out)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        triton_attention.paged_attention(*arguments, out=out)
    for back in (0, 3):
        now = [max(n - back, 1) for n in LENGTHS]
        lens.copy_(torch.tensor(now))
        q.copy_(torch.stack([s[0][:, n - 1] for s, n in zip(inputs, now, strict=True)]))
        graph.replay()
        for row, (s, n) in enumerate(zip(inputs, now, strict=True)):
            dense = attention(s[0][None, :, n - 1 : n], *(t[None, :, :n] for t in s[1:]), 128**-0.5)
            assert torch.equal(out[row], dense[0, 0]), (row, n)
    lens.copy_(torch.tensor([5, 1, 2, 0, 0, 0]))  # a smaller batch in the same graph
    starts.copy_(torch.tensor([0, 1, 2, 3, 3, 3, 3]))
    graph.replay()
    dense = attention(q[None, :1].transpose(1, 2), *(t[None, :, :5] for t in inputs[0][1:]), 128**-0.5)
    assert torch.equal(out[0], dense[0, 0])


def test_tiles_that_have_the_bits_of_the_default():
    """Not promised, printed: which other tiles could serve without changing a bit (warps and rows of a tile)."""
    from jetgraph.lowering import triton_attention, triton_bf16_gemm

    q, k, v = qkv(8, 2, 128)
    whole, _ = triton_attention.attention(q, k, v, 128**-0.5)
    for tile in ((64, 64, 4, 3), (128, 64, 4, 3), (128, 128, 8, 2), (64, 128, 4, 2)):
        out, _ = triton_attention.attention(q, k, v, 128**-0.5, tile=tile)
        print(f"attention {tile}: {'same bits' if torch.equal(out, whole) else 'other bits'}")
        assert (out.double() - whole.double()).abs().max() < 0.05
    x, weight = numbers(LONGEST, 2880), numbers(576, 2880, seed=1)
    product = triton_bf16_gemm.row_tile_gemm(x, weight)
    for tile in (
        (64, 128, 64, 4, 4),
        (128, 256, 64, 8, 3),
        (64, 256, 64, 4, 3),
        (128, 128, 32, 8, 4),
        (16, 128, 64, 4, 4),
    ):
        out = triton_bf16_gemm.row_tile_gemm(x, weight, tile=tile)
        print(f"gemm {tile}: {'same bits' if torch.equal(out, product) else 'other bits'}")
        assert (out.double() - product.double()).abs().max() <= 2 * ROUNDING * product.double().abs().max()

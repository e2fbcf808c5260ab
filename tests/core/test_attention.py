"""`jetgraph::attention` against a dense float64 oracle, and the proof of every mask class."""

from __future__ import annotations

import itertools
import struct

import pytest
import torch
from transformers import masking_utils as hf

import jetgraph.lowering.torch_ops  # noqa: F401  (defines torch.ops.jetgraph)
from jetgraph.lowering import reference
from jetgraph.lowering.masks import Mask, UnknownMask, check_call, classify, sequence_starts

SCALE = 0.125
PACKED = torch.tensor([[0] * 5 + [5] * 9 + [14] + [15] * 8])
LEFT_PADDED = torch.tensor([[0] * 23, [7] * 23])


def qkv(batch=1, heads=4, kv_heads=2, queries=23, keys=23, size=16, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(3)
    shapes = [(batch, heads, queries, size), (batch, kv_heads, keys, size), (batch, kv_heads, keys, size)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def visible(queries, keys, window, first, batch):
    """The definition, one entry at a time."""
    table = torch.zeros(batch, queries, keys, dtype=torch.bool)
    for b, i, j in itertools.product(range(batch), range(queries), range(keys)):
        position = keys - queries + i
        inside = window == 0 or position - window < j
        table[b, i, j] = j <= position and inside and (first is None or j >= first[b, i])
    return table


def dense(q, k, v, scale, window, softcap, first):
    """Attention by plain autograd in float64 with a mask written out; rows that see nothing are zero."""
    q, k, v = q.double(), k.double(), v.double()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(q.shape[2], k.shape[2], window, first, len(q))[:, None]
    weights = torch.where(seen, torch.exp(scores - scores.amax(-1, keepdim=True)), 0.0)
    total = weights.sum(-1, keepdim=True)
    return ((weights / torch.where(total == 0, 1.0, total)) @ v).transpose(1, 2)


CASES = {
    "causal": (0, 0.0, None, 23),
    "window": (5, 0.0, None, 23),
    "window of one": (1, 0.0, None, 23),
    "window wider than the sequence": (64, 0.0, None, 23),
    "softcap": (0, 2.0, None, 23),
    "packed": (0, 0.0, PACKED, 23),
    "packed window softcap": (3, 2.0, PACKED, 23),
    "left padding": (0, 0.0, LEFT_PADDED, 23),
    "left padding, window": (4, 0.0, LEFT_PADDED, 23),
    "a chunk": (4, 0.0, LEFT_PADDED[:, -6:], 6),
    "one token": (0, 0.0, LEFT_PADDED[:, -1:], 1),
}


@pytest.mark.parametrize(("window", "softcap", "first", "queries"), CASES.values(), ids=CASES)
def test_output_and_gradients_equal_a_dense_oracle_bit_for_bit(window, softcap, first, queries):
    batch = 1 if first is None else len(first)
    ours = [t.requires_grad_() for t in qkv(batch, queries=queries)]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    out = torch.ops.jetgraph.attention(*ours, SCALE, window, softcap, first)[0]
    expected = dense(*theirs, SCALE, window, softcap, first)
    assert torch.equal(out, expected.to(torch.bfloat16))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    out.backward(grad)
    expected.backward(grad.double())
    for got, want in zip(ours, theirs, strict=True):
        # A query that sees one key has gradient 0, exactly so by our formula; the oracle's leaves 1e-18 behind.
        assert torch.equal(flushed(got.grad), flushed(want.grad))


def flushed(grad):
    return torch.where(grad.abs() < 2**-45, 0.0, grad)


def test_the_scale_counts_as_the_fp32_number_that_a_graph_holds():
    """1/√128 is no FP32 number: with the double, about one output in 27,000 has another last bit."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 8, 96, 128, generator=generator).bfloat16() for _ in range(4))
    double = 128**-0.5
    single = struct.unpack("f", struct.pack("f", double))[0]
    assert single != double
    out, lse = reference.attention(q, k, v, double)
    exact = torch.softmax(
        (q.double() @ k.double().mT * single).masked_fill(torch.ones(96, 96).triu(1).bool(), float("-inf")), -1
    )
    assert torch.equal(out, (exact @ v.double()).bfloat16().transpose(1, 2))
    assert torch.equal(lse, reference.attention(q, k, v, single)[1])
    gradients = [reference.attention_backward(grad.transpose(1, 2), q, k, v, s) for s in (double, single)]
    assert all(map(torch.equal, *gradients))


def test_gradients_by_finite_differences():
    first = torch.tensor([[0, 0, 2, 2, 2, 5]])
    tensors = [t.requires_grad_() for t in qkv(queries=6, keys=6, size=4, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda *t: torch.ops.jetgraph.attention(*t, SCALE, 3, 1.5, first)[0], tensors)


def test_the_log_sum_exp_is_that_of_the_visible_scores_and_has_no_gradient():
    q, k, v = (t.requires_grad_() for t in qkv(2))
    out, lse = torch.ops.jetgraph.attention(q, k, v, SCALE, 6, 0.0, LEFT_PADDED)
    scores = q.double() @ k.double().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * SCALE
    i, j = torch.meshgrid(torch.arange(q.shape[2]), torch.arange(k.shape[2]), indexing="ij")
    seen = (j <= i) & (j > i - 6) & (j >= LEFT_PADDED[:, None, :, None])
    expected = scores.masked_fill(~seen, float("-inf")).logsumexp(-1)
    assert lse.dtype is torch.float32
    torch.testing.assert_close(lse.double(), expected, rtol=1e-6, atol=1e-6)
    with pytest.raises(NotImplementedError, match="log-sum-exp has no gradient"):
        (out.sum() + lse.nan_to_num(neginf=0.0).sum()).backward()


def test_a_query_that_sees_nothing_gives_zeros_and_zero_gradients():
    first = torch.tensor([[9, 9, 0, 9]])
    q, k, v = (t.requires_grad_() for t in qkv(queries=4, keys=4))
    out = torch.ops.jetgraph.attention(q, k, v, SCALE, 0, 0.0, first)[0]
    assert out[0, [0, 1, 3]].count_nonzero() == 0
    assert out[0, 2].count_nonzero() > 0
    out.backward(torch.ones_like(out))
    assert q.grad[0, :, [0, 1, 3]].count_nonzero() == 0
    assert k.grad[0, :, 3].count_nonzero() == 0  # only the third query looks, and not so far
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_hidden_keys_change_no_bit_of_a_row():
    q, k, v = qkv(2)
    plain = reference.attention(q, k, v, SCALE, 6, 0.0, LEFT_PADDED)[0]
    k[1, :, :7], v[1, :, :7] = 1e4, -1e4
    assert torch.equal(reference.attention(q, k, v, SCALE, 6, 0.0, LEFT_PADDED)[0], plain)


def test_each_packed_sequence_equals_the_sequence_alone():
    q, k, v = qkv()
    packed = reference.attention(q, k, v, SCALE, 4, 0.0, PACKED)[0]
    for start, stop in itertools.pairwise([0, 5, 14, 15, 23]):
        alone = reference.attention(*(t[:, :, start:stop] for t in (q, k, v)), SCALE, 4)[0]
        assert torch.equal(packed[:, start:stop], alone)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "window=-1"),
        ({"softcap": -2.0}, "softcap=-2.0"),
        ({"first": torch.zeros(1, 22, dtype=torch.int64)}, r"expected int64 \[1, 23\]"),
        ({"first": torch.zeros(1, 23)}, r"is torch.float32 \[1, 23\]"),
    ],
)
def test_meaningless_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        reference.attention(*qkv(), SCALE, **options)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (5, 5), (3, 1)])
def test_the_operators_pass_torchs_own_checks(heads, kv_heads):
    q, k, v = (t.requires_grad_() for t in qkv(2, heads, kv_heads, queries=5, keys=5))
    first = torch.tensor([[0] * 5, [2] * 5])
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.jetgraph.attention, (q, k, v, SCALE, 3, 2.0, first), test_utils=checks)
    torch.library.opcheck(torch.ops.jetgraph.attention, (q, k, v, SCALE), test_utils=checks)


# ---------------------------------------------------------------------------------------------------- mask classes


class Config:
    """What transformers' mask makers read of a configuration."""

    def __init__(self, **options):
        self._attn_implementation, self.is_causal = "jetgraph", True
        self.__dict__ |= options


@pytest.fixture(autouse=True)
def registered():
    hf.ALL_MASK_ATTENTION_FUNCTIONS.register("jetgraph", classify)


def made(maker, mask=None, positions=None, *, batch=1, length=12, cache=None, queries=None, **config):
    embeds = torch.zeros(batch, queries or length, 8)
    return maker(Config(**config), embeds, mask, cache, position_ids=positions)


def as_dense(maker, got: Mask, mask=None, positions=None, *, batch=1, length=12, cache=None, queries=None, **config):
    """transformers' own dense mask, and the one that ``got`` stands for."""
    options = config | {"_attn_implementation": "sdpa", "is_causal": True}
    embeds = torch.zeros(batch, queries or length, 8)
    theirs = maker(
        Config(**options), embeds, mask, cache, position_ids=positions, and_mask_function=lambda *a: a[2] >= 0
    )
    ours = visible(queries or length, theirs.shape[-1], int(got.window), got.first, batch)
    return ours, theirs.expand(batch, -1, -1, -1)[:, 0]


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 0, 0, 1, 2]])
FULL, SLIDING = hf.create_causal_mask, hf.create_sliding_window_causal_mask


@pytest.mark.parametrize(
    ("maker", "options", "window", "has_first"),
    [
        (FULL, {}, "0", False),
        (SLIDING, {"sliding_window": 4}, "4", False),
        (FULL, {"positions": POSITIONS}, "0", True),
        (SLIDING, {"positions": POSITIONS, "sliding_window": 3}, "3", True),
        (FULL, {"positions": torch.arange(12)[None]}, "0", False),
        (FULL, {"mask": torch.tensor([[0] * 3 + [1] * 9, [1] * 12]), "batch": 2}, "0", True),
        (SLIDING, {"mask": torch.tensor([[0] * 3 + [1] * 9, [1] * 12]), "batch": 2, "sliding_window": 2}, "2", True),
        (FULL, {"mask": torch.tensor([[0] * 3 + [1] * 6 + [0] * 3, [1] * 10 + [0] * 2]), "batch": 2}, "0", True),
        (FULL, {"mask": torch.tensor([[1] * 9 + [0] * 3, [1] * 12]), "batch": 2}, "0", False),
        (FULL, {"mask": torch.ones(2, 12), "batch": 2}, "0", False),
    ],
)
def test_a_proven_mask_shows_every_real_query_what_transformers_dense_mask_shows(maker, options, window, has_first):
    got = made(maker, **options)
    assert (got.window, got.first is not None) == (window, has_first)
    ours, theirs = as_dense(maker, got, **options)
    real = options["mask"].bool() if "mask" in options else torch.ones(len(ours), 12, dtype=torch.bool)
    assert torch.equal(ours[real], theirs[real])


def cache_of(config, tokens):
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        kv = torch.zeros(1, 1, tokens, 4)
        cache.update(kv, kv, layer)
    return cache


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_masks_with_a_cache_that_drops_old_keys(queries, padded):
    from transformers import MistralConfig

    cache = cache_of(MistralConfig(num_hidden_layers=1, sliding_window=5), 9)
    mask = torch.ones(1, 9 + queries)
    mask[0, : 6 if padded else 0] = 0
    options = {"mask": mask, "queries": queries, "cache": cache, "sliding_window": 5}
    got = made(SLIDING, **options)
    ours, theirs = as_dense(SLIDING, got, **options)
    assert torch.equal(ours, theirs)
    assert (got.first is not None) == padded


def test_sequence_starts():
    assert sequence_starts(torch.tensor([[0, 0, 1, 1, 1, 2]])).tolist() == [[0, 0, 2, 2, 2, 5]]
    assert sequence_starts(torch.tensor([[4]])).tolist() == [[0]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: made(FULL, is_causal=False), "bidirectional_mask_function"),
        (lambda: made(hf.create_chunked_causal_mask, attention_chunk_size=4), "chunked_overlay"),
        (lambda: made(FULL, torch.tensor([[1] * 4 + [0] + [1] * 7])), "padding between real tokens"),
        (lambda: made(FULL, torch.ones(1, 13)), "are not the last positions"),
        (lambda: made(FULL, torch.ones(1, 1, 12)), r"attention_mask has shape \[1, 1, 12\]"),
        (lambda: prefix_lm(), "or_masks"),
        (lambda: classify(1, 4, 4, mask_function=hf.and_masks(hf.sliding_window_overlay(2))), "keys after it"),
        (lambda: classify(1, 4, 4, mask_function=lambda b, h, q, k: k <= q), "built with"),
        (lambda: classify(1, 1, 8, q_offset=torch.tensor(3)), "are not the last positions"),
        (lambda: sequence_starts(torch.tensor([[0, 1, 0]])), "alternate"),
    ],
)
def test_any_other_mask_is_unknown(call, message):
    with pytest.raises(UnknownMask, match=f"UNKNOWN mask class: .*{message}"):
        call()


def prefix_lm():
    embeds, block = torch.zeros(1, 12, 8), torch.tensor([[0] * 4 + [-1] * 8])
    return FULL(Config(), embeds, None, None, block_sequence_ids=block)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"position_ids": torch.arange(12)[None], "attention_mask": torch.ones(1, 12), "use_cache": True},
        {"position_ids": POSITIONS},
        {"position_ids": POSITIONS, "cu_seq_lens_q": torch.tensor([0, 3, 8, 9, 12], dtype=torch.int32)},
        {"position_ids": torch.tensor([[1, 1, 0, 1]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])},
        {"position_ids": torch.tensor([[7]]), "attention_mask": torch.ones(1, 8), "past_key_values": object()},
    ],
)
def test_calls_that_describe_their_sequences_once(arguments):
    check_call(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_ids": POSITIONS, "attention_mask": torch.ones(1, 12)}, "beside an attention_mask or a cache"),
        ({"position_ids": POSITIONS, "use_cache": True}, "beside an attention_mask or a cache"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 12])}, "without position_ids"),
        ({"position_ids": POSITIONS, "cu_seq_lens_q": torch.tensor([0, 3, 12])}, "name different sequences"),
        ({"position_ids": torch.arange(12)[None], "cu_seq_lens_q": torch.tensor([0, 3, 12])}, "different sequences"),
        ({"attention_mask": torch.ones(1, 1, 12, 12)}, r"attention_mask has shape \[1, 1, 12, 12\]"),
        ({"position_ids": torch.zeros(3, 1, 12)}, r"position_ids has shape \[3, 1, 12\]"),
    ],
)
def test_contradicting_descriptions_of_the_sequences_are_unknown(arguments, message):
    with pytest.raises(UnknownMask, match=message):
        check_call(arguments)


@pytest.mark.parametrize(("queries", "keys"), [(0, 0), (0, 3)])
def test_no_tokens(queries, keys):
    q, k, v = (t.requires_grad_() for t in qkv(queries=queries, keys=keys))
    out, lse = torch.ops.jetgraph.attention(q, k, v, SCALE)
    assert (out.shape[1], lse.shape[2]) == (queries, queries)
    out.sum().backward()
    assert k.grad.count_nonzero() == 0

"""The engine's formulas against transformers' own modules, bit for bit, and the paged cache against a plain one."""

from __future__ import annotations

import pytest
import torch
from jetgraph_vllm import formulas, paged_cache
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_rms_norm_is_transformers(eps: float, size: float) -> None:
    norm = modeling_llama.LlamaRMSNorm(576, eps).to(torch.bfloat16)
    norm.weight.data = bf16(576)
    x = bf16(33, 576) * size
    assert torch.equal(formulas.rms_norm(x, norm.weight, eps), norm(x))


def test_silu_and_mul_is_transformers() -> None:
    gate, up = bf16(33, 448), bf16(33, 448)
    mlp_product = modeling_llama.ACT2FN["silu"](gate) * up
    assert torch.equal(formulas.silu_and_mul(torch.cat((gate, up), -1)), mlp_product)


def test_rotary_is_transformers() -> None:
    config = LlamaConfig(hidden_size=320, num_attention_heads=5, num_key_value_heads=1, head_dim=64)
    q, k = bf16(1, 5, 33, 64), bf16(1, 1, 33, 64)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, torch.arange(7, 40)[None])
    expected_q, expected_k = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    for x, expected in ((q, expected_q), (k, expected_k)):
        ours = formulas.rotate(x[0].transpose(0, 1), cos[0].unsqueeze(1), sin[0].unsqueeze(1))
        assert torch.equal(ours.transpose(0, 1), expected[0])


def test_rotary_of_part_of_the_head_passes_the_rest() -> None:
    x, cos, sin = bf16(9, 2, 64), bf16(9, 1, 32), bf16(9, 1, 32)
    out = formulas.rotate(x, cos, sin)
    assert torch.equal(out[..., 32:], x[..., 32:])
    assert torch.equal(out[..., :32], formulas.rotate(x[..., :32], cos, sin))


def test_paged_cache_returns_what_was_written() -> None:
    """Three sequences in scattered blocks, written token by token in mixed order and in chunks, with padding slots."""
    block_size, heads, size = 16, 3, 8
    cache = torch.full((12, heads, block_size, 2 * size), torch.nan).to(torch.bfloat16)
    tables = torch.tensor([[7, 2, 9], [0, 11, 0], [5, 0, 0]])
    lengths = [40, 17, 16]
    keys, values = ([bf16(length, heads, size) for length in lengths] for _ in range(2))
    tokens = [(i, position) for i, length in enumerate(lengths) for position in range(length)]
    order = torch.randperm(len(tokens)).tolist()
    for chunk in (order[:1], order[1:30], order[30:]):
        picked = [tokens[j] for j in chunk]
        slots = [int(tables[i, p // block_size]) * block_size + p % block_size for i, p in picked]
        key = torch.stack([keys[i][p] for i, p in picked] + [bf16(heads, size)])
        value = torch.stack([values[i][p] for i, p in picked] + [bf16(heads, size)])
        paged_cache.write_tokens(cache, key, value, torch.tensor([*slots, -1]))
    for i, length in enumerate(lengths):
        k, v = paged_cache.read_sequence(cache, tables[i], length, size)
        assert torch.equal(k[0].transpose(0, 1), keys[i])
        assert torch.equal(v[0].transpose(0, 1), values[i])


@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 3, 16, 128), None), ((2, 5, 16, 3, 64), 0), ((5, 2, 16, 3, 64), 1)], ids=str
)
def test_keys_and_values_of_every_layout(shape: tuple[int, ...], axis: int | None) -> None:
    def cache_shape(blocks: int, block_size: int, heads: int, size: int) -> tuple[int, ...]:
        names = {5: blocks, 16: block_size, 3: heads, 64: size, 128: 2 * size, 2: 2}
        return tuple(names[n] for n in shape)

    assert paged_cache.pair_axis(cache_shape) == axis
    cache = bf16(*shape)
    key, value = paged_cache.keys_and_values(cache, 64, axis)
    assert key.shape == value.shape == (5, 16, 3, 64)
    key[4, 15, 2, 63], value[0, 1, 2, 3] = 11.0, 12.0
    places = {
        None: ((4, 2, 15, 63), (0, 2, 1, 64 + 3)),
        0: ((0, 4, 15, 2, 63), (1, 0, 1, 2, 3)),
        1: ((4, 0, 15, 2, 63), (0, 1, 1, 2, 3)),
    }[axis]
    assert [cache[place].item() for place in places] == [11.0, 12.0]


def test_another_layout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[5, 16, 384\] for 5 blocks of 16 tokens"):
        paged_cache.pair_axis(lambda blocks, block_size, heads, size: (blocks, block_size, heads * 2 * size))

"""Masters and the logprob: what BF16 parameters swallow, and what the gradient of a logprob is worth (A8, A10, N9)."""

from __future__ import annotations

import pytest
import torch

from jetgraph.linear import convert
from jetgraph.policy import get_policy
from jetgraph.trainer import token_logprobs

STEPS, RATE = 100, 1e-6


@pytest.mark.parametrize(("rate", "fraction"), [(1e-6, 0.019), (1e-5, 0.155)])
def test_bf16_masters_swallow_small_updates(rate, fraction):  # [A10, N9: 1.9 % and 15.5 % of N(0, 0.02) move]
    """The policy that the README states: BF16 masters are an option for rates that move them, and no more."""
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(1_000_000, generator=generator) * 0.02).bfloat16()
    sign = torch.randn(1_000_000, generator=generator).sign().bfloat16()
    moved = (weight - rate * sign) != weight
    assert moved.float().mean().item() == pytest.approx(fraction, rel=0.1)


def trained(dtype: torch.dtype) -> tuple[torch.nn.Linear, torch.Tensor]:
    """A quantised layer after 100 steps of SGD that add 1e-6 to every weight, and the weight before."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 128, bias=False, dtype=dtype)
    torch.nn.init.normal_(layer.weight, std=0.02)
    convert(layer, "up", get_policy("jet").linear("model.layers.0.mlp.up_proj"))
    before = layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=RATE)
    for _ in range(STEPS):
        layer.weight.grad = torch.full_like(layer.weight, -1.0)
        optimizer.step()
    return layer, before


def test_float32_masters_keep_what_bf16_masters_lose():  # [N9: 100 steps of +1e-6 move the mean by 1e-4 ± 10 %]
    kept, before = trained(torch.float32)
    assert (kept.weight - before).mean().item() == pytest.approx(STEPS * RATE, rel=0.1)
    lost, start = trained(torch.bfloat16)
    assert (lost.weight.float() - start.float()).mean().item() < 0.3 * STEPS * RATE
    x = torch.randn(17, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = kept(x)
    rounded = kept.weight.detach().bfloat16()
    assert torch.equal(y, torch.ops.jetgraph.linear(x, rounded, None, kept.precision_text))
    arguments = (128, 128, 448.0, 1e-12, "div", False)
    codes = [torch.ops.jetgraph.quantize(w, *arguments)[0].view(torch.uint8) for w in (before.bfloat16(), rounded)]
    assert 0.001 < (codes[0] != codes[1]).float().mean().item() < 0.5  # what a step changes in the rollout


def test_the_logprob_and_its_gradient_against_float64():  # [A8: relative error of the gradient below 1 %]
    """Logits with a standard deviation of 30, where a softmax in BF16 is off by 4 % to 23 %.

    The oracle is the textbook formula in float64 on the same logits: one-hot minus softmax.
    """
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(2, 9, 512, generator=generator) * 30).bfloat16()
    targets = torch.randint(0, 512, (2, 9), generator=generator)
    weights = torch.rand(2, 9, generator=generator) + 0.5
    leaf = logits.clone().requires_grad_()
    logprobs = token_logprobs(leaf, targets)
    (logprobs * weights).sum().backward()
    wide = logits.double()
    shifted = wide - wide.max(-1, keepdim=True).values
    probabilities = shifted.exp() / shifted.exp().sum(-1, keepdim=True)
    expected = shifted.gather(-1, targets[..., None])[..., 0] - shifted.exp().sum(-1).log()
    exact = (torch.nn.functional.one_hot(targets, 512) - probabilities) * weights.double()[..., None]
    assert (logprobs.double() - expected).abs().max() < 1e-4
    assert ((leaf.grad.double() - exact).norm() / exact.norm()).item() < 0.01
    assert (logprobs <= 0).all()

"""Weights quantised once for one optimizer step: shared by every forward and backward in it, and never stale [A5]."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import jetgraph
from jetgraph.lowering import reference, torch_ops  # noqa: F401  (torch_ops registers the operators)
from jetgraph.lowering.weight_codes import StaleWeights, hold
from tests.core.small_models import random_ids, random_model

JET = (128, 128, 448.0, 1e-12, "div", False)
NUM_LINEARS = 7


def codes(weight):
    return torch.ops.jetgraph.quantize_weight(weight, *JET)


def fresh(weight):
    return reference.quantize(weight.detach(), *JET)


def same(a, b) -> bool:
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a, b, strict=True))


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.randn(256, 320, generator=torch.Generator().manual_seed(0)).bfloat16())


def test_without_holding_every_call_is_fresh(weight):
    before = codes(weight)
    weight.data.mul_(2)
    assert not same(codes(weight), before)
    assert same(codes(weight), fresh(weight))


def test_held_codes_are_made_once_and_are_the_codes(weight):
    with hold([("w", weight)]) as held:
        first = codes(weight)
        again = codes(weight.detach())
        assert [t.data_ptr() for t in first] == [t.data_ptr() for t in again]
        assert same(first, fresh(weight))
        assert held.num_quantized == 1


def double(w):
    w.mul_(2)


def copy_in(w):
    w.copy_(w.detach() * 2)


def swap(w):
    w.data = w.detach() * 2


def optimizer_step(w):
    w.grad = -w.detach()
    torch.optim.SGD([w], lr=1.0).step()


@pytest.mark.parametrize("change", [double, copy_in, swap, optimizer_step])
def test_a_change_that_torch_counts_is_seen_at_once(weight, change):  # [A5]
    expected = fresh(weight)[1] * 2  # twice the weight: the same codes, twice the scales
    with hold([("w", weight)]) as held:
        before = codes(weight)[0].clone()
        with torch.no_grad():
            change(weight)
        after = codes(weight)
        assert held.num_quantized == 2
    assert torch.equal(after[0].view(torch.uint8), before.view(torch.uint8))
    assert torch.equal(after[1], expected)


def test_a_change_that_torch_does_not_count_is_an_error(weight):  # [A5]
    def unseen():
        with hold([("w", weight)]):
            codes(weight)
            weight.data.copy_(weight.detach() * 2)

    with pytest.raises(StaleWeights, match="^w changed while its codes were held"):
        unseen()
    assert same(codes(weight), fresh(weight))  # and nothing is held any more


def test_one_bit_is_enough(weight):
    def unseen():
        with hold([("w", weight)]):
            codes(weight)
            row, col = divmod(int(weight.data[:128, :128].abs().argmax()), 128)
            weight.data[row, col] *= 1 + 2**-7  # the largest of a block, by a bit: its scale moves

    with pytest.raises(StaleWeights):
        unseen()


def test_a_change_after_the_last_use_is_none(weight):
    with hold([("w", weight)]):
        codes(weight)
        with torch.no_grad():
            weight.mul_(2)


def test_memory_given_back_cannot_be_checked(weight):
    def resharded():
        with hold([("w", weight)]):
            codes(weight)
            weight.untyped_storage().resize_(0)

    with pytest.raises(StaleWeights, match="do not hold weights under FSDP2"):
        resharded()


def test_an_error_inside_stays_the_error(weight):
    def broken():
        with hold([("w", weight)]):
            codes(weight)
            weight.data.mul_(2)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    with hold([]):  # nothing is left over
        pass


def test_blocks_do_not_nest(weight):
    with hold([]), pytest.raises(RuntimeError, match="held already"), hold([]):
        pass


def test_views_and_rules_are_told_apart(weight):
    with hold([("w", weight)]) as held:
        top, bottom = codes(weight[:128]), codes(weight[128:])
        other = torch.ops.jetgraph.quantize_weight(weight, *JET[:-1], True)
        assert held.num_quantized == 3
    assert same(top, fresh(weight[:128]))
    assert same(bottom, fresh(weight[128:]))
    assert same(other, reference.quantize(weight.detach(), *JET[:-1], True))


def accumulated(model, micro_batches, held=False):
    model.zero_grad(set_to_none=True)

    def run():
        for ids in micro_batches:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    if not held:
        run()
        return None, {n: p.grad.clone() for n, p in model.named_parameters()}
    with model.jetgraph.hold_weights() as block:
        run()
    return block.num_quantized, {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_accumulation_and_recomputation_share_one_quantisation(checkpointing):
    model = jetgraph.compile(random_model("llama", layers=2))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batches = [random_ids(model, 2, 9, seed=s) for s in range(3)]
    _, expected = accumulated(model, batches)
    made, got = accumulated(model, batches, held=True)
    assert made == 2 * NUM_LINEARS
    assert [n for n in expected if not torch.equal(got[n], expected[n])] == []


@pytest.mark.slow
def test_steps_with_held_weights_train_the_same_model():  # [A5]
    plain = jetgraph.compile(random_model("llama", layers=1))
    held = copy.deepcopy(plain)
    batches = [random_ids(plain, 1, 9, seed=s) for s in range(4)]
    for model, hold_them in ((plain, False), (held, True)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            accumulated(model, batches[2 * step : 2 * step + 2], hold_them)
            optimizer.step()
    for (name, a), b in zip(plain.named_parameters(), held.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_dgrad_reads_the_same_codes_transposed():
    """Afresh, and of what is held, which is not quantised again."""
    weight = torch.nn.Parameter(torch.randn(200, 136, generator=torch.Generator().manual_seed(3)).bfloat16())
    codes, scale = torch.ops.jetgraph.quantize_weight(weight, *JET)
    for context in (contextlib.nullcontext(), hold([("weight", weight)])):
        with context as held:
            torch.ops.jetgraph.quantize_weight(weight, *JET)
            codes_t, scale_t = torch.ops.jetgraph.quantize_weight_transposed(weight, *JET)
            assert held is None or held.num_quantized == 1
        assert codes_t.is_contiguous()
        assert scale_t.is_contiguous()
        assert torch.equal(codes_t.view(torch.uint8), codes.t().view(torch.uint8))
        assert torch.equal(scale_t, scale.t())


@pytest.mark.parametrize("name", ["quantize", "quantize_transposed", "quantize_weight_transposed", "quantize_tokens"])
def test_quantisers_pass_torchs_own_checks(name):
    """Shapes, dtypes and strides are those that a compiled graph was promised; no result is an argument's memory."""
    x = torch.randn(130, 200, generator=torch.Generator().manual_seed(4)).bfloat16()
    arguments = JET[1:] if name == "quantize_tokens" else JET
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.jetgraph, name), (x, *arguments), test_utils=checks)

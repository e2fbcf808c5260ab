"""On the GPU the graph keeps its rounding points: grad modes agree, and a row does not depend on the others."""

from __future__ import annotations

import pytest
import torch

import jetgraph
from tests.core.small_models import random_ids, random_model

COUNTS = (1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256)
LONGEST = 257
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
SIZES = {
    "multiples of 128": HEADS | {"hidden_size": 256, "intermediate_size": 512},
    "ragged": HEADS | {"hidden_size": 320, "intermediate_size": 448},
}


@pytest.fixture(params=SIZES, scope="module")
def compiled(request):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    model = random_model("qwen3", sizes=SIZES[request.param]).cuda()
    return jetgraph.compile(model)


def logits(model, ids):
    return model(input_ids=ids, use_cache=False).logits


def test_no_grad_and_training_have_the_same_bits(compiled):
    ids = random_ids(compiled, 2, LONGEST).cuda()
    with torch.no_grad():
        quiet = logits(compiled, ids)
    with torch.inference_mode():
        inferred = logits(compiled, ids)
    trained = logits(compiled, ids)
    assert torch.equal(quiet, trained)
    assert torch.equal(inferred, trained)
    assert torch.equal(logits(compiled, ids), trained)  # and again


@pytest.fixture
def deterministic():
    """Our gradient of attention; operators of torch that have no deterministic kernel only warn."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_recomputed_blocks_give_the_same_gradients(compiled):
    ids = random_ids(compiled, 2, 65).cuda()

    def gradients():
        compiled.zero_grad(set_to_none=True)
        logits(compiled, ids).float().logsumexp(-1).sum().backward()
        return {n: p.grad.clone() for n, p in compiled.named_parameters()}

    kept = gradients()
    compiled.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        recomputed = gradients()
    finally:
        compiled.gradient_checkpointing_disable()
    different = [n for n in kept if not torch.equal(kept[n], recomputed[n])]
    assert not different


@pytest.mark.parametrize("count", COUNTS)
def test_a_row_does_not_depend_on_how_many_there_are(compiled, count):  # [N15, K12]
    ids = random_ids(compiled, 1, LONGEST).cuda()
    with torch.no_grad():
        whole, few = logits(compiled, ids), logits(compiled, ids[:, :count])
    assert torch.equal(few, whole[:, :count])


def test_row_mean_is_a_mean_and_its_rows_are_alone():
    x = torch.randn(LONGEST, 5000, device="cuda")
    mean = torch.ops.jetgraph.row_mean(x)
    exact = x.double().mean(-1, keepdim=True)
    assert (mean.double() - exact).abs().max() < 1e-6  # at worst Σ|x| / C · 47 roundings of 2^-24; errors mostly cancel
    for count in COUNTS:
        assert torch.equal(torch.ops.jetgraph.row_mean(x[:count]), mean[:count])


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_a_sequence_does_not_depend_on_its_batch(compiled, batch):
    ids = random_ids(compiled, 64, 17).cuda()
    with torch.no_grad():
        whole, few = logits(compiled, ids), logits(compiled, ids[:batch])
    assert torch.equal(few, whole[:batch])

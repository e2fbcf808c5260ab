"""What real trainers do around a compiled model, bit for bit against an eager reference that does the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import jetgraph
from jetgraph.lowering import reference as kernels
from tests.core.eager_reference import ReferenceHead, ReferenceLinear, make_reference
from tests.core.small_models import one_step, random_ids, random_model

pytestmark = pytest.mark.slow


def differing(model, other) -> list[str]:
    theirs = dict(other.named_parameters())
    return [n for n, p in model.named_parameters() if not torch.equal(p, theirs[n])]


def train(model, *, steps: int, accumulate: int = 2, autocast: bool = False) -> None:
    """AdamW over accumulated, clipped gradients of growing sequences."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(steps):
        for micro in range(accumulate):
            ids = random_ids(model, 1 + micro, 20 + 7 * step, seed=10 * step + micro)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(input_ids=ids, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())
            (loss / accumulate).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        optimizer.step()
        optimizer.zero_grad()


def test_optimizer_steps_with_accumulation_and_clipping():
    model = random_model()
    expected = make_reference(copy.deepcopy(model))
    before = copy.deepcopy(model.state_dict())
    jetgraph.compile(model, "jet")
    train(model, steps=3)
    train(expected, steps=3)
    assert differing(model, expected) == []
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], model.model.layers[0].mlp.up_proj.weight)
    assert model.jetgraph.num_compiles <= 2  # one sequence, several sequences


def test_float32_masters_under_autocast():
    """One BF16 cast of the master, then everything as with BF16 masters; the master's gradient is FP32."""
    model = random_model().float()
    expected = make_reference(copy.deepcopy(model))
    for name, module in expected.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = _cast_then(module, ReferenceLinear if ".layers." in name else ReferenceHead)
    jetgraph.compile(model, "jet")
    train(model, steps=2, autocast=True)
    train(expected, steps=2, autocast=True)
    assert differing(model, expected) == []
    assert model.model.layers[0].mlp.up_proj.weight.dtype is torch.float32
    model.jetgraph.coverage().require()


def _cast_then(module, function):
    def forward(x):
        operands = (x.bfloat16(), module.weight.bfloat16(), None)
        return function.apply(*operands, False) if function is ReferenceLinear else function.apply(*operands)

    return forward


@pytest.fixture(scope="module")
def expected_step():
    model = jetgraph.compile(random_model(layers=4), "jet")
    return one_step(model, random_ids(model, 2, 40))


def assert_step(model, expected) -> None:
    logits, gradients = one_step(model, random_ids(model, 2, 40))
    assert torch.equal(logits, expected[0])
    assert [n for n in expected[1] if not torch.equal(gradients[n], expected[1][n])] == []


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("layers", ["all", "half"])
def test_activation_checkpointing_of_transformers(expected_step, reentrant, layers):
    """A3: the recomputed forward runs the same FP8 flow, outside and inside of a first forward's context."""
    model = jetgraph.compile(random_model(layers=4), "jet")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if layers == "half":
        for layer in model.model.layers[::2]:
            layer.gradient_checkpointing = False
    assert_step(model, expected_step)
    runs = [model.jetgraph.regions[f"model.layers.{i}"].executions[f"model.layers.{i}"] for i in range(4)]
    forwards = [run["forward"] + run["inference"] for run in runs]
    assert forwards == ([2, 2, 2, 2] if layers == "all" else [1, 2, 1, 2])


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_by_hand_around_two_blocks(expected_step, reentrant):
    """A3, as the row has it: `torch.utils.checkpoint` around two lowered layers."""
    model = jetgraph.compile(random_model(layers=4), "jet")
    for layer in model.model.layers[1:3]:
        layer.forward_inside = layer.__call__

    class Checkpointed(torch.nn.Module):
        def __init__(self, layer) -> None:
            super().__init__()
            self.layer = layer
            self.attention_type = getattr(layer, "attention_type", None)

        def forward(self, hidden, **options):
            return checkpoint(lambda h: self.layer(h, **options), hidden, use_reentrant=reentrant)

    inner = list(model.model.layers)
    model.model.layers = torch.nn.ModuleList([inner[0], Checkpointed(inner[1]), Checkpointed(inner[2]), inner[3]])
    logits, gradients = one_step(model, random_ids(model, 2, 40))
    assert torch.equal(logits, expected_step[0])
    gradients = {n.replace(".layer.", "."): g for n, g in gradients.items()}
    assert [n for n in expected_step[1] if not torch.equal(gradients[n], expected_step[1][n])] == []


def test_weights_changed_in_place_are_quantised_anew():
    """A5: no stale codes, however the weight changes; doubling a weight doubles dx and leaves the codes."""
    model = jetgraph.compile(random_model(), "jet")
    down = model.model.layers[1].mlp.down_proj
    ids = random_ids(model, 1, 30)

    def doubled() -> torch.Tensor:
        return down.weight.detach() * 2

    before = kernels.quantize(down.weight.detach(), 128, 128, 448.0, 1e-12, "div", False)[0]
    after = kernels.quantize(doubled(), 128, 128, 448.0, 1e-12, "div", False)[0]
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    changes = {
        "optimizer-like add": lambda: down.weight.data.add_(down.weight.data),
        "copy_": lambda: down.weight.data.copy_(doubled()),
        "data =": lambda: setattr(down.weight, "data", doubled()),
        "load_state_dict": lambda: down.load_state_dict({"weight": doubled()}),
    }
    for name, change in changes.items():
        fresh = random_model()
        fresh.load_state_dict(model.state_dict())
        old, _ = one_step(model, ids)
        with torch.no_grad():
            change()
            fresh.model.layers[1].mlp.down_proj.weight.copy_(down.weight)
        logits, gradients = one_step(model, ids)
        expected_logits, expected = one_step(jetgraph.compile(fresh, "jet"), ids)
        assert not torch.equal(logits, old), name
        assert torch.equal(logits, expected_logits), name
        assert [n for n in expected if not torch.equal(gradients[n], expected[n])] == [], name


def test_dx_doubles_exactly_with_the_weight():
    """A5 at one layer: dX uses the new weights."""
    model = jetgraph.compile(random_model(layers=1), "jet")
    linear = model.model.layers[0].mlp.down_proj
    x = torch.randn(17, linear.in_features, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(17, linear.out_features, dtype=torch.bfloat16)
    (dx,) = torch.autograd.grad(linear(x), x, dy)
    with torch.no_grad():
        linear.weight.mul_(2)
    (twice,) = torch.autograd.grad(linear(x), x, dy)
    assert torch.equal(twice, dx * 2)


def test_frozen_weights_and_frozen_inputs():
    model = random_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1.mlp" in name)
    expected = make_reference(copy.deepcopy(model))
    jetgraph.compile(model, "jet")
    ids = random_ids(model, 1, 30)
    logits, gradients = one_step(model, ids)
    expected_logits, expected_gradients = one_step(expected, ids)
    assert torch.equal(logits, expected_logits)
    assert set(gradients) == {f"model.layers.1.mlp.{p}_proj.weight" for p in ("gate", "up", "down")}
    assert all(torch.equal(gradients[n], expected_gradients[n]) for n in expected_gradients)

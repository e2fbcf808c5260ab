"""Why a whole-model compile of a stock model moves gradients, and why it cannot here: docs/findings-gradients.md.

python -m tests.core.test_whole_model_gradients     # the table of that page
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jetgraph
from tests.core.eager_reference import make_reference
from tests.core.small_models import one_step, random_ids, random_model

SMALL = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Two query heads share one KV head."""
UNGROUPED = {**SMALL, "num_key_value_heads": 4}


# ----------------------------------------------------------------------------------------------- the one operator


def value_gradient(upstream: list[float], dtype: torch.dtype, *, native: bool) -> float:
    """dV of one token whose only KV head serves ``len(upstream)`` query heads; the exact answer is ``sum(upstream)``.

    One token attends to itself with weight 1, so each query head hands on exactly its own upstream gradient, and all
    that the kernel computes is their sum.  ``native``: the kernel's own grouped-query attention; else KV repeated.
    """
    heads, size = len(upstream), 64
    query = torch.zeros(1, heads, 1, size, dtype=dtype, requires_grad=True)
    key, value = (torch.zeros(1, 1, 1, size, dtype=dtype, requires_grad=True) for _ in range(2))
    shared = (key, value) if native else (key.expand(1, heads, 1, size), value.expand(1, heads, 1, size))
    out = F.scaled_dot_product_attention(query, *shared, enable_gqa=native)
    out.backward(torch.tensor(upstream, dtype=dtype).view(1, heads, 1, 1).expand(out.shape).contiguous())
    gradients = set(value.grad.flatten().tolist())
    assert len(gradients) == 1
    return gradients.pop()


STEP = 2.0**-8
"""Half the distance between BF16 numbers above 1: what BF16 loses when it is added to 1."""


@pytest.mark.parametrize("heads", [4, 8, 64])
def test_grouped_attention_of_the_cpu_kernel_adds_heads_in_bf16(heads):
    upstream = [1.0] + [STEP] * (heads - 1)
    exact = sum(upstream)
    assert value_gradient(upstream, torch.float32, native=True) == exact
    assert value_gradient(upstream, torch.bfloat16, native=True) == 1.0  # each addend is rounded away, one by one
    once = torch.tensor(exact).to(torch.bfloat16).item()
    assert value_gradient(upstream, torch.bfloat16, native=False) == once > 1.0


def test_its_result_depends_on_the_order_of_the_heads():
    upstream = [1.0] + [STEP] * 7
    gradients = {value_gradient(order, torch.bfloat16, native=True) for order in (upstream, upstream[::-1])}
    assert gradients == {1.0, 1.03125}


# -------------------------------------------------------------------------------------------------- stock models


def stock(kind: str = "llama", *, sizes: dict[str, int] = SMALL, layers: int = 1, attention: str = "sdpa"):
    model = random_model(kind, layers=layers, sizes=sizes)
    model.set_attn_implementation(attention)
    return model


def compiled_step(model, ids: Tensor, **inputs) -> tuple[Tensor, dict[str, Tensor]]:
    torch._dynamo.reset()
    logits, gradients = one_step(torch.compile(model, backend="aot_eager", fullgraph=True), ids, **inputs)
    return logits, {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients.items()}


def distance(step: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """‖a - b‖ / ‖b‖ over all gradients as one vector."""
    a, b = (torch.cat([g[name].double().flatten() for name in reference]) for g in (step, reference))
    return ((a - b).norm() / b.norm()).item()


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> set[str]:
    assert one.keys() == other.keys()
    return {name for name in one if not torch.equal(one[name], other[name])}


def causal(ids: Tensor) -> Tensor:
    """The mask that transformers leaves out in eager execution and builds while tracing."""
    length = ids.shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril().expand(ids.shape[0], 1, length, length)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 2])
def test_a_stock_model_compiled_whole_differs_behind_k_and_v_alone(batch):
    model = stock()
    ids = random_ids(model, batch, 48)
    logits, gradients = one_step(model, ids)
    compiled_logits, compiled = compiled_step(model, ids)
    assert torch.equal(logits, compiled_logits)
    block = "model.layers.0"
    behind_k_and_v = {f"{block}.self_attn.k_proj.weight", f"{block}.self_attn.v_proj.weight"}
    behind_k_and_v |= {f"{block}.input_layernorm.weight", "model.embed_tokens.weight"}
    assert differing(gradients, compiled) == behind_k_and_v


@pytest.mark.slow
def test_eager_with_the_mask_that_tracing_builds_has_the_compiled_gradients():
    """The mask itself changes no number; it makes transformers repeat K and V instead of asking the kernel to share."""
    model = stock()
    ids = random_ids(model, 2, 48)
    _, compiled = compiled_step(model, ids)
    _, masked = one_step(model, ids, attention_mask=causal(ids))
    assert differing(masked, compiled) == set()


@pytest.mark.slow
@pytest.mark.parametrize("why", ["no groups", "eager attention", "a padded batch"])
def test_nothing_differs_where_both_sides_repeat_k_and_v(why):
    sizes = UNGROUPED if why == "no groups" else SMALL
    model = stock(sizes=sizes, attention="eager" if why == "eager attention" else "sdpa")
    ids = random_ids(model, 2, 48)
    inputs = {}
    if why == "a padded batch":
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][1, -5:] = 0
    logits, gradients = one_step(model, ids, **inputs)
    compiled_logits, compiled = compiled_step(model, ids, **inputs)
    assert torch.equal(logits, compiled_logits)
    assert differing(gradients, compiled) == set()


@pytest.mark.slow
def test_neither_gradient_is_wrong():
    """Against float64 both sides have the error of BF16, and it is larger than what separates them."""
    model = stock(layers=2)
    ids = random_ids(model, 1, 48)
    _, exact = one_step(copy.deepcopy(model).double(), ids)
    _, gradients = one_step(model, ids)
    _, compiled = compiled_step(model, ids)
    assert 0 < distance(compiled, gradients) < min(distance(gradients, exact), distance(compiled, exact))
    assert distance(compiled, exact) == pytest.approx(distance(gradients, exact), rel=0.1)


# ------------------------------------------------------------------------------------------------------- jetgraph


@pytest.mark.slow
def test_a_model_that_jetgraph_compiles_whole_has_the_reference_gradients():
    """One attention operator, told the grouping and no mask, runs in eager code and in every graph."""
    model = random_model(sizes=SMALL)
    reference = make_reference(copy.deepcopy(model))
    jetgraph.compile(model, "jet", scope="whole")
    for batch, length in ((1, 24), (2, 17)):
        ids = random_ids(model, batch, length)
        logits, gradients = one_step(model, ids)
        expected_logits, expected = one_step(reference, ids)
        assert torch.equal(logits, expected_logits)
        assert differing(gradients, expected) == set()


# ---------------------------------------------------------------------------------------------- the page's table


def main() -> None:
    cases = [
        ("llama", 2, "sdpa", torch.float32, SMALL),
        ("llama", 2, "eager", torch.bfloat16, SMALL),
        ("llama", 2, "sdpa", torch.bfloat16, UNGROUPED),
        ("llama", 2, "sdpa", torch.bfloat16, SMALL),
        ("llama", 2, "sdpa", torch.bfloat16, {**SMALL, "num_key_value_heads": 1}),
        ("qwen2", 2, "sdpa", torch.bfloat16, SMALL),
        ("llama", 12, "sdpa", torch.bfloat16, SMALL),
        ("qwen3", 12, "sdpa", torch.bfloat16, SMALL),
    ]
    columns = "model, layers, attention, heads : KV heads, dtype, compiled - eager, worst parameter"
    names = [*columns.split(", "), "eager - float64", "compiled - float64"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for kind, layers, attention, dtype, sizes in cases:
        model = stock(kind, sizes=sizes, layers=layers, attention=attention).to(dtype)
        ids = random_ids(model, 1, 48)
        _, exact = one_step(copy.deepcopy(model).double(), ids)
        logits, eager = one_step(model, ids)
        compiled_logits, compiled = compiled_step(model, ids)
        assert torch.equal(logits, compiled_logits)
        worst = max((distance({n: compiled[n]}, {n: eager[n]}), n.removeprefix("model.")) for n in eager)
        heads = f"{sizes['num_attention_heads']} : {sizes['num_key_value_heads']}"
        numbers = (distance(compiled, eager), distance(eager, exact), distance(compiled, exact))
        total, left, right = (f"{100 * x:.2g} %" for x in numbers)
        where = f"{100 * worst[0]:.2g} %: {worst[1]}" if worst[0] else "none"
        row = (kind, layers, attention, heads, str(dtype)[6:], total, where, left, right)
        print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()

"""A model captured as one graph, and exported programs: the same bits as block by block."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.export import Dim, export

import jetgraph
from jetgraph.compiler import CompileError
from jetgraph.exported import ExportError
from jetgraph.lowering.masks import UnknownMask
from tests.core.eager_reference import make_reference
from tests.core.small_models import random_ids, random_model
from tests.core.test_compile import assert_same_step

pytestmark = pytest.mark.slow


def test_a_model_compiled_whole_equals_the_reference():
    """One batch and several, no mask given: where stock `aot_eager` differs from eager (joint-graph pitfall 9)."""
    model = random_model("llama", tied=True)
    expected = make_reference(copy.deepcopy(model))
    jetgraph.compile(model, "jet", scope="whole")
    for batch, length in ((1, 40), (2, 20), (1, 77)):
        assert_same_step(model, expected, random_ids(model, batch, length))
    assert model.jetgraph.num_compiles == 2
    report = model.jetgraph.coverage().require()
    assert {row.ran for row in report.rows} == {"region x3"}
    assert report.rows[0].roles == ("FPROP", "DGRAD", "WGRAD")


def test_a_model_compiled_whole_refuses_masks_that_it_cannot_prove():
    model = jetgraph.compile(random_model("llama", layers=1), "jet", scope="whole")
    ids = random_ids(model, 1, 12)
    with pytest.raises(UnknownMask, match="compiled whole got attention_mask; .* compile it with scope='blocks'"):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    with pytest.raises(UnknownMask, match="got position_ids that restart"):
        model(input_ids=ids, position_ids=torch.arange(12)[None] % 6)
    assert model.jetgraph.num_compiles == 0


class Logits(torch.nn.Module):
    """What gets exported: tensors in, a tensor out."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=ids, use_cache=False).logits


def exported(model, ids):
    sizes = {"ids": {0: Dim.AUTO, 1: Dim.AUTO}}
    return export(Logits(model), (ids,), dynamic_shapes=sizes, strict=False)


def gradients(module, ids):
    logits = module(ids)
    parameters = dict(module.named_parameters())
    (logits.float() * torch.linspace(-1, 1, logits.shape[-1])).sum().backward()
    return logits.detach(), {n.removeprefix("inner."): p.grad for n, p in parameters.items()}


def test_an_exported_program_is_compiled_by_fqn():
    model = random_model("llama", layers=1)
    ids = random_ids(model, 2, 20)
    program = jetgraph.compile(exported(model, ids), "jet", provider="stock")
    logits, _ = gradients(program, ids)
    compiled = jetgraph.compile(model, "jet", provider="stock")
    assert torch.equal(logits, gradients(Logits(compiled), ids)[0])
    rows = {row.fqn: row for row in program.jetgraph.coverage().require().rows}
    assert rows["inner.model.layers.0.mlp.down_proj"].roles == ("FPROP", "DGRAD", "WGRAD")
    assert rows["inner.lm_head"].ran == "torch's own nn.Linear"
    assert set(dict(program.named_parameters())) == {f"inner.{n}" for n, _ in model.named_parameters()}


def test_an_exported_program_keeps_to_torchs_attention_or_is_refused():
    model = random_model("llama", layers=1)
    with pytest.raises(CompileError, match=r"runs torch's own attention \(scaled_dot_product_attention"):
        jetgraph.compile(exported(model, random_ids(model, 2, 20)), "jet")


def test_a_compiled_model_exports_its_precision():
    """Whoever runs the exported program runs the same operators: logits and gradients bit for bit."""
    model = jetgraph.compile(random_model("llama", layers=1, tied=True), "jet")
    ids = random_ids(model, 2, 20)
    expected = gradients(Logits(model), ids)
    model.zero_grad()
    program = exported(model, ids)
    module = program.module()
    targets = [str(n.target) for n in module.graph.nodes]
    assert targets.count("jetgraph.linear.default") == 7
    logits, grads = gradients(module, ids)
    assert torch.equal(logits, expected[0])
    assert all(torch.equal(g, expected[1].get(n, expected[1]["model.embed_tokens.weight"])) for n, g in grads.items())


def test_a_linear_with_a_computed_weight_is_refused():
    class Computed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(4, 4, dtype=torch.bfloat16))

        def forward(self, x):
            return torch.nn.functional.linear(x, self.weight * 2)

    program = export(Computed(), (torch.randn(3, 4, dtype=torch.bfloat16),))
    with pytest.raises(
        ExportError, match=r"node linear is a linear .* expected one of an nn.Linear whose module is known"
    ):
        jetgraph.compile(program, "bf16", provider="stock")


def test_a_linear_written_inside_another_module_is_refused():
    class Inside(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)

        def forward(self, x):
            return torch.nn.functional.linear(x, self.up.weight)

    program = export(torch.nn.Sequential(Inside()), (torch.randn(3, 4, dtype=torch.bfloat16),))
    with pytest.raises(ExportError, match=r"is a linear inside 0; expected one of an nn.Linear"):
        jetgraph.compile(program, "bf16", provider="stock")


def test_a_model_compiled_whole_refuses_a_call_that_is_not_causal():
    model = jetgraph.compile(random_model("llama", layers=1), "jet", scope="whole")
    with pytest.raises(UnknownMask, match="compiled whole got is_causal"):
        model(input_ids=random_ids(model, 1, 12), is_causal=False)
    model.config.is_causal = False
    with pytest.raises(UnknownMask, match="config.is_causal is False"):
        model(input_ids=random_ids(model, 1, 12))

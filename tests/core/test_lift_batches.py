"""Batches: however the sequences of a step lie in memory, its graph is the same, and masks count only when proven."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import jetgraph
import jetgraph.lowering.torch_ops
from jetgraph.batch import Sequences
from jetgraph.fx_record import record_graph
from jetgraph.interpret import interpret
from jetgraph.lift.lifter import Lifter, SequenceMask, SequenceStarts
from jetgraph.normal_form import TermBuilder
from jetgraph.precision import BF16
from jetgraph.replay import replay_step
from jetgraph.trainer import capture_step
from tests.core.small_models import random_ids, random_model

PACKED = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 0, 1, 2, 3, 4, 5, 6]])
LEFT = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 11])
RIGHT = torch.tensor([[1] * 11, [1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "policy", "provider"), [
    ("llama", "jet", "reference"), ("qwen3", "jet", "reference"), ("llama", "bf16", "stock"),
])  # fmt: skip
def test_one_graph_for_every_arrangement(kind, policy, provider):
    """One sequence, several, packed, padded on either side: one digest, and each replays its own bits."""
    model = jetgraph.compile(random_model(kind), policy, provider=provider)
    plain = capture_step(model.jetgraph, random_ids(model, 1, 53)).graph
    unmasked = {
        "two": capture_step(model.jetgraph, random_ids(model, 2, 29)),
        "as many rows as K/V heads": capture_step(model.jetgraph, random_ids(model, 2, 4)),
    }
    masked = {
        "padded right": capture_step(model.jetgraph, random_ids(model, 2, 11), attention_mask=RIGHT),
        "padded left": capture_step(model.jetgraph, random_ids(model, 2, 11), attention_mask=LEFT),
        "packed": capture_step(model.jetgraph, random_ids(model, 1, 17), position_ids=PACKED),
    }
    for name, step in (unmasked | masked).items():
        graph = replay_step(model, step)
        assert graph.meta["unknown"] == [], name
        assert graph.meta["replay"]["passed"], (name, graph.meta["replay"]["cases"])
        assert forward_digest(graph) == forward_digest(plain), name
        if name in unmasked or provider == "reference":  # with a mask transformers repeats K and V for SDPA, whose
            assert graph.semantic_digest == plain.semantic_digest, name  # gradients then are other terms


def forward_digest(graph):
    return graph.restrict({name: i for name, i in graph.outputs.items() if "grad." not in name}).semantic_digest


# --------------------------------------------------------------------------------------------------------- evidence


def sequences(positions, real=None):
    return Sequences.of(positions, torch.ones_like(positions, dtype=torch.bool) if real is None else real.bool())


def test_where_sequences_start():
    assert sequences(PACKED).starts[0].tolist() == [0] * 8 + [8] * 2 + [10] * 7
    left = sequences((LEFT.cumsum(1) - 1).clamp_min(0), LEFT)
    assert left.starts[LEFT.bool()].tolist() == [4] * 7 + [0] * 11
    assert not left.rows_are_sequences
    assert sequences(torch.arange(11).expand(2, -1), RIGHT).rows_are_sequences
    assert not sequences(PACKED).rows_are_sequences


def own_prefix(batch: Sequences, window: int = 0) -> torch.Tensor:
    """[B, 1, S, S] by the definition, one pair at a time."""
    rows, length = batch.starts.shape
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for b in range(rows):
        for i in range(length):
            first = max(int(batch.starts[b, i]), i - window + 1 if window else 0)
            mask[b, 0, i, first : i + 1] = True
    return mask


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize(
    "batch", [sequences(PACKED), sequences((LEFT.cumsum(1) - 1).clamp_min(0), LEFT)], ids=["packed", "left"]
)
def test_masks_are_recognised_by_their_values(batch, window):
    mask = own_prefix(batch, window)
    additive = torch.zeros(mask.shape, dtype=torch.bfloat16).masked_fill(~mask, float("-inf"))
    assert batch.recognise(mask) == SequenceMask(window)
    assert batch.recognise(additive) == SequenceMask(window, additive=True)
    assert batch.recognise(batch.starts) == SequenceStarts()
    pair = tuple(x[-1] for x in torch.where(~mask & batch.real[:, None, :, None]))
    for wrong, shown in ((mask.clone(), True), (additive.clone(), 0.0)):
        wrong[pair] = shown
        assert batch.recognise(wrong) is None
    assert batch.recognise(batch.starts + batch.real) is None
    assert batch.recognise(additive + 1.0) is None
    assert batch.recognise(torch.where(additive == 0, additive, -5.0)) is None  # a bias on the scores, no mask


def test_padding_may_hold_anything():
    batch = sequences(torch.arange(11).expand(2, -1), RIGHT)
    starts = batch.starts.clone()
    starts[1, 8:] = 7
    assert batch.recognise(starts) == SequenceStarts()


# ------------------------------------------------------------------------------------- what the operator's mask becomes


def lifted_attention(first, *, rows_are_sequences=True, window=4):
    """The lifter after `jetgraph::attention` over [2, H, 5, 4] with ``first`` bound to this."""
    shapes = [(2, 3, 5, 4), (2, 1, 5, 4), (2, 1, 5, 4)]
    tensors = [torch.randn(s, generator=torch.Generator().manual_seed(0)).bfloat16() for s in shapes]
    starts = torch.zeros(2, 5, dtype=torch.int64)

    def call(q, k, v, starts):
        given = None if first is None else starts
        return torch.ops.jetgraph.attention(q, k, v, 0.5, window, 2.0, given)[0]

    ops = record_graph(make_fx(call)(*tensors, starts))
    builder = TermBuilder()
    lifter = Lifter(builder, (2, 5))
    lifter.rows_are_sequences = rows_are_sequences
    bound = {}
    for op, shape in zip(ops, shapes, strict=False):
        term = builder.intern("input", (), {"name": op.name}, ("T", shape[1] * shape[3]), BF16)
        flat = lifter.layouts.view(lifter.layouts.token_matrix(term), (2, 5, shape[1], shape[3]))
        bound[op.name] = lifter.layouts.permute(flat, (0, 2, 1, 3))
    bound[ops[3].name] = lifter.token_input("starts", 2) if first == "unproven" else first
    lifter.outputs(ops, lifter.run(ops, bound))
    return lifter


@pytest.mark.parametrize(("first", "rows"), [(SequenceStarts(), False), (SequenceStarts(), True), (None, True)])
def test_proven_starts_and_plain_rows_are_one_term(first, rows):
    lifter = lifted_attention(first, rows_are_sequences=rows)
    assert lifter.unknown == []
    (node,) = (n for n in lifter.builder.nodes if n.op == "attention")
    attrs = {key: node.attr(key) for key in ("mask", "window", "softcap", "heads", "kv_heads", "scale")}
    assert attrs == {"mask": "causal", "window": 4, "softcap": 2.0, "heads": 3, "kv_heads": 1, "scale": 0.5}


@pytest.mark.parametrize(("first", "rows"), [("unproven", True), (None, False)])
def test_what_is_not_proven_is_unknown(first, rows):
    lifter = lifted_attention(first, rows_are_sequences=rows)
    assert not any(node.op == "attention" for node in lifter.builder.nodes)
    assert any("jetgraph.attention" in name for name in lifter.unknown)


# ------------------------------------------------------------------------------------------------- torch's attention

SDPA = torch.ops.aten


def sdpa(name, q, k, v, grad, mask, dropout=0.0):
    """Out and gradients of one of torch's kernels, called as its schema says."""
    if name == "flash":
        out, *rest, _debug = SDPA._scaled_dot_product_flash_attention(q, k, v, dropout, True, scale=0.5)
        lse, *sizes, seed, offset = rest
        return out, *SDPA._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, *sizes, dropout, True, seed, offset, scale=0.5
        )
    if name == "efficient":
        out, *rest = SDPA._scaled_dot_product_efficient_attention(q, k, v, mask, True, dropout, mask is None, scale=0.5)
        return out, *SDPA._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, mask, out, *rest, dropout, [True, True, True, False], mask is None, scale=0.5
        )[:3]
    out, lse, *sizes, seed, offset, _debug = SDPA._scaled_dot_product_cudnn_attention(
        q, k, v, mask, True, dropout, mask is None, scale=0.5
    )
    return out, *SDPA._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, seed, offset, mask, *sizes, dropout, mask is None, scale=0.5
    )


def lifted_sdpa(name, masked, dropout=0.0):
    """The lifter after `sdpa` over [2, 3, 8, 64], with a proven mask or none."""
    shape = (2, 3, 8, 64)
    tensors = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(4)]
    mask = torch.empty(2, 1, 8, 8, dtype=torch.bfloat16, device="meta") if masked else None
    ops = record_graph(make_fx(lambda *given: sdpa(name, *given, dropout))(*tensors, mask))
    builder = TermBuilder()
    lifter = Lifter(builder, (2, 8))
    bound = {}
    for op, what in zip(ops, ("q", "k", "v", "grad"), strict=False):
        term = builder.intern("input", (), {"name": what}, ("T", 3 * 64), BF16)
        flat = lifter.layouts.view(lifter.layouts.token_matrix(term), (2, 8, 3, 64))
        bound[op.name] = lifter.layouts.permute(flat, (0, 2, 1, 3))
    bound[ops[4].name] = SequenceMask(0, additive=True) if masked else None
    lifter.outputs(ops, lifter.run(ops, bound))
    return lifter


@pytest.mark.parametrize(("name", "masked"), [
    ("flash", False), ("efficient", False), ("efficient", True), ("cudnn", False), ("cudnn", True),
])  # fmt: skip
def test_the_attention_that_torch_runs_on_a_gpu_is_lifted(name, masked):
    lifter = lifted_sdpa(name, masked)
    builder = lifter.builder
    assert lifter.unknown == []
    kernel = f"aten::_scaled_dot_product_{name}_attention"
    (forward,) = (n for n in builder.nodes if n.op == "attention")
    (backward,) = (n for n in builder.nodes if n.op == "attention_backward")
    assert (forward.kernel, backward.kernel) == (kernel, f"{kernel}_backward")
    for node in (forward, backward):
        assert {key: node.attr(key) for key in ("mask", "window", "softcap", "heads", "kv_heads", "scale")} == {
            "mask": "causal", "window": 0, "softcap": 0.0, "heads": 3, "kv_heads": 3, "scale": 0.5,
        }  # fmt: skip
    assert [builder.nodes[i].attr("name") for i in forward.inputs] == ["q", "k", "v"]
    assert [builder.nodes[i].attr("name") for i in backward.inputs] == ["grad", "q", "k", "v"]


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn"])
def test_dropout_in_it_is_refused(name):
    lifter = lifted_sdpa(name, False, dropout=0.1)
    assert not any(node.op.startswith("attention") for node in lifter.builder.nodes)
    refused = [text.split(" at ")[0] for text in lifter.unknown]
    call = f"aten._scaled_dot_product_{name}_attention"
    assert refused == [f"{call}.default: attention dropout", f"{call}_backward.default: attention dropout"]


@pytest.mark.parametrize(("columns", "known"), [(11, True), (10, False)])
def test_a_mask_that_is_padded_and_cut_again_is_the_mask(columns, known):
    """As SDPA does for the memory-efficient kernel: rows of 11 become rows of 16, of which 11 are read."""

    def call(mask):
        wide = torch.nn.functional.pad(mask, (0, 5))
        return wide[..., :columns].expand(2, 3, 11, columns)

    ops = record_graph(make_fx(call)(torch.zeros(2, 1, 11, 11, dtype=torch.bfloat16)))
    lifter = Lifter(TermBuilder(), (2, 11))
    mask = SequenceMask(0, additive=True)
    (out,) = lifter.outputs(ops, lifter.run(ops, {ops[0].name: mask}))
    assert (out == mask, lifter.unknown == []) == (known, known)


def test_one_mask_for_every_head_is_recognised():
    batch = sequences(torch.arange(11).expand(2, -1), RIGHT)
    mask = torch.ones(11, 11).tril().bool().expand(2, 1, 11, 11)
    assert batch.recognise(mask.expand(2, 5, 11, 11)) == SequenceMask(0)
    assert batch.recognise(mask.repeat(1, 5, 1, 1)) is None


# --------------------------------------------------------------------------------------------------------------- bias


@pytest.mark.parametrize("op", ["addmm", "row_tile_gemm"])
def test_a_bias_is_added_before_the_one_rounding(op):
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 448, generator=generator).bfloat16() for n in (53, 64))
    b = torch.randn(64, generator=generator).bfloat16()
    forms = {
        "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
        "row_tile_gemm": lambda x, w, b: torch.ops.jetgraph.row_tile_gemm(x, w, b),
    }
    ops = record_graph(make_fx(forms[op])(x, w, b))
    builder = TermBuilder()
    lifter = Lifter(builder, 53)
    leaf = lifter.layouts.token_matrix(builder.intern("input", (), {"name": "x"}, ("T", 448), BF16))
    parameters = [lifter.parameter(name, t.shape, "bfloat16") for name, t in (("w", w), ("b", b))]
    value = lifter.outputs(ops, lifter.run(ops, dict(zip((o.name for o in ops), [leaf, *parameters], strict=False))))[0]
    graph = builder.graph("g", {"out": lifter.layouts.read(value)}, {})
    assert [node.op for node in graph.nodes if node.op in ("gemm", "add", "round")] == ["gemm", "add", "round"]
    got = interpret(graph, {"x": x, "w": w, "b": b})["out"]
    assert torch.equal(got, forms[op](x, w, b))
    exact = (x.double() @ w.double().T + b.double()).float().bfloat16()
    twice = ((x.double() @ w.double().T).bfloat16().float() + b.float()).bfloat16()
    assert (got != exact).sum() * 20 < (got != twice).sum()  # rounding twice differs in many places, FP32 sums in few

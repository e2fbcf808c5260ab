"""Fusions: what each makes of a graph, that every bit stays, that a doubtful one is refused, and what it saves."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import jetgraph
from jetgraph.node import Phase
from jetgraph.passes import fuse as fusing
from jetgraph.passes.edit import mark_forward
from jetgraph.passes.fuse.legality import disagreement
from jetgraph.trainer import capture_step
from tests.core.small_models import one_step, random_ids, random_model

ops = torch.ops.jetgraph
JET = (448.0, 1e-12, "div", False)
SHORT = {"jetgraph.": "", "aten.": "", ".default": "", ".Tensor_Scalar": "", ".Tensor": "", ".dim": ""}


def traced(function, *inputs: Tensor) -> GraphModule:
    module = make_fx(function, tracing_mode="fake")(*inputs)
    mark_forward(module.graph)
    module.graph.eliminate_dead_code()
    return module


def text(module: GraphModule) -> list[str]:
    """One line a call: operator and the nodes that it reads, numbered in order; results of tuples as n.i."""
    names, lines = {}, []
    for node in module.graph.nodes:
        if node.op == "placeholder":
            names[node] = node.name.removesuffix("_1")
        elif node.op == "call_function" and node.target.__name__ == "getitem":
            names[node] = f"{names[node.args[0]]}.{node.args[1]}"
        elif node.op == "call_function":
            names[node] = f"%{len(lines)}"
            target = str(node.target)
            for long, short in SHORT.items():
                target = target.replace(long, short)
            lines.append(f"{names[node]} = {target}({', '.join(names[n] for n in node.all_input_nodes)})")
    output = next(n for n in module.graph.nodes if n.op == "output")
    return [*lines, f"return {', '.join(names[n] for n in output.all_input_nodes)}"]


def residual_norm(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """What Hugging Face's RMSNorm traces to, after a residual add, read by two quantisers."""
    s = x + r
    wide = s.to(torch.float32)
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    y = (w * normed.to(torch.bfloat16)).view(-1, x.shape[-1])
    return (s, *ops.quantize(y, 1, 128, *JET), *ops.quantize_tokens(y, 128, *JET))


def plain_norm(x: Tensor, w: Tensor) -> Tensor:
    """A norm whose result no quantiser reads, as q's and k's."""
    wide = x.to(torch.float32)
    return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)


def rotary(h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Hugging Face's rotary embedding of heads [B, S, H, D]."""
    t, (c, s) = h.transpose(1, 2), (a.unsqueeze(1) for a in (cos, sin))
    half = h.shape[-1] // 2
    return t * c + torch.cat((-t[..., half:], t[..., :half]), -1) * s


def normed_rotary(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The same after the heads' own norm, as `fuse_inverse_rms` leaves it."""
    r = ops.inverse_rms(x, 1e-6, False)
    return rotary(w * (x.float() * r).to(torch.bfloat16), cos, sin)


def gated(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    return ops.quantize(F.silu(gate) * up, 1, 128, *JET)


def gradients(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
    d_gate = torch.ops.aten.silu_backward(dy * up, gate)
    d_up = F.silu(gate) * dy
    return tuple(
        t for d in (d_gate, d_up) for t in (*ops.quantize(d, 1, 128, *JET), *ops.quantize_tokens(d, 128, *JET))
    )


def both_ways(x: Tensor) -> tuple[Tensor, ...]:
    return (*ops.quantize_tokens(x, 128, *JET), *ops.quantize(x, 1, 128, *JET))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


CASES = {
    "norm": (residual_norm, (numbers(2, 5, 320), numbers(2, 5, 320, seed=1), numbers(320, seed=2)), fusing.fuse_norms),
    "norm alone": (plain_norm, (numbers(2, 5, 3, 64), numbers(64, seed=1)), fusing.fuse_inverse_rms),
    "rotary": (rotary, (numbers(2, 5, 3, 64), *(numbers(1, 5, 64, seed=s) for s in (1, 2))), fusing.fuse_rotary),
    "heads' norm and rotary": (
        normed_rotary,
        (numbers(2, 5, 3, 64), numbers(64, seed=3), *(numbers(2, 5, 64, seed=s) for s in (1, 2))),
        fusing.fuse_rotary,
    ),
    "activation": (gated, (numbers(7, 192), numbers(7, 192, seed=1)), fusing.fuse_activations),
    "gradients": (gradients, tuple(numbers(7, 192, seed=s) for s in range(3)), fusing.fuse_activation_gradients),
    "both ways": (both_ways, (numbers(7, 192),), fusing.fuse_copies),
}
BEFORE_AND_AFTER = {
    "norm alone": (
        [
            "%0 = _to_copy(x)",
            "%1 = pow(%0)",
            "%2 = mean(%1)",
            "%3 = add(%2)",
            "%4 = rsqrt(%3)",
            "%5 = mul(%0, %4)",
            "%6 = _to_copy(%5)",
            "%7 = mul(w, %6)",
            "return %7",
        ],
        [
            "%0 = inverse_rms(x)",
            "%1 = _to_copy(x)",
            "%2 = mul(%1, %0)",
            "%3 = _to_copy(%2)",
            "%4 = mul(w, %3)",
            "return %4",
        ],
    ),
    "norm": (
        [
            "%0 = add(x, r)",
            "%1 = _to_copy(%0)",
            "%2 = pow(%1)",
            "%3 = mean(%2)",
            "%4 = add(%3)",
            "%5 = rsqrt(%4)",
            "%6 = mul(%1, %5)",
            "%7 = _to_copy(%6)",
            "%8 = mul(w, %7)",
            "%9 = view(%8)",
            "%10 = quantize(%9)",
            "%11 = quantize_tokens(%9)",
            "return %0, %10.0, %10.1, %11.0, %11.1",
        ],
        ["%0 = rms_norm_quantize(x, r, w)", "return %0.0, %0.2, %0.3, %0.4, %0.5"],
    ),
    "rotary": (
        [
            "%0 = transpose.int(h)",
            "%1 = unsqueeze(cos)",
            "%2 = unsqueeze(sin)",
            "%3 = mul(%0, %1)",
            "%4 = slice(%0)",
            "%5 = neg(%4)",
            "%6 = slice(%0)",
            "%7 = cat(%5, %6)",
            "%8 = mul(%7, %2)",
            "%9 = add(%3, %8)",
            "return %9",
        ],
        ["%0 = rms_norm_rotary(h, cos, sin)", "%1 = transpose.int(%0.0)", "return %1"],
    ),
    "heads' norm and rotary": (
        [
            "%0 = inverse_rms(x)",
            "%1 = _to_copy(x)",
            "%2 = mul(%1, %0)",
            "%3 = _to_copy(%2)",
            "%4 = mul(w, %3)",
            "%5 = transpose.int(%4)",
            "%6 = unsqueeze(cos)",
            "%7 = unsqueeze(sin)",
            "%8 = mul(%5, %6)",
            "%9 = slice(%5)",
            "%10 = neg(%9)",
            "%11 = slice(%5)",
            "%12 = cat(%10, %11)",
            "%13 = mul(%12, %7)",
            "%14 = add(%8, %13)",
            "return %14",
        ],
        ["%0 = rms_norm_rotary(x, w, cos, sin)", "%1 = transpose.int(%0.0)", "return %1"],
    ),
    "activation": (
        ["%0 = silu(gate)", "%1 = mul(%0, up)", "%2 = quantize(%1)", "return %2.0, %2.1"],
        ["%0 = silu_mul_quantize(gate, up)", "return %0.0, %0.1"],
    ),
    "gradients": (
        [
            "%0 = mul(dy, up)",
            "%1 = silu_backward(%0, gate)",
            "%2 = silu(gate)",
            "%3 = mul(%2, dy)",
            "%4 = quantize(%1)",
            "%5 = quantize_tokens(%1)",
            "%6 = quantize(%3)",
            "%7 = quantize_tokens(%3)",
            "return %4.0, %4.1, %5.0, %5.1, %6.0, %6.1, %7.0, %7.1",
        ],
        ["%0 = silu_mul_backward_quantize(dy, gate, up)", "return %0.0, %0.1, %0.2, %0.3, %0.4, %0.5, %0.6, %0.7"],
    ),
    "both ways": (
        ["%0 = quantize_tokens(x)", "%1 = quantize(x)", "return %0.0, %0.1, %1.0, %1.1"],
        ["%0 = quantize_rows_and_tokens(x)", "return %0.2, %0.3, %0.0, %0.1"],
    ),
}


def bits(results: tuple[Tensor, ...]) -> list[Tensor]:
    return [t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()]) for t in results]


def run(module: GraphModule, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    module.recompile()
    return bits(module(*inputs))


@pytest.mark.parametrize("case", CASES)
def test_what_a_fusion_makes_of_a_graph(case):
    function, inputs, fuse = CASES[case]
    module = traced(function, *inputs)
    before, after = BEFORE_AND_AFTER[case]
    assert text(module) == before
    (fusion,) = fuse(module)
    assert fusion.refusal == ""
    assert text(module) == after
    for given in (inputs, [t * 1e3 for t in inputs], [t * 0 for t in inputs]):
        assert all(map(torch.equal, run(module, given), bits(function(*given))))


@pytest.mark.parametrize("case", CASES)
def test_a_fusion_that_changes_a_bit_is_not_applied(case, monkeypatch):
    function, inputs, fuse = CASES[case]
    module = traced(function, *inputs)
    package = f"{fusing.__name__}.{fuse.__module__.rpartition('.')[2]}"
    monkeypatch.setattr(f"{package}.disagreement", lambda *nodes: "getitem differs in bits from getitem_1")
    (fusion,) = fuse(module)
    assert fusion.refusal == "getitem differs in bits from getitem_1"
    assert text(module) == BEFORE_AND_AFTER[case][0]
    assert all(map(torch.equal, run(module, inputs), bits(function(*inputs))))


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (lambda x: x * 9, lambda x: x * 3 * 3, "differs in bits"),  # one rounding against two
        (lambda x: x * 0.0, lambda x: -(x * 0.0), "differs in bits"),  # the sign of zero
        (lambda x: x[:, 1:], lambda x: x[:, :-1], "differs in bits"),
        (lambda x: x.float(), lambda x: x, r"is torch.bfloat16 \[131, 8\]; expected torch.float32 \[131, 8\]"),
        (lambda x: x, lambda x: x[1:], r"is torch.bfloat16 \[130, 8\]; expected torch.bfloat16 \[131, 8\]"),
        (lambda x: x * 2, lambda x: x + x, ""),
    ],
    ids=["rounding", "zero", "places", "dtype", "shape", "equal"],
)
def test_what_the_check_sees(one, other, message):
    module = traced(lambda x: (one(x), other(x)), numbers(131, 8))
    a, b = next(n for n in module.graph.nodes if n.op == "output").args[0]
    leaf = next(n for n in module.graph.nodes if n.op == "placeholder" and isinstance(n.meta["val"], Tensor))
    found = disagreement([a], [b], [leaf])
    assert re.search(message, found) if message else found == ""


def _read_elsewhere(gate, up):
    y = F.silu(gate) * up
    return (y, *ops.quantize(y, 1, 128, *JET))


def _two_rules(gate, up):
    y = F.silu(gate) * up
    return (*ops.quantize(y, 1, 128, *JET), *ops.quantize_tokens(y, 128, 448.0, 1e-10, "div", False))


def _broadcast(gate, up):
    return ops.quantize(F.silu(gate) * up[:1], 1, 128, *JET)


def _gelu(gate, up):
    return ops.quantize(F.gelu(gate) * up, 1, 128, *JET)


@pytest.mark.parametrize("function", [_read_elsewhere, _two_rules, _broadcast, _gelu])
def test_what_is_left_alone(function):
    module = traced(function, numbers(7, 192), numbers(7, 192, seed=1))
    before = text(module)
    assert fusing.fuse(module) == []
    assert text(module) == before


def _times_its_length(x):
    return ops.quantize(x * x.shape[0], 1, 128, *JET)


def _silu_times_its_length(x):
    return ops.quantize(F.silu(x) * x.shape[0], 1, 128, *JET)


def _length_added(x):
    wide = (x + x.shape[0]).to(torch.float32)
    y = x[0] * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    return ops.quantize(y, 1, 128, *JET)


@pytest.mark.parametrize("function", [_times_its_length, _silu_times_its_length, _length_added])
def test_a_size_is_no_operand_of_a_fusion(function):
    """A length that may change is a node of the graph too."""
    module = make_fx(function, tracing_mode="symbolic")(numbers(7, 192))
    mark_forward(module.graph)
    assert not {f.operator for f in fusing.fuse(module)} & {"jetgraph::silu_mul_quantize", "jetgraph::rms_norm_rotary"}
    x = numbers(9, 192, seed=1)
    assert all(map(torch.equal, run(module, (x,)), bits(function(x))))


def _gemma(x, r, w):
    """(1 + w) in FP32 before the rounding: another norm."""
    wide = (x + r).to(torch.float32)
    y = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * (1.0 + w.float())).to(torch.bfloat16)
    return ops.quantize(y.view(-1, 320), 1, 128, *JET)


def _sum_not_mean(x, r, w):
    wide = (x + r).to(torch.float32)
    y = w * (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    return ops.quantize(y.view(-1, 320), 1, 128, *JET)


def _weight_made_late(x, r, w):
    """(1 + w) in BF16, as an operator behind the sum: where the call would stand it does not exist yet."""
    wide = (x + r).to(torch.float32)
    y = (w + 1.0) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(torch.bfloat16)
    return ops.quantize(y.view(-1, 320), 1, 128, *JET)


def _turned_the_other_way(h, cos, sin):
    t, (c, s) = h.transpose(1, 2), (a.unsqueeze(1) for a in (cos, sin))
    return t * c + torch.cat((t[..., 32:], -t[..., :32]), -1) * s


def _pairs_of_neighbours(h, cos, sin):
    t, (c, s) = h.transpose(1, 2), (a.unsqueeze(1) for a in (cos, sin))
    return t * c + torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2) * s


def _wide_angles(h, cos, sin):
    return rotary(h, cos.float(), sin.float())


def _every_second_number(h, cos, sin):
    t, (c, s) = h.transpose(1, 2), (a.unsqueeze(1) for a in (cos, sin))
    return t * c + torch.cat((-t[..., 1::2], t[..., ::2]), -1) * s


def _slices_without_an_end(h, cos, sin):
    t, (c, s), cut = h.transpose(1, 2), (a.unsqueeze(1) for a in (cos, sin)), torch.ops.aten.slice
    return t * c + torch.cat((-cut(t, 3, 32), cut(t, 3, 0, 32)), -1) * s


def _one_angle_for_all(h, cos, sin):
    t, (c, s) = h.transpose(1, 2), (a[0, :1].unsqueeze(1) for a in (cos, sin))
    return t * c + torch.cat((-t[..., 32:], t[..., :32]), -1) * s


@pytest.mark.parametrize(
    "function",
    [_turned_the_other_way, _pairs_of_neighbours, _wide_angles, _every_second_number, _slices_without_an_end,
     _one_angle_for_all],
)  # fmt: skip
def test_other_rotations_are_left_alone(function):
    module = traced(function, *CASES["rotary"][1])
    assert fusing.fuse_rotary(module) == []


def test_a_rotation_whose_norm_is_read_elsewhere_keeps_the_norm():
    def function(x, w, cos, sin):
        h = w * (x.float() * ops.inverse_rms(x, 1e-6, False)).to(torch.bfloat16)
        return rotary(h, cos, sin), h

    inputs = CASES["heads' norm and rotary"][1]
    module = traced(function, *inputs)
    (fusion,) = fusing.fuse_rotary(module)
    assert fusion.refusal == ""
    assert all(map(torch.equal, run(module, inputs), bits(function(*inputs))))


def _in_an_engine(x, w, table, positions):
    """All tokens in a row, x part of wider rows, angles looked up behind the norm."""
    heads = x[:, 64:].view(-1, 3, 64)
    h = (w * (heads.float() * ops.inverse_rms(heads, 1e-6, False)).to(torch.bfloat16)).view(-1, 192)
    cos, sin = table[positions].unsqueeze(0).split(64, -1)
    return rotary(h.view(1, -1, 3, 64), cos, sin)


def test_tokens_in_a_row_and_angles_made_late_are_one_call():
    inputs = numbers(7, 256), numbers(64, seed=1), numbers(9, 128, seed=2), torch.tensor([3, 1, 4, 1, 5, 8, 2])
    module = traced(_in_an_engine, *inputs)
    (fusion,) = fusing.fuse_rotary(module)
    assert fusion.refusal == ""
    left = {str(n.target) for n in module.graph.nodes}
    assert "jetgraph.rms_norm_rotary.default" in left
    assert not left & {"jetgraph.inverse_rms.default", "aten.mul.Tensor"}
    assert all(map(torch.equal, run(module, inputs), bits(_in_an_engine(*inputs))))


@pytest.mark.parametrize("function", [_gemma, _sum_not_mean, _weight_made_late])
def test_other_norms_are_left_alone(function):
    module = traced(function, *CASES["norm"][1])
    assert fusing.fuse_norms(module) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy", "batch", "length"),
    [("llama", "jet", 1, 9), ("llama", "jet", 2, 70), ("qwen3", "jet_ue8m0", 2, 131), ("qwen3", "bf16", 1, 9)],
)
def test_a_fused_model_has_every_bit_and_keeps_less(kind, policy, batch, length):
    plain, fused = (jetgraph.compile(random_model(kind), policy, fused=on) for on in (False, True))
    ids = random_ids(plain, batch, length)
    (logits, grads), (fused_logits, fused_grads) = one_step(plain, ids), one_step(fused, ids)
    assert torch.equal(fused_logits, logits)
    assert [n for n in grads if not torch.equal(grads[n], fused_grads[n])] == []
    with torch.no_grad():
        assert torch.equal(fused(input_ids=ids, use_cache=False).logits, logits)
    fused.jetgraph.coverage().require()
    tried = fused.jetgraph.fusions()
    assert [f for f in tried if f.refusal] == []
    operators = {f.operator.removeprefix("jetgraph::") for f in tried}
    expected = {
        "rms_norm_quantize", "silu_mul_quantize", "silu_mul_backward_quantize", "quantize_rows_and_tokens",
    }  # fmt: skip
    alone = {"inverse_rms"} if kind == "qwen3" or policy == "bf16" else set()
    assert operators == (set() if policy == "bf16" else expected) | alone | {"rms_norm_rotary"}
    if policy != "bf16" and batch == 1:
        kept, less = (sum(s.bytes_per_token or 0 for s in m.jetgraph.saved()) for m in (plain, fused))
        assert less < kept / 1.5
    if batch == 1:
        wide = [s for s in fused.jetgraph.saved() if s.dtype == "float32" and (s.bytes_per_token or 0) > 64]
        assert wide == []  # a norm's FP32 copy is half as large before it is made


@pytest.mark.slow
def test_a_fused_model_is_the_same_graph():
    """Fusions move no rounding point, so nothing that verify compares may change, however the sequences lie."""
    plain, fused = (jetgraph.compile(random_model("qwen3"), fused=on) for on in (False, True))
    packed = torch.tensor([[*range(8), 0, 1, *range(7)]])
    left = torch.tensor([[0] * 4 + [1] * 7, [1] * 11])
    # from the second shape on sizes are symbols, which a program reads off whatever it keeps: codes, too
    for shape, options in [
        ((1, 53), {}), ((2, 29), {}), ((1, 17), {"position_ids": packed}), ((2, 11), {"attention_mask": left})
    ]:  # fmt: skip
        graphs = [capture_step(m.jetgraph, random_ids(m, *shape), **options).graph for m in (plain, fused)]
        assert [g.meta["unknown"] for g in graphs] == [[], []], shape
        assert graphs[0].semantic_digest == graphs[1].semantic_digest, shape
        norms = [sorted(n.fqn for n in g.nodes if n.op == "rsqrt" and n.phase is Phase.FORWARD) for g in graphs]
        assert norms[0] == norms[1]

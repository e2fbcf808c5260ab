"""A small decoder in the vocabulary, built for one side: q/k/v, norms, rotary, attention, gated MLP, tied or free head.

`build("train")` and `build("infer")` are the same terms under other names of places and another order of nodes; the
meta is what both lifters write.  `rewrite` rebuilds a graph with some nodes changed, for mutations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jetgraph.graph import Node, Phase, PrecisionGraph, Role
from jetgraph.normal_form import Provenance, TermBuilder
from jetgraph.ops import COMMUTATIVE
from jetgraph.precision import BF16, F32, Format, Granularity, Precision, Scale

ACTIVATION = Scale(Granularity.per_group(128))
WEIGHT = Scale(Granularity.per_block(128, 128))
KERNELS = {
    f"ref.{name}": {"row_invariant": True} for name in ("gemm", "sum", "attention", "quantize", "combine")
}  # fmt: skip
ROUTE = {
    "top_k": 2, "score": "softmax", "renormalise": True, "scale": 1.0, "tie_break": "lowest index",
    "selection": "computed", "capacity": None,
}  # fmt: skip
CARRIES = {"slice", "cat", "broadcast", "permute", "pick", "neg", "embed"}


@dataclass(frozen=True)
class Model:
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 512
    vocabulary: int = 1000
    experts: int = 0
    """0 is a dense MLP; otherwise each layer routes every token to two of them"""
    activation: Scale | None = ACTIVATION
    weight: Scale | None = WEIGHT
    logprob: bool = True
    backward: bool = False

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim


def build(side: str, model: Model | None = None, **changes: Any) -> PrecisionGraph:
    return _Builder(side, replace(model or Model(), **changes)).graph()


class _Builder:
    def __init__(self, side: str, model: Model) -> None:
        self.side, self.model, self.b = side, model, TermBuilder()
        self.parameters: dict[str, dict[str, Any]] = {}
        self.operands: dict[str, dict[str, str]] = {}
        self.scope: dict[str, dict[str, str]] = {}

    def at(self, fqn: str, role: Role = Role.NONE, phase: Phase = Phase.FORWARD) -> None:
        source = "modeling.py" if self.side == "train" else "engine.py"
        self.b.where = Provenance(fqn, role, phase, f"{source}:{len(fqn)}")

    def parameter(self, name: str, *shape: int) -> int:
        self.parameters[name] = {"digest": sha(name), "shape": list(shape), "format": "bf16"}
        return self.b.parameter(name, shape)

    def linear(self, x: int, fqn: str, rows: int, columns: int, *, fp8: bool = True, weight: str = "") -> int:
        self.at(fqn, Role.FPROP)
        name = weight or f"{fqn}.weight"
        w = self.parameter(name, rows, columns)
        if fp8 and self.model.activation:
            x = self.b.quantize(x, self.model.activation, "ref.quantize")
        if fp8 and self.model.weight:
            w = self.b.quantize(w, self.model.weight, "ref.quantize")
            precision = str(self.b.precision(w))
            self.operands[name] = {"precision": precision, "digest": sha(name + precision)}
        if fp8:
            self.scope[fqn] = {"activation": str(self.b.precision(x)), "weight": str(self.b.precision(w))}
        return self.b.round(self.b.gemm(x, w, "nt", "ref.gemm"), Format.BF16)

    def norm(self, x: int, fqn: str) -> int:
        b, n = self.b, self.model.hidden
        self.at(fqn)
        variance = b.mean(b.pointwise("sq", [x]), n, "ref.sum")
        r = b.pointwise("rsqrt", [b.pointwise("add", [variance, b.const(1e-5)])])
        scaled = b.round(b.pointwise("mul", [x, b.broadcast(r, [(n, False)])]), Format.BF16)
        return b.round(b.pointwise("mul", [self.parameter(f"{fqn}.weight", n), scaled]), Format.BF16)

    def rotary(self, x: int, heads: int, cos: int, sin: int) -> int:
        b, half = self.b, self.model.head_dim // 2
        x1 = b.slice(x, heads, 2 * half, 1, 0, half)
        x2 = b.slice(x, heads, 2 * half, 1, half, 2 * half)
        c, s = (b.broadcast(t, [(heads, False), (half, True)]) for t in (cos, sin))

        def product(left: int, right: int) -> int:
            return b.round(b.pointwise("mul", [left, right]), Format.BF16)

        low = b.round(b.pointwise("sub", [product(x1, c), product(x2, s)]), Format.BF16)
        high = b.round(b.pointwise("add", [product(x2, c), product(x1, s)]), Format.BF16)
        return b.cat([low, high], heads, [half, half], 1)

    def residual(self, x: int, y: int, block: str, norm: str) -> int:
        self.at(block if self.side == "train" else norm)  # the engine fuses the addition into the next norm
        return self.b.round(self.b.pointwise("add", [x, y]), Format.BF16)

    def mlp(self, h: int, fqn: str) -> int:
        b, m = self.b, self.model
        gate = self.linear(h, f"{fqn}.gate_proj", m.intermediate, m.hidden)
        up = self.linear(h, f"{fqn}.up_proj", m.intermediate, m.hidden)
        self.at(f"{fqn}.act_fn" if self.side == "train" else fqn)
        silu = b.round(b.pointwise("silu", [gate]), Format.BF16)
        self.at(fqn)
        y = b.round(b.pointwise("mul", [silu, up]), Format.BF16)
        return self.linear(y, f"{fqn}.down_proj", m.hidden, m.intermediate)

    def experts(self, h: int, fqn: str) -> int:
        b, m = self.b, self.model
        logits = self.linear(h, f"{fqn}.gate", m.experts, m.hidden, fp8=False)
        self.at(fqn)
        weights = b.intern("route", (logits,), ROUTE, ("T", m.experts), F32)  # type: ignore[arg-type]
        results = [self.mlp(h, f"{fqn}.experts.{e}") for e in range(m.experts)]
        self.at(fqn)
        combined = {"order": "expert", "format": "f32"}
        total = b.intern("combine", (weights, *results), combined, ("T", m.hidden), F32, "ref.combine")
        return b.round(total, Format.BF16)

    def graph(self) -> PrecisionGraph:
        b, m = self.b, self.model
        outputs: dict[str, int] = {}
        self.at("model.rotary_emb")
        frequency = self.parameter("model.rotary_emb.inv_freq", m.head_dim // 2)
        position = b.pointwise("int_to_float", [b.input("position")])
        angle = b.pointwise("mul", [b.broadcast(position, [(m.head_dim // 2, False)]), frequency])
        cos, sin = (b.round(b.pointwise(op, [angle]), Format.BF16) for op in ("cos", "sin"))
        self.at("model.embed_tokens")
        table = self.parameter("model.embed_tokens.weight", m.vocabulary, m.hidden)
        x = b.intern("embed", (table, b.input("token")), {}, ("T", m.hidden), BF16)
        for i in range(m.layers):
            block = f"model.layers.{i}"
            h = self.norm(x, f"{block}.input_layernorm")
            kv = m.kv_heads * m.head_dim
            q = self.linear(h, f"{block}.self_attn.q_proj", m.hidden, m.hidden)
            k = self.linear(h, f"{block}.self_attn.k_proj", kv, m.hidden)
            v = self.linear(h, f"{block}.self_attn.v_proj", kv, m.hidden)
            self.at(f"{block}.self_attn" if self.side == "train" else f"{block}.self_attn.rotary_emb")
            q, k = self.rotary(q, m.heads, cos, sin), self.rotary(k, m.kv_heads, cos, sin)
            self.at(f"{block}.self_attn")
            attrs = {"heads": m.heads, "kv_heads": m.kv_heads, "head_dim": m.head_dim, "scale": m.head_dim**-0.5}
            attrs |= {"mask": "causal", "window": 0, "softcap": 0.0}
            a = b.intern("attention", (q, k, v), attrs, ("T", m.hidden), Precision(Format.F32), "ref.attention")  # type: ignore[arg-type]
            outputs |= {f"k.{i}": k, f"v.{i}": v}
            o = self.linear(b.round(a, Format.BF16), f"{block}.self_attn.o_proj", m.hidden, m.hidden)
            x = self.residual(x, o, block, f"{block}.post_attention_layernorm")
            h = self.norm(x, f"{block}.post_attention_layernorm")
            d = self.experts(h, f"{block}.mlp") if m.experts else self.mlp(h, f"{block}.mlp")
            x = self.residual(
                x, d, block, f"model.layers.{i + 1}.input_layernorm" if i + 1 < m.layers else "model.norm"
            )
        h = self.norm(x, "model.norm")
        outputs["logits"] = self.linear(
            h, "lm_head", m.vocabulary, m.hidden, fp8=False, weight="model.embed_tokens.weight"
        )
        if m.logprob:
            self.at("logprob")
            p = b.intern("log_softmax", (outputs["logits"],), {}, ("T", m.vocabulary), Precision(Format.F32), "ref.sum")
            outputs["logprob"] = b.intern("gather", (p, b.input("target")), {}, ("T", 1), Precision(Format.F32))
        if m.backward:
            self.at("model.norm", Role.WGRAD, Phase.BACKWARD)
            dy = b.pointwise("mul", [outputs["logits"], b.const(0.5)])
            outputs["grad.lm_head.weight"] = b.gemm(dy, h, "tn", "ref.gemm")
        meta = {
            "side": self.side, "model": "toy", "policy": "jet", "provider": "reference", "device": "cpu",
            "versions": {"toy": "1"}, "capture": {"mode": "eager"}, "parameters": self.parameters,
            "operands": self.operands, "dead": [], "scope": self.scope, "kernels": KERNELS, "guards": [],
            "replay": {"passed": True, "cases": ["prefill"], "injected": []}, "compiler": "eager",
        }  # fmt: skip
        return b.graph(f"toy-{self.side}", outputs, meta)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


Change = Callable[[TermBuilder, int, Node, list[int], list[int]], int | None]
"""(builder, index, node, new inputs, new indices of all earlier nodes) → the new term, or None to leave it"""


def rewrite(graph: PrecisionGraph, change: Change, outputs: dict[str, int] | None = None) -> PrecisionGraph:
    """The graph rebuilt in normal form with some nodes changed; what reads a changed value follows it."""
    b, new = TermBuilder(), []
    for index, node in enumerate(graph.nodes):
        b.where = Provenance(node.fqn, node.role, node.phase, node.source, node.reason)
        inputs = [new[i] for i in node.inputs]
        term = change(b, index, node, inputs, new)
        new.append(remake(b, node, inputs) if term is None else term)
    named = {k: new[i] for k, i in (outputs or graph.outputs).items()}
    return PrecisionGraph(graph.name, tuple(b.nodes), named, graph.meta).restrict(named)


def remake(b: TermBuilder, node: Node, inputs: list[int]) -> int:
    if node.op == "round":
        return b.round(inputs[0], node.type.precision.format)
    if node.op in COMMUTATIVE:
        inputs = sorted(inputs, key=lambda i: b.digests[i])
    precision = node.type.precision
    if node.op in CARRIES and node.op != "embed":
        formats = {b.precision(i) for i in inputs if b.op(i) != "const"}
        precision = formats.pop() if len(formats) == 1 else Precision(Format.F32)
    return b.intern(node.op, inputs, dict(node.attrs), node.type.shape, precision, node.kernel)


def with_meta(graph: PrecisionGraph, **changes: Any) -> PrecisionGraph:
    return replace(graph, meta={**graph.meta, **changes})

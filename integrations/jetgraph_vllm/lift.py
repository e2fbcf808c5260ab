"""`EngineCapture` → the precision graph of what the engine executes, embedding to token logprob.

The body and head arrive as functionalised ATen and go through the same expansions as the trainer's graph.  What is the
engine's own is here: stored FP8 codes and merged weights, the KV cache write and the attention call, the rotary table.

* Stored codes of ``qkv_proj`` rows a…b become ``quantize(parameter q_proj.weight)`` with the precision the checkpoint
  declares.  That is a claim about values; the graph carries their digest, and verification compares it with the digest
  of what training's next forward computes (JG017).
* K and V must be what the cache write stored *and* what the attention call was given; one alone misses a fault.
* The rotary table is identified by content: the trainer's formula, run on every position, must equal the live buffer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import jetgraph.lift.all  # noqa: F401  (registers the expansions)
from jetgraph.digest import tensor_digest
from jetgraph.export import declared_policy
from jetgraph.graph import PrecisionGraph
from jetgraph.interpret import Quantized, interpret
from jetgraph.layout import Value
from jetgraph.lift.attention import attention, attention_attrs
from jetgraph.lift.gemm import gemm, with_bias
from jetgraph.lift.lifter import HANDLERS, Frame, Lifter, LiftError, QuantizedHalf, only, refuse_unless, with_defaults
from jetgraph.lowering import reference
from jetgraph.normal_form import TermBuilder
from jetgraph.precision import BF16, Format, Precision
from jetgraph.record import Op, evaluate_size
from jetgraph.versions import versions
from jetgraph_vllm.capture_format import CapturedGraph, EngineCapture, GraphInput, LinearPart
from jetgraph_vllm.leaves import CacheWrite, RotaryTable, Stored

NUM_TOKENS = 53
"""The token axis while lifting: a number no dimension of a model has (the captured graphs are symbolic in it)."""

KERNELS = {
    "jetgraph_vllm.attention.ExactAttentionImpl": "jetgraph::attention",
    "jetgraph_vllm.attention_cuda.ExactFlashAttentionImpl": "jetgraph::attention",
}
"""Attention implementations → the kernel they run; others keep their own name."""


@dataclass(frozen=True)
class LiftedEngine:
    """``graph`` for the verifier; ``body`` and ``head`` (one step's parts) for the replay gate."""

    graph: PrecisionGraph
    body: PrecisionGraph
    head: PrecisionGraph
    leaves: dict[str, torch.Tensor | Quantized]


def lift_engine(capture: EngineCapture) -> LiftedEngine:
    """Lift a capture; operators without an expansion become `unknown` nodes by name."""
    return _EngineLifter(capture).run()


class _EngineLifter:
    def __init__(self, capture: EngineCapture) -> None:
        self.capture = capture
        self.builder = TermBuilder()
        self.lifter = Lifter(
            self.builder,
            NUM_TOKENS,
            {
                "aten.slice": self._slice,
                "aten.t": self._t,
                "aten.mm": self._mm,
                "aten.addmm": self._mm,
                "aten.index_select": self._index_select,
                "jetgraph.fp8_gemm": self._fp8_gemm,
                "jetgraph.row_tile_gemm": self._row_tile_gemm,
                "vllm.unified_kv_cache_update": self._cache_update,
                "auto_functionalized": self._functionalised,
                **dict.fromkeys(("_C.rotary_embedding",), self._stock_rotary),
            },
        )
        self.attention = {a.layer_name: a for a in capture.attention}
        self.part_of_term: dict[int, str] = {}
        self.leaves: dict[str, torch.Tensor | Quantized] = {}
        self.operands: dict[str, dict[str, str]] = {}
        self.declared = capture.config.get("quantization_config", {}).get("jetgraph", {})
        self.policy = declared_policy(self.declared)
        self.tables: dict[str, Value | None] = {}

    # ---------------------------------------------------------------------------------------------------- the path

    def run(self) -> LiftedEngine:
        builder, lifter = self.builder, self.lifter
        hidden = self._run(self.capture.body, {})
        logits = self._run(self.capture.head(2), {"hidden_states": hidden})
        outputs = {"logits": lifter.layouts.read(logits)}
        outputs |= self._sampler(outputs["logits"])
        for index, (k, v) in enumerate(lifter.keys_values):
            outputs |= {f"k.{index}": k, f"v.{index}": v}
        leaf = lifter.layouts.token_matrix(
            builder.intern("input", (), {"name": "hidden"}, builder.nodes[hidden.term].type.shape, BF16)
        )
        alone = self._run(self.capture.head(2), {"hidden_states": leaf})
        self._state_reasons()
        graph = builder.graph("infer", outputs, {})
        graph = dataclasses.replace(graph, meta={**graph.meta, **self._meta(graph)})
        body = builder.graph("body", {"hidden": lifter.layouts.read(hidden)}, {})
        head = builder.graph("head", {"logits": lifter.layouts.read(alone)}, {})
        return LiftedEngine(graph, body, head, self.leaves)

    def _run(self, captured: CapturedGraph, given: dict[str, Value]) -> Value:
        """The value of a captured graph's only output."""
        bound = {i.name: given.get(i.fqn) or self._bind(i) for i in captured.inputs}
        symbols = {
            str(op.value): NUM_TOKENS for op in captured.aten if op.kind == "placeholder" and isinstance(op.value, str)
        }
        env = self.lifter.run(captured.aten, bound, sizes=lambda size: evaluate_size(size, symbols))
        (value,) = self.lifter.outputs(captured.aten, env)
        return value

    def _sampler(self, logits: int) -> dict[str, int]:
        """The engine's own logprob chain, traced with a handful of rows."""
        trace = self.capture.sampler
        if not trace:
            return {}
        rows = next(op.value.shape[0] for op in trace if op.name == "token_ids")
        lifter = Lifter(self.builder, rows)
        bound = {
            "logits": lifter.layouts.token_matrix(logits),
            "token_ids": lifter.token_input("targets", 1),
        }
        env = lifter.run(trace, bound)
        (value,) = lifter.outputs(trace, env)
        self.lifter.unknown += lifter.unknown
        return {"logprob": lifter.layouts.read(value)}

    # ------------------------------------------------------------------------------------------------------- leaves

    def _bind(self, given: GraphInput) -> Any:
        if given.kind == "size":
            return NUM_TOKENS
        if given.kind == "object":
            return given.fqn
        if given.kind == "input":
            return self.lifter.token_input(given.fqn, 1)
        if not given.fqn:
            raise LiftError(f"placeholder {given.source}: no live tensor of the engine has its address")
        module, _, leaf = given.fqn.rpartition(".")
        if given.fqn.endswith("cos_sin_cache"):
            return RotaryTable(given.fqn)
        if module in self.capture.linears and leaf in ("weight", "weight_scale_inv", "bias"):
            weight = "codes" if given.dtype == "float8_e4m3fn" else "weight"
            return Stored(module, {"weight": weight, "weight_scale_inv": "scale", "bias": "bias"}[leaf])
        name = self.capture.aliases.get(given.fqn, given.fqn)
        self.leaves[name] = self.capture.tensors[name]
        assert given.shape is not None
        return self.lifter.parameter(name, given.shape, given.dtype)

    def _part_value(self, stored: Stored, part: LinearPart) -> Any:
        """One checkpoint weight inside a live tensor: half of a quantised operand, or a BF16 weight or bias."""
        rows = slice(*part.rows)
        if stored.kind == "bias":
            name = f"{part.name}.bias"
            self.leaves[name] = self.capture.tensors[f"{stored.module}.bias"][rows]
            return self.lifter.parameter(name, tuple(self.leaves[name].shape), "bfloat16")
        name = f"{part.name}.weight"
        live = self.capture.tensors[f"{stored.module}.weight"][rows]
        if stored.kind == "weight":
            self.leaves[name] = live
            value = self.lifter.parameter(name, tuple(live.shape), "bfloat16")
            self.part_of_term[value.term] = part.name
            return value
        precision = Precision.parse(self.declared["weight"])
        assert precision.scale is not None
        assert part.scale_rows is not None
        source = self.builder.parameter(name, tuple(live.shape))
        term = self.builder.quantize(source, precision.scale, "jetgraph::quantize")
        scales = self.capture.tensors[f"{stored.module}.weight_scale_inv"][slice(*part.scale_rows)]
        self.operands[name] = {"precision": str(precision), "digest": tensor_digest(live, scales)}
        self.leaves[name] = Quantized(live, scales)
        self.part_of_term[term] = part.name
        return QuantizedHalf(term, stored.kind)

    # --------------------------------------------------------------------------------------------- stored weights

    def _slice(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        if not isinstance(args[0], Stored):
            return HANDLERS["aten.slice"](lift, frame, op, args, kwargs)
        stored, dim, start, stop = with_defaults(args, 0, 0, 1 << 62)[:4]
        refuse_unless(dim == 0 and not stored.transposed, "a stored weight cut across its columns")
        parts = self.capture.linears[stored.module]
        held = {p.scale_rows if stored.kind == "scale" else p.rows: p for p in parts}
        end = max(stop_ for _, stop_ in held)  # type: ignore[misc]
        part = held.get((start, min(stop, end)))
        refuse_unless(part is not None, f"rows {start}:{stop} of {stored.module} are no checkpoint weight")
        return self._part_value(stored, part)  # type: ignore[arg-type]

    def _whole(self, stored: Any) -> Any:
        """A stored tensor used whole is its only part."""
        if not isinstance(stored, Stored):
            return stored
        parts = self.capture.linears[stored.module]
        refuse_unless(len(parts) == 1, f"{stored.module} holds {len(parts)} weights and is used as one")
        return self._part_value(stored, parts[0])

    def _t(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        if isinstance(args[0], Stored):
            return replace(args[0], transposed=not args[0].transposed)
        return HANDLERS["aten.t"](lift, frame, op, args, kwargs)

    def _at(self, fqn: str | None) -> None:
        if fqn:
            self.builder.where = replace(self.builder.where, fqn=fqn)

    def _fp8_gemm(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        """A merged weight that no slice has cut is one GEMM per checkpoint weight, joined."""
        weight = args[2]
        if isinstance(weight, Stored) and len(self.capture.linears[weight.module]) > 1:
            self.builder.rules["merged weight is its linears"] += 1
            outs = [
                self._fp8_part(lift, frame, op, (*args[:2], *self._operands_of(part, args[2:5]), *args[5:]), kwargs)
                for part in self.capture.linears[weight.module]
            ]
            return lift.layouts.cat(outs, 1)
        return self._fp8_part(lift, frame, op, (*args[:2], *map(self._whole, args[2:5]), *args[5:]), kwargs)

    def _operands_of(self, part: LinearPart, stored: tuple) -> list[Any]:
        """Codes, scales and bias of one part of a merged weight."""
        module = stored[0].module
        refuse_unless(
            all(s is None or (isinstance(s, Stored) and s.module == module and not s.transposed) for s in stored),
            f"codes of {module} with the scales or the bias of another linear",
        )
        return [None if s is None else self._part_value(s, part) for s in stored]

    def _fp8_part(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        self._at(self.part_of_term.get(args[2].term))
        return HANDLERS["jetgraph.fp8_gemm"](lift, frame, op, args, kwargs)

    def _row_tile_gemm(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        args = (args[0], *map(self._whole, args[1:]))
        self._at(self.part_of_term.get(args[1].term, "lm_head" if "logits" in self.builder.where.fqn else None))
        return HANDLERS["jetgraph.row_tile_gemm"](lift, frame, op, args, kwargs)

    def _mm(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        """x @ merged.T (+ bias) is one GEMM per checkpoint weight, joined: BF16 weights have no grid to straddle."""
        bias, x, weight = (None, *args)[-3:]
        if not isinstance(weight, Stored):
            self._at("lm_head" if "logits" in self.builder.where.fqn or "lm_head" in self.builder.where.fqn else None)
            return HANDLERS["aten.mm" if bias is None else "aten.addmm"](lift, frame, op, args, kwargs)
        only(kwargs)
        refuse_unless(bias is None or bias == Stored(weight.module, "bias"), "the bias of another linear")
        refuse_unless(weight.transposed and weight.kind == "weight", "a merged weight multiplied from the left")
        self.builder.rules["merged weight is its linears"] += len(self.capture.linears[weight.module]) > 1
        outs = []
        for part in self.capture.linears[weight.module]:
            self._at(part.name)
            parameter = self._part_value(weight, part)
            kernel = "aten::mm" if bias is None else "aten::addmm"
            product = gemm(lift, lift.layouts.read(x), parameter.term, "nt", kernel)
            outs.append(with_bias(lift, op, product, None if bias is None else self._part_value(bias, part)))
        return lift.layouts.cat(outs, 1) if len(outs) > 1 else outs[0]

    # -------------------------------------------------------------------------------------------- cache, attention

    def _cache_update(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        only(kwargs)
        k, v, layer = args
        return CacheWrite(lift.layouts.read(k), lift.layouts.read(v), layer)

    def _functionalised(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        """An in-place operator as (its result, then each argument it wrote)."""
        name = args[0].text.removeprefix("OpOverload ").rsplit(".", 1)[0]
        if name == "vllm.unified_attention_with_output":
            return None, self._attention(lift, kwargs)
        if name == "_C.rotary_embedding":
            return (None, *self._stock_rotary(lift, kwargs))
        return lift.unknown_op(frame, op, tuple(kwargs.values()), name)

    def _attention(self, lift: Lifter, kwargs: dict[str, Any]) -> Value:
        layer, write = kwargs["layer_name"], kwargs["kv_cache_dummy_dep"]
        q, k, v = (lift.layouts.read(kwargs[x]) for x in ("query", "key", "value"))
        refuse_unless(isinstance(write, CacheWrite), f"{layer}: attention does not depend on its cache write (JG018)")
        refuse_unless(write.layer == layer, f"{layer}: attention reads the cache of {write.layer}")
        refuse_unless((write.k, write.v) == (k, v), f"{layer}: the cache holds other K or V than the call was given")
        used = {"query", "key", "value", "output", "layer_name", "kv_cache_dummy_dep"}
        only({key: value for key, value in kwargs.items() if key not in used})
        live = self.attention[layer]
        refuse_unless(live.kv_cache_dtype == "auto", f"{layer}: KV cache in {live.kv_cache_dtype}")
        attrs = attention_attrs(
            live.num_heads,
            live.num_kv_heads,
            live.head_size,
            live.scale,
            window=live.sliding_window or 0,
            softcap=live.logits_soft_cap or 0.0,
        )
        self._at(live.fqn.removesuffix(".attn"))
        term = attention(lift, (q, k, v), attrs, KERNELS.get(live.impl, live.impl))
        return lift.layouts.view(lift.layouts.token_matrix(term), lift.layouts.shape(kwargs["query"]))

    # -------------------------------------------------------------------------------------------------------- rotary

    def _index_select(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        table, dim, positions = args
        refuse_unless(isinstance(table, RotaryTable) and dim == 0, "index_select of something not the rotary table")
        return self._rotary_rows(table, positions)

    def _rotary_rows(self, table: RotaryTable, positions: Value) -> Value:
        """cat(cos, sin) of position · inv_freq if the live table is exactly that; else a lookup in the table itself."""
        builder, layouts = self.builder, self.lifter.layouts
        live = self.capture.tensors[table.fqn]
        inv_freq = self._inv_freq().to(live.device)
        name = "model.rotary_emb.inv_freq"
        frequency = self.lifter.parameter(name, tuple(inv_freq.shape), "float32")
        number = layouts.pointwise(
            "int_to_float", [Value(positions.term, positions.atoms, (positions.dims[0], ()))], Format.F32
        )
        angle = layouts.pointwise(
            "mul", [number, Value(frequency.term, frequency.atoms, ((), frequency.dims[0]))], Format.F32
        )
        fmt = {torch.bfloat16: Format.BF16, torch.float32: Format.F32}[live.dtype]
        # torch filled the table; that its rows are these very bits is checked below, on every position
        halves = [layouts.pointwise(f, [angle], fmt, kernel=f"aten::{f}") for f in ("cos", "sin")]
        rows = layouts.cat(halves, 1)
        if table.fqn not in self.tables:
            every = torch.arange(live.shape[0], device=live.device)  # sines have other last bits on another device
            graph = builder.graph("table", {"rows": rows.term}, {})
            want = interpret(graph, {"positions": every, name: inv_freq})["rows"]
            self.tables[table.fqn] = rows if torch.equal(want, live) else None
        if self.tables[table.fqn] is not None:
            builder.rules["table[position] is its formula"] += 1
            self.leaves[name] = inv_freq
            return rows
        self.leaves[table.fqn] = live
        stored = self.lifter.parameter(table.fqn, tuple(live.shape), str(live.dtype).removeprefix("torch."))
        term = builder.intern("embed", (stored.term, positions.term), {}, ("T", live.shape[1]), Precision(fmt))
        return layouts.token_matrix(term)

    def _inv_freq(self) -> torch.Tensor:
        config = AutoConfig.from_pretrained(self.capture.model)
        rope = config.rope_parameters
        if rope["rope_type"] == "default":
            dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            exponent = torch.arange(0, dim, 2, dtype=torch.int64).to(dtype=torch.float) / dim
            return 1.0 / (rope["rope_theta"] ** exponent)
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))[0]

    def _stock_rotary(self, lift: Lifter, kwargs: dict[str, Any]) -> tuple[Value, Value]:
        """`_C.rotary_embedding`: FP32 products and sum, one rounding; writes query and key in place."""
        refuse_unless(bool(kwargs["is_neox"]), "interleaved rotary")
        used = {"positions", "query", "key", "head_size", "cos_sin_cache", "is_neox"}
        only({k: v for k, v in kwargs.items() if k not in used}, rope_dim_offset=0)
        rows = self._rotary_rows(kwargs["cos_sin_cache"], kwargs["positions"])
        layouts, size = lift.layouts, kwargs["head_size"]
        half = size // 2
        cos, sin = (layouts.slice(rows, 1, i * half, (i + 1) * half) for i in (0, 1))
        cos, sin = (Value(x.term, x.atoms, (x.dims[0], (), x.dims[1])) for x in (cos, sin))
        turned = []
        for x in (kwargs["query"], kwargs["key"]):
            shape = layouts.shape(x)
            heads = layouts.view(x, (NUM_TOKENS, x_features(shape) // size, size))
            first, second = (layouts.slice(heads, 2, i * half, (i + 1) * half) for i in (0, 1))
            product = lambda a, b: layouts.pointwise("mul", [a, b], Format.F32)  # noqa: E731
            low = layouts.pointwise("sub", [product(first, cos), product(second, sin)], Format.BF16)
            high = layouts.pointwise("add", [product(second, cos), product(first, sin)], Format.BF16)
            turned.append(layouts.view(layouts.cat([low, high], 2), shape))
        return turned[0], turned[1]

    # ---------------------------------------------------------------------------------------------------------- meta

    def _state_reasons(self) -> None:
        if not self.declared:
            return
        for index, node in enumerate(self.builder.nodes):
            if node.op == "gemm" and node.fqn:
                reason = self.policy.linear(node.fqn, rollout=True).reason
                for i in (index, *(j for j in node.inputs if self.builder.nodes[j].op == "quantize")):
                    self.builder.nodes[i] = replace(self.builder.nodes[i], reason=reason)

    def _meta(self, graph: PrecisionGraph) -> dict[str, Any]:
        parameters = {str(n.attr("name")): n for n in graph.nodes if n.op == "parameter"}
        linears = [p.name for parts in self.capture.linears.values() for p in parts]
        scope = {name: self.policy.linear(name, rollout=True) for name in dict.fromkeys([*linears, "lm_head"])}
        return {
            "side": "infer",
            "model": self.capture.config["architectures"][0],
            "policy": self.policy.name,
            "provider": self.declared.get("ops", "stock"),
            "device": self.capture.settings.get("device_type", "cpu"),  # older ones ran on CPUs
            "versions": versions("torch") | self.capture.settings.get("versions", {}),
            "compiler": self.capture.settings.get("executed_by", "fx"),
            "capture": {
                k: v for k, v in self.capture.settings.items() if k not in ("versions", "device_type", "executed_by")
            },
            "parameters": {
                name: {
                    "digest": tensor_digest(leaf),
                    "shape": list(node.type.shape),
                    "format": str(node.type.precision),
                }
                for name, node in sorted(parameters.items())
                if isinstance(leaf := self.leaves[name], torch.Tensor)  # what is only stored quantised is an operand
            },
            "dead": [],
            "operands": dict(sorted(self.operands.items())),
            "scope": {
                name: {"activation": str(p.activation), "weight": str(p.weight)} for name, p in sorted(scope.items())
            },
            "kernels": {
                k: {"row_invariant": k in reference.ROW_INVARIANT}
                for k in sorted({n.kernel for n in graph.nodes if n.kernel})
            },
            "unknown": sorted(set(self.lifter.unknown)),
        }


def x_features(shape: tuple[int, ...]) -> int:
    features = 1
    for size in shape[1:]:
        features *= size
    return features

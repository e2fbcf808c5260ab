"""A recorded stock vLLM → the precision graph of what it executes, to be held against training's.

    capture = StockCapture.load("tests/data/stock_vllm/default.json.gz")
    verify(train, lift_stock(capture, train))

Stock vLLM declares no scale rules, and its stored codes do not say by which rule they were made.  So a stored part is
identified by content: if its digest is that of the trainer's operand of the same name, it is that quantised parameter.
If only the *checkpoint's* part is known and loading changed it, the stored part is the known one quantised again, by
the rule that `requant_weight_ue8m0_inplace` is attested to have.  Anything else is an `operand` leaf that nothing
accounts for; a weight packed for another kernel cannot even be read, and is unknown.

`jetgraph_vllm.stock_replay` replays the lifted graph where the engine runs; the capture holds the outcome by the
graph's digest.  A graph that was not replayed says so in ``meta["replay"]``, and verification reports JG093.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jetgraph.lift.all  # noqa: F401  (registers the expansions)
from jetgraph.graph import PrecisionGraph
from jetgraph.layout import Value
from jetgraph.lift.attention import attention, attention_attrs
from jetgraph.lift.gemm import gemm
from jetgraph.lift.lifter import HANDLERS, Frame, Lifter, QuantizedHalf, only, refuse_unless
from jetgraph.normal_form import TermBuilder
from jetgraph.precision import Division, Format, Granularity, Precision, Scale, ScaleRule
from jetgraph.record import Op, Ref, evaluate_size
from jetgraph_vllm.leaves import CacheWrite, RotaryTable, Stored
from jetgraph_vllm.stock_format import StockCapture, StockCaptureError, StockInput
from jetgraph_vllm.stock_ops import EXPANSIONS, log_softmax_of, rotate

NUM_TOKENS = 53
REQUANTISED = Precision(
    Format.E4M3,
    Scale(Granularity.per_block(128, 128), ScaleRule(448.0, 1e-4, Division.DIVIDE, power_of_two=True)),
)
"""What DeepGEMM's post-processing makes of FP8 weights at load, unless VLLM_USE_DEEP_GEMM_E8M0=0."""

GEMMS = {
    "vllm.fp8_gemm_nt_op": ("q_input", "input_scale", "weight", "weight_scale", "output"),
    "_C.cutlass_scaled_mm": ("a", "a_scales", "b", "b_scales", "out"),
}
"""FP8 GEMMs, by what they call codes and scales of the activation, of the weight, and the result."""


def lift_stock(capture: StockCapture, train: PrecisionGraph) -> PrecisionGraph:
    """The graph that verification takes as the engine's, if the engine is meant to follow ``train``.

    Stock vLLM declares no policy: what its linears must be is what ``train``'s policy demands, and its stored codes are
    known by the digests of ``train``'s operands.  Nothing else of ``train`` is used.
    """
    return _StockLifter(capture, train.meta["policy"], train.meta["scope"], train.meta["operands"]).run()


def _one_result(ops: Sequence[Op]) -> list[Op]:
    """A program that returns its result alone; before it, a graph returns each argument that an operator wrote.

    Raises:
        StockCaptureError: it returns something else too, of which nothing is known.
    """
    *body, output = ops
    (returned,) = output.args
    if not isinstance(returned, tuple):
        return [*ops]
    writers = {op.name for op in body if op.target == "auto_functionalized"}
    written = {op.name for op in body if op.target == "getitem" and op.args[0].name in writers}
    *before, result = returned
    others = [item.name if isinstance(item, Ref) else str(item) for item in before]
    if unknown := [name for name in others if name not in written]:
        raise StockCaptureError(
            f"the engine's graph returns {', '.join(unknown)} beside its result; expected one value, and the arguments "
            "that operators wrote: models with more than one result, such as drafts, cannot be read"
        )
    return [*body, replace(output, args=((result,),))]


class _StockLifter:
    def __init__(
        self,
        capture: StockCapture,
        policy: str,
        scope: Mapping[str, Mapping[str, str]],
        known: Mapping[str, Mapping[str, str]],
    ) -> None:
        self.capture = capture
        self.policy = policy
        self.scope = scope
        self.known = known
        self.builder = TermBuilder()
        self.lifter = Lifter(
            self.builder,
            NUM_TOKENS,
            {
                "auto_functionalized": self._functionalised,
                "vllm.unified_kv_cache_update": self._cache_update,
                "vllm.compute_token_logprobs": self._logprobs,
                "aten.index_select": self._table_rows,
                "aten.index": self._table_rows,
                "_C.marlin_gemm": self._marlin_gemm,
                "aten.view": self._view,
                "aten.reshape": self._view,
                "aten.t": self._transposed,
                "aten.permute": self._transposed,
                "aten.mm": self._mm,
                "aten.empty": self._empty,
                "aten.empty_strided": self._empty,
                "neg": lambda lift, frame, op, args, kwargs: -frame.sizes(args[0]),
            },
        )
        self.operands: dict[str, dict[str, str]] = {}
        self.parameters: dict[str, dict[str, Any]] = {}

    # ---------------------------------------------------------------------------------------------------- the path

    def run(self) -> PrecisionGraph:
        builder, lifter = self.builder, self.lifter
        hidden = self._run(self.capture.ops, self.capture.inputs, {})
        logits = self._run(*self.capture.head(), {"hidden_states": hidden})
        outputs = {"logits": lifter.layouts.read(logits)}
        outputs["logprob"] = self._sampler(outputs["logits"])
        for index, (k, v) in enumerate(lifter.keys_values):
            outputs |= {f"k.{index}": k, f"v.{index}": v}
        graph = builder.graph(self.capture.label, outputs, {})
        return dataclasses.replace(graph, meta={**graph.meta, **self._meta(graph)})

    def _sampler(self, logits: int) -> int:
        """The engine's own chain from logits to logprobs, recorded with a handful of rows."""
        trace = self.capture.sampler
        rows = next(op.value.shape[0] for op in trace if op.name == "token_ids")
        lifter = Lifter(self.builder, rows, {"vllm.compute_token_logprobs": self._logprobs})
        given = {"logits": lifter.layouts.token_matrix(logits), "token_ids": lifter.token_input("targets", 1)}
        (logprob,) = lifter.outputs(trace, lifter.run(trace, given))
        self.lifter.unknown += lifter.unknown
        return lifter.layouts.read(logprob)

    def _run(self, ops: Sequence[Op], inputs: Sequence[StockInput], given: Mapping[str, Value]) -> Value:
        bound = {i.name: given[i.fqn] if i.fqn in given else self._bind(i) for i in inputs}
        symbols = {
            str(op.value): NUM_TOKENS
            for op in ops
            if op.kind == "placeholder" and isinstance(op.value, str) and op.value.isidentifier()
        }
        env = self.lifter.run(ops, bound, sizes=lambda size: evaluate_size(size, symbols))
        (value,) = self.lifter.outputs(_one_result(ops), env)
        return value

    def _bind(self, given: StockInput) -> Any:
        if given.kind == "size":
            return NUM_TOKENS
        if given.kind == "object":
            return given.fqn
        if given.kind == "input":
            scratch = "_modules[" in given.fqn  # a module's plain attribute, such as a kernel's workspace: no operand
            return None if scratch else self.lifter.token_input(given.fqn, 1)
        module, _, leaf = given.fqn.rpartition(".")
        if leaf == "cos_sin_cache":
            return RotaryTable(given.fqn)
        linear = self.capture.linears.get(module)
        if given.shape and linear is not None and linear["scales"] is not None:
            return Stored(module, "codes" if leaf == "weight" else "scale")
        if leaf == "weight" and linear is not None and all("digest" in part for part in linear["parts"]):
            return Stored(module, "weight")
        assert given.shape is not None
        return self._parameter(given.fqn, given.shape, given.dtype, self.capture.tensors[given.fqn]["digest"])

    def _parameter(self, name: str, shape: Sequence[int], dtype: str, digest: str) -> Value:
        short = {"bfloat16": "bf16", "float32": "f32"}[dtype]
        self.parameters[name] = {"digest": digest, "shape": list(shape), "format": short}
        return self.lifter.parameter(name, shape, dtype)

    # ------------------------------------------------------------------------------------------------------- writes

    def _functionalised(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        """(result, each written argument) of an operator that writes its arguments."""
        name = args[0].text.removeprefix("OpOverload ").rsplit(".", 1)[0]
        if name in EXPANSIONS:
            return None, *EXPANSIONS[name](lift, kwargs)
        if name in GEMMS:
            return None, self._fp8_gemm(lift, name, kwargs)
        if name == "_C.rotary_embedding":
            return None, *self._rotary(lift, kwargs)
        if name == "vllm.unified_attention_with_output":
            return None, self._attention(lift, kwargs), None
        return lift.unknown_op(frame, op, tuple(kwargs.values()), name)

    def _empty(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        """Memory that nobody wrote; what is in it is nothing that training has."""
        if op.value.dtype == "float8_e4m3fn":
            return None  # a buffer for codes: only writers that name it as their result may take it
        return HANDLERS["aten.empty"](lift, frame, op, args, kwargs)

    # ---------------------------------------------------------------------------------------------- linears, stored

    def _parts(self, stored: Stored) -> list[tuple[str, int]]:
        """(checkpoint module, term) of every part in row order."""
        found = []
        for part in self.capture.linears[stored.module]["parts"]:
            name = f"{part['name']}.weight"
            found.append((part["name"], self._part(name, part, self._width(stored.module))))
        return found

    def _width(self, module: str) -> int:
        return int(self.capture.linears[module]["weight"][0][1])

    def _part(self, name: str, part: Mapping[str, Any], width: int) -> int:
        shape = (part["rows"][1] - part["rows"][0], width)
        known = self.known.get(name, {})
        if known and part.get("digest") == known.get("digest"):
            return self._quantised(name, shape, Precision.parse(known["precision"]), part["digest"])
        if known and part.get("codes_changed") and part.get("checkpoint_digest") == known.get("digest"):
            once = Precision.parse(known["precision"])
            assert once.scale is not None
            assert REQUANTISED.scale is not None
            self.operands[name] = {"precision": str(REQUANTISED), "digest": part["digest"]}
            inner = self.builder.quantize(self.builder.parameter(name, shape), once.scale, "jetgraph::quantize")
            return self.builder.quantize(inner, REQUANTISED.scale, "vllm::requant_weight_ue8m0_inplace")
        leaf = {"name": f"{name} as stored by the engine"}
        return self.builder.intern("operand", (), leaf, shape, self._apparent(part))

    def _apparent(self, part: Mapping[str, Any]) -> Precision:
        """λ as far as the stored scales show it."""
        rule = ScaleRule(power_of_two=bool(part.get("powers_of_two")))
        return Precision(Format.E4M3, Scale(Granularity.per_block(128, 128), rule))

    def _quantised(self, name: str, shape: tuple[int, int], precision: Precision, digest: str) -> int:
        assert precision.scale is not None
        self.operands[name] = {"precision": str(precision), "digest": digest}
        return self.builder.quantize(self.builder.parameter(name, shape), precision.scale, "jetgraph::quantize")

    def _fp8_gemm(self, lift: Lifter, name: str, kwargs: dict[str, Any]) -> Value:
        """One GEMM per checkpoint part, joined: each part of a merged weight has its own rows of scales."""
        codes, scales, weight, weight_scales, out = (kwargs.get(k) for k in GEMMS[name])
        only({k: v for k, v in kwargs.items() if k not in GEMMS[name]}, use_deep_gemm_e8m0=...)
        refuse_unless(isinstance(codes, QuantizedHalf) and isinstance(scales, QuantizedHalf), "codes nobody quantised")
        refuse_unless((codes.part, scales.part, codes.term) == ("codes", "scale", scales.term), "another's scales")
        refuse_unless(isinstance(weight, Stored) and isinstance(weight_scales, Stored), "another weight")
        refuse_unless((weight.kind, weight_scales.kind) == ("codes", "scale"), "codes and scales exchanged")
        refuse_unless(weight.module == weight_scales.module, "the weight's scales are another module's")
        refuse_unless(weight.transposed == weight_scales.transposed, "codes transposed without their scales")
        refuse_unless(isinstance(out, Value), "a result that is no tensor")
        outs = []
        for fqn, term in self._parts(weight):
            self.builder.where = replace(self.builder.where, fqn=fqn)
            product = gemm(lift, codes.term, term, "nt", name.replace(".", "::"))
            outs.append(lift.layouts.pointwise("round", [product], Format.BF16))
        self.builder.rules["merged weight is its linears"] += len(outs) > 1
        return lift.layouts.cat(outs, 1) if len(outs) > 1 else outs[0]

    def _marlin_gemm(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        """W8A16: the activation stays BF16; the packed weight cannot be read back, so it is unknown part by part."""
        only(kwargs)
        x, weight = args[0], args[2]
        refuse_unless(all(a is None for a in (args[1], args[3], *args[5:10])), "an operand beside x, weight and scales")
        refuse_unless(isinstance(weight, Stored), "a weight of no module")
        outs = []
        for part in self.capture.linears[weight.module]["parts"]:
            name = f"{part['name']}.weight packed for Marlin"
            lift.unknown.append(name)
            self.builder.where = replace(self.builder.where, fqn=part["name"])
            shape = (part["rows"][1] - part["rows"][0], lift.layouts.shape(x)[-1])
            leaf = self.builder.intern("unknown", (), {"name": name}, shape, Precision(Format.E4M3))
            product = gemm(lift, lift.layouts.read(x), leaf, "nt", "_C::marlin_gemm")
            outs.append(lift.layouts.pointwise("round", [product], Format.BF16))
        return lift.layouts.cat(outs, 1) if len(outs) > 1 else outs[0]

    def _view(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        if not isinstance(args[0], QuantizedHalf):
            return HANDLERS["aten.view"](lift, frame, op, args, kwargs)
        was = frame.spec(op.args[0])
        refuse_unless(was is not None and was.shape == op.value.shape, "codes seen in another shape")
        return args[0]

    def _transposed(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        if isinstance(args[0], Stored):
            return replace(args[0], transposed=not args[0].transposed)
        return HANDLERS[op.target.rsplit(".", 1)[0]](lift, frame, op, args, kwargs)

    def _mm(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        x, weight = args
        if not isinstance(weight, Stored):
            self.builder.where = replace(self.builder.where, fqn="lm_head")
            return HANDLERS["aten.mm"](lift, frame, op, args, kwargs)
        refuse_unless(weight.kind == "weight", "stored codes multiplied as numbers")
        refuse_unless(weight.transposed, "a stored weight whose rows are contracted")
        outs = []
        for part in self.capture.linears[weight.module]["parts"]:
            self.builder.where = replace(self.builder.where, fqn=part["name"])
            shape = (part["rows"][1] - part["rows"][0], self._width(weight.module))
            term = self._parameter(f"{part['name']}.weight", shape, "bfloat16", part["digest"]).term
            product = gemm(lift, lift.layouts.read(x), term, "nt", "aten::mm")
            outs.append(lift.layouts.pointwise("round", [product], Format.BF16))
        self.builder.rules["merged weight is its linears"] += len(outs) > 1
        return lift.layouts.cat(outs, 1) if len(outs) > 1 else outs[0]

    # -------------------------------------------------------------------------------------------- cache, attention

    def _cache_update(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        only(kwargs)
        k, v, layer = args
        return CacheWrite(lift.layouts.read(k), lift.layouts.read(v), layer)

    def _attention(self, lift: Lifter, kwargs: dict[str, Any]) -> Value:
        layer, write = kwargs["layer_name"], kwargs.get("kv_cache_dummy_dep")
        refuse_unless(layer in self.capture.attention, f"{layer}: attributes of the live layer are not recorded")
        refuse_unless(isinstance(write, CacheWrite), f"{layer}: attention does not depend on its cache write (JG018)")
        q, k, v = (lift.layouts.read(kwargs[x]) for x in ("query", "key", "value"))
        refuse_unless(write.layer == layer, f"{layer}: attention reads the cache of {write.layer}")
        refuse_unless((write.k, write.v) == (k, v), f"{layer}: the cache holds other K or V than the call was given")
        used = {"query", "key", "value", "output", "layer_name", "kv_cache_dummy_dep"}
        only({key: value for key, value in kwargs.items() if key not in used})
        live = self.capture.attention[layer]
        refuse_unless(live["kv_cache_dtype"] == "auto", f"{layer}: KV cache in {live['kv_cache_dtype']}")
        attrs = attention_attrs(
            live["num_heads"],
            live["num_kv_heads"],
            live["head_size"],
            live["scale"],
            window=live["sliding_window"] or 0,
            softcap=live["logits_soft_cap"] or 0.0,
        )
        self.builder.where = replace(self.builder.where, fqn=live["fqn"].removesuffix(".attn"))
        term = attention(lift, (q, k, v), attrs, live["impl"].rsplit(".", 1)[1])
        return lift.layouts.view(lift.layouts.token_matrix(term), lift.layouts.shape(kwargs["query"]))

    # ------------------------------------------------------------------------------------------------------- rotary

    def _rotary(self, lift: Lifter, kwargs: dict[str, Any]) -> tuple[Value, Value]:
        refuse_unless(bool(kwargs["is_neox"]), "interleaved rotary")
        named = ("positions", "query", "key", "head_size", "cos_sin_cache", "is_neox")
        only({k: v for k, v in kwargs.items() if k not in named}, rope_dim_offset=0)
        rows = self._rows(kwargs["cos_sin_cache"], kwargs["positions"])
        q, k = (rotate(lift, kwargs[x], rows, kwargs["head_size"]) for x in ("query", "key"))
        return q, k

    def _table_rows(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        table, *rest = args
        refuse_unless(isinstance(table, RotaryTable), f"{op.target} of something not the rotary table")
        index = rest[0][0] if op.target.startswith("aten.index.") else rest[1]
        return self._rows(table, index)

    def _rows(self, table: RotaryTable, positions: Value) -> Value:
        """cat(cos, sin) of position · inv_freq if that was seen to hold on every position; else rows of the table."""
        builder, layouts = self.builder, self.lifter.layouts
        live = self.capture.rotary[table.fqn]
        same = next((f for f in live["formulas"] if f["differing"] == 0), None)
        if same is None:
            dtype = live["dtype"].removeprefix("torch.")
            leaf = self._parameter(table.fqn, live["shape"], dtype, live["digest"])
            fmt = Precision({"bfloat16": Format.BF16, "float32": Format.F32}[dtype])
            return layouts.token_matrix(
                builder.intern("embed", (leaf.term, positions.term), {}, ("T", live["shape"][1]), fmt)
            )
        name, size = "model.rotary_emb.inv_freq", live["shape"][1] // 2
        frequency = self._parameter(name, (size,), "float32", same["inv_freq_digest"])
        flat = Value(positions.term, positions.atoms, (positions.dims[0], ()))
        number = layouts.pointwise("int_to_float", [flat], Format.F32)
        row = Value(frequency.term, frequency.atoms, ((), frequency.dims[0]))
        angle = layouts.pointwise("mul", [number, row], Format.F32)
        builder.rules["table[position] is its formula"] += 1
        halves = [layouts.pointwise(f, [angle], Format.BF16, kernel=f"aten::{f}") for f in ("cos", "sin")]
        return layouts.cat(halves, 1)

    # --------------------------------------------------------------------------------------------- logprobs and meta

    def _logprobs(self, lift: Lifter, frame: Frame, op: Op, args: tuple, kwargs: dict) -> Any:
        only(kwargs)
        return log_softmax_of(lift, *args)

    def _meta(self, graph: PrecisionGraph) -> dict[str, Any]:
        settings = self.capture.settings
        return {
            "side": "infer",
            "model": self.capture.config["architectures"][0],
            "policy": self.policy,
            "provider": "vllm",
            "device": settings["device"],
            "versions": settings["versions"],
            "compiler": self.capture.compiler,
            "capture": {k: v for k, v in settings.items() if k not in ("versions", "device")},
            "parameters": dict(sorted(self.parameters.items())),
            "dead": [],
            "operands": dict(sorted(self.operands.items())),
            "scope": {name: dict(demand) for name, demand in sorted(self.scope.items())},
            "kernels": {k: {"row_invariant": False} for k in sorted({n.kernel for n in graph.nodes if n.kernel})},
            "replay": self.capture.replay_of(graph),
            "unknown": sorted(set(self.lifter.unknown)),
        }

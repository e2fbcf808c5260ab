"""The single faults of the lifting prototype's table, as edits of an engine graph's nodes.

They look at structure (a round that feeds a square is a residual), not at this toy's names, so they apply to graphs of
real models as well.  `apply(graph, mutation, layer)` changes one layer, or all with ``layer=None``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from jetgraph.graph import Node, PrecisionGraph, Role
from jetgraph.normal_form import TermBuilder
from jetgraph.precision import Division, Format, Granularity, Precision
from jetgraph.verify.fault import layer_of
from tests.verify.toy_transformer import remake, rewrite


@dataclass(frozen=True)
class Context:
    """What an edit sees: the old graph, the node, its new inputs, and the new index of every earlier node."""

    graph: PrecisionGraph
    b: TermBuilder
    node: Node
    inputs: list[int]
    new: list[int]

    def old(self, port: int) -> Node:
        return self.graph.nodes[self.node.inputs[port]]

    def reads(self, *path: str) -> bool:
        """Whether some input is this chain of ops, outermost first: ``reads("round", "silu")``."""
        return any(self.chain(i, path) for i in self.node.inputs)

    def chain(self, index: int, path: tuple[str, ...]) -> bool:
        node = self.graph.nodes[index]
        if node.op != path[0]:
            return False
        return len(path) == 1 or any(self.chain(i, path[1:]) for i in node.inputs)

    def with_inputs(self, inputs: list[int]) -> int:
        return remake(self.b, self.node, inputs)

    def with_scale(self, **rule: object) -> int:
        scale = self.node.type.precision.scale
        assert scale is not None
        scale = replace(scale, rule=replace(scale.rule, **rule))  # type: ignore[arg-type]
        return self.b.quantize(self.inputs[0], scale, self.node.kernel)


Edit = Callable[[Context], int | None]


def eps(c: Context) -> int | None:
    if c.node.op != "add" or not c.reads("mean"):
        return None
    return c.with_inputs([c.b.const(1e-6) if c.old(p).op == "const" else i for p, i in enumerate(c.inputs)])


def residual_not_rounded(c: Context) -> int | None:
    in_norm = c.node.op == "sq" or (c.node.op == "mul" and (c.reads("rsqrt") or c.reads("broadcast", "rsqrt")))
    if not in_norm or not c.reads("round", "add"):
        return None
    kept = [
        c.b.nodes[i].inputs[0] if c.chain(o, ("round", "add")) else i
        for o, i in zip(c.node.inputs, c.inputs, strict=True)
    ]
    return c.with_inputs(kept)


def silu_not_rounded(c: Context) -> int | None:
    return c.inputs[0] if c.node.op == "round" and c.old(0).op == "silu" else None


def rotary_not_rounded(c: Context) -> int | None:
    if c.node.op not in ("add", "sub") or not all(c.chain(i, ("round", "mul")) for i in c.node.inputs):
        return None
    return c.with_inputs([c.b.nodes[i].inputs[0] for i in c.inputs])


def gemm_not_rounded(c: Context) -> int | None:
    block = c.node.op == "round" and c.old(0).op == "gemm" and layer_of(c.old(0).fqn) is not None
    return c.inputs[0] if block else None


def _quantize(tokens: bool, edit: Edit) -> Edit:
    def change(c: Context) -> int | None:
        return edit(c) if c.node.op == "quantize" and ("T" in c.node.type.shape) == tokens else None

    return change


def amax_floor(c: Context) -> int | None:
    return c.with_scale(amax_floor=1e-10)


def reciprocal(c: Context) -> int | None:
    return c.with_scale(division=Division.RECIPROCAL_OF_SCALE)


def power_of_two(c: Context) -> int | None:
    return c.with_scale(power_of_two=True)


def _block(granularity: Granularity) -> Edit:
    def change(c: Context) -> int | None:
        scale = c.node.type.precision.scale
        assert scale is not None
        return c.b.quantize(c.inputs[0], replace(scale, granularity=granularity), c.node.kernel)

    return change


def attention_scale(c: Context) -> int | None:
    if c.node.op != "attention":
        return None
    attrs = dict(c.node.attrs)
    attrs["scale"] = float(attrs["scale"]) * 1.01  # type: ignore[arg-type]
    return c.b.intern("attention", c.inputs, attrs, c.node.type.shape, c.node.type.precision, c.node.kernel)


def next_layers_key(c: Context) -> int | None:
    """The K weight of the next layer (the last takes the first's)."""
    layer = layer_of(c.node.fqn)
    if c.node.op != "gemm" or not c.node.fqn.endswith("k_proj") or layer is None:
        return None
    name = c.graph.nodes[c.old(1).inputs[0]].attr("name")
    other = str(name).replace(f".{layer}.", f".{layer + 1}.")
    if other not in c.graph.meta["operands"]:
        other = str(name).replace(f".{layer}.", ".0.")
    scale = c.old(1).type.precision.scale
    assert scale is not None
    weight = c.b.parameter(other, c.old(1).type.shape)  # type: ignore[arg-type]
    return c.with_inputs([c.inputs[0], c.b.quantize(weight, scale, c.old(1).kernel)])


def _other_half(c: Context) -> int | None:
    """The result of the other of gate and up in this node's layer."""
    wanted = "up_proj" if c.node.op == "silu" else "gate_proj"
    for index, node in enumerate(c.graph.nodes[: len(c.new)]):
        if node.op == "round" and layer_of(node.fqn) == layer_of(c.node.fqn):
            gemm = c.graph.nodes[node.inputs[0]]
            if gemm.op == "gemm" and gemm.fqn.endswith(wanted):
                return c.new[index]
    return None


def gate_and_up_swapped(c: Context) -> int | None:
    if c.node.op == "silu":
        up = _other_half(c)
        assert up is not None, "up comes after silu in this graph: the mutation needs both gemms first"
        return c.with_inputs([up])
    if c.node.op == "mul" and c.reads("round", "silu"):
        gate = _other_half(c)
        return c.with_inputs(
            [i if c.chain(o, ("round", "silu")) else gate or -1 for o, i in zip(c.node.inputs, c.inputs, strict=True)]
        )
    return None


def stored_codes(c: Context) -> int | None:
    """One bit of one code: the lifter finds no parameter for what v_proj stores."""
    if c.node.op != "gemm" or not c.node.fqn.endswith("v_proj"):
        return None
    codes = c.b.intern("operand", (), {"name": f"{c.node.fqn}.codes"}, c.old(1).type.shape, c.old(1).type.precision)
    return c.with_inputs([c.inputs[0], codes])


def output_from_empty(c: Context) -> int | None:
    if c.node.op != "quantize" or not c.reads("round", "attention"):
        return None
    empty = c.b.intern(
        "poison", (), {"name": f"empty.{layer_of(c.node.fqn)}"}, c.node.type.shape, c.old(0).type.precision
    )
    return c.with_inputs([empty])


def norm_weight_of_next_layer(c: Context) -> int | None:
    layer = layer_of(c.node.fqn)
    if c.node.op != "mul" or "input_layernorm" not in c.node.fqn or layer is None or not c.reads("parameter"):
        return None
    inputs = []
    for port, term in enumerate(c.inputs):
        if c.old(port).op == "parameter":
            name = f"model.layers.{layer + 1}.input_layernorm.weight"
            if name not in c.graph.meta["parameters"]:
                name = "model.layers.0.input_layernorm.weight"
            term = c.b.parameter(name, c.old(port).type.shape)  # type: ignore[arg-type]
        inputs.append(term)
    return c.with_inputs(inputs)


def kv_cache_fp8(c: Context) -> int | None:
    if c.node.op != "attention":
        return None
    scale = next(n.type.precision.scale for n in c.graph.nodes if n.op == "quantize" and "T" in n.type.shape)
    assert scale is not None
    q, k, v = c.inputs
    return c.with_inputs([q, c.b.quantize(k, scale, ""), c.b.quantize(v, scale, "")])


def rotary_forgotten_on_k(c: Context) -> int | None:
    if c.node.op != "attention":
        return None
    queue = [c.node.inputs[1]]
    while c.graph.nodes[queue[0]].op != "slice":
        queue += c.graph.nodes[queue.pop(0)].inputs
    return c.with_inputs([c.inputs[0], c.new[c.graph.nodes[queue[0]].inputs[0]], c.inputs[2]])


def unquantised(c: Context) -> int | None:
    return c.inputs[0] if c.node.op == "quantize" else None


def gemm_in_bf16(c: Context) -> int | None:
    if c.node.op != "gemm" or c.node.role is not Role.FPROP or layer_of(c.node.fqn) is None:
        return None
    attrs = dict(c.node.attrs)
    return c.b.intern("gemm", c.inputs, attrs, c.node.type.shape, Precision(Format.BF16), c.node.kernel)


def weights_quantised_twice(c: Context) -> int | None:
    if c.node.op != "quantize" or "T" in c.node.type.shape:
        return None
    scale = c.node.type.precision.scale
    assert scale is not None
    return c.b.quantize(c.with_inputs(c.inputs), scale, c.node.kernel)


@dataclass(frozen=True)
class Mutation:
    """``one`` and ``every`` are (faults in one layer, faults in n layers as (per layer, besides))."""

    edit: Edit
    rule: str
    one: int
    every: tuple[int, int]


MUTATIONS = {
    "eps": Mutation(eps, "JG011", 2, (2, 1)),
    "residual not rounded before norm": Mutation(residual_not_rounded, "JG004", 2, (2, 0)),
    "silu not rounded": Mutation(silu_not_rounded, "JG004", 1, (1, 0)),
    "rotary products not rounded": Mutation(rotary_not_rounded, "JG004", 8, (8, 0)),
    "gemm not rounded": Mutation(gemm_not_rounded, "JG004", 7, (7, 0)),
    "activation amax floor": Mutation(_quantize(True, amax_floor), "JG005", 4, (4, 0)),
    "activation reciprocal": Mutation(_quantize(True, reciprocal), "JG005", 4, (4, 0)),
    "activation power of two": Mutation(_quantize(True, power_of_two), "JG003", 4, (4, 0)),
    "activation 1x64": Mutation(_quantize(True, _block(Granularity.per_group(64))), "JG002", 4, (4, 0)),
    "weight 64x128": Mutation(_quantize(False, _block(Granularity.per_block(64, 128))), "JG002", 7, (7, 0)),
    "attention scale": Mutation(attention_scale, "JG011", 1, (1, 0)),
    "K weight of the next layer": Mutation(next_layers_key, "JG013", 1, (1, 0)),
    "gate and up swapped": Mutation(gate_and_up_swapped, "JG012", 2, (2, 0)),
    "one bit of one code": Mutation(stored_codes, "JG017", 1, (1, 0)),
    "output read from empty": Mutation(output_from_empty, "JG011", 1, (1, 0)),
    "norm weight of the next layer": Mutation(norm_weight_of_next_layer, "JG013", 1, (1, 0)),
    "kv cache fp8": Mutation(kv_cache_fp8, "JG008", 1, (1, 0)),
    "rotary forgotten on k": Mutation(rotary_forgotten_on_k, "JG011", 1, (1, 0)),
    "engine not quantised": Mutation(unquantised, "JG014", 7, (7, 0)),
    "gemm accumulates in bf16": Mutation(gemm_in_bf16, "JG010", 7, (7, 0)),
    "weights quantised twice": Mutation(weights_quantised_twice, "JG009", 7, (7, 0)),
}


def apply(graph: PrecisionGraph, edit: Edit, layer: int | None = None) -> PrecisionGraph:
    def change(b: TermBuilder, index: int, node: Node, inputs: list[int], new: list[int]) -> int | None:
        if layer is not None and place_of(graph, node) != layer:
            return None
        return edit(Context(graph, b, node, inputs, new))

    return rewrite(graph, change)


def place_of(graph: PrecisionGraph, node: Node) -> int | None:
    """The layer a node belongs to; a quantised weight's is its parameter's."""
    if layer_of(node.fqn) is None and node.op == "quantize":
        return layer_of(str(dict(graph.nodes[node.inputs[0]].attrs).get("name", "")))
    return layer_of(node.fqn)

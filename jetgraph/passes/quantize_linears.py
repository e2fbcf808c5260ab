"""Replace the GEMMs of quantised linears by quantise → FP8 GEMM, in FPROP, DGRAD and WGRAD.

requires: a joint or inference graph; `mark_forward` already applied to the latter
ensures:  every GEMM of a linear that the policy quantises runs on FP8 codes; linears that read one tensor share one
          quantised copy of it (q/k/v, gate/up); a weight is quantised once in forward and once in backward, so that no
          codes of a weight are kept between them
numerics: changed, by the policy's declared scale rule and nothing else
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from jetgraph.graph import Role
from jetgraph.lowering.torch_ops import scale_arguments
from jetgraph.passes import edit
from jetgraph.passes.linears import LinearGemm, Operand, find_linear_gemms
from jetgraph.policy import LinearPrecision, WgradSource
from jetgraph.precision import Precision

ops = torch.ops.jetgraph


@dataclass(frozen=True)
class LoweredGemm:
    """One GEMM that the pass replaced."""

    fqn: str
    role: Role
    node: str
    reason: str


def quantize_linears(
    module: GraphModule, decide: Callable[[str], LinearPrecision], wgrad_source: WgradSource
) -> list[LoweredGemm]:
    """Rewrite ``module`` in place; ``decide`` maps a relative FQN to its precision.  Returns what was replaced."""
    graph = module.graph
    quantizer = _Quantizer(graph, wgrad_source)
    lowered = []
    for gemm in find_linear_gemms(graph):
        precision = decide(gemm.fqn)
        if not precision.quantized:
            continue
        with graph.inserting_before(gemm.node):
            arguments = quantizer.arguments(gemm, precision)
        with graph.inserting_before(gemm.node):
            new = edit.call(graph, ops.fp8_gemm.default, arguments, gemm.node, gemm.role is Role.FPROP)
        gemm.node.replace_all_uses_with(new)
        graph.erase_node(gemm.node)
        lowered.append(LoweredGemm(gemm.fqn, gemm.role, new.name, precision.reason))
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return lowered


class _Quantizer:
    """Makes quantised operands, each once per source, orientation and phase."""

    def __init__(self, graph: Graph, wgrad_source: WgradSource) -> None:
        self.graph = graph
        self.wgrad_source = wgrad_source
        self.made: dict[tuple, tuple[Node, ...]] = {}

    def arguments(self, gemm: LinearGemm, precision: LinearPrecision) -> tuple:
        """The arguments of `jetgraph::fp8_gemm` that compute what ``gemm`` did: a[M,K] · b[N,K]ᵀ."""
        if gemm.role is Role.WGRAD:
            left = self.along_tokens(self._as_rows(gemm.a, True), precision, gemm.node)
            right = self.along_tokens(self._as_rows(gemm.b, False), precision, gemm.node)
            return (*left, *right, gemm.bias, 1, precision.group)
        incoming = precision.activation if gemm.role is Role.FPROP else precision.gradient
        if gemm.a.transposed or gemm.b.weight is None:
            raise NotImplementedError(
                f"{gemm.fqn}: {gemm.role.value} has the weight on the left; only x @ W.T and dy @ W are lowered"
            )
        left = self.quantized(gemm.a.source, incoming, gemm.node)
        right = self.weight(gemm, precision)
        return (*left, *right, gemm.bias, precision.group, precision.group)

    def _as_rows(self, operand: Operand, is_left: bool) -> Node:
        """WGRAD is dyᵀ · x: the left operand arrives transposed and the right one does not; give back [T, C]."""
        if operand.transposed is not is_left:
            raise NotImplementedError(f"WGRAD reads {operand.source.name} in an orientation that is not lowered")
        return operand.source

    def quantized(self, source: Node, precision: Precision, like: Node) -> tuple[Node, Node]:
        assert precision.scale is not None
        arguments = scale_arguments(precision.scale)
        return self._once(("rows", source, arguments), source, ops.quantize.default, (source, *arguments), like)

    def weight(self, gemm: LinearGemm, precision: LinearPrecision) -> tuple[Node, Node]:
        assert precision.weight.scale is not None
        source, forward = gemm.b.source, gemm.role is Role.FPROP
        arguments = scale_arguments(precision.weight.scale)
        key = ("weight", source, forward, arguments)
        if key not in self.made:
            with self.graph.inserting_before(gemm.node):
                node = edit.call(self.graph, ops.quantize.default, (source, *arguments), gemm.node, forward)
                node.meta["jetgraph_reason"] = precision.reason
            self.made[key] = edit.results(self.graph, node, 2)
        codes, scale = self.made[key]
        if forward:
            return codes, scale
        with self.graph.inserting_before(gemm.node):
            permute = torch.ops.aten.permute.default
            return tuple(edit.call(self.graph, permute, (n, [1, 0]), gemm.node, False) for n in (codes, scale))  # type: ignore[return-value]

    def along_tokens(self, source: Node, precision: LinearPrecision, like: Node) -> tuple[Node, Node]:
        assert precision.wgrad.scale is not None
        rows, cols, *rule = scale_arguments(precision.wgrad.scale)
        assert cols == 1
        saved = self.made.get(("rows", source, scale_arguments(precision.activation.scale)))  # type: ignore[arg-type]
        if self.wgrad_source is WgradSource.REQUANTIZE and saved is not None and edit.is_forward(saved[0]):
            key = ("requantized", source, precision.group, rows, *rule)
            if key not in self.made:
                arguments = (*saved, precision.group, rows, *rule)
                with self.graph.inserting_before(like):
                    node = edit.call(self.graph, ops.requantize_tokens.default, arguments, like, False)
                self.made[key] = edit.results(self.graph, node, 2)
            return self.made[key]  # type: ignore[return-value]
        return self._once(
            ("tokens", source, rows, *rule), source, ops.quantize_tokens.default, (source, rows, *rule), like
        )

    def _once(self, key: tuple, source: Node, target, arguments: tuple, like: Node) -> tuple[Node, Node]:
        """Quantise right where ``source`` is made, in its own phase, so that all its users share the result."""
        if key not in self.made:
            forward = edit.is_forward(source) or source.op == "placeholder" and "tangent" not in source.name
            owner = edit.origin(source) if source.op == "call_function" else like
            with edit.after(self.graph, source):
                node = edit.call(self.graph, target, arguments, owner, forward)
            self.made[key] = edit.results(self.graph, node, 2)
        return self.made[key]  # type: ignore[return-value]

"""Expand the operators of quantised linears into quantise → FP8 GEMM, in FPROP, DGRAD and WGRAD.

requires: a joint or inference graph; `mark_forward` already applied to the latter
ensures:  every `jetgraph::linear`, `linear_dgrad` and `linear_wgrad` is gone; linears that read one tensor share one
          quantised copy of it (q/k/v, gate/up); a weight is quantised once in forward and once in backward, so that no
          codes of a weight are kept between them unless the trainer holds weights; every GEMM names the provider that
          runs it
numerics: unchanged: the operators compute the same primitives on the same operands
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from jetgraph.graph import Role
from jetgraph.lowering.kernels import Kernels
from jetgraph.lowering.linear_ops import along_tokens, gemm_grid
from jetgraph.lowering.provider import Gemm
from jetgraph.lowering.torch_ops import scale_arguments
from jetgraph.passes import edit
from jetgraph.passes.linears import LinearGemm, find_linear_gemms, source_of
from jetgraph.policy import LinearPrecision, WgradSource
from jetgraph.precision import Precision

ops = torch.ops.jetgraph


@dataclass(frozen=True)
class LoweredGemm:
    """One GEMM that the pass expanded."""

    fqn: str
    role: Role
    node: str
    reason: str
    provider: str


def quantize_linears(module: GraphModule, kernels: Kernels = Kernels()) -> list[LoweredGemm]:  # noqa: B008  (frozen)
    """Rewrite ``module`` in place.  Returns what was expanded.

    Raises:
        ProviderError: a GEMM cannot run on the provider that ``kernels`` wants for it.
    """
    graph = module.graph
    quantizer = _Quantizer(graph)
    lowered = []
    for gemm in find_linear_gemms(graph):
        with graph.inserting_before(gemm.node):
            arguments = quantizer.arguments(gemm)
        provider = kernels.provider(_request(gemm.role, arguments), gemm.node.meta["val"].device)
        with graph.inserting_before(gemm.node):
            new = edit.call(graph, ops.fp8_gemm.default, (*arguments, provider), gemm.node, gemm.role is Role.FPROP)
        gemm.node.replace_all_uses_with(new)
        graph.erase_node(gemm.node)
        lowered.append(LoweredGemm(gemm.fqn, gemm.role, new.name, gemm.precision.reason, provider))
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return lowered


def _request(role: Role, arguments: tuple) -> Gemm:
    """The GEMM with the arguments of `jetgraph::fp8_gemm`, as the registry asks about it."""
    a, _, b, _, bias, b_rows, group = arguments
    depth = 0 if role is Role.WGRAD else a.meta["val"].shape[1]  # WGRAD's is the number of tokens: it decides nothing
    return Gemm(b.meta["val"].shape[0], depth, b_rows, group, bias is not None, role is Role.DGRAD)


class _Quantizer:
    """Makes quantised operands, each once per source, orientation and phase."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.made: dict[tuple, tuple[Node, ...]] = {}

    def arguments(self, gemm: LinearGemm) -> tuple:
        """The arguments of `jetgraph::fp8_gemm` that compute what ``gemm`` does: a[M,K] · b[N,K]ᵀ."""
        precision = gemm.precision
        if gemm.role is Role.WGRAD:
            left = self.grouped(gemm.left, precision, gemm.node, activation=False)
            right = self.grouped(gemm.right, precision, gemm.node, activation=True)
        else:
            incoming = precision.activation if gemm.role is Role.FPROP else precision.gradient
            left = self.quantized(gemm.left, incoming, gemm.node)
            right = self.weight(gemm)
        return (*left, *right, gemm.bias, *gemm_grid(gemm.role.name.lower(), precision))

    def quantized(self, source: Node, precision: Precision, like: Node) -> tuple[Node, Node]:
        assert precision.scale is not None
        arguments = scale_arguments(precision.scale)
        key = ("rows", source_of(source), arguments)
        return self._once(key, source, ops.quantize.default, (source, *arguments), like)

    def weight(self, gemm: LinearGemm) -> tuple[Node, Node]:
        precision = gemm.precision
        assert precision.weight.scale is not None
        source, forward = gemm.right, gemm.role is Role.FPROP
        arguments = scale_arguments(precision.weight.scale)
        key = ("weight", source, forward, arguments)
        if key not in self.made:
            with self.graph.inserting_before(gemm.node):
                is_parameter = source.op == "placeholder"  # else a cast of a master
                if forward:
                    target = ops.quantize_weight if is_parameter else ops.quantize
                else:
                    target = ops.quantize_weight_transposed if is_parameter else ops.quantize_transposed
                node = edit.call(self.graph, target.default, (source, *arguments), gemm.node, forward)
                node.meta["jetgraph_reason"] = precision.reason
            self.made[key] = edit.results(self.graph, node, 2)
        return self.made[key]  # type: ignore[return-value]

    def grouped(self, source: Node, precision: LinearPrecision, like: Node, *, activation: bool) -> tuple[Node, Node]:
        """An operand of WGRAD: codes [C, T] and their scales."""
        assert precision.wgrad.scale is not None
        assert precision.activation.scale is not None
        if not along_tokens(precision.wgrad):
            return self._transposed(self.quantized(source, precision.wgrad, like), like)
        rows, _, *rule = scale_arguments(precision.wgrad.scale)
        if activation and precision.wgrad_source is WgradSource.REQUANTIZE:
            saved = self.quantized(source, precision.activation, like)
            key = ("requantized", saved, precision.group, rows, *rule)
            if key not in self.made:
                arguments = (*saved, precision.group, rows, *rule)
                with self.graph.inserting_before(like):
                    node = edit.call(self.graph, ops.requantize_tokens.default, arguments, like, False)
                self.made[key] = edit.results(self.graph, node, 2)
            return self.made[key]  # type: ignore[return-value]
        key = ("tokens", source_of(source), rows, *rule)
        return self._once(key, source, ops.quantize_tokens.default, (source, rows, *rule), like)

    def _once(self, key: tuple, source: Node, target, arguments: tuple, like: Node) -> tuple[Node, Node]:
        """Quantise right where ``source`` is made, in its own phase, so that all its users share the result."""
        if key not in self.made:
            forward = edit.is_forward(source) or source.op == "placeholder" and "tangent" not in source.name
            origin = edit.origin(source)
            owner = origin if origin.op == "call_function" else like
            with edit.after(self.graph, source):
                node = edit.call(self.graph, target, arguments, owner, forward)
            self.made[key] = edit.results(self.graph, node, 2)
        return self.made[key]  # type: ignore[return-value]

    def _transposed(self, halves: tuple[Node, ...], like: Node) -> tuple[Node, Node]:
        with self.graph.inserting_before(like):
            permute = torch.ops.aten.permute.default
            return tuple(edit.call(self.graph, permute, (n, [1, 0]), like, edit.is_forward(like)) for n in halves)  # type: ignore[return-value]

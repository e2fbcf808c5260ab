"""Find the linear layers of a joint graph: each `jetgraph::linear` operator and its gradients, with role and FQN.

requires: a joint (or inference) ATen graph from AOTAutograd, calls tagged by `partitioner_tag`, module stacks in `meta`
ensures:  the graph is unchanged
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from jetgraph.fx_record import module_fqn, relative_fqn
from jetgraph.graph import Role
from jetgraph.linear import Linear
from jetgraph.lowering.linear_ops import parsed
from jetgraph.passes.edit import VIEWS, is_forward
from jetgraph.policy import LinearPrecision

aten, ops = torch.ops.aten, torch.ops.jetgraph
ROLES = {
    ops.linear.default: Role.FPROP,
    ops.linear_dgrad.default: Role.DGRAD,
    ops.linear_wgrad.default: Role.WGRAD,
}
PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.linear.default})


@dataclass(frozen=True)
class LinearGemm:
    """``node`` is one GEMM of the quantised linear at ``fqn`` (relative to the compiled module).

    Operands: x and weight of FPROP, dy and weight of DGRAD, dy and x of WGRAD.
    """

    node: Node
    role: Role
    fqn: str
    left: Node
    right: Node
    bias: Node | None
    precision: LinearPrecision


def find_linear_gemms(graph: Graph) -> list[LinearGemm]:
    """The three GEMMs of every quantised linear, in graph order."""
    found = []
    for node in graph.nodes:
        role = ROLES.get(node.target)
        if role is None:
            continue
        left, right, *bias, text = node.args
        found.append(
            LinearGemm(node, role, module_of(node)[0], left, right, bias[0] if bias else None, parsed(text))  # type: ignore[arg-type]
        )
    return found


def find_plain_linears(graph: Graph) -> list[str]:
    """Relative FQNs of `nn.Linear` layers in the forward that are not `jetgraph.linear.Linear`."""
    found = []
    for node in graph.nodes:
        if node.op == "call_function" and node.target in PRODUCTS and is_forward(node):
            fqn, cls = module_of(node)
            if _is_plain_linear(cls):
                found.append(fqn)
    return found


def _is_plain_linear(cls: type | str) -> bool:
    if isinstance(cls, type):
        return issubclass(cls, torch.nn.Linear) and not issubclass(cls, Linear)
    return cls.endswith("Linear") and not cls.startswith("jetgraph.")


def source_of(node: Node) -> Node:
    """The tensor that views of it (flattening tokens) stand for: linears that read it share its codes."""
    while node.op == "call_function" and node.target in VIEWS and _keeps_rows(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _keeps_rows(node: Node) -> bool:
    """A view or reshape that leaves the feature axis as it is."""
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if node.target in (aten.t.default, aten.transpose.int, aten.permute.default):
        return False
    return before.ndim > 0 and after.ndim > 0 and before.shape[-1] == after.shape[-1]


def module_of(node: Node) -> tuple[str, type | str]:
    """(relative FQN, class) of the innermost module whose forward, or whose gradient, this node belongs to."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    return (relative_fqn(module_fqn(node)), list(stack.values())[-1][1]) if stack else ("", "")

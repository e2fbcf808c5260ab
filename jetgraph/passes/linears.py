"""Find the GEMMs that `nn.Linear` modules became in a joint graph, with their roles and operands.

requires: a joint (or inference) ATen graph from AOTAutograd, calls tagged by `partitioner_tag`, module stacks in `meta`
ensures:  the graph is unchanged
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from jetgraph.graph import Role
from jetgraph.passes.edit import is_forward

aten = torch.ops.aten
_IDENTITIES = {aten.detach.default, aten.alias.default}
_CASTS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default, *_IDENTITIES}


@dataclass(frozen=True)
class Operand:
    """One operand of a GEMM: the tensor as stored, and whether the GEMM reads it transposed."""

    source: Node
    transposed: bool

    @property
    def weight(self) -> Node | None:
        """The parameter placeholder this operand is (through casts), if it is one."""
        node = self.source
        while node.op == "call_function" and node.target in _CASTS:
            node = node.args[0]  # type: ignore[assignment]
        is_parameter = node.op == "placeholder" and "tangent" not in node.name and node.meta["val"].ndim == 2
        return node if is_parameter else None


@dataclass(frozen=True)
class LinearGemm:
    """``node`` computes a @ b (+ bias) for the linear at ``fqn`` (relative to the compiled module)."""

    node: Node
    role: Role
    fqn: str
    a: Operand
    b: Operand
    bias: Node | None


def module_of(node: Node) -> tuple[str, type | str]:
    """(relative FQN, class) of the innermost module whose forward, or whose gradient, this node belongs to."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return "", ""
    fqn, cls = list(stack.values())[-1]
    return relative_fqn(fqn), cls


def relative_fqn(fqn: str) -> str:
    """``L['self'].mlp.up_proj`` → ``mlp.up_proj``."""
    return fqn.removeprefix("L['self']").removeprefix(".")


def is_linear(cls: type | str) -> bool:
    return issubclass(cls, torch.nn.Linear) if isinstance(cls, type) else "Linear" in cls


def find_linear_gemms(graph: Graph) -> list[LinearGemm]:
    """Every matrix product that a linear module's forward or gradient became, in graph order."""
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or node.target not in (aten.mm.default, aten.addmm.default):
            continue
        fqn, cls = module_of(node)
        if not is_linear(cls):
            continue
        bias, a, b = node.args if node.target is aten.addmm.default else (None, *node.args)
        left, right = operand(a), operand(b)
        if is_forward(node):
            role = Role.FPROP
        else:
            role = Role.DGRAD if left.weight or right.weight else Role.WGRAD
        found.append(LinearGemm(node, role, fqn, left, right, bias))
    return found


def operand(node: Node) -> Operand:
    """Strip transposes (and no-ops between them) off a GEMM's argument."""
    transposed = False
    while node.op == "call_function" and (node.target in _IDENTITIES or _is_transpose(node)):
        transposed ^= _is_transpose(node)
        node = node.args[0]  # type: ignore[assignment]
    return Operand(node, transposed)


def _is_transpose(node: Node) -> bool:
    if node.target is aten.t.default:
        return True
    if node.meta["val"].ndim != 2:
        return False
    if node.target is aten.transpose.int:
        return {d % 2 for d in node.args[1:]} == {0, 1}  # type: ignore[operator]
    return node.target is aten.permute.default and list(node.args[1]) == [1, 0]  # type: ignore[arg-type]

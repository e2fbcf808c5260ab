"""Give unquantised linears a forward GEMM whose rows do not depend on how many there are.

requires: a joint or inference graph, after `quantize_linears`
ensures:  every FPROP GEMM of a linear is `jetgraph::fp8_gemm` or `jetgraph::row_tile_gemm`; gradients are untouched
          (a rollout computes none)
numerics: the same sums in another order; both round once to BF16
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from jetgraph.graph import Role
from jetgraph.passes import edit
from jetgraph.passes.linears import find_linear_gemms

aten = torch.ops.aten


def make_gemms_row_invariant(module: GraphModule) -> list[str]:
    """Rewrite ``module`` in place; returns the FQNs (relative) whose FPROP changed."""
    graph = module.graph
    changed = []
    for gemm in find_linear_gemms(graph):
        if gemm.role is not Role.FPROP:
            continue
        if gemm.a.transposed or not gemm.b.transposed or gemm.bias is not None or gemm.b.weight is None:
            raise NotImplementedError(
                f"{gemm.fqn}: a BF16 linear with a bias has no row-invariant kernel yet; use provider 'stock'"
            )
        with graph.inserting_before(gemm.node):
            arguments = (gemm.a.source, gemm.b.source)
            new = edit.call(graph, torch.ops.jetgraph.row_tile_gemm.default, arguments, gemm.node, True)
        gemm.node.replace_all_uses_with(new)
        graph.erase_node(gemm.node)
        changed.append(gemm.fqn)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return changed

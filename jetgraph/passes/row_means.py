"""On a GPU, means along a row become `jetgraph::row_mean`, whose bits do not depend on the other rows.

requires: a joint or inference graph, calls tagged by `partitioner_tag`
ensures:  on the devices named, no forward mean of FP32 over the last axis is ATen's; everything else is unchanged
numerics: the same sum in an order of its own: other last bits than ATen's on the GPU, whose order depends on how many
          rows there are; none on the CPU, where ATen's does not
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from jetgraph.passes import edit

DEVICES = frozenset({"cuda"})


def row_means(module: GraphModule, devices: frozenset[str] = DEVICES) -> int:
    """Rewrite ``module`` in place.  Returns how many means were replaced."""
    graph, replaced = module.graph, 0
    for node in list(graph.nodes):
        if node.target is torch.ops.aten.mean.dim and edit.is_forward(node) and _is_along_rows(node, devices):
            with graph.inserting_before(node):
                mean = edit.call(graph, torch.ops.jetgraph.row_mean.default, (node.args[0],), node, True)
                if not _keeps_axis(node):
                    mean = edit.call(graph, torch.ops.aten.squeeze.dim, (mean, -1), node, True)
            node.replace_all_uses_with(mean)
            graph.erase_node(node)
            replaced += 1
    if replaced:
        graph.lint()
        module.recompile()
    return replaced


def _is_along_rows(node: Node, devices: frozenset[str]) -> bool:
    value, mean = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    if value.device.type not in devices or not value.dtype is mean.dtype is torch.float32:
        return False
    return node.args[1] in ([-1], [value.ndim - 1])


def _keeps_axis(node: Node) -> bool:
    return len(node.args) > 2 and bool(node.args[2])

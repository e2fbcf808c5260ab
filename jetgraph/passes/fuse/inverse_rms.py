"""1/√(mean(x²) + eps) of a norm that no quantiser follows, as one `jetgraph::inverse_rms` (q's and k's norms).

requires: norms before quantisers are fused already
ensures:  what a norm multiplies with is one call that reads x in BF16; its squares are never stored
numerics: unchanged, checked when applied
"""

from __future__ import annotations

from torch.fx import GraphModule, Node

from jetgraph.passes import edit
from jetgraph.passes.fuse.legality import Fusion, disagreement
from jetgraph.passes.fuse.match import aten, is_call, ops, replace
from jetgraph.passes.fuse.norms import mean_and_eps
from jetgraph.passes.linears import module_of

OPERATOR = "jetgraph::inverse_rms"


def fuse_inverse_rms(module: GraphModule) -> list[Fusion]:
    graph, tried = module.graph, []
    for r in [n for n in graph.nodes if n.target is aten.rsqrt.default and edit.is_forward(n)]:
        found = _squared(r)
        if found is None:
            continue
        wide, mean, eps = found
        x = wide.args[0]
        with graph.inserting_before(wide):
            fused = edit.call(graph, ops.inverse_rms.default, (x, eps, is_call(mean, ops.row_mean.default)), r, True)
        refusal = disagreement([r], [fused], [x])  # type: ignore[list-item]
        if not refusal:
            replace(r, fused)
        tried.append(Fusion(OPERATOR, module_of(r)[0], refusal))
        graph.eliminate_dead_code()
    return tried


def _squared(r: Node) -> tuple[Node, Node, float] | None:
    """The FP32 copy of what is squared, the mean and eps."""
    shifted = r.args[0]
    if not is_call(shifted, aten.add.Tensor) or not isinstance(shifted.args[0], Node):  # type: ignore[union-attr]
        return None
    square = shifted.args[0].args[0] if shifted.args[0].args else None  # type: ignore[union-attr]
    if not isinstance(square, Node) or not square.args or not isinstance(square.args[0], Node):
        return None
    found = mean_and_eps(square.args[0], r)
    return (square.args[0], *found) if found is not None else None

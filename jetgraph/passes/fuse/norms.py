"""[residual add →] RMSNorm → quantise, as `jetgraph::rms_norm_quantize`.

requires: lowered linears
ensures:  a norm whose result only quantisers of one group and rule read in the forward pass is one call, its residual
          add included; backward reads the sum and 1/√(mean + eps), from which it can compute the rest (`recompute`)
numerics: unchanged, checked when applied
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from jetgraph.passes import edit
from jetgraph.passes.fuse.legality import Fusion, disagreement
from jetgraph.passes.fuse.match import (
    Quantisers,
    ask_codes,
    aten,
    either_order,
    first_of,
    forward_readers,
    is_call,
    is_rounding,
    ops,
    quantisers_of,
    replace,
    same_shape,
)
from jetgraph.passes.linears import module_of, source_of

OPERATOR = "jetgraph::rms_norm_quantize"


@dataclass(frozen=True)
class Norm:
    """y = weight · bf16(wide · r), r = rsqrt(mean(wide²) + eps), wide = float(s); ``added`` is what s sums, or None."""

    y: Node
    normed: Node
    r: Node
    wide: Node
    s: Node
    added: tuple[Node, Node] | None
    weight: Node
    eps: float
    own_mean: bool
    quantisers: Quantisers


def fuse_norms(module: GraphModule) -> list[Fusion]:
    graph, tried = module.graph, []
    for quantiser in [n for n in graph.nodes if n.target is ops.quantize.default and edit.is_forward(n)]:
        norm = find(source_of(quantiser.args[0]))
        if norm is not None and norm.quantisers.rows is quantiser:
            tried.append(_fuse(graph, norm))
            graph.eliminate_dead_code()
    return tried


def find(y: Node) -> Norm | None:
    """The norm that ``y`` is the result of, if it can be fused."""
    if not is_call(y, aten.mul.Tensor) or y.meta["val"].dtype is not torch.bfloat16:
        return None
    quantisers = quantisers_of(y, forward_readers(y))
    if quantisers is None:
        return None
    for weight, normed in either_order(y):
        if weight.meta["val"].ndim != 1 or not is_rounding(normed) or not is_call(normed.args[0], aten.mul.Tensor):
            continue
        for wide, r in either_order(normed.args[0]):  # type: ignore[arg-type]
            shift = mean_and_eps(wide, r)
            if shift is None:
                continue
            mean, eps = shift
            s = wide.args[0]
            assert isinstance(s, Node)
            added = _added(s)
            if first_of(y.graph, [weight, s if added else wide]) is not weight:
                continue  # computed in the block, after the place where the call would read it
            own_mean = is_call(mean, ops.row_mean.default)
            return Norm(y, normed, r, wide, s, added, weight, eps, own_mean, quantisers)
    return None


def mean_and_eps(wide: Node, r: Node) -> tuple[Node, float] | None:
    """The mean and eps if r = rsqrt(mean(wide²) + eps) over the last axis, else None."""
    if not is_call(wide, aten._to_copy.default) or wide.args[0].meta["val"].dtype is not torch.bfloat16:  # type: ignore[union-attr]
        return None
    shifted = r.args[0] if is_call(r, aten.rsqrt.default) else None
    if not is_call(shifted, aten.add.Tensor) or len(shifted.args) != 2 or shifted.kwargs:  # type: ignore[union-attr]
        return None
    mean, eps = shifted.args  # type: ignore[union-attr]
    if not is_call(mean, ops.row_mean.default) and not (is_call(mean, aten.mean.dim) and mean.args[1:] == ([-1], True)):  # type: ignore[union-attr]
        return None
    square = mean.args[0]  # type: ignore[union-attr]
    if not is_call(square, aten.pow.Tensor_Scalar) or square.args != (wide, 2):  # type: ignore[union-attr]
        return None
    return (mean, eps) if isinstance(eps, float) else None  # type: ignore[return-value]


def _added(s: Node) -> tuple[Node, Node] | None:
    """The summands of a residual add that the norm's kernel can make."""
    if is_call(s, aten.add.Tensor) and edit.is_forward(s):
        for a, b in either_order(s)[:1]:
            if same_shape(a, b) and a.meta["val"].dtype is b.meta["val"].dtype is torch.bfloat16:
                return a, b
    return None


def _fuse(graph: Graph, norm: Norm) -> Fusion:
    fqn, quantisers = module_of(norm.y)[0], norm.quantisers
    x, residual = norm.added or (norm.s, None)
    has_tokens = quantisers.tokens is not None
    arguments = (x, residual, norm.weight, norm.eps, norm.own_mean, has_tokens, quantisers.group, *quantisers.rule)
    with graph.inserting_before(
        norm.s if norm.added else norm.wide
    ):  # where all it reads is there, and before its users
        fused = edit.call(graph, ops.rms_norm_quantize.default, arguments, norm.y, True)
    s, r, *codes = edit.results(graph, fused, 6)
    pairs = [(norm.r, r)] + ([(norm.s, s)] if norm.added else [])
    pairs += [(old, new) for old, new in zip(quantisers.results, codes, strict=True) if old is not None]
    leaves = [n for n in (x, residual, norm.weight) if n is not None]
    refusal = disagreement([old for old, _ in pairs], [new for _, new in pairs], leaves)
    if not refusal:
        ask_codes(norm.y, codes[0])
        for old, new in pairs:
            replace(old, new)
    return Fusion(OPERATOR, fqn, refusal)

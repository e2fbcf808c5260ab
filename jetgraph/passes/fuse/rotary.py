"""[heads' RMSNorm →] rotary embedding, as `jetgraph::rms_norm_rotary`.

requires: `fuse_inverse_rms` already applied
ensures:  x · cos + turned(x) · sin, turned being (-second half, first half), of heads [B, S, H, D] is one call, the
          heads' own norm included; what it gives lies as before, tokens first
numerics: unchanged, checked when applied
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from jetgraph.passes import edit
from jetgraph.passes.fuse.legality import Fusion, disagreement
from jetgraph.passes.fuse.match import aten, either_order, first_of, is_call, is_rounding, ops, replace
from jetgraph.passes.linears import module_of

OPERATOR = "jetgraph::rms_norm_rotary"
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default)
"""What leaves numbers in their order."""


@dataclass(frozen=True)
class Norm:
    """weight · bf16(x · r), r being a `jetgraph::inverse_rms` of x."""

    x: Node
    weight: Node
    r: Node


@dataclass(frozen=True)
class Rotation:
    """``y`` [B, H, S, D] of ``heads`` [B, S, H, D] by cos and sin [1 or B, S, D]."""

    y: Node
    heads: Node
    cos: Node
    sin: Node


def fuse_rotary(module: GraphModule) -> list[Fusion]:
    graph, tried = module.graph, []
    for y in [n for n in graph.nodes if n.target is aten.add.Tensor and edit.is_forward(n)]:
        rotation = find(y)
        if rotation is not None:
            tried.append(_fuse(graph, rotation))
            graph.eliminate_dead_code()
    return tried


def find(y: Node) -> Rotation | None:
    """The rotation that ``y`` is the result of, if it can be fused."""
    for straight, turned in either_order(y):
        if not is_call(straight, aten.mul.Tensor) or not is_call(turned, aten.mul.Tensor):
            continue
        for t, cos in either_order(straight):
            for joined, sin in either_order(turned):
                if _is_turned(joined, t) and _is_angle(cos) and _is_angle(sin) and is_call(t, aten.transpose.int):
                    heads = t.args[0]
                    if t.args[1:] == (1, 2) and _is_bf16(heads, y) and heads.meta["val"].ndim == 4:  # type: ignore[union-attr]
                        return Rotation(y, heads, cos.args[0], sin.args[0])  # type: ignore[arg-type]
    return None


def _is_turned(joined: Node, t: Node) -> bool:
    """Whether ``joined`` is (-second half, first half) of ``t`` along its last axis, the fourth."""
    if not is_call(joined, aten.cat.default) or joined.args[1:] not in ((-1,), (3,)) or len(joined.args[0]) != 2:  # type: ignore[arg-type]
        return False
    minus, first = joined.args[0]  # type: ignore[misc]
    second = minus.args[0] if is_call(minus, aten.neg.default) else None
    if not is_call(second, aten.slice.Tensor) or not is_call(first, aten.slice.Tensor):
        return False
    size = t.meta["val"].shape[-1]
    if not isinstance(size, int) or size % 2:
        return False
    if len(second.args) != 4 or first.args != (t, 3, 0, size // 2):
        return False  # every second number, say
    of, axis, start, stop = second.args
    return of is t and axis == 3 and start == size // 2 and stop >= size  # type: ignore[operator]


def _is_angle(node: Node) -> bool:
    """Whether ``node`` is [1 or B, S, D] in BF16, the same for all heads."""
    is_wider = is_call(node, aten.unsqueeze.default) and node.args[1] == 1 and node.meta["val"].ndim == 4
    return is_wider and _is_bf16(node)


def _is_bf16(*nodes: Node) -> bool:
    return all(n.meta["val"].dtype is torch.bfloat16 for n in nodes)


def _norm_of(heads: Node) -> Norm | None:
    """The norm that ``heads`` [B, S, H, D] are the result of, or as [S, H, D]: an engine has its tokens in a row."""
    normed = heads
    while normed.target in RESHAPES:
        normed = normed.args[0]  # type: ignore[assignment]
    shape, of_norm = tuple(heads.meta["val"].shape), tuple(normed.meta["val"].shape)
    in_a_row = isinstance(shape[0], int) and shape[0] == 1 and len(of_norm) == 3
    if of_norm != (shape[1:] if in_a_row else shape if len(of_norm) == 4 else None):
        return None
    for weight, rounded in either_order(normed) if is_call(normed, aten.mul.Tensor) else []:
        if weight.meta["val"].ndim != 1 or not is_rounding(rounded) or not is_call(rounded.args[0], aten.mul.Tensor):
            continue
        for wide, r in either_order(rounded.args[0]):  # type: ignore[arg-type]
            if is_call(r, ops.inverse_rms.default) and is_call(wide, aten._to_copy.default):
                x = wide.args[0]
                if r.args[0] is x and _is_bf16(x, weight):  # type: ignore[arg-type]
                    return Norm(x, weight, r)  # type: ignore[arg-type]
    return None


def _fuse(graph: Graph, rotation: Rotation) -> Fusion:
    y, heads, norm = rotation.y, rotation.heads, _norm_of(rotation.heads)
    place, others = y, [rotation.cos, rotation.sin]
    if norm is not None and all(first_of(graph, [n, norm.r]) is n for n in (norm.weight, *others)):
        place = norm.r  # what else reads r, as backward does, can read it of the call
    x, weight, eps, own_mean, leaf = heads, None, 0.0, True, heads
    with graph.inserting_before(place):
        if norm is not None:
            (x, eps, own_mean), weight, leaf = norm.r.args, norm.weight, norm.x  # type: ignore[assignment]
            if x.meta["val"].ndim == 3:
                x = edit.call(graph, aten.unsqueeze.default, (x, 0), y, True)
        fused = edit.call(graph, ops.rms_norm_rotary.default, (x, weight, eps, own_mean, *others), y, True)
    out, r = edit.results(graph, fused, 2)
    with graph.inserting_before(y):
        pairs = [(y, edit.call(graph, aten.transpose.int, (out, 1, 2), y, True))]
    if place is not y:
        with graph.inserting_after(r):
            old = norm.r  # type: ignore[union-attr]
            pairs.append((old, r if x is leaf else edit.call(graph, aten.squeeze.dim, (r, 0), old, True)))
    leaves = [n for n in (leaf, weight, *others) if n is not None]
    refusal = disagreement([old for old, _ in pairs], [new for _, new in pairs], leaves)
    if not refusal:
        for old, new in pairs:
            replace(old, new)
    return Fusion(OPERATOR, module_of(y)[0], refusal)

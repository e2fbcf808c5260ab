"""silu(gate) · up → quantise, and the gradients of gate and up → quantise.

requires: lowered linears
ensures:  a gated activation whose result only quantisers of one group and rule read in the forward pass is one
          `jetgraph::silu_mul_quantize`; backward computes silu(gate) again; both gradients, where only quantisers read
          them, are one `jetgraph::silu_mul_backward_quantize`
numerics: unchanged, checked when applied
"""

from __future__ import annotations

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
    ops,
    quantisers_of,
    readers,
    replace,
    same_shape,
)
from jetgraph.passes.linears import module_of, source_of

FORWARD, BACKWARD = "jetgraph::silu_mul_quantize", "jetgraph::silu_mul_backward_quantize"


def fuse_activations(module: GraphModule) -> list[Fusion]:
    graph, tried = module.graph, []
    for quantiser in [n for n in graph.nodes if n.target is ops.quantize.default and edit.is_forward(n)]:
        y = source_of(quantiser.args[0])
        quantisers = quantisers_of(y, forward_readers(y)) if is_call(y, aten.mul.Tensor) else None
        if quantisers is None or quantisers.rows is not quantiser:
            continue
        for silu, up in either_order(y):
            if is_call(silu, aten.silu.default) and same_shape(silu, up) and _is_bf16(silu, up):
                tried.append(_fuse(graph, y, silu, up, quantisers))
                graph.eliminate_dead_code()
                break
    return tried


def _is_bf16(*nodes: Node) -> bool:
    return all(n.meta["val"].dtype is torch.bfloat16 for n in nodes)


def _fuse(graph: Graph, y: Node, silu: Node, up: Node, quantisers: Quantisers) -> Fusion:
    gate = silu.args[0]
    assert isinstance(gate, Node)
    arguments = (gate, up, quantisers.tokens is not None, quantisers.group, *quantisers.rule)
    with graph.inserting_before(y):
        fused = edit.call(graph, ops.silu_mul_quantize.default, arguments, y, True)
    codes = edit.results(graph, fused, 4)
    pairs = [(old, new) for old, new in zip(quantisers.results, codes, strict=True) if old is not None]
    refusal = disagreement([old for old, _ in pairs], [new for _, new in pairs], [gate, up])
    if not refusal:
        late = [u for u in silu.users if not edit.is_forward(u) and u.op != "output"]
        if late:
            with graph.inserting_before(first_of(graph, late)):
                again = edit.call(graph, aten.silu.default, (gate,), silu, False)
            for user in late:
                user.replace_input_with(silu, again)
        ask_codes(y, codes[0])
        for old, new in pairs:
            replace(old, new)
    return Fusion(FORWARD, module_of(y)[0], refusal)


def fuse_activation_gradients(module: GraphModule) -> list[Fusion]:
    graph, tried = module.graph, []
    for d_gate in [n for n in graph.nodes if n.target is aten.silu_backward.default]:
        fusion = _fuse_gradients(graph, d_gate)
        if fusion is not None:
            tried.append(fusion)
            graph.eliminate_dead_code()
    return tried


def _fuse_gradients(graph: Graph, d_gate: Node) -> Fusion | None:
    """d_gate = silu_backward(dy · up, gate) and d_up = dy · silu(gate), if quantisers are all that read them."""
    d_silu, gate = d_gate.args
    if not is_call(d_silu, aten.mul.Tensor) or not isinstance(gate, Node):
        return None
    for dy, up in either_order(d_silu):  # type: ignore[arg-type]
        products = [n for n in dy.users if is_call(n, aten.mul.Tensor) and n is not d_silu]
        d_up = next((n for n in products if any(_is_silu_of(s, gate) for _, s in _from(n, dy))), None)
        if d_up is None or not _is_bf16(dy, up, gate) or not (same_shape(dy, up) and same_shape(dy, gate)):
            continue
        pair = [quantisers_of(n, readers(n)) for n in (d_gate, d_up)]
        if None in pair or any(q.tokens is None for q in pair):  # type: ignore[union-attr]
            continue
        for_gate, for_up = pair
        if (for_gate.group, for_gate.rule) != (for_up.group, for_up.rule):  # type: ignore[union-attr]
            continue
        anchor = first_of(graph, [d_gate, d_up])
        if any(first_of(graph, [leaf, anchor]) is anchor for leaf in (dy, gate, up)):
            continue  # made after the place where the call would read it
        with graph.inserting_before(anchor):
            arguments = (dy, gate, up, for_gate.group, *for_gate.rule)  # type: ignore[union-attr]
            fused = edit.call(graph, ops.silu_mul_backward_quantize.default, arguments, d_gate, False)
        codes = edit.results(graph, fused, 8)
        old = [*for_gate.results, *for_up.results]  # type: ignore[union-attr]
        pairs = [(o, n) for o, n in zip(old, codes, strict=True) if o is not None]
        refusal = disagreement([o for o, _ in pairs], [n for _, n in pairs], [dy, gate, up])
        if not refusal:
            for value, first in ((d_gate, codes[0]), (d_up, codes[4])):
                ask_codes(value, first)
            for o, n in pairs:
                replace(o, n)
        return Fusion(BACKWARD, module_of(d_gate)[0], refusal)
    return None


def _is_silu_of(node: Node, gate: Node) -> bool:
    return is_call(node, aten.silu.default) and node.args[0] is gate


def _from(product: Node, factor: Node) -> list[tuple[Node, Node]]:
    return [(a, b) for a, b in either_order(product) if a is factor]

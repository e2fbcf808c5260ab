"""Row-parallel GEMMs beside plain ones: the same products, added in another order (JG016) or rounded between (JG004).

A row-parallel linear cuts K over ranks; each rank's sum travels to the others over a wire.  On an FP32 wire nothing is
rounded that the plain GEMM does not round, so the two are one precision flow *modulo reduction order*: a verdict of its
own, never bitwise.  On a BF16 wire every partial sum is rounded: another sequence of roundings.

So terms are compared in the sequential view, where every `row_parallel_gemm` is a `gemm` of the same operands, and how
each pair was really added is compared afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from jetgraph.graph import Node
from jetgraph.verify.fault import Fault, at
from jetgraph.verify.forward import Forward

ROW_PARALLEL = "row_parallel_gemm"


def sequential(forward: Forward) -> Forward:
    """The same graph, same indices, with every GEMM adding its products in one place."""
    graph = forward.graph
    if all(node.op != ROW_PARALLEL for node in graph.nodes):
        return forward
    return Forward(replace(graph, nodes=tuple(map(_plain, graph.nodes))))


def _plain(node: Node) -> Node:
    if node.op != ROW_PARALLEL:
        return node
    return replace(node, op="gemm", attrs=(("contraction", node.attr("contraction")),))


def reduction_faults(train: Forward, infer: Forward, phi: Sequence[int | None]) -> Iterator[Fault]:
    """JG016 or JG004 for each engine GEMM that adds its products otherwise than its image does."""
    for index in infer.live:
        image = phi[index]
        if image is None or ROW_PARALLEL not in (infer.nodes[index].op, train.nodes[image].op):
            continue
        sums = [_sums(train.nodes[image]), _sums(infer.nodes[index])]
        if sums[0] != sums[1]:
            rule = "JG016" if {wire for _, wire in sums} == {"f32"} else "JG004"
            place = {"train": (train.graph, image), "infer": (infer.graph, index)}
            yield at(rule, *(_words(*s) for s in sums), **place)  # type: ignore[arg-type]


def _sums(node: Node) -> tuple[int, str]:
    """(number of partial sums, their format on the wire)"""
    if node.op != ROW_PARALLEL:
        return 1, "f32"
    return int(str(node.attr("parts"))), str(node.attr("wire"))


def _words(parts: int, wire: str) -> str:
    return "one sum over K" if parts == 1 else f"{parts} partial sums added over a wire in {wire}"

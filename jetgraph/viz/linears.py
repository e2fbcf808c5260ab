"""The linears of a graph with the λ of every GEMM's operands: the rows of the table and of the overview's strips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jetgraph.graph import Phase, PrecisionGraph, Role
from jetgraph.viz.layers import layer_of, relative, spans

KEY_OPS = frozenset({"gemm", "attention", "embed", "log_softmax"})
"""What the overview names one by one."""


@dataclass(frozen=True)
class Gemm:
    """One GEMM: operands and result by their short λ (`f8e4m3[1x128]`), the result after the rounding it feeds."""

    fqn: str
    role: str
    operands: tuple[str, str]
    result: str
    kernel: str
    reason: str
    node: int


@dataclass(frozen=True)
class FoldedGemm:
    """Equal GEMMs of several layers; ``fqn`` has ``*`` for the layer."""

    fqn: str
    layers: tuple[int, ...]
    first: Gemm

    @property
    def where(self) -> str:
        return spans(self.layers)


def gemms(graph: PrecisionGraph) -> tuple[Gemm, ...]:
    """All GEMMs that a linear's FPROP, DGRAD and WGRAD are made of.  A backward GEMM without a path of its own is
    named by the FPROP it shares an operand with."""
    rounded = {n.inputs[0]: str(n.attr("format")) for n in graph.nodes if n.op == "round"}
    owner: dict[int, str] = {}
    rows = []
    for index, node in enumerate(graph.nodes):
        if node.op != "gemm" or node.role is Role.NONE:
            continue
        if node.role is Role.FPROP:
            for i in node.inputs:
                owner.setdefault(i, node.fqn)
        fqn = node.fqn or next((owner[i] for i in reversed(node.inputs) if i in owner), "")
        a, b = (graph.nodes[i].type.precision.short() for i in node.inputs)
        result = rounded.get(index, node.type.precision.short())
        rows.append(Gemm(fqn, node.role.value, (a, b), result, node.kernel, node.reason, index))
    return tuple(rows)


def folded(rows: Sequence[Gemm]) -> tuple[FoldedGemm, ...]:
    """Rows folded over layers, ordered by first linear and FPROP, DGRAD, WGRAD."""
    groups: dict[tuple, list[Gemm]] = {}
    for row in rows:
        key = (relative(row.fqn), row.role, row.operands, row.result, row.kernel, row.reason)
        groups.setdefault(key, []).append(row)
    paths = {path: i for i, path in enumerate(dict.fromkeys(relative(row.fqn) for row in rows))}
    order = [role.value for role in Role]
    found = []
    for key, group in groups.items():
        layers = tuple(sorted({n for row in group if (n := layer_of(row.fqn)) is not None}))
        found.append(FoldedGemm(key[0], layers, group[0]))
    return tuple(sorted(found, key=lambda f: (paths[f.fqn], order.index(f.first.role), f.layers)))


def key_ops(graph: PrecisionGraph, members: Sequence[int]) -> list[int]:
    """The nodes of a section that the overview shows: forward GEMMs, attention, embedding, log-softmax."""
    return [i for i in sorted(members) if graph.nodes[i].op in KEY_OPS and graph.nodes[i].phase is Phase.FORWARD]

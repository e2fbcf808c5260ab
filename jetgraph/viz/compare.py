"""What changed from one graph to another, edge by edge: two runs, two policies, or training and rollout.

This describes; it decides nothing.  `jetgraph.verify` proves containment and calls things by the ids of docs/rules;
here any two graphs are held side by side, both ways, and a difference is a plain pair of words.  Partners are those of
`matching`; constants are compared as part of the op that reads them.  Source lines and node numbers are not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jetgraph.graph import Node, Phase, PrecisionGraph
from jetgraph.ops import COMMUTATIVE
from jetgraph.precision import Precision, Scale
from jetgraph.viz.differences import Difference
from jetgraph.viz.study import Study, study

KINDS = {
    "format": "an edge carries another number format",
    "granularity": "other blocks of an edge's tensor share a scale",
    "scale rule": "scales or codes of an edge are computed or stored otherwise",
    "rounding": "a value is rounded on one side only, or to another format",
    "wiring": "an op reads another value",
    "shape": "a value has another shape",
    "attribute": "an op has another attribute or constant",
    "kernel": "an op ran by another kernel",
    "policy rule": "another rule of the policy decided it (said if both graphs name rules at all)",
    "removed": "an op of the first graph that the second has not",
    "added": "an op of the second graph that the first has not",
    "output": "an output is on one side only, or names another value",
}
"""Every kind of change, in the order of reports."""
NAMES = ("A", "B")
ABSENT, PRESENT = "–", "present"
_PORTS = {
    "gemm nt": ("x", "W"),
    "gemm nn": ("dy", "W"),
    "gemm tn": ("dy", "x"),
    "row_parallel_gemm nt": ("x", "W"),
    "attention": ("q", "k", "v"),
    "attention_backward": ("dout", "q", "k", "v"),
    "embed": ("W", "ids"),
    "gather": ("x", "ids"),
}
"""What an op's inputs are called, where that says more than their number; a GEMM's by its contraction."""


@dataclass(frozen=True)
class Change:
    """One change at one edge or node.

    ``what`` is the edge or op without its module (``x of gemm FPROP``); ``before`` and ``after`` are the words of both
    graphs; ``left`` and ``right`` node indices (of an edge: the consumer), None where a side has no such node; ``port``
    the consumer's input if this is an edge.
    """

    kind: str
    what: str
    before: str
    after: str
    left: int | None
    right: int | None
    port: int | None = None

    @property
    def text(self) -> str:
        if PRESENT in (self.before, self.after):
            return f"{self.what}: only in the {'first' if self.before == PRESENT else 'second'} graph"
        return f"{self.what}: {self.before} → {self.after}"


@dataclass(frozen=True)
class Comparison:
    """``changes`` one by one, in the order of the graphs; ``run`` what the files say of how they were made: (field,
    first, second)."""

    study: Study
    changes: tuple[Change, ...]
    run: tuple[tuple[str, str, str], ...]
    left_out: str
    """in one sentence, the part of one graph that was not compared; empty if everything was"""

    @property
    def graphs(self) -> tuple[PrecisionGraph, PrecisionGraph]:
        assert self.study.infer is not None
        return self.study.train.graph, self.study.infer.graph

    @property
    def equal(self) -> bool:
        return not self.changes and not self.run and not self.left_out

    @property
    def num_unknown(self) -> tuple[int, int]:
        """Operators outside the vocabulary on each side: equal names are all that can be said of them."""
        left, right = (sum(n.op in ("unknown", "poison") for n in graph.nodes) for graph in self.graphs)
        return left, right

    @property
    def exit_status(self) -> int:
        """0 no difference, 1 differences, 3 none found, but an operator's meaning is unknown."""
        if not self.equal:
            return 1
        return 3 if any(self.num_unknown) else 0

    @property
    def differences(self) -> tuple[Difference, ...]:
        """The changes as the pictures take them."""
        return tuple(Difference(c.left, c.right, c.kind, c.text, c.what) for c in self.changes)


def compare(left: PrecisionGraph, right: PrecisionGraph, names: tuple[str, str] = NAMES) -> Comparison:
    """Everything that changed from ``left`` to ``right``.

    If one graph has no backward part, the other's is left out, together with what its forward computes for it alone.
    """
    has_backward = [any(n.phase is Phase.BACKWARD for n in g.nodes) for g in (left, right)]
    known = study(left, right, names=names)
    compared = [set(range(len(g.nodes))) for g in (left, right)]
    left_out = ""
    if has_backward[0] != has_backward[1]:
        side = 0 if has_backward[0] else 1
        compared[side] = set(known.sides[side].forward)
        missing = len((left, right)[side].nodes) - len(compared[side])
        left_out = (
            f"{names[1 - side]} has no backward part: {missing:,} nodes of {names[side]} that serve it are not compared"
        )
    found = tuple(_Walk(known, compared).changes())
    return Comparison(known, found, tuple(_run(left.meta, right.meta)), left_out)


class _Walk:
    """One pass over the partners, then over the nodes without one."""

    def __init__(self, known: Study, compared: list[set[int]]) -> None:
        assert known.infer is not None
        assert known.matching is not None
        self.left, self.right = known.train.graph, known.infer.graph
        self.left_of, self.right_of = known.matching.train_of, known.matching.infer_of
        self.compared = compared
        self.both_have_rules = all(any(node.reason for node in graph.nodes) for graph in (self.left, self.right))

    def changes(self) -> Iterator[Change]:
        for b, a in enumerate(self.left_of):
            if b in self.compared[1] and a is not None and a in self.compared[0]:
                yield from self._pair(a, b)
        for side, graph, partner in ((0, self.left, self.right_of), (1, self.right, self.left_of)):
            for index, node in enumerate(graph.nodes):
                if node.op != "const" and index in self.compared[side] and partner[index] is None:
                    yield _alone(node, index, side)
        yield from self._outputs()

    def _pair(self, a: int, b: int) -> Iterator[Change]:
        before, after = self.left.nodes[a], self.right.nodes[b]
        if before.op == "const" or before.op != after.op:
            return
        what = word(after)
        for name, x, y in _attributes(before, after):
            kind = "rounding" if after.op == "round" else "attribute"
            yield Change(kind, f"{name} of {what}", x, y, a, b)
        if before.type.shape != after.type.shape:
            yield Change("shape", what, _list(before.type.shape), _list(after.type.shape), a, b)
        if before.kernel != after.kernel:
            yield Change("kernel", what, before.kernel or ABSENT, after.kernel or ABSENT, a, b)
        rules = _rule(before, self.left), _rule(after, self.right)
        if self.both_have_rules and rules[0] != rules[1]:
            yield Change("policy rule", what, *rules, a, b)
        if len(before.inputs) != len(after.inputs):
            yield Change("wiring", what, f"{len(before.inputs)} inputs", f"{len(after.inputs)} inputs", a, b)
            return
        for port, (x, y) in enumerate(zip(before.inputs, self._aligned(before, after), strict=True)):
            for kind, first, second in self._edge(x, y):
                yield Change(kind, f"{port_name(after, port)} of {what}", first, second, a, b, port)
        if not after.inputs and before.type.precision != after.type.precision:
            for kind, first, second in precision_changes(before.type.precision, after.type.precision):
                yield Change(kind, what, first, second, a, b)

    def _aligned(self, before: Node, after: Node) -> tuple[int, ...]:
        """The inputs of ``after`` in the order in which ``before`` reads their partners, if the op lets them swap."""
        x, y = before.inputs[:1], after.inputs[:1]
        if after.op not in COMMUTATIVE or len(after.inputs) != 2 or self._same(x[0], y[0]):
            return after.inputs
        return after.inputs[::-1] if self._same(x[0], after.inputs[1]) else after.inputs

    def _same(self, a: int, b: int) -> bool:
        return self._base(self.left, a) == self.left_of[self._base(self.right, b)]

    @staticmethod
    def _base(graph: PrecisionGraph, index: int) -> int:
        """The value below its roundings and quantisations."""
        while graph.nodes[index].op in ("round", "quantize"):
            index = graph.nodes[index].inputs[0]
        return index

    def _edge(self, x: int, y: int) -> Iterator[tuple[str, str, str]]:
        """What changed on the edges that two partners read: (kind, before, after)."""
        before, after = self.left.nodes[x], self.right.nodes[y]
        if before.op == after.op == "const":
            if before.attrs != after.attrs:
                yield "attribute", f"constant {before.attr('value')!r}", f"constant {after.attr('value')!r}"
            return
        if self.left_of[y] == x and before.type.precision == after.type.precision:
            return
        if not self._same(x, y):
            yield "wiring", name_of(self.left, x), name_of(self.right, y)
            return
        changed = list(precision_changes(before.type.precision, after.type.precision))
        scaled = before.type.precision.scale or after.type.precision.scale
        for kind, first, second in changed:
            yield ("rounding" if kind == "format" and not scaled else kind), first, second
        if not changed:
            first, second = self._steps(self.left, x), self._steps(self.right, y)
            if first != second:
                yield "rounding", first, second

    def _steps(self, graph: PrecisionGraph, index: int) -> str:
        """The roundings and quantisations between an op and the value it reads, in their order."""
        steps = []
        while graph.nodes[index].op in ("round", "quantize"):
            node = graph.nodes[index]
            steps.append(f"{node.op} {node.type.precision.short()}")
            index = node.inputs[0]
        return ", ".join(reversed(steps)) or "not rounded"

    def _outputs(self) -> Iterator[Change]:
        for name, index in self.left.outputs.items():
            if name not in self.right.outputs:
                if index in self.compared[0]:
                    yield Change("output", name, _value(self.left, index), ABSENT, index, None)
            elif self.left_of[self.right.outputs[name]] != index:
                other = self.right.outputs[name]
                yield Change("output", name, name_of(self.left, index), name_of(self.right, other), index, other)
        for name, index in self.right.outputs.items():
            if name not in self.left.outputs and index in self.compared[1]:
                yield Change("output", name, ABSENT, _value(self.right, index), None, index)


def _alone(node: Node, index: int, side: int) -> Change:
    here, there = (PRESENT, ABSENT) if side == 0 else (ABSENT, PRESENT)
    kind = "rounding" if node.op == "round" else ("removed", "added")[side]
    return Change(kind, word(node), here, there, index if side == 0 else None, index if side == 1 else None)


def precision_changes(before: Precision, after: Precision) -> Iterator[tuple[str, str, str]]:
    """What differs between two λ, only the fields that do: (kind, before, after)."""
    if before == after:
        return
    if before.format is not after.format or before.scale is None or after.scale is None:
        yield "format", before.short(), after.short()
        return
    if before.scale.granularity != after.scale.granularity:
        yield "granularity", before.short(), after.short()
    pairs = [(x, y) for x, y in zip(_scale(before.scale), _scale(after.scale), strict=True) if x != y]
    if pairs:
        yield "scale rule", ", ".join(x for x, _ in pairs), ", ".join(y for _, y in pairs)


def _scale(scale: Scale) -> list[str]:
    rule = scale.rule
    return [
        f"{scale.format} scales",
        "powers of two" if rule.power_of_two else "any scale",
        f"qmax {_number(rule.qmax)}",
        f"floor {_number(rule.amax_floor)}",
        f"division {rule.division}",
        "dynamic" if scale.dynamic else "static",
    ]


def _number(value: float) -> str:
    """The shortest text that is the same number."""
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def word(node: Node) -> str:
    """An op in a few words: ``gemm FPROP``, ``quantize f8e4m3[1x128]``, ``parameter``, ``backward mul``."""
    if node.op in ("round", "quantize"):
        detail = node.type.precision.short()
    elif node.op == "unknown":
        detail = str(node.attr("name"))
    else:
        detail = node.role.value
    words = " ".join(part for part in (node.op, detail) if part)
    return f"backward {words}" if node.phase is Phase.BACKWARD and not node.role.value else words


def port_name(node: Node, port: int) -> str:
    names = _PORTS.get(f"{node.op} {dict(node.attrs).get('contraction', '')}".strip(), ())
    if port < len(names):
        return names[port]
    return "input" if len(node.inputs) == 1 else f"input {port}"


def name_of(graph: PrecisionGraph, index: int) -> str:
    """A value by what makes it and where."""
    node = graph.nodes[index]
    name = dict(node.attrs).get("name") if node.op in ("parameter", "operand", "input") else node.fqn
    return f"{word(node)} {name}".strip()


def _rule(node: Node, graph: PrecisionGraph) -> str:
    """The policy's rule without the policy's own name, which is a fact of the run."""
    return node.reason.removeprefix(f"{graph.meta.get('policy')}: ") or ABSENT


def _value(graph: PrecisionGraph, index: int) -> str:
    return graph.nodes[index].type.precision.short()


def _attributes(before: Node, after: Node) -> list[tuple[str, str, str]]:
    pairs = zip(before.attrs, after.attrs, strict=True)
    return [(name, _list(x), _list(y)) for (name, x), (_, y) in pairs if repr(x) != repr(y)]


def _list(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


RUN = ("model", "policy", "provider", "engine", "device", "compiler", "versions", "kernels", "operands")
"""Fields of a graph file that say how the run was made; what else it keeps of its capture is not compared."""


def _run(before: Any, after: Any) -> Iterator[tuple[str, str, str]]:
    for field in RUN:
        x, y = before.get(field), after.get(field)
        if x == y:
            continue
        if not isinstance(x, dict) or not isinstance(y, dict):
            yield field, _plain(x), _plain(y)
            continue
        keys = [k for k in dict.fromkeys([*x, *y]) if x.get(k) != y.get(k)]
        if len(keys) > 4:
            yield field, f"{len(x)} entries", f"{len(y)} entries, {len(keys)} differ"
        else:
            yield from ((f"{field}: {k}", _plain(x.get(k)), _plain(y.get(k))) for k in keys)


def _plain(value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items()) or "none"
    return str(value)

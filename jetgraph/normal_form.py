"""Building graphs in normal form: every constructor applies the rewrites of R that keep every bit, then interns.

Equal terms become one node, so two programs that mean the same are the same set of digests and containment is a table
look-up.  Each rule that fires is counted in `TermBuilder.rules`; what justifies it is in docs/spec.md §4.  Rules are
local (a constructor and its arguments), strictly decrease size or move `neg`, `slice` and `cat` one way, and so end.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jetgraph.graph import Attr, Node, Phase, PrecisionGraph, Role, ValueType
from jetgraph.node import Labels, term_digest
from jetgraph.ops import COMMUTATIVE
from jetgraph.precision import BF16, F32, I64, Format, Precision, Scale

TOKENS = "T"


def as_f32(value: float) -> float:
    """The FP32 number nearest to a Python float: attributes are compared as a kernel sees them."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


@dataclass(frozen=True)
class Provenance:
    """Where nodes being built come from; attached to a node when it is first made."""

    fqn: str = ""
    role: Role = Role.NONE
    phase: Phase = Phase.FORWARD
    source: str = ""
    reason: str = ""


class TermBuilder:
    """Interns terms; a term is its index in `nodes`."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.digests: list[bytes] = []
        self.rules: Counter[str] = Counter()
        self.where = Provenance()
        self._index: dict[bytes, int] = {}
        self._labels = Labels()

    # ------------------------------------------------------------------------------------------------- interning

    def intern(
        self,
        op: str,
        inputs: Sequence[int],
        attrs: Mapping[str, Attr],
        shape: tuple,
        precision: Precision,
        kernel: str = "",
    ) -> int:
        """The node with exactly this meaning; made if it does not exist yet.  No rewriting happens here."""
        items = tuple(sorted(attrs.items()))
        type_ = ValueType(tuple(shape), precision)
        digest = term_digest(op, self._labels.of(op, items, type_), [self.digests[i] for i in inputs])
        known = self._index.get(digest)
        if known is not None:
            return known
        where = self.where
        node = Node(
            op, tuple(inputs), items, type_, where.fqn, where.role, where.phase, kernel, where.source, where.reason
        )
        self._index[digest] = len(self.nodes)
        self.nodes.append(node)
        self.digests.append(digest)
        return len(self.nodes) - 1

    def graph(self, name: str, outputs: dict[str, int], meta: dict[str, Any]) -> PrecisionGraph:
        """The frozen graph of these outputs: only what they need, rules counted in ``meta["rules"]``."""
        return PrecisionGraph(
            name, tuple(self.nodes), outputs, {**meta, "rules": dict(sorted(self.rules.items()))}
        ).restrict(outputs)

    # ------------------------------------------------------------------------------------------------- questions

    def op(self, term: int) -> str:
        return self.nodes[term].op

    def per_token(self, term: int) -> bool:
        return TOKENS in self.nodes[term].type.shape

    def num_features(self, term: int) -> int:
        return math.prod(s for s in self.nodes[term].type.shape if s != TOKENS)  # type: ignore[misc]

    def precision(self, term: int) -> Precision:
        return self.nodes[term].type.precision

    def format(self, term: int) -> Format:
        return self.nodes[term].type.precision.format

    def is_const(self, term: int, value: float) -> bool:
        node = self.nodes[term]
        return node.op == "const" and node.attrs == (("value", as_f32(value)),)

    def _shape(self, per_token: bool, features: int) -> tuple:
        return (TOKENS, features) if per_token else (features,)

    # --------------------------------------------------------------------------------------------------- leaves

    def input(self, name: str, precision: Precision = I64) -> int:
        return self.intern("input", (), {"name": name}, (TOKENS, 1), precision)

    def parameter(self, name: str, shape: Sequence[int], precision: Precision = BF16) -> int:
        return self.intern("parameter", (), {"name": name}, tuple(shape), precision)

    def const(self, value: float) -> int:
        return self.intern("const", (), {"value": as_f32(value)}, (1,), F32)

    # ------------------------------------------------------------------------------------------------ pointwise

    def round(self, x: int, fmt: Format) -> int:
        if self.format(x) is fmt:
            self.rules["round of a value already in that format"] += 1
            return x
        if fmt in (Format.F32, Format.F64):
            self.rules["widening keeps the number"] += 1
            return x
        if self.op(x) == "neg":
            self.rules["neg out of round"] += 1
            return self.neg(self.round(self.nodes[x].inputs[0], fmt))
        return self.intern("round", (x,), {"format": str(fmt)}, self.nodes[x].type.shape, Precision(fmt))

    def neg(self, x: int) -> int:
        node = self.nodes[x]
        if node.op == "neg":
            self.rules["neg of neg"] += 1
            return node.inputs[0]
        if node.op == "const":
            return self.const(-float(dict(node.attrs)["value"]))  # type: ignore[arg-type]
        return self.intern("neg", (x,), {}, node.type.shape, node.type.precision)

    def pointwise(
        self, op: str, inputs: Sequence[int], attrs: Mapping[str, Attr] | None = None, kernel: str = ""
    ) -> int:
        """An FP32 pointwise op on terms that already agree in features (scalars excepted)."""
        terms = list(inputs)
        if op == "mul":
            for i in (0, 1):
                if self.is_const(terms[i], 1.0):
                    self.rules["mul by 1"] += 1
                    return terms[1 - i]
                if self.op(terms[i]) == "neg":
                    self.rules["neg out of mul"] += 1
                    terms[i] = self.nodes[terms[i]].inputs[0]
                    return self.neg(self.pointwise("mul", terms))
        if op == "add":
            for i in (1, 0):
                if self.op(terms[i]) == "neg":
                    self.rules["add of neg is sub"] += 1
                    return self.pointwise("sub", (terms[1 - i], self.nodes[terms[i]].inputs[0]))
        if op == "pow" and attrs is not None:
            if attrs["exponent"] == 1.0:
                self.rules["pow 1"] += 1
                return terms[0]
            if attrs["exponent"] == 2.0:
                return self.pointwise("sq", terms)
        if op in COMMUTATIVE:
            ordered = sorted(terms, key=lambda t: self.digests[t])
            self.rules["commuted operands"] += ordered != terms
            terms = ordered
        widest = max(terms, key=self.num_features)
        shape = self._shape(any(map(self.per_token, terms)), self.num_features(widest))
        return self.intern(op, terms, attrs or {}, shape, F32, kernel)

    # ---------------------------------------------------------------------------------------------- arrangement

    def broadcast(self, x: int, factors: Iterable[tuple[int, bool]]) -> int:
        """Repeat x's features along the factors (size, present) that are not present; neighbours are merged."""
        merged: list[tuple[int, bool]] = []
        for size, present in factors:
            if size == 1:
                continue
            if merged and merged[-1][1] == present:
                merged[-1] = (merged[-1][0] * size, present)
            else:
                merged.append((size, present))
        if all(present for _, present in merged) or self.op(x) == "const":
            return x
        if self.op(x) == "neg":
            return self.neg(self.broadcast(self.nodes[x].inputs[0], merged))
        sizes, present = tuple(s for s, _ in merged), tuple(int(p) for _, p in merged)
        shape = self._shape(self.per_token(x), math.prod(sizes))
        return self.intern("broadcast", (x,), {"sizes": sizes, "present": present}, shape, self.precision(x))

    def slice(self, x: int, outer: int, size: int, inner: int, start: int, stop: int) -> int:
        if (start, stop) == (0, size) or self.op(x) == "const":  # a constant has every width
            return x
        node = self.nodes[x]
        attrs = dict(node.attrs)
        if node.op == "cat" and (attrs["outer"], attrs["inner"]) == (outer, inner) and sum(attrs["sizes"]) == size:  # type: ignore[arg-type]
            parts, sizes, position = [], [], 0
            for part, width in zip(node.inputs, attrs["sizes"], strict=True):  # type: ignore[arg-type]
                if start <= position and position + width <= stop:
                    parts.append(part)
                    sizes.append(width)
                position += width
            if sum(sizes) == stop - start:
                self.rules["slice of cat"] += 1
                return self.cat(parts, outer, sizes, inner)
        if node.op == "slice" and (attrs["outer"], attrs["inner"]) == (outer, inner):
            self.rules["slice of slice"] += 1
            base = int(attrs["start"])  # type: ignore[arg-type]
            return self.slice(node.inputs[0], outer, int(attrs["size"]), inner, base + start, base + stop)  # type: ignore[arg-type]
        cut = {"outer": outer, "size": size, "inner": inner, "start": start, "stop": stop}
        shape = self._shape(self.per_token(x), outer * (stop - start) * inner)
        return self.intern("slice", (x,), cut, shape, self.precision(x))

    def cat(self, parts: Sequence[int], outer: int, sizes: Sequence[int], inner: int) -> int:
        terms: list[int] = []
        widths: list[int] = []
        for part, width in zip(parts, sizes, strict=True):
            node = self.nodes[part]
            attrs = dict(node.attrs)
            if node.op == "cat" and (attrs["outer"], attrs["inner"]) == (outer, inner):
                self.rules["cat of cat"] += 1
                terms += node.inputs
                widths += attrs["sizes"]  # type: ignore[operator]
            else:
                terms.append(part)
                widths.append(width)
        if len(terms) == 1:
            return terms[0]
        whole = self._whole(terms, outer, sum(widths), inner)
        if whole is not None:
            self.rules["cat of adjacent slices"] += 1
            return whole
        formats = {self.precision(t) for t in terms if self.op(t) != "const"}
        precision = formats.pop() if len(formats) == 1 else F32
        shape = self._shape(any(map(self.per_token, terms)), outer * sum(widths) * inner)
        return self.intern("cat", terms, {"outer": outer, "sizes": tuple(widths), "inner": inner}, shape, precision)

    def _whole(self, terms: Sequence[int], outer: int, size: int, inner: int) -> int | None:
        """The one term of which ``terms`` are all the slices in order, if there is one."""
        position, base = 0, None
        for term in terms:
            node = self.nodes[term]
            attrs = dict(node.attrs)
            if node.op != "slice" or (attrs["outer"], attrs["size"], attrs["inner"]) != (outer, size, inner):
                return None
            if attrs["start"] != position or (base is not None and node.inputs[0] != base):
                return None
            position, base = int(attrs["stop"]), node.inputs[0]  # type: ignore[arg-type]
        return base if position == size else None

    def permute(self, x: int, sizes: Sequence[int], order: Sequence[int]) -> int:
        if list(order) == sorted(order):
            return x
        attrs: dict[str, Attr] = {"sizes": tuple(sizes), "order": tuple(order)}
        return self.intern("permute", (x,), attrs, self.nodes[x].type.shape, self.precision(x))

    # --------------------------------------------------------------------------- reductions, GEMM and the others

    def mean(self, x: int, size: int, kernel: str) -> int:
        shape = self._shape(self.per_token(x), self.num_features(x) // size)
        return self.intern("mean", (x,), {"size": size}, shape, F32, kernel)

    def sum(self, x: int, sizes: Sequence[int], reduced: Sequence[int], tokens: bool, kernel: str) -> int:
        kept = math.prod(s for s, r in zip(sizes, reduced, strict=True) if not r)
        attrs: dict[str, Attr] = {"sizes": tuple(sizes), "reduced": tuple(int(r) for r in reduced)}
        op = "sum_tokens" if tokens else "sum"
        return self.intern(op, (x,), attrs, self._shape(self.per_token(x) and not tokens, kept), F32, kernel)

    def quantize(self, x: int, scale: Scale, kernel: str) -> int:
        precision = Precision(Format.E4M3, scale)
        return self.intern("quantize", (x,), {}, self.nodes[x].type.shape, precision, kernel)

    def gemm(self, a: int, b: int, contraction: str, kernel: str) -> int:
        """nt: [T,K]·[N,K]ᵀ → [T,N]; nn: [T,N]·[N,K] → [T,K]; tn: [T,N]ᵀ·[T,K] → [N,K]."""
        left, right = self.nodes[a].type.shape, self.nodes[b].type.shape
        shape = {"nt": (left[0], right[0]), "nn": (left[0], right[1]), "tn": (left[1], right[1])}[contraction]
        return self.intern("gemm", (a, b), {"contraction": contraction}, shape, F32, kernel)

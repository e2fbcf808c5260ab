"""SSA over storages: a record with in-place and ``out=`` operators as one in which every value is written once.

Engine graphs write into buffers that `empty` made, and into their own arguments.  Such an operator returns nothing, so
read naively it has no user and everything behind it is lost.  Here each write makes a new value of the storage that it
went to; whoever reads that storage afterwards, through whatever view, reads the new value.  A buffer that nobody wrote
keeps the value of its `empty`, which the lifter turns into `poison`.

What an operator writes is read from its schema.  A write becomes torch's own functional form,
``auto_functionalized(op, **arguments) → (result, each written argument)``; a written view goes back into what it views
by ``view``, ``permute`` or ``slice_scatter``.  Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jetgraph.record import Op, Ref, Symbol, TensorSpec

VIEWS = frozenset({"view", "reshape", "_unsafe_view", "detach", "alias", "split", "split_with_sizes", "slice"}) | {
    "permute",
    "transpose",
    "t",
    "squeeze",
    "unsqueeze",
    "_get_data_attr",
    "chunk",
}
"""Operators, ATen or torch methods, whose result is memory of their first argument."""

SAME_SHAPE_ANEW = frozenset({"view", "reshape", "_unsafe_view", "squeeze", "unsqueeze"})


class StorageError(ValueError):
    """A write through a view that has no known inverse, or an argument that a schema does not have."""


@dataclass(frozen=True)
class Schema:
    """Argument names of an operator in order, which of them it writes, and how many results it returns."""

    name: str
    arguments: tuple[str, ...]
    written: tuple[str, ...]
    num_results: int

    @classmethod
    def parse(cls, text: str) -> Schema:
        """``_C::rms_norm(Tensor! result, Tensor input, …) -> ()``."""
        match = re.fullmatch(r"([\w:]+?)(?:\.\w+)?\((.*)\) -> (.*)", text.strip())
        if match is None:
            raise StorageError(f"schema {text!r} cannot be read")
        name, body, returns = match.groups()
        arguments, written = [], []
        for item in _split(body):
            if item == "*":
                continue
            kind, _, argument = item.split("=")[0].rpartition(" ")
            arguments.append(argument)
            if "!" in kind:
                written.append(argument)
        results = 0 if returns == "()" else len(_split(returns.strip("()"))) if returns.startswith("(") else 1
        return cls(name.replace("::", "."), tuple(arguments), tuple(written), results)


def _split(body: str) -> list[str]:
    """At the commas that are in no bracket."""
    items, depth, current = [], 0, ""
    for character in body:
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            items.append(current.strip())
            current = ""
        else:
            current += character
    return [*items, current.strip()] if current.strip() else items


def base_name(target: str) -> str:
    """``aten.view.default`` and the method ``view`` are the same view."""
    return target.split(".")[1] if target.startswith(("aten.", "prims.")) else target


def functional(ops: Sequence[Op], schemas: Mapping[str, str]) -> list[Op]:
    """``ops`` with every write in functional form; ``schemas`` maps ``_C.rms_norm`` to its schema.

    Raises:
        StorageError: a write through a view that cannot be undone.
    """
    parsed = {name: Schema.parse(text) for name, text in schemas.items()}
    return _Storages(ops, parsed).run()


def unrecorded(ops: Sequence[Op], schemas: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Arguments of each call that a record without keywords cannot show: they may have had any value.

    A call whose schema ends with its last recorded argument can have had no keywords.
    """
    parsed = {name: Schema.parse(text) for name, text in schemas.items()}
    missing = {}
    for op in ops:
        schema = parsed.get(op.target.removesuffix(".default"))
        if op.kind == "call" and schema is not None and not op.kwargs and len(op.args) < len(schema.arguments):
            missing[op.name] = schema.arguments[len(op.args) :]
    return missing


class _Storages:
    def __init__(self, ops: Sequence[Op], schemas: Mapping[str, Schema]) -> None:
        self.ops = ops
        self.by_name = {op.name: op for op in ops}
        self.schemas = schemas
        self.short = {name.split(".")[-1]: name for name in schemas}
        self.parent: dict[str, str] = {}
        self.now: dict[str, str] = {}
        self.read_at: dict[str, int] = {}
        self.writes: dict[str, int] = {}
        self.out: list[Op] = []
        self.names = set(self.by_name)

    def run(self) -> list[Op]:
        for op in self.ops:
            schema = self._schema(op)
            if schema is not None and schema.written:
                self._write_all(op, schema)
                continue
            op = replace(op, args=self._current(op.args), kwargs=self._current(op.kwargs))
            if schema is not None:
                op = replace(op, target=f"{schema.name}.default")
            self.out.append(op)
            self.now[op.name] = op.name
            viewed = self._viewed(self.by_name[op.name])
            if viewed is not None:
                self.parent[op.name] = viewed
            self.read_at[op.name] = self.writes.get(self._root(op.name), 0)
        return self.out

    def _schema(self, op: Op) -> Schema | None:
        if op.kind != "call":
            return None
        base = op.target.removesuffix(".default")
        return self.schemas.get(base) or self.schemas.get(self.short.get(base, ""))

    def _viewed(self, op: Op) -> str | None:
        """The op whose memory this one's result is."""
        if op.kind != "call" or not op.args or not isinstance(op.args[0], Ref):
            return None
        source = op.args[0].name
        if op.target == "getitem":
            origin = self.by_name[source]
            return source if base_name(origin.target) in VIEWS else None
        if base_name(op.target) in VIEWS:
            return source
        same = isinstance(op.value, TensorSpec) and op.value == self.by_name[source].value
        return source if op.target in ("to", "contiguous") and same else None

    def _root(self, name: str) -> str:
        while name in self.parent:
            name = self.parent[name]
        return name

    # ----------------------------------------------------------------------------------------------------- reading

    def _current(self, argument: Any) -> Any:
        """The argument with every tensor as it is now, after all writes to its storage."""
        if isinstance(argument, Ref):
            return Ref(self._fresh(argument.name))
        if isinstance(argument, tuple):
            return tuple(self._current(a) for a in argument)
        if isinstance(argument, dict):
            return {k: self._current(v) for k, v in argument.items()}
        return argument

    def _fresh(self, name: str) -> str:
        """The op that holds the present value of ``name``: its view is taken again if its storage was written."""
        writes = self.writes.get(self._root(name), 0)
        if self.read_at[name] == writes:
            return self.now[name]
        source = self._fresh(self.parent[name])
        op = self.by_name[name]
        self.now[name] = self._emit(replace(op, args=(Ref(source), *self._current(op.args[1:]))))
        self.read_at[name] = writes
        return self.now[name]

    def _emit(self, op: Op) -> str:
        name, number = op.name, 1
        while name in self.names or any(name == o.name for o in self.out[-1:]):
            number += 1
            name = f"{op.name}@{number}"
        self.names.add(name)
        self.out.append(replace(op, name=name))
        return name

    # ----------------------------------------------------------------------------------------------------- writing

    def _write_all(self, op: Op, schema: Schema) -> None:
        positional = schema.arguments[: len(op.args)]
        if len(op.args) > len(schema.arguments) or set(op.kwargs) - set(schema.arguments):
            raise StorageError(f"{op.name}: {schema.name} has arguments {schema.arguments}, called with others")
        given = {**dict(zip(positional, op.args, strict=True)), **op.kwargs}
        written = [a for a in schema.written if isinstance(given.get(a), Ref)]
        specs = [self.by_name[given[a].name].value for a in written]
        result = () if schema.num_results == 0 else (op.value,)
        value = ((None,) if schema.num_results == 0 else result) + tuple(specs)
        call = Op(
            f"{op.name}@written" if schema.num_results else op.name,
            "call",
            "auto_functionalized",
            (Symbol("object", f"OpOverload {schema.name}.default"),),
            {k: self._current(v) for k, v in given.items()},
            value,
            op.fqn,
            op.source,
            op.phase,
        )
        self.out.append(call)
        self.names.add(call.name)
        if schema.num_results:
            self.out.append(
                Op(op.name, "call", "getitem", (Ref(call.name), 0), {}, op.value, op.fqn, op.source, op.phase)
            )
        self.now[op.name], self.read_at[op.name] = op.name, 0
        for index, (argument, spec) in enumerate(zip(written, specs, strict=True), start=1):
            item = Op(f"{op.name}@{argument}", "call", "getitem", (Ref(call.name), index), {}, spec, op.fqn, op.source)
            self._write(given[argument].name, self._emit(item))

    def _write(self, name: str, new: str) -> None:
        """``name``'s memory holds ``new`` from now on."""
        root = self._root(name)
        self._put(name, new)
        self.writes[root] = self.writes.get(root, 0) + 1
        while True:  # the chain just written is up to date
            self.read_at[name] = self.writes[root]
            if name not in self.parent:
                return
            name = self.parent[name]

    def _put(self, name: str, new: str) -> None:
        if name not in self.parent:
            self.now[name] = new
            return
        parent = self.parent[name]
        op, whole = self.by_name[name], self.by_name[parent]
        if op.target == "getitem":  # one part of a split
            origin = self.parent[parent]
            dim, start, stop = _part(whole, op.args[1], self.by_name[origin].value)
            put = self._scatter(op, origin, new, dim, start, stop)
            self.now[name] = new
            self._put_into(parent, put)
            return
        self.now[name] = new
        if op.target.startswith("aten.slice"):
            dim, start, stop = (*op.args[1:], *(0, 0, None)[len(op.args) - 1 :])[:3]
            self._put_into(name, self._scatter(op, parent, new, dim, start, stop))
        elif base_name(op.target) in SAME_SHAPE_ANEW:
            self._put_into(
                name,
                self._emit(
                    Op(f"{name}@back", "call", "aten.view.default", (Ref(new), whole.value.shape), {}, whole.value)
                ),
            )
        elif base_name(op.target) in ("detach", "alias", "_get_data_attr") or op.target in ("to", "contiguous"):
            self._put_into(name, new)
        elif base_name(op.target) == "permute":
            order = [d % len(whole.value.shape) for d in op.args[1]]
            inverse = tuple(order.index(d) for d in range(len(order)))
            self._put_into(
                name,
                self._emit(Op(f"{name}@back", "call", "aten.permute.default", (Ref(new), inverse), {}, whole.value)),
            )
        elif base_name(op.target) in ("t", "transpose"):
            self._put_into(
                name, self._emit(replace(op, name=f"{name}@back", args=(Ref(new), *op.args[1:]), value=whole.value))
            )
        else:
            raise StorageError(f"{name}: written through {op.target}, whose inverse is not known")

    def _scatter(self, op: Op, whole: str, new: str, dim: int, start: int, stop: int | None) -> str:
        spec = self.by_name[whole].value
        call = Op(
            f"{op.name}@back",
            "call",
            "aten.slice_scatter.default",
            (Ref(self._fresh(whole)), Ref(new), dim, start, stop),
            {},
            spec,
        )
        return self._emit(call)

    def _put_into(self, view: str, new: str) -> None:
        self._put(self.parent[view], new)


def _part(split: Op, index: int, whole: TensorSpec) -> tuple[int, int, int]:
    """(dim, start, stop) of one result of a split."""
    sizes = split.args[1]
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    dim %= len(whole.shape)
    total = whole.shape[dim]
    if isinstance(sizes, int) and isinstance(total, int):
        width = -(-total // sizes) if base_name(split.target) == "chunk" else sizes
        sizes = tuple(min(width, total - at) for at in range(0, total, width))
    if not isinstance(sizes, tuple):
        raise StorageError(f"{split.name}: a split of {total} by {sizes}")
    start = sum(sizes[:index])
    return dim, start, start + sizes[index]

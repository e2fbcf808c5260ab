"""Captured ATen programs → precision-graph terms.  Torch-free: it reads `jetgraph.record` lists.

`Lifter.run` walks one recorded program, binding placeholders to `Value`s and expanding each operator into primitives
(the handlers live in `jetgraph.lift.aten`).  A handler consumes every argument and keyword or refuses; an operator
without a handler becomes an `unknown` node under its own name, so the verdict is UNKNOWN and says which one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetgraph.graph import Phase, Role
from jetgraph.layout import LayoutError, Layouts, Value
from jetgraph.normal_form import Provenance, TermBuilder
from jetgraph.precision import BF16, F32, I64, Format, Precision
from jetgraph.record import Op, Ref, TensorSpec, references

FORMATS = {
    "bfloat16": Format.BF16,
    "float32": Format.F32,
    "float64": Format.F64,
    "int64": Format.I64,
    "int32": Format.I64,
    "float8_e4m3fn": Format.E4M3,
}
CONTRACTION_ROLE = {"nt": Role.FPROP, "nn": Role.DGRAD, "tn": Role.WGRAD}


class LiftError(ValueError):
    """A recorded operator uses an argument or a form that its expansion does not cover."""


@dataclass(frozen=True, slots=True)
class QuantizedHalf:
    """Codes or scales of a quantised term as a captured tensor; ``transposed`` if stored [C, R]."""

    term: int
    part: str
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class Zeros:
    """A tensor of zeros that something will be written into."""

    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Filled:
    """A tensor that holds one number everywhere."""

    value: float


@dataclass(frozen=True, slots=True)
class SequenceStarts:
    """An integer tensor [B, S] that was seen to hold, for every token, where its own sequence starts in its row."""


@dataclass(frozen=True, slots=True)
class SequenceMask:
    """A mask [B, 1, S, S] that was seen to show every token the last ``window`` tokens (0: all) of its own prefix.

    ``additive`` if it holds 0 and -inf rather than truth values.
    """

    window: int
    additive: bool = False


@dataclass(frozen=True, slots=True)
class PaddedMask:
    """A mask with more columns after its last key, for a kernel that wants rows to start at certain addresses."""

    mask: SequenceMask
    num_keys: int


@dataclass(frozen=True, slots=True)
class Nothing:
    """A tensor without elements: it holds no number, whatever made it."""


@dataclass
class Frame:
    """One run of a recorded program: its values by name, how sizes read, and where its modules live."""

    ops: Mapping[str, Op]
    sizes: Callable[[Any], int]
    prefix: str
    env: dict[str, Any] = field(default_factory=dict)

    def shape(self, op: Op) -> tuple[int, ...]:
        return tuple(self.sizes(s) for s in op.value.shape)

    def spec(self, argument: Any) -> TensorSpec | None:
        """The traced spec of an argument that is a reference to an earlier op."""
        if not isinstance(argument, Ref) or argument.name not in self.ops:
            return None
        value = self.ops[argument.name].value
        return value if isinstance(value, TensorSpec) else None


Handler = Callable[["Lifter", Frame, Op, tuple, dict], Any]
HANDLERS: dict[str, Handler] = {}


def handles(*targets: str) -> Callable[[Handler], Handler]:
    """Register a handler for targets such as ``aten.mul`` (all overloads) or ``aten.mul.Scalar`` (that one)."""

    def register(handler: Handler) -> Handler:
        for target in targets:
            HANDLERS[target] = handler
        return handler

    return register


class Lifter:
    """Lifts recorded programs into one builder; several programs (blocks, head, backward) share it."""

    def __init__(
        self, builder: TermBuilder, token_shape: int | Sequence[int], handlers: Mapping[str, Handler] | None = None
    ) -> None:
        self.builder = builder
        self.layouts = Layouts(builder, token_shape)
        self.handlers = {**HANDLERS, **(handlers or {})}
        self.keys_values: list[tuple[int, int]] = []
        self.unknown: list[str] = []
        self.rows_are_sequences = True
        """Whether each row of the captured batch is one sequence from its first position on (padding may follow)."""

    # ---------------------------------------------------------------------------------------------------- running

    def run(
        self,
        ops: Sequence[Op],
        bound: Mapping[str, Any],
        *,
        prefix: str = "",
        sizes: Callable[[Any], int] = int,
        keep: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Values by op name of everything that the program's outputs (and the ops named in ``keep``) depend on."""
        frame = Frame({op.name: op for op in ops}, sizes, prefix, dict(bound))
        live = live_names(ops, keep, bound)
        for op in ops:
            if op.kind == "output" or op.name in frame.env or op.name not in live:
                continue
            if op.kind == "placeholder":
                raise LiftError(f"placeholder {op.name} of {prefix or 'the program'} is bound to nothing")
            self.builder.where = self._provenance(frame, op)
            frame.env[op.name] = self._expand(frame, op)
        return frame.env

    def outputs(self, ops: Sequence[Op], env: Mapping[str, Any]) -> tuple:
        """The values of the program's output op, in order (None where it returns no value)."""
        (result,) = ops[-1].args
        items = result if isinstance(result, tuple) else (result,)
        return tuple(env[item.name] if isinstance(item, Ref) else item for item in items)

    def _provenance(self, frame: Frame, op: Op) -> Provenance:
        relative = op.fqn.replace("L['self']", "").strip(".")
        fqn = ".".join(part for part in (frame.prefix, relative) if part)
        return Provenance(fqn, Role.NONE, Phase(op.phase), op.source)

    def _expand(self, frame: Frame, op: Op) -> Any:
        if op.target.startswith("aten.") and _has_no_elements(op.value):
            return tuple(Nothing() for _ in op.value) if isinstance(op.value, tuple) else Nothing()
        base = op.target.rsplit(".", 1)[0]
        handler = self.handlers.get(op.target) or self.handlers.get(base)
        args = self._resolve(frame, op.args)
        kwargs = self._resolve(frame, op.kwargs)
        if handler is None:
            return self.unknown_op(frame, op, args, op.target)
        try:
            return handler(self, frame, op, args, kwargs)
        except Exception as error:  # an expansion that fails has no meaning: UNKNOWN by name, never a traceback
            reason = error if isinstance(error, (LayoutError, LiftError)) else f"{type(error).__name__} {error}"
            return self.unknown_op(frame, op, args, f"{op.target}: {reason}")

    def _resolve(self, frame: Frame, argument: Any) -> Any:
        if isinstance(argument, Ref):
            return frame.env[argument.name]
        if isinstance(argument, tuple):
            return tuple(self._resolve(frame, a) for a in argument)
        if isinstance(argument, dict):
            return {k: self._resolve(frame, v) for k, v in argument.items()}
        return argument

    # ------------------------------------------------------------------------------------------------ for handlers

    def unknown_op(self, frame: Frame, op: Op, args: Any, name: str) -> Any:
        """An `unknown` node (per result) that depends on every tensor argument; recorded in ``self.unknown``."""
        self.unknown.append(f"{name} at {self.builder.where.fqn or op.name}")
        terms = list(dict.fromkeys(_terms(args)))

        def result(spec: Any, index: int) -> Any:
            if not isinstance(spec, TensorSpec):
                return spec
            shape = tuple(frame.sizes(s) for s in spec.shape)
            per_token = bool(self.layouts.token_dims(shape))
            node_shape = ("T", math.prod(shape) // self.layouts.num_tokens) if per_token else shape
            precision = Precision(FORMATS.get(spec.dtype, Format.F32))
            term = self.builder.intern("unknown", terms, {"name": f"{name}#{index}"}, node_shape, precision)
            return self.layouts.value(term, shape)

        if isinstance(op.value, tuple):
            return tuple(result(spec, i) for i, spec in enumerate(op.value))
        return result(op.value, 0)

    def operand(self, value: Any) -> Value:
        """A tensor argument as a Value; a Python number becomes a constant."""
        if isinstance(value, Value):
            return value
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return Value(self.builder.const(float(value)), (), ())
        raise LiftError(f"expected a tensor or a number, got {type(value).__name__}")

    def format_of(self, op: Op) -> Format:
        return FORMATS[op.value.dtype]

    def rounded(self, value: Value, op: Op) -> Value:
        return Value(self.builder.round(value.term, self.format_of(op)), value.atoms, value.dims)

    def parameter(self, name: str, shape: Sequence[int], dtype: str) -> Value:
        """A parameter or buffer leaf, laid out as stored."""
        term = self.builder.parameter(name, shape, {"bfloat16": BF16, "float32": F32, "int64": I64}[dtype])
        return self.layouts.value(term, shape)

    def token_input(self, name: str, rank: int, precision: Precision = I64) -> Value:
        """A per-token input of rank 1, [T], or 2, [B, S]."""
        layouts = self.layouts
        flat = Value(self.builder.input(name, precision), layouts.tokens, (layouts.tokens,))
        return flat if rank == 1 else layouts.view(flat, (1, *layouts.token_shape)[-rank:])


def live_names(ops: Sequence[Op], keep: Sequence[str] = (), bound: Container[str] = ()) -> set[str]:
    """Ops that the program's outputs and ``keep`` depend on, not looking behind what is ``bound`` already."""
    by_name = {op.name: op for op in ops}
    stack = [*references(ops[-1].args), *keep]
    live: set[str] = set()
    while stack:
        name = stack.pop()
        if name in live or name not in by_name:
            continue
        live.add(name)
        if name not in bound:
            stack += references(by_name[name].args) + references(by_name[name].kwargs)
    return live


def _has_no_elements(value: Any) -> bool:
    specs = value if isinstance(value, tuple) else (value,)
    return bool(specs) and all(isinstance(s, TensorSpec) and 0 in s.shape for s in specs)


def refuse_unless(condition: bool, what: str) -> None:
    if not condition:
        raise LiftError(what)


def only(kwargs: dict[str, Any], **allowed: Any) -> None:
    """Refuse keywords other than ``allowed``; an allowed one must have the given value (``...`` is any value)."""
    for key, value in kwargs.items():
        if value is None or value is False:
            continue
        if key not in allowed or (allowed[key] is not ... and value != allowed[key]):
            raise LiftError(f"keyword {key}={value!r} is not covered")


def with_defaults(args: tuple, *defaults: Any) -> tuple[Any, ...]:
    """Positional arguments, the last ones filled from ``defaults`` (which stand for the last positions)."""
    missing = 1 + len(defaults) - len(args)
    return (*args, *defaults[len(defaults) - missing :]) if missing > 0 else args


def _terms(argument: Any) -> list[int]:
    if isinstance(argument, (Value, QuantizedHalf)):
        return [argument.term]
    if isinstance(argument, (tuple, list)):
        return [t for a in argument for t in _terms(a)]
    return []

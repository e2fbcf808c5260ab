"""The recorder of what one live step really executes.

`Recorder` observes a step: a dispatch trace of everything outside the compiled regions, with each region call as one
step in it.  The regions' graphs are the very modules that execute.  Nothing is typed by hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode

from jetgraph.codegen import Execution
from jetgraph.fx_record import record_argument, record_value
from jetgraph.record import Op, Ref, TensorSpec
from jetgraph.whole import is_sharded


@dataclass
class CompiledRegion:
    """One compiled variant of a region: the FX modules that execute, by what they compute."""

    forward: GraphModule | None = None
    backward: GraphModule | None = None
    inference: GraphModule | None = None
    num_outputs: int = 0
    executions: dict[str, Execution] = field(default_factory=dict)
    """By kind, how that graph is executed."""
    seconds: float = 0.0
    lowered: list = field(default_factory=list)


@dataclass(frozen=True)
class RegionCall:
    """One execution of a compiled region in a recorded step; ``forward_call`` pairs a backward with its forward."""

    name: str
    region: CompiledRegion
    kind: str
    prefix: str
    sizes: dict[str, int]
    forward_call: str | None = None

    @property
    def graph(self) -> GraphModule:
        module = getattr(self.region, self.kind)
        assert module is not None
        return module


@dataclass
class Step:
    """A recorded step: the outer ops in order (regions among them), named leaves, and named results."""

    ops: list[Op] = field(default_factory=list)
    regions: dict[str, RegionCall] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Records a live step; use `recording`.

    Tensors are followed by the memory they view: (storage address, offset, shape, strides, dtype).  Every tensor seen
    is kept alive until the end, so an address names one tensor.  After an in-place write, other views of that storage
    are forgotten: reading one gives a leaf named ``stale…``, which no graph accepts.
    """

    active: Recorder | None = None

    def __init__(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.step = Step()
        self.module_name = ""
        self.in_backward = False
        self._held: list[tuple[str, torch.Tensor]] = []
        self._names: dict[tuple, str] = {}
        self._overwritten: set[str] = set()
        self._stack: list[tuple[str, tuple]] = []
        self._model = model
        first: dict[int, str] = {}
        self._sharded = {
            place: first.setdefault(id(parameter), place)
            for place, parameter in model.named_parameters(remove_duplicate=False)
            if is_sharded(parameter)
        }
        """Where a sharded parameter stands → its first name, for parameters that exist whole only inside a forward."""
        for name, tensor in [*model.named_buffers(), *model.named_parameters(), *inputs.items()]:
            if not is_sharded(tensor):
                self._leaf(tensor, name)

    # ------------------------------------------------------------------------------------------------ dispatch trace

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        recorded_args, recorded_kwargs = self._argument(args), self._argument(kwargs)
        out = func(*args, **kwargs)
        self._record(str(func), recorded_args, recorded_kwargs, out, _writes(func, args, kwargs))
        return out

    def region_call(self, region: CompiledRegion, kind: str, args: Sequence[Any], out: Any) -> None:
        """Called by a compiled region after it ran."""
        name = f"region{len(self.step.regions)}"
        graph = getattr(region, kind)
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        sizes = _symbol_sizes(placeholders, args)
        forward_call, prefix = None, self.module_name
        if kind == "forward":
            self._stack.append((name, region))
        elif kind == "backward":
            position = max(i for i, (_, r) in enumerate(self._stack) if r is region)
            forward_call, _ = self._stack.pop(position)
            prefix = self.step.regions[forward_call].prefix
        self.gathered(prefix, recurse=True)
        self.step.regions[name] = RegionCall(name, region, kind, prefix, sizes, forward_call)
        recorded = tuple(self._argument(a) for a in args)
        self._record(f"region.{kind}", recorded, {}, out, [], name)

    def _record(self, target: str, args: Any, kwargs: Any, out: Any, written: Any, name: str | None = None) -> None:
        name = name or f"v{len(self.step.ops)}"
        phase = "backward" if self.in_backward else "forward"
        self.step.ops.append(Op(name, "call", target, args, kwargs, record_value(out), self.module_name, "", phase))
        if isinstance(out, torch.Tensor):
            self._bind(out, name)
        elif isinstance(out, (tuple, list)):
            for index, item in enumerate(out):
                if isinstance(item, torch.Tensor):
                    part = f"{name}_{index}"
                    self.step.ops.append(
                        Op(
                            part,
                            "call",
                            "getitem",
                            (Ref(name), index),
                            {},
                            record_value(item),
                            self.module_name,
                            "",
                            phase,
                        )
                    )
                    self._bind(item, part)
        for tensor in written:
            storage = tensor.untyped_storage().data_ptr()
            self._overwritten |= {n for n, t in self._held if t.untyped_storage().data_ptr() == storage}
            for key in [k for k in self._names if k[0] == storage]:
                self._names[key] = f"stale_{self._names[key]}"
        if len(written) == 1:
            self._bind(written[0], name)

    def gathered(self, place: str, *, recurse: bool) -> None:
        """FSDP2 has gathered the parameters of the module at ``place``: these tensors are leaves now."""
        if not self._sharded:
            return
        stem = f"{place}." if place else ""
        for relative, tensor in self._model.get_submodule(place).named_parameters(
            recurse=recurse, remove_duplicate=False
        ):
            name = self._sharded.get(stem + relative)
            if name is None or is_sharded(tensor) or self._names.get(self._key(tensor)) == name:
                continue
            if any(held == name for held, _ in self._held):  # gathered a second time, elsewhere
                self._bind(tensor, name)
            else:
                self._leaf(tensor, name)

    def start_backward(self) -> None:
        """What follows is the gradient; outside the regions no module is at work then."""
        self.in_backward, self.module_name = True, ""

    # -------------------------------------------------------------------------------------------------- identity

    def _key(self, tensor: torch.Tensor) -> tuple:
        storage = tensor.untyped_storage().data_ptr()
        return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype

    def _bind(self, tensor: torch.Tensor, name: str) -> None:
        self._held.append((name, tensor))
        self._overwritten.discard(name)
        self._names[self._key(tensor)] = name

    def _leaf(self, tensor: torch.Tensor, name: str) -> None:
        self.step.ops.append(Op(name, "placeholder", name, (), {}, record_value(tensor)))
        self._bind(tensor, name)

    def name_of(self, tensor: torch.Tensor) -> str:
        """The op or leaf that made this tensor; a tensor made before recording becomes a leaf of its own."""
        name = self._names.get(self._key(tensor))
        if name is None:
            name = f"leaf{len(self.step.ops)}"
            if tensor.numel() == 1 and not tensor.requires_grad:
                self._leaf(tensor, name)
                self.step.ops[-1] = Op(name, "placeholder", f"constant:{tensor.item()!r}", (), {}, record_value(tensor))
            else:
                self._leaf(tensor, name)
        return name

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Every recorded tensor that still holds what was recorded, by the name of what made it."""
        return {name: tensor for name, tensor in self._held if name not in self._overwritten}

    def _argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self.name_of(value))
        if isinstance(value, (tuple, list)):
            return tuple(self._argument(v) for v in value)
        if isinstance(value, dict):
            return {k: self._argument(v) for k, v in value.items()}
        return record_argument(value)


def _writes(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Every tensor that an in-place or out= operator writes into, lists of tensors included."""
    if not func._schema.is_mutable:
        return []
    written: list[torch.Tensor] = []
    for position, declared in enumerate(func._schema.arguments):
        if declared.alias_info is None or not declared.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(declared.name)
        items = value if isinstance(value, (tuple, list)) else (value,)
        written += [item for item in items if isinstance(item, torch.Tensor)]
    return written


def _symbol_sizes(placeholders: Sequence[torch.fx.Node], args: Sequence[Any]) -> dict[str, int]:
    """Concrete values of a graph's size symbols in this call."""
    sizes: dict[str, int] = {}
    for node, value in zip(placeholders, args, strict=True):
        spec = record_value(node.meta.get("val"))
        if isinstance(spec, str) and isinstance(value, int):
            sizes[spec] = value
        elif isinstance(spec, TensorSpec) and isinstance(value, torch.Tensor):
            sizes.update({s: int(n) for s, n in zip(spec.shape, value.shape, strict=True) if isinstance(s, str)})
    return sizes


@contextlib.contextmanager
def recording(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> Iterator[Recorder]:
    """Observe everything that runs inside the block; ``recorder.step`` holds it afterwards."""
    recorder = Recorder(model, inputs)
    handles = []
    for name, module in model.named_modules():

        def enter(_module: Any, _args: Any, name: str = name) -> None:
            recorder.module_name = name
            recorder.gathered(name, recurse=False)

        if getattr(module, "_compiled_call_impl", None) is None and not _inside_compiled(model, name):
            handles.append(module.register_forward_pre_hook(enter))
    Recorder.active = recorder
    try:
        with recorder:
            yield recorder
    finally:
        Recorder.active = None
        for handle in handles:
            handle.remove()


def _inside_compiled(model: torch.nn.Module, name: str) -> bool:
    parts = name.split(".")
    return any(
        getattr(model.get_submodule(".".join(parts[:i])), "_compiled_call_impl", None) is not None
        for i in range(1, len(parts))
    )

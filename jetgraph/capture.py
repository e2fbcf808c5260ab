"""Where torch hands us a block: the torch.compile backend, and the recorder of what one step really executes.

`Backend` receives a block from Dynamo, lets AOTAutograd derive the joint forward+backward graph, runs the passes on it
and returns plain FX code.  One `Backend` serves all blocks that make the same decisions, so equal layers compile once.

`Recorder` observes one live step: a dispatch trace of everything outside the compiled regions, with each region call as
one step in it.  The regions' graphs are the very modules that execute.  Nothing is typed by hand.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from jetgraph.fx_record import record_argument, record_value
from jetgraph.passes.edit import mark_forward
from jetgraph.record import Op, Ref, TensorSpec

Pass = Callable[[GraphModule], None]


@dataclass
class CompiledRegion:
    """One compiled variant of a region: the FX modules that execute, by what they compute."""

    forward: GraphModule | None = None
    backward: GraphModule | None = None
    inference: GraphModule | None = None
    num_outputs: int = 0
    seconds: float = 0.0
    lowered: list = field(default_factory=list)


class Backend:
    """A torch.compile backend that runs ``passes`` on joint graphs and executes the partitioned result as FX code.

    Private torch API used (same in 2.11–2.13): aot_autograd(partition_fn=…), default_partition, fx_graph_cse,
    node.meta["partitioner_tag"], node.meta["desc"].
    """

    __name__ = "jetgraph"

    def __init__(self, name: str, lower: Callable[[GraphModule], list]) -> None:
        self.name = name
        self.lower = lower
        self.compiled: list[CompiledRegion] = []

    @property
    def last_trained(self) -> CompiledRegion | None:
        """The newest variant that has a backward."""
        return next((c for c in reversed(self.compiled) if c.backward is not None), None)

    def __call__(self, module: GraphModule, example_inputs: Sequence[Any]) -> Callable:
        start = time.perf_counter()
        region = CompiledRegion()
        self.compiled.append(region)

        def partition(joint: GraphModule, joint_inputs: Any, *, num_fwd_outputs: int, **options: Any) -> tuple:
            joint.graph.eliminate_dead_code()
            joint.graph = fx_graph_cse(joint.graph)
            region.lowered = self.lower(joint)
            region.num_outputs = num_fwd_outputs
            return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **options)

        def forward(graph: GraphModule, _inputs: Any) -> Callable:
            region.forward = graph
            return make_boxed_func(_observed(region, "forward", graph))

        def backward(graph: GraphModule, _inputs: Any) -> Callable:
            region.backward = graph
            return make_boxed_func(_observed(region, "backward", graph))

        def inference(graph: GraphModule, _inputs: Any) -> Callable:
            mark_forward(graph.graph)
            graph.graph = fx_graph_cse(graph.graph)
            region.lowered = self.lower(graph)
            region.inference = graph
            return make_boxed_func(_observed(region, "inference", graph))

        compiled = aot_autograd(
            fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, partition_fn=partition
        )(module, example_inputs)
        region.seconds = time.perf_counter() - start
        return compiled


def _observed(region: CompiledRegion, kind: str, graph: GraphModule) -> Callable:
    """Run the FX code; when a `Recorder` is active, tell it what went in and came out."""

    def run(*args: Any) -> Any:
        recorder = Recorder.active
        if recorder is None:
            return graph.forward(*args)
        with _disable_current_modes():
            out = graph.forward(*args)
        recorder.region_call(region, kind, args, out)
        return out

    return run


# -------------------------------------------------------------------------------------------------------- recording


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
        self._keep: list[torch.Tensor] = []
        self._names: dict[tuple, str] = {}
        self._stack: list[tuple[str, tuple]] = []
        for name, tensor in [*model.named_buffers(), *model.named_parameters(), *inputs.items()]:
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
            for key in [k for k in self._names if k[0] == storage]:
                self._names[key] = f"stale_{self._names[key]}"
        if len(written) == 1:
            self._bind(written[0], name)

    def start_backward(self) -> None:
        """What follows is the gradient; outside the regions no module is at work then."""
        self.in_backward, self.module_name = True, ""

    # -------------------------------------------------------------------------------------------------- identity

    def _key(self, tensor: torch.Tensor) -> tuple:
        storage = tensor.untyped_storage().data_ptr()
        return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype

    def _bind(self, tensor: torch.Tensor, name: str) -> None:
        self._keep.append(tensor)
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


def run_region(name: str, compiled: Callable) -> Callable:
    """What a region's `_compiled_call_impl` becomes: Dynamo never sees the recorder's dispatch mode.

    Batch and sequence axes are marked dynamic on the way in, so one compile serves every size above 1.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = Recorder.active
        _mark_sizes_dynamic(args, kwargs)
        if recorder is None:
            return compiled(*args, **kwargs)
        recorder.module_name = name
        with _disable_current_modes():
            return compiled(*args, **kwargs)

    def limited(*args: Any, **kwargs: Any) -> Any:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT, accumulated_recompile_limit=1024):
            return call(*args, **kwargs)

    return limited


RECOMPILE_LIMIT = 64
"""Dynamo counts variants per code object, and all blocks of all models of a family share one; its default is 8."""


def _mark_sizes_dynamic(args: Any, kwargs: Any) -> None:
    for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.ndim >= 2:
            for dim in (0, 1):
                if leaf.shape[dim] > 1:
                    torch._dynamo.maybe_mark_dynamic(leaf, dim)

"""Record what the engine executes, while it executes it.

`backend` is the compile backend of the rollout itself (``compilation_config={"mode": 2, "backend":
"jetgraph_vllm.capture.backend"}``).  It keeps the Dynamo graph that vLLM gives it and hands back the graph's own
``forward``, or on a GPU that graph in `jetgraph_vllm.pieces`: same bits as eager.  So the captured configuration is the
rollout configuration, and the records (as it is, and functionalised) are of the graph that runs.  Functionalising waits
until somebody captures.

`watch` does the same for `compute_logits`, which vLLM leaves outside its graph.  `recording` keeps the inputs and
outputs of real calls for the replay gate.  `jetgraph_vllm.collect` puts everything into an `EngineCapture`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch import Tensor

from jetgraph.fx_record import record_graph
from jetgraph.record import Op
from jetgraph_vllm.capture_format import BatchFacts, BodyCall, CapturedGraph, GraphInput, HeadCall
from jetgraph_vllm.pieces import Pieces, is_exact

BACKEND = f"{__name__}.backend"


@dataclass
class LiveGraph:
    """A graph that this process executes, how to trace it again, and the addresses of the tensors of its first call."""

    label: str
    module: torch.fx.GraphModule
    example_inputs: list[Any]
    tracing_context: Any
    dynamo: list[Op]
    sources: list[str]
    first_arguments: list[Any] = field(default_factory=list)
    seconds: float = 0.0
    pieces: Pieces | None = None
    """What runs the graph, if not its own operators one by one."""

    @property
    def executed_by(self) -> str:
        return "fx" if self.pieces is None else self.pieces.executed_by

    @property
    def placeholders(self) -> list[Op]:
        return [op for op in self.dynamo if op.kind == "placeholder"]

    @functools.cached_property
    def aten(self) -> list[Op]:
        """The graph as functional ATen; its placeholders are those of ``dynamo``, in order."""
        start = time.perf_counter()
        with torch._guards.tracing(self.tracing_context):
            record = functionalise(self.module, self.example_inputs)
        self.seconds = time.perf_counter() - start
        num_inputs = sum(op.kind == "placeholder" for op in record)
        if num_inputs != len(self.placeholders):
            raise RuntimeError(
                f"functionalising the {self.label} changed {len(self.placeholders)} inputs into {num_inputs}: "
                "the two records could not be matched"
            )
        return record


@dataclass
class Recorder:
    """The graphs compiled in this process and, between start and stop of a recording, their calls."""

    bodies: list[LiveGraph] = field(default_factory=list)
    active: bool = False
    body_calls: list[BodyCall] = field(default_factory=list)
    head_calls: list[HeadCall] = field(default_factory=list)
    attention_outputs: dict[str, Tensor] = field(default_factory=dict)


RECORDER = Recorder()


# ------------------------------------------------------------------------------------------------------ backends


def backend(graph_module: torch.fx.GraphModule, example_inputs: list[Any], **_: Any) -> Callable:
    """Compile backend for the body: record, then run the graph itself, or of an exact model on a GPU its `Pieces`."""
    graph = _record("body", graph_module, example_inputs)
    RECORDER.bodies.append(graph)
    if _runs_in_pieces(graph_module, example_inputs):
        graph.pieces = Pieces(copy.deepcopy(graph_module), os.environ.get("JETGRAPH_PIECES", "inductor"))

    def execute(*arguments: Any) -> Any:
        if graph.pieces is None:
            return graph_module.forward(*arguments)
        graph.pieces.comparing = RECORDER.active
        return graph.pieces(*arguments)

    def run(*arguments: Any) -> Any:
        _remember_first(graph, arguments)
        batch = _current_batch() if RECORDER.active else None
        if batch is None:
            return execute(*arguments)
        RECORDER.attention_outputs = {}
        inputs = _tensor_arguments(graph, arguments)
        result = execute(*arguments)
        output = result[0] if isinstance(result, (tuple, list)) else result
        RECORDER.body_calls.append(BodyCall(inputs, output.clone(), batch, RECORDER.attention_outputs))
        return result

    return run


def _runs_in_pieces(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> bool:
    """JETGRAPH_PIECES: ``none`` nowhere, ``fx`` or ``inductor`` also on a CPU."""
    wish = os.environ.get("JETGRAPH_PIECES", "")
    on_gpu = any(isinstance(value, Tensor) and value.is_cuda for value in example_inputs)
    return wish != "none" and (on_gpu or bool(wish)) and is_exact(graph_module)


def head_backend(
    graph_module: torch.fx.GraphModule, example_inputs: list[Any], *, heads: list[LiveGraph], **_: Any
) -> Callable:
    """Compile backend for `compute_logits`; appends to ``heads``."""
    graph = _record("head", graph_module, example_inputs)
    index = len(heads)
    heads.append(graph)

    def run(*arguments: Any) -> Any:
        _remember_first(graph, arguments)
        if not RECORDER.active:
            return graph_module.forward(*arguments)
        (hidden,) = _tensor_arguments(graph, arguments).values()
        result = graph_module.forward(*arguments)
        logits = result[0] if isinstance(result, (tuple, list)) else result
        RECORDER.head_calls.append(HeadCall(index, hidden, logits.clone()))
        return result

    return run


def watch(model: torch.nn.Module) -> list[LiveGraph]:
    """Run the live model's `compute_logits` through `head_backend` from now on; returns the list of its graphs."""
    heads: list[LiveGraph] = []
    record = functools.partial(head_backend, heads=heads)
    compiled = torch.compile(model.compute_logits, backend=record, fullgraph=True, dynamic=False)

    @functools.wraps(model.compute_logits)
    def compute_logits(hidden: Tensor, *arguments: Any, **keywords: Any) -> Any:
        if hidden.shape[0] > 1:  # one graph for every n > 1; Dynamo always specialises to a single row
            torch._dynamo.mark_dynamic(hidden, 0)
        return compiled(hidden, *arguments, **keywords)

    model.compute_logits = compute_logits
    return heads


def _record(label: str, graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> LiveGraph:
    sources = [_source_name(node) for node in graph_module.graph.nodes if node.op == "placeholder"]
    context = torch._guards.TracingContext.try_get()
    return LiveGraph(label, graph_module, list(example_inputs), context, record_graph(graph_module), sources)


def functionalise(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> list[Op]:
    """The graph as functional ATen.  It is traced, not executed; the placeholders keep their order.

    Mutating ops become ``auto_functionalized`` of version 1, which leaves views as ordinary nodes; version 2, torch's
    default, folds them into keyword arguments.
    """
    import torch._inductor.config as inductor_config
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    records: list[list[Op]] = []

    def keep(functional: torch.fx.GraphModule, _: list[Any]) -> Callable:
        records.append(record_graph(functional))
        return make_boxed_func(functional.forward)

    with torch.no_grad(), inductor_config.patch(enable_auto_functionalized_v2=False):
        aot_autograd(fw_compiler=keep, inference_compiler=keep)(graph_module, example_inputs)
    (record,) = records
    return record


def _source_name(node: torch.fx.Node) -> str:
    source = getattr(node, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)


# ----------------------------------------------------------------------------------------------------- recording


@contextlib.contextmanager
def recording(model: torch.nn.Module) -> Iterator[Recorder]:
    """Keep inputs and outputs of every body, attention and head call inside the block; earlier calls are forgotten."""
    RECORDER.body_calls, RECORDER.head_calls = [], []
    layers = attention_layers(model)
    for layer in layers:
        layer.impl.forward = _attention_that_keeps_its_output(layer.impl.forward)
    RECORDER.active = True
    try:
        yield RECORDER
    finally:
        RECORDER.active = False
        for layer in layers:
            del layer.impl.forward


def _attention_that_keeps_its_output(forward: Callable) -> Callable:
    def forward_and_keep(layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        result = forward(layer, *args, **kwargs)
        output = kwargs.get("output", result)
        RECORDER.attention_outputs[layer.layer_name] = output.clone()
        return result

    return forward_and_keep


def attention_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    from vllm.model_executor.layers.attention import Attention

    return [module for module in model.modules() if isinstance(module, Attention)]


def _current_batch() -> BatchFacts | None:
    """The division of this step's rows into requests; None while vLLM profiles without requests."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if not metadata:
        return None
    if isinstance(metadata, dict):
        metadata = next(iter(metadata.values()))
    block_size = _block_size()
    seq_lens = metadata.seq_lens.tolist()
    num_blocks = [-(-length // block_size) for length in seq_lens]
    return BatchFacts(
        int(metadata.num_actual_tokens),
        metadata.query_start_loc.tolist(),
        seq_lens,
        [metadata.block_table[i, :n].tolist() for i, n in enumerate(num_blocks)],
        metadata.slot_mapping[: metadata.num_actual_tokens].tolist(),
    )


def _block_size() -> int:
    from vllm.forward_context import get_forward_context

    layer = next(iter(get_forward_context().no_compile_layers.values()))
    return layer.kv_cache.shape[2]


def _tensor_arguments(graph: LiveGraph, arguments: tuple[Any, ...]) -> dict[str, Tensor]:
    """Copies of the tensor arguments that are not weights, by their names in the Python signature."""
    return {
        argument_name(source): value.clone()
        for source, value in zip(graph.sources, arguments, strict=True)
        if isinstance(value, Tensor) and not is_module_state(source)
    }


def argument_name(source: str) -> str:
    """``L['positions']`` → ``positions``."""
    return source.removeprefix("L['").removesuffix("']")


def is_module_state(source: str) -> bool:
    return "_parameters[" in source or "_buffers[" in source


def _remember_first(graph: LiveGraph, arguments: tuple[Any, ...]) -> None:
    """Address, shape and dtype of every argument of the first call: how live names are found later."""
    if graph.first_arguments:
        return
    for value in arguments:
        fact = (value.data_ptr(), tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        graph.first_arguments.append(fact)


# ---------------------------------------------------------------------------------------------------- collecting


def describe_graph(graph: LiveGraph, names: dict[tuple[int, tuple[int, ...]], tuple[str, str]]) -> CapturedGraph:
    """The stored form of a live graph; ``names`` maps (address, shape) to (kind, fqn)."""
    if not graph.first_arguments:
        raise RuntimeError(f"the {graph.label} graph never ran: generate something before capturing")
    aten_placeholders = [op for op in graph.aten if op.kind == "placeholder"]
    inputs = []
    for aten, dynamo, source, fact in zip(
        aten_placeholders, graph.placeholders, graph.sources, graph.first_arguments, strict=True
    ):
        kind, fqn, shape, dtype = _identify(source, fact, names)
        inputs.append(GraphInput(aten.name, dynamo.name, source, kind, fqn, shape, dtype))
    root = _root_module(inputs)
    dynamo, aten = ([_with_live_fqn(op, root) for op in ops] for ops in (graph.dynamo, graph.aten))
    return CapturedGraph(graph.label, dynamo, aten, inputs, _fixed_rows(graph, inputs), graph.seconds)


def _root_module(inputs: list[GraphInput]) -> str:
    """Live FQN of the module that was compiled: what a weight's live name has before its name inside that module."""
    for described in inputs:
        inside = ".".join(re.findall(r"\['([^']+)'\]", described.source.removeprefix("L['self']")))
        if described.kind == "parameter" and f".{described.fqn}".endswith(f".{inside}"):
            return described.fqn.removesuffix(inside).rstrip(".")
    return ""


def _with_live_fqn(op: Op, root: str) -> Op:
    """``L['self'].layers.0.mlp`` → ``model.layers.0.mlp``."""
    if not op.fqn.startswith("L['self']"):
        return op
    inside = op.fqn.removeprefix("L['self']").lstrip(".")
    return dataclasses.replace(op, fqn=".".join(name for name in (root, inside) if name))


def _identify(
    source: str, fact: Any, names: dict[tuple[int, tuple[int, ...]], tuple[str, str]]
) -> tuple[str, str, tuple[int, ...] | None, str]:
    if isinstance(fact, int):
        return "size", "", None, ""
    if not isinstance(fact, tuple):
        return "object", str(getattr(fact, "value", fact)), None, ""
    address, shape, dtype = fact
    text = str(dtype).removeprefix("torch.")
    if not is_module_state(source):
        return "input", argument_name(source), shape, text
    if (address, shape) not in names:
        raise RuntimeError(
            f"{source} is no parameter or buffer of the live model: was the model changed since its first call?"
        )
    return *names[address, shape], shape, text


def _fixed_rows(graph: LiveGraph, inputs: list[GraphInput]) -> int | None:
    for op, described in zip(graph.placeholders, inputs, strict=True):
        if described.kind == "input":
            rows = op.value.shape[0]
            return rows if isinstance(rows, int) else None
    return None

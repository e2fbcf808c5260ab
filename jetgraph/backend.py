"""Where torch hands us a block: the torch.compile backend, and how a compiled block is called.

`Backend` receives a block from Dynamo, lets AOTAutograd derive the joint forward+backward graph, runs the passes on it
and returns plain FX code, or Inductor's.  One `Backend` serves all blocks that make the same decisions, so equal layers
compile once.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import default_partition
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes

from jetgraph.capture import CompiledRegion, Recorder
from jetgraph.codegen import Execution
from jetgraph.passes.edit import mark_forward


class Backend:
    """A torch.compile backend that runs ``lower`` on joint graphs and executes the partitioned result.

    ``codegen`` fx executes the graph's operators one by one; inductor fuses them (`jetgraph.codegen`).

    Private torch API used (same in 2.11–2.13): aot_autograd(partition_fn=…), default_partition, fx_graph_cse,
    node.meta["partitioner_tag"], and a callable's ``_boxed_call`` (it takes its arguments as a list, which it empties).
    """

    __name__ = "jetgraph"
    num_made = 0

    def __init__(self, name: str, lower: Callable[[GraphModule], list], codegen: str = "fx") -> None:
        Backend.num_made += 1
        self.name = name
        self.lower = lower
        self.codegen = codegen
        self.compiled: list[CompiledRegion] = []
        self.running = ""
        self.executions: dict[str, Counter[str]] = defaultdict(Counter)
        """FQN of a region → how often each kind of graph ran for it; a backward counts for the region run last."""

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

        def forward(graph: GraphModule, inputs: Sequence[Any]) -> Callable:
            return self._executed(region, "forward", graph, inputs)

        def backward(graph: GraphModule, inputs: Sequence[Any]) -> Callable:
            return self._executed(region, "backward", graph, inputs)

        def inference(graph: GraphModule, inputs: Sequence[Any]) -> Callable:
            mark_forward(graph.graph)
            graph.graph = fx_graph_cse(graph.graph)
            region.lowered = self.lower(graph)
            return self._executed(region, "inference", graph, inputs)

        compiled = aot_autograd(
            fw_compiler=forward, bw_compiler=backward, inference_compiler=inference, partition_fn=partition
        )(module, example_inputs)
        region.seconds = time.perf_counter() - start
        return compiled

    def _executed(self, region: CompiledRegion, kind: str, graph: GraphModule, inputs: Sequence[Any]) -> Callable:
        """``graph`` as a callable that counts and, when a `Recorder` is active, tells it what went in and came out."""
        setattr(region, kind, graph)
        execution = region.executions[kind] = Execution(graph, inputs, kind, self.codegen)

        def run(args: list[Any]) -> Any:
            self.executions[self.running][kind] += 1
            recorder = Recorder.active
            if recorder is None:
                return execution.run(args)
            given = tuple(args)
            with _disable_current_modes():
                out = execution.run(args, captured=True)
            recorder.region_call(region, kind, given, out)
            return out

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def run_region(
    name: str,
    backend: Backend,
    module: torch.nn.Module,
    compiled: Callable,
    check: Callable[[], None],
    proven: Callable[..., contextlib.AbstractContextManager] | None = None,
) -> Callable:
    """What a region's `_compiled_call_impl` becomes: Dynamo never sees the recorder's dispatch mode.

    Batch and sequence axes are marked dynamic on the way in, so one compile serves every size above 1.  With a KV
    cache (`generate`) the block runs eagerly: a cache is indexed by layer, so each block would compile for itself; its
    linears run their declared precision either way, and ``check`` raises if some declare none.  ``proven`` checks a
    call and holds while it is traced.
    """

    @torch.compiler.disable(recursive=False)  # an outer torch.compile breaks here and calls the block as compiled
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None:
            check()
            return module._call_impl(*args, **kwargs)
        _mark_sizes_dynamic(args, kwargs)
        backend.running = name
        recorder = Recorder.active
        modes = _disable_current_modes() if recorder is not None else contextlib.nullcontext()
        if recorder is not None:
            recorder.module_name = name
        options = torch._dynamo.config.patch(
            recompile_limit=recompile_limit(),
            accumulated_recompile_limit=1 << 20,
            optimize_ddp=False,  # it would cut a block at DDP's buckets; DDP's own hooks overlap between blocks
        )
        with modes, options, proven(*args, **kwargs) if proven is not None else contextlib.nullcontext():
            return compiled(*args, **kwargs)

    def enter(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_exporting():  # the operators of the linears are exported, region or not
            check()
            return module._call_impl(*args, **kwargs)
        return call(*args, **kwargs)

    return enter


COMPILES_PER_GRAD_MODE_AND_MASK = 3
"""One sequence; several; and one more where the first call had as many sequences as tokens (Dynamo takes equal sizes
for one symbol).  Measured over random sizes by `benchmarks.compile`."""
COMPILES_PER_BACKEND = COMPILES_PER_GRAD_MODE_AND_MASK * 3 * 3
"""Three grad modes (training, no_grad, inference_mode) and three mask kinds (none, ``first``, a window)."""


def recompile_limit() -> int:
    """Dynamo counts variants per code object, and all blocks of all models of a family share one; its default is 8.

    With ``fullgraph`` it raises when the limit is hit, so a block never falls back to eager unseen.
    """
    return COMPILES_PER_BACKEND * Backend.num_made


@torch.compiler.disable
def _mark_sizes_dynamic(args: Any, kwargs: Any) -> None:
    for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.ndim >= 2:
            for dim in (0, 1):
                if leaf.shape[dim] > 1:
                    torch._dynamo.maybe_mark_dynamic(leaf, dim)

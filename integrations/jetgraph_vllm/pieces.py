"""How an exact model's body runs on a GPU: its graph is cut at attention, each piece is lowered like a trainer's block.

    run = Pieces(graph_module, "inductor")        # called like graph_module.forward, and gives its bits
    run.executed_by                               # "fx", "inductor-exact": what a captured graph says of itself

Between two attentions lie GEMMs and what is computed for them.  The trainer's own passes put a norm and its quantiser,
heads' norm and rotary embedding, an activation and its quantiser into one kernel, each checked when it is applied
(`jetgraph.passes.fuse`); Inductor makes kernels of the rest, whose results are compared with the operators' bit for bit
when a piece first runs and at every capture (`jetgraph.codegen`).  Attention and the write to its cache run as they
are.  Equal layers share one executable.

A call reads nothing back to the host once every piece has run, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compile_utils import fx_graph_cse
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.split_module import split_module

from jetgraph.codegen import Execution
from jetgraph.passes.edit import mark_forward
from jetgraph.passes.fuse import Fusion, fuse_activations, fuse_inverse_rms, fuse_norms, fuse_rotary

CUTS = ("vllm::unified_kv_cache_update", "vllm::unified_attention_with_output")
"""Operators that no piece holds: they read the step's metadata and write to memory of the engine."""


LOOKUPS = ("flatten", "index_select", "to", operator.getitem, torch.cat)
"""What rotary embeddings look a step's angles up with."""
ALLOCATIONS = (torch.empty, torch.ops.aten.empty.memory_format)


class Pieces:
    """One body, compiled piece by piece.

    Private torch API used (same in 2.11–2.13): aot_autograd, fx_graph_cse, node.meta["example_value"] of placeholders
    of Dynamo's graphs.
    """

    def __init__(self, module: GraphModule, codegen: str) -> None:
        self.codegen = codegen
        self.comparing = False
        """Compare Inductor's results with the operators' in each call, as at the first: a capture asks for it."""
        self.fusions: list[Fusion] = []
        self._executions: dict[str, Execution] = {}
        """By what a piece computes: equal layers are one entry."""
        self.split, names = cut(module)
        self.num_pieces = len(names)
        for name in names:
            piece = getattr(self.split, name)
            delattr(self.split, name)
            setattr(self.split, name, self._compiled(piece))

    def __call__(self, *arguments: Any) -> Any:
        return self.split(*arguments)

    @property
    def executed_by(self) -> str:
        """The least exact of what ran the pieces."""
        by = {execution.by for execution in self._executions.values()}
        return next((each for each in ("inductor", "inductor-exact") if each in by), "fx")

    def describe(self) -> str:
        """One line: how many pieces, what was fused, who runs them, and what was refused for which reason."""
        fused = Counter(fusion.operator for fusion in self.fusions if not fusion.refusal)
        refused = {f"{f.operator}: {f.refusal}" for f in self.fusions if f.refusal}
        if self.codegen == "inductor":
            refused |= {f"operator by operator: {e.reason}" for e in self._executions.values() if e.reason}
        parts = [f"{self.num_pieces} pieces, {len(self._executions)} executables, run by {self.executed_by}"]
        parts += [f"{count} {name}" for name, count in fused.items()]
        return "; ".join([", ".join(parts), *sorted(refused)])

    def _compiled(self, piece: GraphModule) -> Callable:
        """``piece`` as a callable that returns what it returned: one value, or a tuple."""
        inputs = [node.meta["example_value"] for node in piece.graph.nodes if node.op == "placeholder"]
        (output,) = piece.graph.find_nodes(op="output")
        single = not isinstance(output.args[0], (tuple, list))
        if single:  # AOTAutograd knows tuples alone
            output.args = ((output.args[0],),)
            piece.recompile()
        with torch.no_grad():
            run = aot_autograd(fw_compiler=self._lowered, inference_compiler=self._lowered)(piece, inputs)
        return (lambda *arguments: run(*arguments)[0]) if single else run

    def _lowered(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable:
        mark_forward(graph.graph)
        graph.graph = fx_graph_cse(graph.graph)
        key = "\n".join([graph.code, *_described(graph)])
        if key not in self._executions:
            for fuse in (fuse_norms, fuse_inverse_rms, fuse_rotary, fuse_activations):
                self.fusions += fuse(graph)
            graph.graph.eliminate_dead_code()
            graph.graph.lint()
            graph.recompile()
            self._executions[key] = Execution(graph, inputs, "inference", self.codegen)
        execution = self._executions[key]

        def run(arguments: list[Any]) -> Any:
            return execution.run(arguments, captured=self.comparing)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def is_exact(module: GraphModule) -> bool:
    """Whether all that runs between attentions is ours or ATen's: a model that declares ``ops: exact``."""
    called = {_name(node) for node in module.graph.nodes} - {"", *CUTS}
    foreign = [name for name in called if not name.startswith(("aten::", "jetgraph::"))]
    return "jetgraph::quantize" in called and not foreign


def cut(module: GraphModule) -> tuple[GraphModule, list[str]]:
    """``module`` as submodules in the order of its calls, and the names of those that hold no operator of `CUTS`.

    The memory that attention writes to is allocated with the attention: a piece's results must be computed by it.
    """
    graph = module.graph
    _look_up_once(graph)
    for node in [n for n in graph.nodes if isinstance(n.meta.get("example_value"), torch.Size)]:
        _ask_where_needed(node)
    for node in [n for n in graph.nodes if _name(n) == CUTS[1]]:
        for made in _allocation(node):
            node.prepend(made)
    number, whole, numbers = 0, set(), {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if node.target is operator.getitem and node.args[0] in numbers:  # a tuple does not leave its submodule
            numbers[node] = numbers[node.args[0]]
            continue
        is_cut = _name(node) in CUTS or _is_allocation(node)
        if is_cut != (number in whole):
            number += 1
            if is_cut:
                whole.add(number)
        numbers[node] = number
    module.recompile()
    split = split_module(module, None, numbers.__getitem__, keep_original_order=True)
    names = [name for name, _ in split.named_children()]
    return split, [name for name in names if int(name.removeprefix("submod_")) not in whole]


def _look_up_once(graph: Graph) -> None:
    """Each layer looks the same angles up; later ones take what the first one found."""
    given, found = set(graph.find_nodes(op="placeholder")), {}
    for node in list(graph.nodes):
        if node.target in LOOKUPS and given.issuperset(node.all_input_nodes):
            first = found.setdefault((node.target, repr(node.args), repr(node.kwargs)), node)
            given.add(first)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _ask_where_needed(size: Node) -> None:
    """A `torch.Size` cannot leave a submodule: whoever reads ``size`` asks the tensor itself."""
    for user in list(size.users):
        with size.graph.inserting_before(user):
            user.replace_input_with(size, size.graph.node_copy(size))
    size.graph.erase_node(size)


def _allocation(attention: Node) -> list[Node]:
    """What makes the memory that ``attention`` writes to, in order: a size, an empty tensor, a view of it."""
    node = attention.kwargs.get("output", attention.args[3] if len(attention.args) > 3 else None)
    found: list[Node] = []
    while isinstance(node, Node) and _is_allocation(node):
        found.insert(0, node)
        node = node.args[0] if node.args else None
    return found


def _is_allocation(node: Node) -> bool:
    """An empty tensor, a view of one, or a size that only such a call reads."""
    if node.target in ALLOCATIONS:
        return True
    if node.op == "call_method" and node.target in ("view", "reshape"):
        return _is_allocation(node.args[0])  # type: ignore[arg-type]
    is_size = isinstance(node.meta.get("example_value"), torch.Size)
    return is_size and all(user.target in ALLOCATIONS for user in node.users)


def _name(node: Node) -> str:
    """Qualified name of the operator that ``node`` calls, without its overload."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return getattr(target, "_qualified_op_name", "") if node.op == "call_function" else ""


def _described(graph: GraphModule) -> Iterator[str]:
    """dtype, device, shape and strides of each input, without which equal code need not be the same computation."""
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        if isinstance(value, Tensor):
            yield f"{value.dtype} {value.device} {tuple(value.shape)} {tuple(value.stride())}"
        else:
            yield str(value)

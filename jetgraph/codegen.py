"""How a lowered graph is executed: operator by operator, or by kernels that Inductor makes of what lies between GEMMs.

A forward graph must keep every bit, because the rollout and `no_grad` compute the same numbers by other graphs.  So
Inductor gets one only if all that it would compute itself is rounded exactly (`EXACT`: no sums, no exponentials), it is
told to keep every cast, and its results on the first inputs, and on those of every captured step, are compared with the
operators' bit for bit.  A graph that fails either test runs operator by operator; `Execution.reason` says why.

A backward graph keeps its casts too, but Inductor adds in its own order; no rollout computes it.  A captured step runs
it operator by operator, as its graph says.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from jetgraph.lowering.probe_cache import sources
from jetgraph.passes.edit import VIEWS

CODEGENS = ("auto", "fx", "inductor")

_aten = torch.ops.aten
EXACT = VIEWS | {
    operator.getitem,
    *(_aten.add.Tensor, _aten.add.Scalar, _aten.sub.Tensor, _aten.mul.Tensor, _aten.mul.Scalar, _aten.neg.default),
    *(_aten.abs.default, _aten.relu.default, _aten.maximum.default, _aten.minimum.default, _aten.where.self),
    *(_aten._to_copy.default, _aten.clone.default, _aten.cat.default, _aten.copy.default, _aten.alias.default),
    *(_aten.expand.default, _aten.slice.Tensor, _aten.select.int, _aten.unsqueeze.default, _aten.squeeze.dim),
    *(_aten.split.Tensor, _aten.split_with_sizes.default, _aten.sym_size.int),
    *(_aten.index_select.default, _aten.embedding.default),
    _aten.rsqrt.default,  # one instruction of the hardware, for both
}
"""What Inductor's kernels compute with ATen's bits."""
CALLED = frozenset(
    {
        *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default),
        *(_aten._scaled_dot_product_flash_attention.default, _aten._scaled_dot_product_efficient_attention.default),
        *(_aten._scaled_dot_product_cudnn_attention.default, _aten._scaled_dot_product_flash_attention_for_cpu.default),
    }
)
"""What Inductor calls as it is, beside every operator of ours."""


class Execution:
    """One graph and what executes it.

    Private torch API used (same in 2.11–2.13): compile_fx_inner, select_decomp_table, inductor's config,
    node.meta["low_precision_pointwise_barrier"], node.meta["inductor_realize_to_strides"],
    proxy_tensor._extract_tensor_metadata, torch._prims_common.is_non_overlapping_and_dense_or_false,
    torch._C._AutoDispatchBelowAutograd, torch._guards.detect_fake_mode.
    """

    def __init__(self, graph: GraphModule, inputs: Sequence[Any], kind: str, codegen: str) -> None:
        self.graph = graph
        self.is_forward = kind != "backward"
        self.reason = "" if codegen == "inductor" else "asked for"
        """Why the graph runs operator by operator; empty if Inductor's kernels run."""
        self.compared = False
        self._generated: Callable | None = None
        if codegen != "inductor":
            return
        inexact = next(inexact_calls(graph), None) if self.is_forward else None
        if inexact is not None:
            self.reason = (
                f"{inexact.target} ({inexact.name}) would be computed by Inductor, in an order or rounding of its own"
            )
        else:
            # a backward graph may be compiled when it first runs, while a recorder is at work that must not see this
            with _disable_current_modes():
                self._generated = generate(graph, inputs, self.is_forward)

    @property
    def by(self) -> str:
        """``fx``, ``inductor-exact`` (a forward that was compared) or ``inductor``."""
        if self._generated is None:
            return "fx"
        return "inductor-exact" if self.is_forward and self.compared else "inductor"

    def run(self, args: list[Any], *, captured: bool = False) -> Any:
        """The graph's results; ``args`` are emptied if nobody else needs them.  ``captured``: somebody records them.

        Nothing in a lowered graph is differentiated, so autograd is not asked at every operator: the host needs a third
        less time for a step of a decoder block.
        """
        with torch._C._AutoDispatchBelowAutograd():
            if self._generated is None:
                return self.graph.forward(*_taken(args))
            if not self.is_forward:
                return self.graph.forward(*_taken(args)) if captured else self._generated(args)
            if self.compared and not captured:
                return self._generated(args)
            return self._compare(args)

    def _compare(self, args: list[Any]) -> Any:
        assert self._generated is not None
        nodes = next(iter(self.graph.graph.find_nodes(op="output"))).args[0]
        with _disable_current_modes():
            expected = self.graph.forward(*args)
            results = self._generated(_taken(args))
            compared = zip(nodes, expected, results, strict=True)  # type: ignore[arg-type]
            different = [str(n) for n, e, r in compared if not same_bits(e, r) and not _is_random_state(n)]
        if different:
            names = ", ".join(different[:3])
            self._generated, self.reason = None, f"Inductor's {names} differ in bits from the graph's"
            warnings.warn(f"a forward graph runs operator by operator: {self.reason}", stacklevel=2)
            return expected
        self.compared = True
        return results


def inexact_calls(graph: GraphModule) -> Iterator[Node]:
    """Calls that Inductor would compute itself and whose bits it does not promise."""
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.target in EXACT or node.target in CALLED:
            continue
        if getattr(node.target, "namespace", "") == "jetgraph" or not isinstance(node.target, torch._ops.OpOverload):
            continue  # ours are called; the rest are sizes
        if node.target is _aten.pow.Tensor_Scalar and node.args[1] == 2:
            continue  # x · x, for both
        yield node


def generate(graph: GraphModule, inputs: Sequence[Any], is_forward: bool) -> Callable[[list[Any]], Any]:
    """Inductor's kernels for ``graph``, every cast kept; called with a list, which is emptied."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    # where sizes are fixed, a decomposition makes constants
    with detect_fake_mode(inputs) or contextlib.nullcontext(), _layouts_unasked():
        decomposed = make_fx(graph, decomposition_table=select_decomp_table())(*inputs)
    for node in decomposed.graph.nodes:  # AOTAutograd's own tracing would mark them; ours comes after it
        if node.op == "call_function" and any(map(_is_narrow, (node, *node.all_input_nodes))):
            node.meta["low_precision_pointwise_barrier"] = True
        if len(node.users) > 1 and _ours_reads(node):
            # it is stored for our operator anyway: whoever else reads it shall load it, not compute it again from what
            # was kept in FP32
            node.meta["inductor_realize_to_strides"] = True
    options: dict[str, Any] = {"emulate_precision_casts": True}
    if is_forward:  # no pattern may turn a product and a sum, two roundings, into one
        options["pattern_matcher"] = False
    # Inductor's cache on disk knows our operators by name alone, and its code expects results that lie as they did
    tag = f"{torch.compiler.config.cache_key_tag} jetgraph {sources()}"
    with config.patch(options), torch.compiler.config.patch(cache_key_tag=tag), _layouts_unasked():
        return compile_fx_inner(decomposed, inputs)  # type: ignore[return-value]


@contextlib.contextmanager
def _layouts_unasked() -> Iterator[None]:
    """Ask of no result whether one of its sizes is 1; a symbolic size pays for each such question with a guard.

    Scales [C, T / 128] in columns would cost a compile for up to 128 tokens and one for more.  make_fx asks whether
    they are contiguous, for a note that nothing here reads.  Inductor asks whether a result is dense, and by its
    strides alone it is.
    """
    from torch import _prims_common
    from torch.fx.experimental import proxy_tensor

    ask = _prims_common.is_non_overlapping_and_dense_or_false

    def is_dense(x: Tensor) -> bool:
        return _is_dense_for_every_size(x) or ask(x)

    noted = functools.partial(proxy_tensor._extract_tensor_metadata, include_contiguity=False)
    with (
        mock.patch.object(proxy_tensor, "_extract_tensor_metadata", noted),
        mock.patch.object(_prims_common, "is_non_overlapping_and_dense_or_false", is_dense),
    ):
        yield


def _is_dense_for_every_size(x: Tensor) -> bool:
    """Whether the strides are, in some order, those of a contiguous tensor, whatever the symbolic sizes are."""
    if any(isinstance(stride, torch.SymInt) for stride in x.stride()):
        return False
    expected: Any = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True), key=operator.itemgetter(0)):
        if isinstance(expected, torch.SymInt) or stride != expected:
            return False
        expected = stride * size
    return True


def _ours_reads(node: Node) -> bool:
    """Whether an operator of ours reads ``node``, through views."""
    return any(
        _ours_reads(user) if user.target in VIEWS else getattr(user.target, "namespace", "") == "jetgraph"
        for user in node.users
    )


def _is_random_state(node: Any) -> bool:
    """A result of torch's attention beside the output and the log-sum-exp: seeds of a dropout of 0, other each time."""
    if not isinstance(node, Node) or node.target is not operator.getitem:
        return False
    source, index = node.args
    return source.target in CALLED and index > 1  # type: ignore[operator, union-attr]


def _is_narrow(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two results are equal: tensors in shape, dtype and every bit, a NaN being equal to any NaN."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and bool(a == b)
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    a, b = a.contiguous(), b.contiguous()
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    if torch.equal(a.view(words), b.view(words)):
        return True
    if not a.is_floating_point():
        return False
    x, y = a.float(), b.float()
    return bool(((a.view(words) == b.view(words)) | (x.isnan() & y.isnan())).all())


def _taken(args: list[Any]) -> list[Any]:
    """The same arguments in a list of their own, so that the caller's may be dropped while a graph runs."""
    taken = list(args)
    args.clear()
    return taken

"""Run a precision graph with torch.

One mechanism, four uses: the reference semantics of every primitive, the replay gate of both lifters (the outputs equal
the captured run's bit for bit), attestation, and finding where two runs diverge.

Values are [T, C] tensors in the dtype of their precision; a quantised value is `Quantized`.  Arithmetic is FP32.  Where
a sum's order is a kernel's own business, the node's `kernel` says which one ran, and that one runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jetgraph.graph import Node, PrecisionGraph
from jetgraph.lowering import reference
from jetgraph.lowering.torch_ops import scale_arguments
from jetgraph.precision import Format


class Quantized(NamedTuple):
    """FP8 codes [R, C] and FP32 scales [⌈R/rows⌉, ⌈C/cols⌉]."""

    codes: Tensor
    scales: Tensor


Attend = Callable[[Node, int, Tensor, Tensor, Tensor], Tensor]
"""(node, how many attention nodes came before, q [T, H·D], k and v [T, Hkv·D]) → [T, H·D]"""

DTYPES = {Format.BF16: torch.bfloat16, Format.F32: torch.float32}


class InterpretError(RuntimeError):
    """A node cannot be run: it names the node and why."""


def interpret(
    graph: PrecisionGraph,
    leaves: Mapping[str, Tensor | Quantized],
    *,
    outputs: Iterable[str] | None = None,
    attend: Attend | None = None,
) -> dict[str, Tensor]:
    """Values of ``outputs`` (default: all).  ``leaves`` holds inputs ([T] or [1, T]), parameters and buffers by name; a
    parameter that only exists quantised (in an engine) is given as `Quantized`.

    ``attend`` replaces attention, for runs with a KV cache; the default treats all tokens as one causal sequence.

    Raises:
        InterpretError: an `unknown` or `poison` node is reached, or a leaf is missing.
    """
    wanted = {name: graph.outputs[name] for name in (graph.outputs if outputs is None else outputs)}
    graph = graph.restrict(wanted)
    last_use = _last_uses(graph)
    run = _Run(graph, leaves, attend or whole_sequence)
    for index, node in enumerate(graph.nodes):
        run.values[index] = run.evaluate(index, node)
        for i in node.inputs:
            if last_use[i] == index:
                run.values.pop(i, None)
    return {name: run.values[index] for name, index in graph.outputs.items()}


def _last_uses(graph: PrecisionGraph) -> dict[int, int]:
    last = {i: index for index, node in enumerate(graph.nodes) for i in node.inputs}
    return last | dict.fromkeys(graph.outputs.values(), len(graph.nodes))


def whole_sequence(node: Node, _index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All tokens are one sequence."""
    return attention(node, q, k, v)


def attention(node: Node, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The node's attention, by the kernel that ran, of the last queries of one sequence."""
    heads, scale = _attention_heads(node, q, k, v)
    if node.kernel == "jetgraph::attention":
        return reference.attention(*heads, scale)[0].flatten(1)
    out = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *heads, 0.0, node.attr("mask") == "causal", scale=scale
    )[0]
    return out[0].transpose(0, 1).flatten(1)


def _attention_heads(node: Node, *tensors: Tensor) -> tuple[list[Tensor], float]:
    dim = int(node.attr("head_dim"))  # type: ignore[arg-type]
    heads = [t.to(torch.bfloat16).unflatten(-1, (-1, dim)).transpose(0, 1)[None] for t in tensors]
    return heads, float(node.attr("scale"))  # type: ignore[arg-type]


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "rsqrt": torch.rsqrt,
    "cos": torch.cos,
    "sin": torch.sin,
    "silu": F.silu,
    "int_to_float": lambda x: x,
    "sq": lambda x: x.pow(2),
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "silu_backward": torch.ops.aten.silu_backward,
}


class _Run:
    def __init__(self, graph: PrecisionGraph, leaves: Mapping[str, Tensor | Quantized], attend: Attend) -> None:
        self.graph, self.leaves, self.attend = graph, leaves, attend
        self.values: dict[int, Any] = {}
        self.num_attentions = 0

    def evaluate(self, index: int, node: Node) -> Any:
        inputs = [self.values[i] for i in node.inputs]
        if node.op in _UNARY:
            return _UNARY[node.op](inputs[0].float())
        if node.op in _BINARY:
            return _BINARY[node.op](*(x.float() for x in inputs))
        method = getattr(self, f"_{node.op}", None)
        if method is None:
            name = dict(node.attrs).get("name", "")
            raise InterpretError(f"%{index} {node.op} {name} ({node.fqn or 'no module'}): cannot be run")
        return method(node, *inputs)

    def _per_token(self, node: Node) -> bool:
        return "T" in node.type.shape

    # ------------------------------------------------------------------------------------------------------- leaves

    def _leaf(self, node: Node) -> Any:
        name = str(node.attr("name"))
        if name not in self.leaves:
            raise InterpretError(f"{node.op} {name!r} has no value: pass it in leaves")
        return self.leaves[name]

    def _input(self, node: Node) -> Tensor:
        return self._leaf(node).reshape(-1, node.type.shape[1])

    def _parameter(self, node: Node) -> Tensor | Quantized:
        value = self._leaf(node)
        return value if len(node.type.shape) == 2 else value.reshape(1, -1)

    def _const(self, node: Node) -> Tensor:
        return torch.tensor([[node.attr("value")]], dtype=torch.float32)

    # --------------------------------------------------------------------------------------------------- arrangement

    def _round(self, node: Node, x: Tensor) -> Tensor:
        return x.to(DTYPES[Format(str(node.attr("format")))])

    def _pow(self, node: Node, x: Tensor) -> Tensor:
        return x.float().pow(node.attr("exponent"))

    def _broadcast(self, node: Node, x: Tensor) -> Tensor:
        sizes, present = node.attr("sizes"), node.attr("present")
        rows = x.shape[0] if self._per_token(node) else 1
        kept = [n if p else 1 for n, p in zip(sizes, present, strict=True)]  # type: ignore[arg-type]
        return x.reshape(rows, *kept).expand(rows, *sizes).reshape(rows, -1)  # type: ignore[misc]

    def _slice(self, node: Node, x: Tensor) -> Tensor:
        a = dict(node.attrs)
        cut = x.reshape(x.shape[0], a["outer"], a["size"], a["inner"])[:, :, a["start"] : a["stop"]]  # type: ignore[arg-type, misc]
        return cut.reshape(x.shape[0], -1)

    def _cat(self, node: Node, *parts: Tensor) -> Tensor:
        a = dict(node.attrs)
        rows = max(p.shape[0] for p in parts)
        dtype = DTYPES[node.type.precision.format]
        shaped = [
            (p.to(dtype).expand(rows, a["outer"] * n * a["inner"]) if p.numel() == 1 else p).reshape(  # type: ignore[operator]
                rows,
                a["outer"],
                n,
                a["inner"],  # type: ignore[arg-type]
            )
            for p, n in zip(parts, a["sizes"], strict=True)  # type: ignore[arg-type]
        ]
        return torch.cat(shaped, 2).reshape(rows, -1)

    def _permute(self, node: Node, x: Tensor) -> Tensor:
        sizes, order = node.attr("sizes"), node.attr("order")
        return x.reshape(x.shape[0], *sizes).permute(0, *(d + 1 for d in order)).reshape(x.shape[0], -1)  # type: ignore[misc, union-attr]

    def _pick(self, node: Node, x: tuple[Tensor, ...]) -> Tensor:
        return x[node.attr("index")]  # type: ignore[index]

    # ---------------------------------------------------------------------------------------------------- reductions

    def _mean(self, node: Node, x: Tensor) -> Tensor:
        return x.float().reshape(x.shape[0], -1, node.attr("size")).mean(-1)  # type: ignore[arg-type]

    def _sum(self, node: Node, x: Tensor, tokens: bool = False) -> Tensor:
        sizes, reduced = node.attr("sizes"), node.attr("reduced")
        shaped = (x.float() if node.kernel.startswith("aten::sum.f32") else x).reshape(x.shape[0], *sizes)  # type: ignore[misc]
        dims = [d + 1 for d, r in enumerate(reduced) if r] + ([0] if tokens else [])  # type: ignore[arg-type]
        _, _, order = node.kernel.partition("@")
        if order:
            visited = [int(d) for d in order.split(",")]
            visited += [d for d in range(shaped.ndim) if d not in visited]
            stored = shaped.permute(visited).contiguous()
            shaped = stored.permute([visited.index(d) for d in range(shaped.ndim)])
        return shaped.sum(sorted(dims)).float().reshape(1 if tokens else x.shape[0], -1)

    def _sum_tokens(self, node: Node, x: Tensor) -> Tensor:
        return self._sum(node, x, tokens=True)

    # ----------------------------------------------------------------------------------------------------- FP8, GEMM

    def _quantize(self, node: Node, x: Tensor | Quantized) -> Quantized:
        scale = node.type.precision.scale
        assert scale is not None
        if isinstance(x, Quantized):
            source = self.graph.nodes[node.inputs[0]]
            if source.op == "parameter":  # an engine stores the quantised weight and has no master
                return x
            held = source.type.precision.scale
            assert held is not None
            x = reference.dequantize(*x, held.granularity.rows or 0, held.granularity.cols or 0)
        return Quantized(*reference.quantize(x, *scale_arguments(scale)))

    def _gemm(self, node: Node, a: Tensor | Quantized, b: Tensor | Quantized) -> Tensor:
        contraction = str(node.attr("contraction"))
        if isinstance(a, Quantized) and isinstance(b, Quantized):
            return self._fp8_gemm(node, a, b, contraction)
        if isinstance(a, Quantized) or isinstance(b, Quantized):
            raise InterpretError(f"gemm of {node.fqn}: one operand is quantised and the other is not")
        if node.kernel == "jetgraph::row_tile_gemm":
            return reference.row_tile_gemm(a, b).float()
        if node.kernel == "aten::mm.f32":
            a, b = a.float(), b.float()
        left, right = {"nt": (a, b.t()), "nn": (a, b), "tn": (a.t(), b)}[contraction]
        return (left @ right).float()

    def _fp8_gemm(self, node: Node, a: Quantized, b: Quantized, contraction: str) -> Tensor:
        scale = self.graph.nodes[node.inputs[1]].type.precision.scale
        assert scale is not None
        rows, cols = scale.granularity.rows or 0, scale.granularity.cols or 0
        if contraction == "nt":
            return reference.fp8_gemm(*a, *b, rows, cols)
        across = Quantized(b.codes.t(), b.scales.t())
        if contraction == "nn":
            return reference.fp8_gemm(*a, *across, cols, rows)
        return reference.fp8_gemm(a.codes.t(), a.scales.t(), *across, 1, rows)

    # ---------------------------------------------------------------------------------------- attention, embedding

    def _attention(self, node: Node, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index, self.num_attentions = self.num_attentions, self.num_attentions + 1
        return self.attend(node, index, q, k, v).float()

    def _attention_backward(self, node: Node, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        heads, scale = _attention_heads(node, q, k, v)
        if node.kernel == "jetgraph::attention_backward":
            d_out = grad.unflatten(-1, (-1, int(node.attr("head_dim"))))[None]  # type: ignore[arg-type]
            grads = reference.attention_backward(d_out, *heads, scale)
        else:
            causal = node.attr("mask") == "causal"
            forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, causal, scale=scale)
            (d_out,), _ = _attention_heads(node, grad)
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                d_out, *heads, *forward, 0.0, causal, scale=scale
            )
        return tuple(g[0].transpose(0, 1).flatten(1) for g in grads)

    def _embed(self, node: Node, weight: Tensor, ids: Tensor) -> Tensor:
        return weight[ids[:, 0]]

    def _embed_backward(self, node: Node, grad: Tensor, ids: Tensor) -> Tensor:
        rows, padding = node.attr("rows"), node.attr("padding")
        return torch.ops.aten.embedding_dense_backward(grad, ids[:, 0], rows, padding, False).float()

    # --------------------------------------------------------------------------------------------------- observables

    def _log_softmax(self, node: Node, x: Tensor) -> Tensor:
        return x.float().log_softmax(-1)

    def _log_softmax_backward(self, node: Node, grad: Tensor, output: Tensor) -> Tensor:
        return torch.ops.aten._log_softmax_backward_data(grad, output, -1, torch.float32)

    def _gather(self, node: Node, x: Tensor, ids: Tensor) -> Tensor:
        return x.gather(-1, ids)

    def _gather_backward(self, node: Node, grad: Tensor, ids: Tensor) -> Tensor:
        return grad.new_zeros(grad.shape[0], node.attr("size")).scatter_add_(-1, ids, grad)  # type: ignore[arg-type]

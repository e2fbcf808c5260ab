"""Run a precision graph with torch.

One mechanism, four uses: the reference semantics of every primitive, the replay gate of both lifters (the outputs equal
the captured run's bit for bit), attestation, and finding where two runs diverge.

Values are [T, C] tensors in the dtype of their precision; a quantised value is `Quantized`.  Arithmetic is FP32.  Where
a sum's order is a kernel's own business, the node's `kernel` says which one ran, and that one runs here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jetgraph.batch import ONE_SEQUENCE, Batch
from jetgraph.graph import Node, PrecisionGraph
from jetgraph.interpret_attention import attention, attention_backward
from jetgraph.lowering import reference
from jetgraph.lowering.torch_ops import scale_arguments
from jetgraph.precision import Format
from jetgraph.whole import DTYPES


class Quantized(NamedTuple):
    """FP8 codes [R, C] and FP32 scales [⌈R/rows⌉, ⌈C/cols⌉]."""

    codes: Tensor
    scales: Tensor


class Product(NamedTuple):
    """BF16 operands of a GEMM whose kernel rounds only after it has added a bias, if one is added: so it waits."""

    a: Tensor
    b: Tensor
    kernel: str

    def rounded(self, bias: Tensor | None = None) -> Tensor:
        """FP32 numbers a @ b.T (+ bias [N]), rounded once to BF16."""
        if self.kernel == "jetgraph::row_tile_gemm":
            return torch.ops.jetgraph.row_tile_gemm(self.a, self.b, bias).float()
        out = torch.mm(self.a, self.b.t()) if bias is None else torch.addmm(bias, self.a, self.b.t())
        return out.float()


class Fp8Product(NamedTuple):
    """Quantised operands of a GEMM that a provider's kernel computes on a GPU; it too rounds after a bias."""

    a: Quantized
    b: Quantized
    b_rows: int
    group: int
    provider: str

    def rounded(self, bias: Tensor | None = None) -> Tensor:
        """FP32 numbers a @ b.T (+ bias [N]), rounded once to BF16."""
        operands = *self.a, *self.b, bias, self.b_rows, self.group
        return torch.ops.jetgraph.fp8_gemm(*operands, self.provider).float()


PENDING = (Product, Fp8Product)

Attend = Callable[[Node, int, Tensor, Tensor, Tensor], Tensor]
"""(node, how many attention nodes came before, q [T, H·D], k and v [T, Hkv·D]) → [T, H·D]"""


class InterpretError(RuntimeError):
    """A node cannot be run: it names the node and why."""


def interpret(
    graph: PrecisionGraph,
    leaves: Mapping[str, Tensor | Quantized],
    *,
    outputs: Iterable[str] | None = None,
    attend: Attend | None = None,
    batch: Batch = ONE_SEQUENCE,
) -> dict[str, Tensor]:
    """Values of ``outputs`` (default: all).  ``leaves`` holds inputs ([T] or [B, S]), parameters and buffers by name; a
    parameter that only exists quantised (in an engine) is given as `Quantized`.

    ``batch`` says which tokens make a sequence; by default all do.  ``attend`` replaces attention, for runs with a KV
    cache.

    Raises:
        InterpretError: an `unknown` or `poison` node is reached, or a leaf is missing.
    """
    wanted = {name: graph.outputs[name] for name in (graph.outputs if outputs is None else outputs)}
    run = Run(graph, leaves, wanted.values(), attend=attend, batch=batch)
    kept = set(wanted.values())
    found = {index: run.values[index] for index in run if index in kept}
    return {name: found[index] for name, index in wanted.items()}


def _columns(x: Tensor | Quantized, parts: int) -> list[Any]:
    """Equal runs of K, with their own scales; a run that cuts a scale's block has no meaning and is an error."""
    blocks = x.scales if isinstance(x, Quantized) else x
    if blocks.shape[1] % parts:
        raise InterpretError(f"{blocks.shape[1]} blocks along K cannot be cut in {parts} equal runs")
    if isinstance(x, Quantized):
        return [Quantized(*pair) for pair in zip(x.codes.chunk(parts, 1), x.scales.chunk(parts, 1), strict=True)]
    return list(x.chunk(parts, 1))


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "neg": torch.neg,
    "rsqrt": torch.rsqrt,
    "cos": torch.cos,
    "sin": torch.sin,
    "silu": F.silu,
    "tanh": torch.tanh,
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


def _dense(x: Tensor) -> Tensor:
    """FP32 and contiguous.

    On strided operands ATen's CPU kernels leave their vector code for scalar code, whose silu and gelu have other last
    bits (measured); a node's value must not depend on how its operand happens to lie in memory.
    """
    return x.float().contiguous()


def _plus_bias(node: Node, *inputs: Tensor | Product | Fp8Product) -> Tensor:
    """The sum that a kernel makes before it rounds."""
    products = [x for x in inputs if isinstance(x, PENDING)]
    rows = [x for x in inputs if isinstance(x, Tensor)]
    if len(products) != 1 or rows[0].shape[0] != 1:
        raise InterpretError(f"add of {node.fqn}: a product that its kernel does not round is added to no bias")
    return products[0].rounded(rows[0][0])


class Run:
    """A graph being run: iterate for the indices of what ``wanted`` needs, each evaluated when it is given out.

    ``values`` holds a node's value from then until its last use is behind.  Whoever iterates may put another value in
    its place, which all later nodes then read.
    """

    def __init__(
        self,
        graph: PrecisionGraph,
        leaves: Mapping[str, Tensor | Quantized],
        wanted: Iterable[int],
        *,
        attend: Attend | None = None,
        batch: Batch = ONE_SEQUENCE,
    ) -> None:
        self.graph, self.leaves, self.attend, self.batch = graph, leaves, attend, batch
        tensors = (x.codes if isinstance(x, Quantized) else x for x in leaves.values())
        self.device = next((x.device for x in tensors), torch.device("cpu"))
        self.values: dict[int, Any] = {}
        self.num_attentions = 0
        self.live = graph.ancestors(wanted)
        self._last_use = {i: index for index in self.live for i in graph.nodes[index].inputs}

    def __iter__(self) -> Iterator[int]:
        nodes = self.graph.nodes
        for index in self.live:
            self.values[index] = self.evaluate(index, nodes[index])
            yield index
            for i in (index, *nodes[index].inputs):
                if self._last_use.get(i, index) == index:
                    self.values.pop(i, None)

    def evaluate(self, index: int, node: Node) -> Any:
        inputs = [self.values[i] for i in node.inputs]
        if any(isinstance(x, PENDING) for x in inputs):
            if node.op == "add":
                return _plus_bias(node, *inputs)
            inputs = [x.rounded() if isinstance(x, PENDING) else x for x in inputs]
        if node.op in _UNARY:
            return _UNARY[node.op](_dense(inputs[0]))
        if node.op in _BINARY:
            return _BINARY[node.op](*map(_dense, inputs))
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
        return torch.tensor([[node.attr("value")]], dtype=torch.float32, device=self.device)

    # --------------------------------------------------------------------------------------------------- arrangement

    def _round(self, node: Node, x: Tensor) -> Tensor:
        return x.to(DTYPES[Format(str(node.attr("format")))])

    def _pow(self, node: Node, x: Tensor) -> Tensor:
        return _dense(x).pow(node.attr("exponent"))

    def _gelu(self, node: Node, x: Tensor) -> Tensor:
        return F.gelu(_dense(x), approximate=str(node.attr("approximate")))

    def _gelu_backward(self, node: Node, grad: Tensor, x: Tensor) -> Tensor:
        approximate = str(node.attr("approximate"))
        return torch.ops.aten.gelu_backward(grad.contiguous(), x.contiguous(), approximate=approximate).float()

    def _layer_norm(self, node: Node, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self._native_layer_norm(node, x, weight, bias)[0].float()

    def _layer_norm_backward(self, node: Node, grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        _, mean, rstd = self._native_layer_norm(node, x, weight, weight)
        arguments = (grad, x, [x.shape[-1]], mean, rstd, weight[0], weight[0], [True, True, True])
        return torch.ops.aten.native_layer_norm_backward(*arguments)

    def _native_layer_norm(self, node: Node, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.aten.native_layer_norm(x, [x.shape[-1]], weight[0], bias[0], float(node.attr("eps")))  # type: ignore[arg-type]

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
        rows = x.float().reshape(x.shape[0], -1, node.attr("size"))  # type: ignore[arg-type]
        if node.kernel == "jetgraph::row_mean":
            return torch.ops.jetgraph.row_mean(rows.contiguous())[..., 0]
        return rows.mean(-1)

    def _sum(self, node: Node, x: Tensor, tokens: bool = False) -> Tensor:
        sizes, reduced = node.attr("sizes"), node.attr("reduced")
        _, _, order = node.kernel.partition("@")
        lead = self.batch.token_axes(x.shape[0]) if order and (tokens or self._per_token(node)) else (x.shape[0],)
        shaped = (x.float() if node.kernel.startswith("aten::sum.f32") else x).reshape(*lead, *sizes)  # type: ignore[misc]
        dims = [d + len(lead) for d, r in enumerate(reduced) if r]  # type: ignore[arg-type]
        dims += range(len(lead)) if tokens else ()
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

    def _gemm(self, node: Node, a: Tensor | Quantized, b: Tensor | Quantized) -> Tensor | Product | Fp8Product:
        contraction = str(node.attr("contraction"))
        if isinstance(a, Quantized) and isinstance(b, Quantized):
            return self._fp8_gemm(node, a, b, contraction)
        if isinstance(a, Quantized) or isinstance(b, Quantized):
            raise InterpretError(f"gemm of {node.fqn}: one operand is quantised and the other is not")
        if node.kernel in ("jetgraph::row_tile_gemm", "aten::addmm") and contraction == "nt":
            return Product(a, b, node.kernel)
        if node.kernel == "aten::mm.f32":
            a, b = a.float(), b.float()
        left, right = {"nt": (a, b.t()), "nn": (a, b), "tn": (a.t(), b)}[contraction]
        return (left @ right).float()

    def _fp8_gemm(self, node: Node, a: Quantized, b: Quantized, contraction: str) -> Tensor | Fp8Product:
        scale = self.graph.nodes[node.inputs[1]].type.precision.scale
        assert scale is not None
        rows, cols = scale.granularity.rows or 0, scale.granularity.cols or 0
        if contraction != "nt":
            b, rows, cols = Quantized(b.codes.t(), b.scales.t()), cols, rows
        if contraction == "tn":
            a = Quantized(a.codes.t(), a.scales.t())
        provider = node.kernel.removeprefix("jetgraph::fp8_gemm").removeprefix(".")
        try:
            if provider and a.codes.is_cuda:
                return Fp8Product(a, b, rows, cols, provider)
            return reference.fp8_gemm(*a, *b, rows, cols)
        except ValueError as error:
            raise InterpretError(f"gemm of {node.fqn}: {error}") from error

    def _row_parallel_gemm(self, node: Node, a: Tensor | Quantized, b: Tensor | Quantized) -> Tensor:
        parts, wire = int(node.attr("parts")), DTYPES[Format(str(node.attr("wire")))]  # type: ignore[arg-type]
        ranks = zip(_columns(a, parts), _columns(b, parts), strict=True)
        sums = [self._gemm(node, *rank).to(wire).float() for rank in ranks]
        return functools.reduce(torch.add, sums)

    # ------------------------------------------------------------------------------------------------------ experts

    def _route(self, node: Node, logits: Tensor, *bias: Tensor) -> Tensor:
        a = dict(node.attrs)
        if a["selection"] != "computed" or a["capacity"] is not None or a["tie_break"] != "lowest index":
            raise InterpretError(f"route of {node.fqn}: replayed, capacity-limited or unordered choice cannot be run")
        scores = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}[str(a["score"])](logits.float())
        chosen = sum(bias, scores).sort(dim=-1, descending=True, stable=True).indices[:, : a["top_k"]]  # type: ignore[misc]
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        weights = weights / weights.sum(-1, keepdim=True) if a["renormalise"] else weights
        return weights * a["scale"]

    def _combine(self, node: Node, weights: Tensor, *results: Tensor) -> Tensor:
        if node.attr("order") != "expert":
            raise InterpretError(f"combine of {node.fqn}: order {node.attr('order')!r} cannot be run")
        dtype, total = DTYPES[Format(str(node.attr("format")))], torch.zeros(())
        for weight, result in zip(weights.split(1, -1), results, strict=True):
            more = (total + (weight * result.float()).to(dtype).float()).to(dtype).float()
            total = torch.where(weight != 0, more, total)
        return total

    # ---------------------------------------------------------------------------------------- attention, embedding

    def _attention(self, node: Node, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index, self.num_attentions = self.num_attentions, self.num_attentions + 1
        if self.attend is None:
            return attention(node, q, k, v, self.batch).float()
        return self.attend(node, index, q, k, v).float()

    def _attention_backward(self, node: Node, grad: Tensor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return attention_backward(node, grad, q, k, v, self.batch)

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

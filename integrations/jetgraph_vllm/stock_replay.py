"""The replay gate of `lift_stock`, in the engine's own process: the lifted graph must give the engine's numbers.

    with recording(model) as steps:
        ...                                  # the engine runs
    replays(record, model, folder, trainings, steps)     # what `stock_capture` stores under "replay"

Each recorded step (prefill, decode) is run again through the lifted normal form on the engine's device, from token ids
to logits and logprobs.  What the graph leaves to a kernel, the order of a sum, is done as that kernel does it:

* FP8 GEMMs and log-softmax: by the engine's own operator, on codes, scales and logits that the *graph* computed;
* means of vLLM's norms: in the order of its CUDA kernels, written out in torch (`block_mean`);
* attention: the recorded output is put in, after q, k and v were compared.  Attention rests on attestation alone.

Everything else is the interpreter's plain arithmetic.  An outcome belongs to one graph, by its semantic digest: which
graph a capture lifts to depends on the training that it is held against, and no other graph has been replayed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetgraph.graph import Node, PrecisionGraph
from jetgraph.interpret import InterpretError, Quantized, Run
from jetgraph_vllm import capture
from jetgraph_vllm import stock_facts as facts
from jetgraph_vllm.lift_stock import lift_stock
from jetgraph_vllm.stock_format import StockCapture

# ------------------------------------------------------------------------------------------------------- recording


@dataclass
class Step:
    """One step of the engine: T new tokens, of which n rows get logits over V tokens.

    ``attention`` has per layer name (q, k, v, output), each [T, features].
    """

    inputs: dict[str, Tensor]
    hidden: Tensor
    attention: dict[str, tuple[Tensor, ...]]
    chosen: Tensor | None = None
    logits: Tensor | None = None
    token_ids: Tensor | None = None
    logprobs: Tensor | None = None


@contextlib.contextmanager
def recording(model: torch.nn.Module, *, logprobs: bool) -> Iterator[list[Step]]:
    """Keep what every step reads and gives.  ``logprobs``: the engine scores tokens with `compute_token_logprobs`."""
    steps: list[Step] = []
    attention: dict[str, tuple[Tensor, ...]] = {}
    body = capture.RECORDER.bodies[-1]
    run, layers, compute = body.module.forward, capture.attention_layers(model), model.compute_logits

    def forward(*arguments: Any) -> Any:
        attention.clear()
        inputs = capture._tensor_arguments(body, arguments)
        result = run(*arguments)
        hidden = result[0] if isinstance(result, (tuple, list)) else result
        if attention:  # else vLLM only profiles
            steps.append(Step(inputs, hidden.clone(), dict(attention)))
        return result

    def compute_logits(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        chosen = hidden.clone()
        logits = compute(hidden, *args, **kwargs)
        if steps and logits is not None:
            steps[-1].chosen, steps[-1].logits = chosen, logits.clone()
        return logits

    body.module.forward, model.compute_logits = forward, compute_logits
    for layer in layers:
        layer.impl.forward = _keeping(layer.impl.forward, attention)
    scoring = _scores(steps) if logprobs else contextlib.nullcontext()
    try:
        with scoring:
            yield steps
    finally:
        del body.module.forward
        model.compute_logits = compute
        for layer in layers:
            del layer.impl.forward


def _keeping(forward: Callable, kept: dict[str, tuple[Tensor, ...]]) -> Callable:
    def forward_and_keep(layer: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = [x.detach().clone().flatten(1) for x in (q, k, v)]
        result = forward(layer, q, k, v, *args, **kwargs)
        kept[layer.layer_name] = (*given, kwargs.get("output", result).detach().clone().flatten(1))
        return result

    return forward_and_keep


@contextlib.contextmanager
def _scores(steps: list[Step]) -> Iterator[None]:
    from vllm.v1.worker.gpu.sample import logprob

    score = logprob.compute_token_logprobs

    def compute_token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
        out = score(logits, token_ids)
        if steps:
            steps[-1].token_ids, steps[-1].logprobs = token_ids.clone(), out.clone()
        return out

    logprob.compute_token_logprobs = compute_token_logprobs
    try:
        yield
    finally:
        logprob.compute_token_logprobs = score


# ------------------------------------------------------------------------------------------------ the engine's kernels


def block_mean(squares: Tensor, size: int, *, pairs: bool) -> Tensor:
    """Mean over runs of ``size`` of FP32 squares [R, n · size] → [R, n], summed as vLLM's CUDA norms sum.

    A thread takes runs of eight neighbours, a block of threads apart, and adds each one by one or (``pairs``) as a
    sum of its own, pair by pair; a warp of 32 threads adds as a binary tree; the warps' sums are added one by one.  A
    block has at most 1024 threads, or 256 if there are 256 sums or more: from 4,096 features a row's bits depend on it.
    From csrc/libtorch_stable/layernorm_kernels.cu, csrc/type_convert.cuh and cub's BLOCK_REDUCE_WARP_REDUCTIONS.  The
    square of a BF16 number is exact in FP32, so a fused multiply-add gives the same bits; the division by ``size`` is
    exact for powers of two.

    Raises:
        InterpretError: another size, where a vector of eight would cross a row, or the division would round.
    """
    if size & (size - 1) or size < 8:
        raise InterpretError(f"a norm over {size} features: the order of its sum is known for powers of two from 8 up")
    num_sums = squares.numel() // size
    threads = min(size // 8, 1024 if num_sums < 256 else 256)
    runs = squares.float().reshape(squares.shape[0], -1, size // 8 // threads, threads, 8).unbind(2)
    total = torch.zeros_like(runs[0][..., 0])
    for run in runs:
        if pairs:
            total = total + _by_pairs(run)
        else:
            for i in range(8):
                total = total + run[..., i]
    warps = total.unflatten(-1, (-1, min(32, threads)))
    while warps.shape[-1] > 1:
        warps = warps[..., 0::2] + warps[..., 1::2]
    total = warps[..., 0, 0]
    for warp in range(1, warps.shape[-2]):
        total = total + warps[..., warp, 0]
    return total / size


def _by_pairs(eight: Tensor) -> Tensor:
    total = eight[..., 0] + eight[..., 1]
    for i in range(2, 8, 2):
        total = total + (eight[..., i] + eight[..., i + 1])
    return total


def deep_gemm(a: Quantized, b: Quantized, *, e8m0: bool) -> Tensor:
    """vLLM's operator with the layouts of scales that it is given in serving; BF16 [M, N]."""
    import vllm.model_executor.kernels.linear.scaled_mm.deep_gemm  # noqa: F401  (registers the operator)
    from vllm.utils.deep_gemm import transform_sf_into_required_layout

    num_out, size = b.codes.shape
    weight_scales = transform_sf_into_required_layout(
        sf=b.scales.float().contiguous()[None], mn=num_out, k=size, recipe=(1, 128, 128), num_groups=1, is_sfa=False
    )[0]
    scales = torch.empty_strided(a.scales.shape, (1, -(-a.scales.shape[0] // 4) * 4), dtype=torch.float32)
    out = torch.empty(a.codes.shape[0], num_out, dtype=torch.bfloat16)
    codes = a.codes.contiguous(), b.codes.contiguous()
    torch.ops.vllm.fp8_gemm_nt_op(codes[0], scales.copy_(a.scales), codes[1], weight_scales, out, e8m0)
    return out


def cutlass(a: Quantized, b: Quantized) -> Tensor:
    """BF16 [M, N] by ``_C.cutlass_scaled_mm``, the activation's scales column by column as in serving."""
    out = torch.empty(a.codes.shape[0], b.codes.shape[0], dtype=torch.bfloat16)
    scales = a.scales.t().contiguous().t()
    weight, weight_scales = b.codes.contiguous().t(), b.scales.contiguous().t()
    torch.ops._C.cutlass_scaled_mm(out, a.codes.contiguous(), weight, scales, weight_scales, None)
    return out


class _EngineRun(Run):
    """The interpreter on the engine's device, with the engine's kernels for the sums."""

    e8m0 = False

    def _operand(self, node: Node) -> Any:
        return self._leaf(node)

    def _mean(self, node: Node, x: Tensor) -> Tensor:
        if node.kernel not in ("vllm::rms_norm", "vllm::fused_add_rms_norm") or not x.is_cuda:
            return super()._mean(node, x)
        return block_mean(x, int(node.attr("size")), pairs=node.kernel == "vllm::fused_add_rms_norm")  # type: ignore[arg-type]

    def _fp8_gemm(self, node: Node, a: Quantized, b: Quantized, contraction: str) -> Tensor:
        if node.kernel == "vllm::fp8_gemm_nt_op":
            return deep_gemm(a, b, e8m0=self.e8m0).float()
        if node.kernel == "_C::cutlass_scaled_mm":
            return cutlass(a, b).float()
        return super()._fp8_gemm(node, a, b, contraction)

    def _log_softmax(self, node: Node, x: Tensor) -> Tensor:
        if node.kernel != "vllm::_topk_log_softmax_kernel":
            return super()._log_softmax(node, x)
        from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

        every = torch.arange(x.shape[1]).expand(x.shape).contiguous()
        return compute_token_logprobs(x.contiguous(), every)


OWN_KERNELS = ("vllm::fp8_gemm_nt_op", "_C::cutlass_scaled_mm", "vllm::_topk_log_softmax_kernel", "aten::mm")


# --------------------------------------------------------------------------------------------------------- the gate


def replays(
    record: Mapping[str, Any],
    model: torch.nn.Module,
    folder: Path,
    trainings: Mapping[str, PrecisionGraph],
    steps: list[Step],
) -> list[dict[str, Any]]:
    """The outcome of every different graph that ``record`` lifts to against ``trainings``; failures are recorded."""
    stock = StockCapture.parse(json.loads(json.dumps({**record, "failed": {}})))
    leaves = _leaves(model, folder, stock)
    found: dict[str, dict[str, Any]] = {}
    for training in trainings.values():
        graph = lift_stock(stock, training)
        if graph.semantic_digest not in found:
            found[graph.semantic_digest] = _replay(graph, stock, leaves, steps)
    return list(found.values())


def _leaves(model: torch.nn.Module, folder: Path, stock: StockCapture) -> dict[str, Tensor | Quantized]:
    """Live values by the names of the graph's leaves; of a linear's part, quantised, what the checkpoint holds.

    A part that loading changed is the *graph's* to compute from the checkpoint, so the replay tests that too.
    """
    from jetgraph.export import read_tensors

    live = facts.live_tensors(model)
    leaves: dict[str, Tensor | Quantized] = dict(live)
    device = next(iter(live.values())).device
    given = dict(read_tensors(folder))
    for module, described in stock.linears.items():
        for part in described["parts"]:
            if "scale_rows" not in part:
                if described["scales"] is None and "digest" in part:
                    leaves[f"{part['name']}.weight"] = live[f"{module}.weight"][slice(*part["rows"])]
                continue
            rows, scale_rows = slice(*part["rows"]), slice(*part["scale_rows"])
            scales = live.get(f"{module}.weight_scale_inv", live.get(f"{module}.weight_scale"))
            assert scales is not None
            stored = Quantized(live[f"{module}.weight"][rows], scales[scale_rows])
            name = f"{part['name']}.weight"
            leaves[f"{name} as stored by the engine"] = stored
            held = [given[n].to(device) for n in (name, f"{name}_scale_inv") if n in given]
            leaves[name] = Quantized(*held) if len(held) == 2 else stored
    for table in stock.rotary.values():
        for formula in table["formulas"]:
            if formula["differing"] == 0:
                frequencies = facts.inverse_frequencies(stock.config, table["shape"][1], formula["inv_freq"])
                leaves["model.rotary_emb.inv_freq"] = frequencies.to(device)
                break
    return leaves


def _replay(graph: PrecisionGraph, stock: StockCapture, leaves: Mapping[str, Any], steps: list[Step]) -> dict[str, Any]:
    kernels = {node.kernel for node in graph.nodes}
    outcome: dict[str, Any] = {
        "graph": graph.semantic_digest,
        "injected": sorted({node.kernel for node in graph.nodes if node.op == "attention"}),
        "by_engine": sorted(kernels.intersection(OWN_KERNELS)),
    }
    try:
        compared = [_replay_step(graph, stock, leaves, step) for step in steps]
    except InterpretError as error:
        return {**outcome, "passed": False, "cases": [f"not run: {error}"]}
    cases = [f"{step}: {'; '.join(differences) or 'equal'}" for step, differences in compared]
    return {**outcome, "passed": bool(cases) and not any(d for _, d in compared), "cases": cases}


@torch.no_grad()
def _replay_step(
    graph: PrecisionGraph, stock: StockCapture, leaves: Mapping[str, Any], step: Step
) -> tuple[str, list[str]]:
    """(what was compared, what differs).  Between body and head the rows are picked that the engine picked.

    Compared as numbers, as every replay gate does: −0 and +0 are equal.
    """
    layer_of = {a["fqn"].removesuffix(".attn"): name for name, a in stock.attention.items()}
    wrong: list[str] = []
    num_compared = 0

    def compare(what: str, got: Tensor, want: Tensor) -> None:
        nonlocal num_compared
        num_compared += want.numel()
        if not torch.equal(got.to(want.dtype), want):
            num_differing = int((got.to(want.dtype) != want).sum())
            gap = (got.float() - want.float()).abs().max().item()
            wrong.append(f"{what} off by {gap:g} in {num_differing} of {want.numel()}")

    def attend(node: Node, index: int, *given: Tensor) -> Tensor:
        *wanted, output = step.attention[layer_of[node.fqn]]
        for name, got, want in zip("qkv", given, wanted, strict=True):
            compare(f"{name} of {node.fqn}", got, want)
        return output

    scored = step.token_ids is not None and step.logprobs is not None
    outputs = ("logits", "logprob") if scored else ("logits",)
    graph = graph.restrict({name: graph.outputs[name] for name in outputs})
    targets = {"targets": step.token_ids[:, 0]} if step.token_ids is not None else {}
    run = _EngineRun(graph, {**leaves, **step.inputs, **targets}, graph.outputs.values(), attend=attend)
    run.e8m0 = any(op.kwargs.get("use_deep_gemm_e8m0") is True for op in stock.ops)
    head = _head(graph)
    with torch.device(step.hidden.device):
        for index, node in enumerate(graph.nodes):
            if index == head:
                hidden = run.values[node.inputs[0]]
                compare("hidden", hidden, step.hidden)
                if step.chosen is None:
                    break
                run.values[node.inputs[0]] = hidden[_rows_of(step.hidden, step.chosen)]
            run.values[index] = run.evaluate(index, node)
        else:
            compare("logits", run.values[graph.outputs["logits"]], step.logits)
            if scored:
                compare("logprobs", run.values[graph.outputs["logprob"]], step.logprobs[:, :1])
    num_rows = 0 if step.chosen is None else len(step.chosen)
    kind = "decode" if num_rows == len(step.hidden) else "prefill"
    return f"{kind}, {len(step.hidden)} tokens, {num_rows} rows of logits, {num_compared} numbers", wrong


def _rows_of(hidden: Tensor, chosen: Tensor) -> Tensor:
    """Which rows of the body's output [T, C] the engine gave to its head [n, C]."""
    same = (hidden[None] == chosen[:, None]).all(-1)
    if not same.any(1).all():
        raise InterpretError("a row of the head's input is no row of the body's output")
    return same.int().argmax(1)


def _head(graph: PrecisionGraph) -> int:
    """The GEMM that makes the logits."""
    index = graph.outputs["logits"]
    while graph.nodes[index].op != "gemm":
        index = graph.nodes[index].inputs[0]
    return index

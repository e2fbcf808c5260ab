"""Record what an unmodified vLLM executes, as one JSON file: ``python -m jetgraph_vllm.stock_capture JOB.json``.

The engine stays as it is; hooks only look.  Two ways in, because stock vLLM compiles in two ways:

* mode 2: `jetgraph_vllm.capture.backend` is the compile backend; the graph that it records is the graph that runs.
* mode 3, vLLM's default: the Dynamo graph is cut at attention, each piece goes through Inductor.  Recorded are the cut
  graph, every piece as cut, and every compiled piece after vLLM's own post-grad passes (fusions included).  What
  Inductor makes of it, kernels that may keep FP32 where the graph rounds, lies below: rule JG092.

The file holds no weights: shapes, dtypes, and sha256 of each checkpoint part's codes and scales as the engine stores
them after loading.  `jetgraph_vllm.stock_format` reads it; `jetgraph_vllm.lift_stock` lifts it.

A job:  {"model": folder, "out": file, "label": text, "mode": 2 | 3, "custom_ops": ["all"] | null,
         "pass_config": {...} | null, "llm": {keywords of vllm.LLM},
         "trainings": folder of train_NAME.json[.gz], optional: replay the graphs lifted against them (mode 2)}
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.fx

from jetgraph.fx_record import record_node, record_value
from jetgraph.record import Op, Ref
from jetgraph_vllm import capture, stock_replay
from jetgraph_vllm import stock_facts as facts
from jetgraph_vllm.judge_stock import read_trainings

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
}
"""In this process and without caches: a capture needs a real compilation.  Nothing here changes what is computed."""

PROMPTS = ([11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23], [31, 32, 33, 34, 35, 36, 37])
KERNEL_LINES = ("Selected", "backend", "Marlin", "DeepGEMM", "DeepGemm", "E8M0", "fall")


@dataclasses.dataclass
class Pieces:
    """What mode 3 compiled: the cut graph, each piece as cut, each compiled piece after the post-grad passes."""

    stitch: list[Op] = dataclasses.field(default_factory=list)
    raw: dict[str, list[Op]] = dataclasses.field(default_factory=dict)
    post_grad: dict[str, list[list[Op]]] = dataclasses.field(default_factory=dict)
    ranges: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    arguments: list[Any] = dataclasses.field(default_factory=list)
    sources: list[str] = dataclasses.field(default_factory=list)


def main(arguments: list[str]) -> int:
    job = json.loads(Path(arguments[0]).read_text())
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    Path(job["out"]).write_text(json.dumps(capture_stock(job), ensure_ascii=False))
    return 0


def capture_stock(job: dict[str, Any]) -> dict[str, Any]:
    """Start the engine of ``job``, run two prompts, and return everything recorded; what could not be is named."""
    from vllm import LLM

    lines: list[str] = []
    _listen(lines)  # after the import, which sets up vLLM's loggers

    compilation: dict[str, Any] = {}
    if job.get("custom_ops") is not None:
        compilation["custom_ops"] = job["custom_ops"]
    if job.get("pass_config") is not None:
        compilation["pass_config"] = job["pass_config"]
    pieces = Pieces()
    hooks: Any = contextlib.nullcontext()
    if job["mode"] == 2:
        compilation |= {"mode": 2, "backend": capture.BACKEND, "cudagraph_mode": "NONE"}
    else:
        hooks = watching_pieces(pieces)
    start = time.perf_counter()
    with hooks:
        llm = LLM(
            model=job["model"],
            dtype="bfloat16",
            seed=0,
            skip_tokenizer_init=True,
            compilation_config=compilation,
            **job.get("llm", {}),
        )
    record: dict[str, Any] = {"format": 1, "label": job["label"], "failed": {}}
    record["start_seconds"] = round(time.perf_counter() - start, 1)
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    model = runner.get_model()

    def attempt(name: str, make: Callable[[], Any]) -> None:
        try:
            record[name] = make()
        except Exception:  # one part that a version lacks must not lose the others; the lifter says what is missing
            record["failed"][name] = traceback.format_exc(limit=-4)
            record[name] = None

    attempt("settings", lambda: facts.settings(llm.llm_engine.vllm_config))
    attempt("config", lambda: json.loads(Path(job["model"], "config.json").read_text()))
    heads = _watched_heads(model, record)
    keep: Any = contextlib.nullcontext([])
    replayed = bool(job.get("trainings")) and job["mode"] == 2
    if replayed:
        keep = stock_replay.recording(model, logprobs=not hasattr(runner.sampler, "compute_logprobs"))
    with keep as steps:
        attempt("sampler", lambda: _generate(llm, runner))
    names = facts.live_names(model)
    attempt("tensors", lambda: {n: facts.fact(t) for n, t in facts.live_tensors(model).items()})
    attempt("linears", lambda: facts.linears(model, Path(job["model"])))
    attempt("attention", lambda: facts.attention(model))
    attempt("rotary", lambda: facts.rotary(model, record["config"]))
    if job["mode"] == 2:
        attempt("body", lambda: _graph(capture.RECORDER.bodies[-1], names))
        attempt("body_dynamo", lambda: _encode(capture.RECORDER.bodies[-1].dynamo))
    else:
        attempt("pieces", lambda: _pieces(pieces, names))
    attempt("heads", lambda: [_graph(head, names) for head in heads])
    attempt("schemas", lambda: schemas(record))
    if replayed:
        trainings = read_trainings(Path(job["trainings"]))
        attempt("replay", lambda: stock_replay.replays(record, model, Path(job["model"]), trainings, steps))
    record["kernel_lines"] = list(dict.fromkeys(lines))
    return record


# ------------------------------------------------------------------------------------------------------- the hooks


@contextlib.contextmanager
def watching_pieces(pieces: Pieces) -> Iterator[None]:
    """Fill ``pieces`` while vLLM compiles in mode 3."""
    from vllm.compilation import backends, piecewise_backend
    from vllm.compilation.passes.pass_manager import PostGradPassManager

    current: list[str] = []
    split, make, run = backends.split_graph, piecewise_backend.PiecewiseBackend.__init__, PostGradPassManager.__call__

    def split_graph(graph: torch.fx.GraphModule, ops: list[str]) -> Any:
        pieces.sources = [capture._source_name(n) for n in graph.graph.nodes if n.op == "placeholder"]
        whole, items = split(graph, ops)
        pieces.stitch = _record(whole.graph)
        for item in items:
            pieces.raw[item.submod_name] = _record(item.graph.graph)
        return whole, items

    def init(self: Any, graph: Any, *args: Any, submod_name: str = "", **kwargs: Any) -> None:
        current[:] = [submod_name]
        make(self, graph, *args, submod_name=submod_name, **kwargs)

    def passes(self: Any, graph: torch.fx.Graph) -> None:
        fix = self.fix_functionalization

        def note_then_fix(functional: torch.fx.Graph) -> None:
            name = current[0] if current else ""
            pieces.post_grad.setdefault(name, []).append(_record(functional))
            pieces.ranges.setdefault(name, []).append(_compile_range())
            fix(functional)

        self.fix_functionalization = note_then_fix
        try:
            run(self, graph)
        finally:
            self.fix_functionalization = fix

    backends.split_graph = split_graph
    piecewise_backend.PiecewiseBackend.__init__ = init
    PostGradPassManager.__call__ = passes
    call = backends.VllmBackend.__call__

    def backend(self: Any, graph: torch.fx.GraphModule, example_inputs: Any) -> Any:
        compiled = call(self, graph, example_inputs)

        def remember_first(*arguments: Any) -> Any:
            if not pieces.arguments:
                pieces.arguments = [_address(a) for a in arguments]
            return compiled(*arguments)

        return remember_first

    backends.VllmBackend.__call__ = backend
    try:
        yield
    finally:
        backends.split_graph, piecewise_backend.PiecewiseBackend.__init__ = split, make
        PostGradPassManager.__call__, backends.VllmBackend.__call__ = run, call


def _compile_range() -> str:
    from vllm.compilation.passes.inductor_pass import get_pass_context

    return str(get_pass_context().compile_range)


def _record(graph: torch.fx.Graph) -> list[Op]:
    return [record_node(node, "forward") for node in graph.nodes]


def _address(value: Any) -> Any:
    return (value.data_ptr(), tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value


def _listen(lines: list[str]) -> None:
    class Keep(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            text = entry.getMessage()
            if any(word in text for word in KERNEL_LINES) and len(text) < 400:
                lines.append(text)

    logging.getLogger("vllm").addHandler(Keep(level=logging.INFO))


def _watched_heads(model: Any, record: dict[str, Any]) -> list[capture.LiveGraph]:
    try:
        return capture.watch(model)
    except Exception:
        record["failed"]["watch"] = traceback.format_exc(limit=-4)
        return []


def _generate(llm: Any, runner: Any) -> list[Any]:
    """Run the prompts together and alone, greedy with logprobs; the sampler's record of the first step."""
    from vllm import SamplingParams

    from jetgraph_vllm import sampler_trace

    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0, detokenize=False)
    requests = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
    aten = hasattr(runner.sampler, "compute_logprobs")
    with sampler_trace.tracing(runner.sampler) if aten else _fused_logprobs(runner.model) as trace:
        llm.generate(requests, sampling, use_tqdm=False)
        llm.generate(requests[:1], sampling, use_tqdm=False)
    return _encode(trace)


@contextlib.contextmanager
def _fused_logprobs(model: Any) -> Iterator[list[Op]]:
    """The second GPU model runner: one Triton kernel from logits to the logprobs of given tokens.

    Recorded as one operator on the tensor that `compute_logits` returned; if it is given another tensor, that is a
    placeholder of its own name and the lifter will not take it for the logits.
    """
    from vllm.v1.worker.gpu.sample import logprob

    record: list[Op] = []
    returned: list[int] = []
    compute, score = model.compute_logits, logprob.compute_token_logprobs

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = compute(*args, **kwargs)
        returned[:] = [logits.data_ptr()]
        return logits

    def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        out = score(logits, token_ids)
        if not record:
            name = "logits" if [logits.data_ptr()] == returned else "other_logits"
            arguments = (Ref(name), Ref("token_ids"))
            record.extend(
                [
                    Op(name, "placeholder", name, value=record_value(logits)),
                    Op("token_ids", "placeholder", "token_ids", value=record_value(token_ids)),
                    Op("logprobs", "call", "vllm.compute_token_logprobs", arguments, value=record_value(out)),
                    Op("output", "output", "output", ((Ref("logprobs"),),)),
                ]
            )
        return out

    model.compute_logits, logprob.compute_token_logprobs = compute_logits, compute_token_logprobs
    try:
        yield record
    finally:
        model.compute_logits, logprob.compute_token_logprobs = compute, score


# -------------------------------------------------------------------------------------------------------- encoding


def _encode(ops: list[Op]) -> list[Any]:
    from jetgraph.record import _encode_op

    return [_encode_op(op) for op in ops]


def _graph(graph: capture.LiveGraph, names: dict[Any, tuple[str, str]]) -> dict[str, Any]:
    described = capture.describe_graph(graph, names)
    return {
        "ops": _encode(described.aten),
        "inputs": [dataclasses.asdict(i) for i in described.inputs],
        "num_rows": described.num_rows,
    }


def _pieces(pieces: Pieces, names: dict[Any, tuple[str, str]]) -> dict[str, Any]:
    inputs = []
    for source, fact in zip(pieces.sources, pieces.arguments, strict=True):
        kind, fqn, shape, dtype = capture._identify(source, fact, names)
        inputs.append({"source": source, "kind": kind, "fqn": fqn, "shape": shape, "dtype": dtype})
    return {
        "stitch": _encode(pieces.stitch),
        "inputs": inputs,
        "raw": {name: _encode(ops) for name, ops in pieces.raw.items()},
        "post_grad": {name: [_encode(ops) for ops in versions] for name, versions in pieces.post_grad.items()},
        "ranges": pieces.ranges,
    }


def schemas(record: dict[str, Any]) -> dict[str, str]:
    """The schema of every operator outside ATen that occurs in the record: what it mutates is read from there."""
    found: dict[str, str] = {}
    for namespace in ("_C", "_C_cache_ops", "vllm"):
        space = getattr(torch.ops, namespace)
        for name in _names_in(record, namespace):
            with contextlib.suppress(AttributeError, RuntimeError):
                found[f"{namespace}.{name}"] = str(getattr(space, name).default._schema)
    return found


def _names_in(record: dict[str, Any], namespace: str) -> list[str]:
    import re

    text = json.dumps(record)
    return sorted(set(re.findall(rf"(?<![\w.]){namespace}(?:\.|::)(\w+)", text)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

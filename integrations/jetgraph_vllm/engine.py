"""vLLM offline in this process, in the configuration that rolls out.

    engine = Engine("exported", max_num_batched_tokens=512, max_num_seqs=32)
    completions = engine.generate([[1, 2, 3]], max_tokens=8, temperature=1.0, seeds=[7], prompt_logprobs=True)
    engine.limits(tokens=29, sequences=8)         # smaller steps from now on: chunked prefill, mixed batches
    capture = engine.capture()

Unless ``enforce_eager``, the engine runs through `jetgraph_vllm.capture.backend`, which executes the graph it records.
The engine writes no text: prompts and completions are token ids.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_AOT_COMPILE": "0",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
"""Set before vLLM is imported, unless the caller has a value.  No caches: a capture needs a real compilation.

vLLM's second model runner, the default of 0.26 on a GPU, computes logprobs by kernels of its own, whose sums have other
last bits than training's log-softmax; the first one has torch's.
"""

_DEFAULT_PROMPTS = ([11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23], [31, 32, 33, 34, 35, 36, 37])


@dataclass(frozen=True)
class Completion:
    """One finished request.  Logprobs are the engine's own, of the tokens in the same order."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    prompt_logprobs: list[float] | None
    """Of prompt[1:] (the first token has none), or None if they were not asked for."""
    num_cached_tokens: int
    """Prompt tokens that the prefix cache supplied."""
    versions: list[int] | None = None
    """Weight version that sampled each token, if weight sync is attached (`jetgraph_vllm.sync`)."""


@dataclass(frozen=True)
class Step:
    """One step of the scheduler: new tokens of each running request, and how many requests were preempted before it."""

    num_tokens: tuple[int, ...]
    num_preempted: int

    @property
    def is_mixed(self) -> bool:
        """Decoding requests and prompt chunks in one batch."""
        return 1 in self.num_tokens and max(self.num_tokens) > 1


class Engine:
    """One vLLM engine.  ``options`` go to `vllm.LLM` as they are (``block_size``, ``num_gpu_blocks_override`` …)."""

    def __init__(
        self,
        model_dir: str | Path,
        *,
        max_num_batched_tokens: int = 512,
        max_num_seqs: int = 32,
        max_model_len: int = 512,
        enforce_eager: bool = False,
        enable_prefix_caching: bool = False,
        custom_ops: Sequence[str] = ("all",),
        compilation: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """``compilation``: further entries of vLLM's compilation_config, such as ``{"cudagraph_mode": "FULL"}``.

        With a ``mode`` of its own, or with CUDA graphs, calls pass our recorder by, and such an engine has no capture.
        ``environment``: variables that vLLM is to read, so set before it is imported.
        """
        os.environ.update(environment or {})
        set_environment()
        import jetgraph_vllm

        jetgraph_vllm.register()
        from vllm import LLM

        from jetgraph_vllm import capture

        self.model_dir = Path(model_dir)
        chosen = dict(compilation or {})
        self.is_recorded = not enforce_eager and "mode" not in chosen
        given: dict[str, Any] = {"custom_ops": list(custom_ops)}
        if self.is_recorded:
            given |= {"mode": 2, "backend": capture.BACKEND}
        given |= chosen
        num_bodies = len(capture.RECORDER.bodies)
        start = time.perf_counter()
        self.llm = LLM(
            model=str(model_dir),
            dtype="bfloat16",
            seed=0,
            skip_tokenizer_init=True,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=True,
            enable_prefix_caching=enable_prefix_caching,
            enforce_eager=enforce_eager,
            compilation_config=given,
            **options,
        )
        self.start_seconds = time.perf_counter() - start
        self._bodies = capture.RECORDER.bodies[num_bodies:]
        self._caps = (max_num_batched_tokens, max_num_seqs)
        self._heads = capture.watch(self.model) if self.is_recorded else []
        self.steps: list[Step] = []
        self.scheduler.schedule = self._note_steps(self.scheduler.schedule)

    def describe_pieces(self) -> str:
        """How the body runs if not as its own graph (`jetgraph_vllm.pieces`); else empty."""
        return "; ".join(body.pieces.describe() for body in self._bodies if body.pieces is not None)

    # ------------------------------------------------------------------------------------------------- live parts

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    @property
    def runner(self) -> Any:
        return self.core.model_executor.driver_worker.worker.model_runner

    @property
    def model(self) -> Any:
        return self.runner.get_model()

    @property
    def checkpoint_config(self) -> dict[str, Any]:
        """The folder's ``config.json``, with the precision that it declares."""
        return read_config(self.model_dir)

    @property
    def config(self) -> Any:
        return self.llm.llm_engine.vllm_config

    # ------------------------------------------------------------------------------------------------- generating

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int | Sequence[int],
        temperature: float = 1.0,
        seeds: Sequence[int] | None = None,
        prompt_logprobs: bool = False,
        stop_token_ids: Sequence[int] = (),
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> list[Completion]:
        """Run all prompts together.  Without ``stop_token_ids`` each completion has exactly its ``max_tokens``."""
        from vllm import SamplingParams

        if temperature > 0 and seeds is None:
            raise ValueError("sampling needs one seed per prompt: a rollout that cannot be repeated cannot be checked")
        if seeds is not None and len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts: give one each")
        self.steps.clear()
        limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
        sampling = [
            SamplingParams(
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=None if seeds is None else seeds[i],
                max_tokens=limits[i],
                ignore_eos=True,
                stop_token_ids=list(stop_token_ids) or None,
                logprobs=0,
                prompt_logprobs=0 if prompt_logprobs else None,
                detokenize=False,
            )
            for i in range(len(prompts))
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [_completion(output) for output in self.llm.generate(requests, sampling, use_tqdm=False)]

    def _note_steps(self, schedule: Any) -> Any:
        """Keep what the scheduler decides in ``self.steps``, emptied at each `generate`."""

        @functools.wraps(schedule)
        def schedule_and_note(*args: Any, **kwargs: Any) -> Any:
            decided = schedule(*args, **kwargs)
            counts = tuple(decided.num_scheduled_tokens.values())
            if counts:
                self.steps.append(Step(counts, len(decided.preempted_req_ids or ())))
            return decided

        return schedule_and_note

    def limits(self, tokens: int | None = None, sequences: int | None = None) -> None:
        """Cap the tokens and requests of one step from now on; None is the cap the engine was built with."""
        tokens, sequences = tokens or self._caps[0], sequences or self._caps[1]
        if tokens > self._caps[0] or sequences > self._caps[1]:
            raise ValueError(
                f"limits {tokens}, {sequences}: the engine was built for at most {self._caps[0]}, {self._caps[1]}"
            )
        self.scheduler.max_num_scheduled_tokens = tokens
        self.scheduler.max_num_running_reqs = sequences

    def reset_prefix_cache(self) -> None:
        self.llm.reset_prefix_cache()

    # -------------------------------------------------------------------------------------------------- capturing

    def capture(self, prompts: Sequence[Sequence[int]] = _DEFAULT_PROMPTS, *, max_tokens: int = 3, values: bool = True):
        """Run ``prompts`` (greedy, with prompt logprobs) while recording, and collect an `EngineCapture`.

        The prompts run once together and then each alone, so body and head are seen with many rows, few and one.
        """
        from jetgraph_vllm import capture, collect, sampler_trace

        graphs = str(getattr(self.config.compilation_config.cudagraph_mode, "name", "NONE"))
        if not self.is_recorded or graphs != "NONE":
            mode = self.config.compilation_config.mode
            raise ValueError(
                f"nothing records an engine of compilation mode {mode} with cudagraph_mode {graphs}: build it with "
                "enforce_eager=False, without a mode of its own and without CUDA graphs"
            )
        with capture.recording(self.model) as recorder, sampler_trace.tracing(self.runner.sampler) as sampler:
            self.generate(prompts, max_tokens=max_tokens, temperature=0.0, prompt_logprobs=True)
            for prompt in prompts:
                self.generate([prompt], max_tokens=max_tokens, temperature=0.0)
        return collect.collect(self, self._bodies, self._heads, recorder, sampler, with_values=values)


def set_environment() -> None:
    """Defaults of `ENVIRONMENT`; refuses if vLLM was imported with its own multiprocessing in mind."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        raise ValueError("VLLM_ENABLE_V1_MULTIPROCESSING is not 0: the engine must run in this process to be captured")


def _completion(output: Any) -> Completion:
    sampled = output.outputs[0]
    tokens = list(sampled.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(sampled.logprobs, tokens, strict=True)]
    prompt = list(output.prompt_token_ids)
    given = None
    if output.prompt_logprobs is not None:
        entries = list(output.prompt_logprobs)[1:]
        given = [entry[token].logprob for entry, token in zip(entries, prompt[1:], strict=True)]
    versions = getattr(sampled, "weight_versions", None)
    cached = output.num_cached_tokens or 0
    return Completion(prompt, tokens, logprobs, given, cached, None if versions is None else list(versions))


def read_config(model_dir: Path) -> dict[str, Any]:
    return json.loads((model_dir / "config.json").read_text())

"""Arms of an engine benchmark: each in a process of its own that stays warm and is asked over pipes, one at a time.

    with Arm("bf16", {"folder": "model", "ours": False, "options": {...}}) as arm:
        arm.ask({"do": "generate", "batch": 64, "prompt": 256, "tokens": 128})     # {"seconds": ..., "tokens": ...}

So arms can take turns within seconds of each other, while no arm's settings, patches or memory reach another's.  This
file is both ends: ``python -m benchmarks.arms`` is the process.  One JSON object a line on stdin and stdout; whatever
the engine prints goes to stderr, whose last lines are shown if it dies.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_WAIT_POLICY": "passive",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


SPARE = 1024
"""Tokens of a cache that no request needs; vLLM keeps a page empty."""


class ArmFailed(RuntimeError):
    """The arm's process ended, or refused what it was asked; carries its reason in one line."""


class Arm:
    """The benchmark's end of one arm.

    ``setup``: ``folder`` to serve, ``ours`` (false: no plugin is loaded), ``options`` of `vllm.LLM`, and
    ``environment``, if any.

    Raises:
        ArmFailed: the engine does not start, as stock FP8 does on a CPU.
    """

    def __init__(self, name: str, setup: dict[str, Any]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  (closed with the arm)
        plugins = {} if setup["ours"] else {"VLLM_PLUGINS": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.arms"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**ENVIRONMENT, **os.environ, **plugins, **setup.get("environment", {})},
        )
        try:
            self.started = self.ask(setup)
        except ArmFailed:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            ArmFailed: see the class.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._log.seek(0)
            said = [text for text in self._log.read().splitlines() if text.strip()]
            raise ArmFailed(f"{self.name}: the process ended: {said[-1] if said else 'nothing was said'}")
        answer = json.loads(line)
        if "error" in answer:
            raise ArmFailed(f"{self.name}: {answer['error']}")
        return answer

    def __enter__(self) -> Arm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process; an engine that does not go by itself is killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


# ---------------------------------------------------------------------------------------------- the arm's own process


class Served:
    """The arm's engine, and the trainer's model once a sync is asked for."""

    def __init__(self, setup: dict[str, Any]) -> None:
        import torch
        from vllm import LLM

        self.torch = torch
        self.folder = setup["folder"]
        start = time.perf_counter()
        self.llm = LLM(model=setup["folder"], skip_tokenizer_init=True, seed=0, **setup["options"])
        self.start_seconds = time.perf_counter() - start
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self.trainer: Any = None
        self.version = 0

    def generate(self, batch: int, prompt: int, tokens: int, seed: int = 0) -> dict[str, Any]:
        """Seconds for ``batch`` random prompts, sampled at temperature 1 to exactly ``tokens`` tokens each."""
        from vllm import SamplingParams

        draw = self.torch.Generator().manual_seed(seed)
        ids = self.torch.randint(0, self.vocabulary, (batch, prompt), generator=draw).tolist()
        sampling = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": row} for row in ids]
        self.llm.reset_prefix_cache()
        self._finish_device_work()
        start = time.perf_counter()
        outputs = self.llm.generate(requests, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": sum(len(o.outputs[0].token_ids) for o in outputs)}

    def sync(self, masters: str, policy: str, staging: str | None) -> dict[str, Any]:
        """One full update from the BF16 ``masters``, of which a weight moves each time; and what a plain copy costs."""
        import jetgraph_vllm.sync as live
        from transformers import AutoModelForCausalLM

        from jetgraph.sync import publish

        torch = self.torch
        weights = live.attach(self.llm, staging=staging)
        device = self._device()
        if self.trainer is None:
            self.trainer = AutoModelForCausalLM.from_pretrained(masters, dtype=torch.bfloat16).to(device)
        with torch.no_grad():
            next(self.trainer.parameters()).view(-1)[self.version] += 1
        self.version += 1
        before = self._start_peak()
        report = weights.update(publish(self.trainer, self.version, policy), verify=False)
        return {
            "stall": report.stall_seconds,
            "seconds": report.seconds,
            "bytes": report.num_bytes,
            "peak": self._peak() - before,
            "copy": self._copy_seconds(report.num_bytes),
        }

    def _copy_seconds(self, num_bytes: int) -> float:
        """Median seconds of copying as many bytes within the device."""
        a = self.torch.empty(num_bytes, dtype=self.torch.uint8, device=self._device())
        b = self.torch.empty_like(a)
        seconds = []
        for _ in range(6):
            self._finish_device_work()
            start = time.perf_counter()
            b.copy_(a)
            self._finish_device_work()
            seconds.append(time.perf_counter() - start)
        return sorted(seconds[1:])[len(seconds[1:]) // 2]

    def _device(self) -> str:
        return "cuda" if self.torch.cuda.is_available() else "cpu"

    def _finish_device_work(self) -> None:
        if self.torch.cuda.is_available():
            self.torch.cuda.synchronize()

    def _start_peak(self) -> int:
        if not self.torch.cuda.is_available():
            return self._peak()
        self.torch.cuda.reset_peak_memory_stats()
        return self.torch.cuda.memory_allocated()

    def _peak(self) -> int:
        """Bytes: of torch's own on a GPU, else the largest that this process ever was."""
        if self.torch.cuda.is_available():
            return self.torch.cuda.max_memory_allocated()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve() -> None:
    """Answer requests until stdin ends; the first line is the setup."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is no answer
    served: Served | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if served is None:
                served = Served(request)
                answer = {"start_seconds": served.start_seconds}
            else:
                answer = getattr(served, request.pop("do"))(**request)
        except Exception as error:  # told to the other end, which decides
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


# ------------------------------------------------------------------------------------------------------------ models


def write_model(folder: Path, layers: int, *, tiny: bool = False, device: str = "cpu") -> Path:
    """A random BF16 model of Qwen3-8B's sizes (or tiny ones) as a Hugging Face folder; kept if it is there already."""
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.numerics import QWEN3_8B, TINY

    if (folder / "config.json").is_file():
        return folder
    kept = (TINY if tiny else QWEN3_8B).to_dict()
    kept.pop("layer_types", None)  # one of each layer: made anew for as many as are asked
    config = type(QWEN3_8B).from_dict({**kept, "num_hidden_layers": layers})
    config.layer_types = ["full_attention"] * layers
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    del model
    give_back_memory()
    return folder


def give_back_memory() -> None:
    """What this process's allocator keeps of a GPU, for engines in other processes."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def without_plugin(exported: Path, folder: Path) -> Path:
    """The exported block-FP8 checkpoint as stock engines read it: the same tensors, no word of jetgraph."""
    config = json.loads((exported / "config.json").read_text())
    del config["quantization_config"]["jetgraph"]
    return _same_tensors(exported, folder, config)


def with_stock_operators(exported: Path, folder: Path) -> Path:
    """The exported checkpoint whose linears alone are ours (``ops: stock``): the same tensors."""
    config = json.loads((exported / "config.json").read_text())
    config["quantization_config"]["jetgraph"]["ops"] = "stock"
    return _same_tensors(exported, folder, config)


def _same_tensors(exported: Path, folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file in exported.iterdir():
        link = folder / file.name
        if file.name != "config.json" and not link.exists():
            link.symlink_to(file.resolve())
    return folder


def cache_options(folder: Path, tokens: int) -> dict[str, Any]:
    """Of `vllm.LLM` on a GPU that several engines share: a K/V cache for ``tokens`` tokens, and no measuring of memory.

    vLLM measures what is free to size its cache, and refuses if another process allocates meanwhile.
    """
    config = json.loads((folder / "config.json").read_text())
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_token = config["num_hidden_layers"] * config["num_key_value_heads"] * size * 2 * 2  # K and V, BF16
    return {"kv_cache_memory_bytes": max(per_token * (tokens + SPARE), 1 << 28), "gpu_memory_utilization": 0.05}


if __name__ == "__main__":
    serve()

"""`jetgraph.engines.RolloutEngine` for vLLM: one subprocess per run, talking through a job file."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jetgraph.attest import Attestation
from jetgraph.audit import Audit
from jetgraph.child_process import run_module
from jetgraph.diverge import Recording
from jetgraph.engines import EngineRun, RolloutPlan
from jetgraph.graph import PrecisionGraph
from jetgraph.policy import Policy
from jetgraph.scoring import Rollout
from jetgraph_vllm import stock_settings
from jetgraph_vllm.lift_stock import lift_stock
from jetgraph_vllm.stock_format import StockCapture

MAX_STEP = 1024
"""Tokens in one step of a plan that sets no limit."""

SHARING = {"OMP_WAIT_POLICY": "passive", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Several engines or trainers may share a machine: do not spin, do not pin threads, and hold 1 GiB of keys and values.

On a CPU vLLM else asks for 92 % of the memory, and refuses to start where something else holds a tenth.
"""


class EngineFailed(RuntimeError):
    """The engine's process ended with an error; carries the last lines it printed."""


class VllmEngine:
    """Runs ``python -m jetgraph_vllm`` on a folder: ours (exported by jetgraph) or a stock Hugging Face one."""

    def run(
        self,
        model_dir: Path,
        *,
        graph: Path | None = None,
        plans: Sequence[RolloutPlan] = (),
        options: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> EngineRun:
        with tempfile.TemporaryDirectory() as folder:
            job_file, results_file = Path(folder, "job.json"), Path(folder, "results.json")
            job = self._job(model_dir, graph, plans, results_file)
            job["engine"] |= dict(options or {})
            job_file.write_text(json.dumps(job))
            self._subprocess("jetgraph_vllm", job_file, say)
            results = json.loads(results_file.read_text())
        mode = results["engine"]["logprobs_mode"]  # what the live engine was set to
        rollouts = {plan.name: _rollouts(results["steps"][plan.name], plan, mode) for plan in plans}
        return EngineRun(results["engine"]["start_seconds"], graph, rollouts)

    def capture_stock(
        self,
        model_dir: Path,
        train: Path,
        graph: Path,
        options: Mapping[str, Any] | None = None,
        *,
        say: Callable[[str], None] = print,
    ) -> None:
        """As the protocol says; ``options`` go to `vllm.LLM`.  The graph is replayed in the engine's process.

        Raises:
            EngineFailed: vLLM has no kernel of its own for the checkpoint on this machine, or another reason to stop.
            StockCaptureError: a part of the engine could not be recorded.
        """
        with tempfile.TemporaryDirectory() as folder:
            job_file, record = Path(folder, "job.json"), Path(folder, "capture.json")
            trainings = Path(folder, "trainings")
            trainings.mkdir()
            shutil.copy(train, trainings / "train_followed.json")
            job = stock_settings.capture_job(model_dir, record, options or {}, trainings)
            job_file.write_text(json.dumps(job))
            say("recording the engine's own kernels")
            self._subprocess("jetgraph_vllm.stock_capture", job_file, say, more=stock_settings.ENVIRONMENT)
            lifted = lift_stock(StockCapture.load(record), PrecisionGraph.load(train))
        graph.parent.mkdir(parents=True, exist_ok=True)
        lifted.save(graph)
        say(f"{len(lifted.nodes)} nodes, replay {lifted.meta['replay']['passed']}")

    def record(
        self,
        model_dir: Path,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        seed: int = 1,
        tokens: int | None = None,
        say: Callable[[str], None] = print,
    ) -> Recording:
        """As the protocol says, in an eager engine: hooks see what modules compute."""
        step = {"name": "live", "do": "borders", "prompt": list(prompt), "seed": seed, "max_tokens": max_tokens}
        options = {
            "model_dir": str(model_dir),
            "enforce_eager": True,
            "max_model_len": max(512, len(prompt) + max_tokens + 1),
        }
        with tempfile.TemporaryDirectory() as folder:
            job_file, results_file = Path(folder, "job.json"), Path(folder, "results.json")
            steps = [step | ({} if tokens is None else {"tokens": tokens})]
            job_file.write_text(json.dumps({"engine": options, "results": str(results_file), "steps": steps}))
            self._subprocess("jetgraph_vllm", job_file, say)
            return Recording.from_plain(json.loads(results_file.read_text())["steps"]["live"])

    def attest(self, *, say: Callable[[str], None] = print) -> Attestation:
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder, "attestation.json")
            self._subprocess("jetgraph_vllm.attest", found, say)
            return Attestation.parse(found.read_text())

    def audit(
        self,
        model_dir: Path,
        policy: Policy | None,
        options: Mapping[str, Any] | None = None,
        *,
        say: Callable[[str], None] = print,
    ) -> Audit:
        with tempfile.TemporaryDirectory() as folder:
            job, found = Path(folder, "job.json"), Path(folder, "audit.json")
            content = {
                "model": str(model_dir),
                "policy": None if policy is None else policy.to_plain(),
                "llm": dict(options or {}),
                "out": str(found),
            }
            job.write_text(json.dumps(content))
            self._subprocess("jetgraph_vllm.audit", job, say, plain_linears=False)
            return Audit.from_plain(json.loads(found.read_text()))

    def _job(self, model_dir: Path, graph: Path | None, plans: Sequence[RolloutPlan], results: Path) -> dict[str, Any]:
        longest = max((len(p) + plan.max_tokens for plan in plans for p in plan.prompts), default=0)
        steps: list[dict[str, Any]] = [{"name": "graph", "do": "graph", "path": str(graph)}] if graph else []
        steps += [
            {
                "name": plan.name,
                "do": "generate",
                "prompts": [list(p) for p in plan.prompts],
                "seeds": list(plan.seeds),
                "max_tokens": plan.max_tokens,
                "temperature": plan.temperature,
                "top_k": plan.top_k,
                "top_p": plan.top_p,
                "tokens": plan.tokens,
                "sequences": plan.sequences,
                "one_at_a_time": plan.one_at_a_time,
                "prompt_logprobs": plan.prompt_logprobs,
            }
            for plan in plans
        ]
        widest = max([plan.tokens or MAX_STEP for plan in plans], default=256)
        options = {
            "model_dir": str(model_dir),
            "max_num_batched_tokens": max(widest, 256),  # vLLM profiles a step of this size at start-up
            "max_model_len": max(512, longest + 1),
        }
        modes = sorted({plan.logprobs for plan in plans})
        if len(modes) > 1:
            raise ValueError(f"plans ask for {' and '.join(modes)}: an engine has one, run it once for each")
        options |= {"logprobs_mode": modes[0]} if modes else {}
        return {"engine": options, "results": str(results), "steps": steps}

    def _subprocess(
        self,
        module: str,
        argument: Path,
        say: Callable[[str], None],
        *,
        plain_linears: bool = True,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """``plain_linears``: see `jetgraph_vllm.linear.keep_plain_linears`; without, the engine is as it comes."""
        environment = {**SHARING, **os.environ, **(more or {})}
        environment |= {"JETGRAPH_PLAIN_LINEAR": "1"} if plain_linears else {}
        status, lines = run_module(module, argument, environment, "jetgraph_vllm:", say, stdout=subprocess.DEVNULL)
        if status != 0:
            raise EngineFailed("vLLM ended with an error; its last lines:\n" + "\n".join(lines))


def _rollouts(step: dict[str, Any], plan: RolloutPlan, mode: str) -> list[Rollout]:
    sampling = replace(plan.sampling, logprobs=mode)
    return [
        Rollout(
            tuple(c["prompt"]),
            tuple(c["tokens"]),
            tuple(c["logprobs"]),
            None if c["prompt_logprobs"] is None else tuple(c["prompt_logprobs"]),
            sampling,
        )
        for c in step["completions"]
    ]

"""The trainer's side of a pair, in its own process: ``python -m jetgraph.train_process JOB.json``.

The job is written by `jetgraph.pair.run_trainer`.  Compiles the model, captures and replays one real step, writes its
graph, and scores rollouts with the forward that a training step runs.  Progress goes to stderr, one line each.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import jetgraph
from jetgraph.compiler import CompileError
from jetgraph.replay import in_words, replay_step
from jetgraph.scoring import Rollout, mismatch, sampled_scores
from jetgraph.trainer import capture_step


def main(arguments: list[str]) -> int:
    job = json.loads(Path(arguments[0]).read_text())
    try:
        Path(job["results"]).write_text(json.dumps(run(job)))
    except (ValueError, OSError, CompileError, NotImplementedError) as error:
        print(f"error: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return 2
    return 0


def run(job: dict[str, Any]) -> dict[str, Any]:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(job["model_dir"], dtype=torch.bfloat16).to(job["device"]).train()
    compiled = jetgraph.compile(model, job["policy"], provider=job["provider"], engine=job["engine"]).jetgraph
    say(f"{type(model).__name__}, policy {compiled.policy.name}, provider {job['provider']}")
    if job["graph"]:
        start = time.perf_counter()
        step = capture_step(compiled, backward=job["backward"])
        graph = replay_step(model, step)
        graph.save(job["graph"])
        size = f"{len(graph.nodes)} nodes, {graph.num_edges} edges"
        say(f"captured a step: {size}, {in_words(graph)}, {time.perf_counter() - start:.0f} s")
    mismatches, logprobs, scores = {}, {}, {}
    for name, rollouts in job["rollouts"].items():
        start = time.perf_counter()
        sampled = [Rollout.from_plain(r) for r in rollouts]
        result = mismatch(model, sampled, scores=scores)
        mismatches[name] = asdict(result)
        logprobs[name] = [sampled_scores(scores, rollout) for rollout in sampled]
        say(f"scored {result.num_tokens} tokens of {name}: {time.perf_counter() - start:.0f} s")
    saved = compiled.saved()
    return {
        "compile_seconds": compiled.seconds,
        "num_compiles": compiled.num_compiles,
        "saved": {
            "fp8": sum(t.bytes_per_token or 0 for t in saved if t.quantized),
            "other": sum(t.bytes_per_token or 0 for t in saved if not t.quantized),
        },
        "mismatches": mismatches,
        "logprobs": logprobs,
    }


def say(text: str) -> None:
    print(f"jetgraph: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Run one engine in its own process: ``python -m jetgraph_vllm JOB.json``.

The job is a JSON object:

    {"engine": {"model_dir": "exported", "enable_prefix_caching": true, …},    keywords of `Engine`
     "results": "results.json",                                                written after every step
     "prompts": [[1, 2, 3], …],
     "seeds": [100, 101, …],                                                   one per prompt
     "max_tokens": 64,                                                         or one number per prompt
     "steps": [
        {"name": "batch", "do": "generate", "prompt_logprobs": true},
        {"name": "mixed", "do": "generate", "tokens": 29, "sequences": 8},
        {"name": "alone", "do": "generate", "one_at_a_time": true, "only": 6},
        {"name": "warm",  "do": "generate", "keep_prefix_cache": true},
        {"name": "raw",   "do": "capture", "path": "capture.pt"},
        {"name": "graph", "do": "graph", "path": "infer.json"},
        {"name": "live",  "do": "borders", "prompt": [1, 2, 3], "seed": 7, "max_tokens": 8}]}

A ``generate`` step takes all prompts, or the first ``only`` ones, together unless ``one_at_a_time``; ``tokens`` and
``sequences`` limit the engine's steps (absent: as built); ``temperature`` is 1, ``top_k`` 0 and ``top_p`` 1 unless
given; the prefix cache is emptied first unless ``keep_prefix_cache``.  A ``capture`` step writes an `EngineCapture`,
without tensors if ``"values": false``.  A ``graph`` step captures, lifts and replays: it writes the precision graph of
what the engine executes, with the outcome of the replay gate in it.  A ``borders`` step needs an eager engine: it runs
one request and returns what `jetgraph.diverge.Recording` holds.  ``prompts``, ``seeds`` and ``max_tokens`` may stand in
a step too.

The results are ``{"engine": {"start_seconds", "logprobs_mode", "pieces"}, "steps": {name: {...}}}``; a generate step
has ``completions`` (fields of `Completion`), ``num_steps``, ``num_mixed_steps``, ``num_preemptions``,
``rows`` (all token counts of a step that occurred) and ``seconds``.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

from jetgraph_vllm.engine import Completion, Engine, Step

_STEP_KEYS = {
    "generate": {
        "name",
        "do",
        "prompt_logprobs",
        "tokens",
        "sequences",
        "one_at_a_time",
        "only",
        "temperature",
        "top_k",
        "top_p",
        "keep_prefix_cache",
        "prompts",
        "seeds",
        "max_tokens",
    },
    "capture": {"name", "do", "path", "values"},
    "graph": {"name", "do", "path"},
    "borders": {"name", "do", "prompt", "seed", "max_tokens", "tokens"},
}


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    job = json.loads(Path(arguments[0]).read_text())
    check_job(job)
    run_job(job)
    return 0


def check_job(job: dict[str, Any]) -> None:
    """Refuse a job with missing or unknown parts before an engine is started for it."""
    missing = {"engine", "results", "steps"} - job.keys()
    if missing:
        raise ValueError(f"job lacks {', '.join(sorted(missing))}")
    for step in job["steps"]:
        kind = step.get("do")
        if kind not in _STEP_KEYS or "name" not in step:
            raise ValueError(f"step {step}: expected a name and do = {' or '.join(_STEP_KEYS)}")
        unknown = step.keys() - _STEP_KEYS[kind]
        if unknown:
            raise ValueError(f"step {step['name']}: unknown {', '.join(sorted(unknown))}")
        if kind == "generate" and not {"prompts", "seeds", "max_tokens"} <= job.keys() | step.keys():
            raise ValueError(f"step {step['name']}: the job has no prompts, seeds and max_tokens")


LONG = ("completions", "rows", "prompt", "tokens", "logprobs", "steps", "digests")
"""Parts of an outcome that are not shown while it runs."""


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    engine = Engine(**job["engine"])
    say(f"engine started in {engine.start_seconds:.1f} s")
    mode = str(engine.config.model_config.logprobs_mode)
    started = {"start_seconds": engine.start_seconds, "logprobs_mode": mode, "pieces": engine.describe_pieces()}
    if started["pieces"]:
        say(f"body in {started['pieces']}")
    results: dict[str, Any] = {"engine": started, "steps": {}}
    for step in job["steps"]:
        start = time.perf_counter()
        run = {"generate": run_generate, "capture": run_capture, "graph": run_graph, "borders": run_borders}[step["do"]]
        outcome = run(engine, {**job, **step}, step)
        outcome["seconds"] = time.perf_counter() - start
        results["steps"][step["name"]] = outcome
        Path(job["results"]).write_text(json.dumps(results))
        shown = {k: f"{v:.1f}" if isinstance(v, float) else v for k, v in outcome.items() if k not in LONG}
        say(f"{step['name']}: " + ", ".join(f"{k} {v}" for k, v in shown.items()))
    return results


def run_generate(engine: Engine, job: dict[str, Any], step: dict[str, Any]) -> dict[str, Any]:
    engine.limits(step.get("tokens"), step.get("sequences"))
    if not step.get("keep_prefix_cache"):
        engine.reset_prefix_cache()
    count = step.get("only", len(job["prompts"]))
    groups = [[i] for i in range(count)] if step.get("one_at_a_time") else [list(range(count))]
    max_tokens = job["max_tokens"]
    completions: list[Completion] = []
    steps: list[Step] = []
    for group in groups:
        completions += engine.generate(
            [job["prompts"][i] for i in group],
            max_tokens=max_tokens if isinstance(max_tokens, int) else [max_tokens[i] for i in group],
            temperature=step.get("temperature", 1.0),
            top_k=step.get("top_k", 0),
            top_p=step.get("top_p", 1.0),
            seeds=[job["seeds"][i] for i in group],
            prompt_logprobs=step.get("prompt_logprobs", False),
        )
        steps += engine.steps
    return {"completions": [dataclasses.asdict(completion) for completion in completions], **describe_steps(steps)}


def describe_steps(steps: list[Step]) -> dict[str, Any]:
    return {
        "num_steps": len(steps),
        "num_mixed_steps": sum(step.is_mixed for step in steps),
        "num_preemptions": sum(step.num_preempted for step in steps),
        "rows": sorted({sum(step.num_tokens) for step in steps}),
    }


def run_capture(engine: Engine, job: dict[str, Any], step: dict[str, Any]) -> dict[str, Any]:
    engine.limits()
    capture = engine.capture(values=step.get("values", True))
    capture.save(step["path"])
    return {
        "path": step["path"],
        "num_body_ops": len(capture.body.aten),
        "num_heads": len(capture.heads),
        "num_body_calls": len(capture.body_calls),
    }


def run_graph(engine: Engine, job: dict[str, Any], step: dict[str, Any]) -> dict[str, Any]:
    from jetgraph_vllm.lift import lift_engine
    from jetgraph_vllm.replay import replay_capture

    engine.limits()
    lifted = replay_capture(engine.capture(gate_prompts(), max_tokens=2), lift_engine)
    lifted.save(step["path"])
    replay = lifted.meta["replay"]
    return {
        "num_nodes": len(lifted.nodes),
        "num_edges": lifted.num_edges,
        "replayed": f"{len(replay['cases'])} calls, {'all equal' if replay['passed'] else 'NOT EQUAL'}",
    }


def run_borders(engine: Engine, job: dict[str, Any], step: dict[str, Any]) -> dict[str, Any]:
    from jetgraph_vllm.borders import finish_recording, start_recording

    engine.limits(step.get("tokens"))
    engine.reset_prefix_cache()
    engine.llm.apply_model(start_recording)
    (completion,) = engine.generate(
        [step["prompt"]], max_tokens=step["max_tokens"], seeds=[step["seed"]], prompt_logprobs=True
    )
    (found,) = engine.llm.apply_model(finish_recording)
    logprobs = [*(completion.prompt_logprobs or ()), *completion.logprobs]
    return {"prompt": completion.prompt, "tokens": completion.tokens, "logprobs": logprobs, **found}


def gate_prompts() -> list[list[int]]:
    """Prompts of 17 and 5 tokens: the gate sees them prefilled together, decoded together, and one of them alone."""
    return [list(range(11, 28)), list(range(31, 36))]


def say(text: str) -> None:
    print(f"jetgraph_vllm: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

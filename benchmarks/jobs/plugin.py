"""The plugin in every way that an engine can run: the same tokens and bits?  python -m benchmarks.jobs.plugin FOLDER

FOLDER is a checkpoint that `jetgraph export` wrote.  Each arm is an engine in processes of its own:

    eager     operator by operator; all others are compared with it
    pieces    vLLM's mode 3, with piecewise CUDA graphs
    full      our backend in mode 2, with full CUDA graphs
    spawned   `vllm.LLM(FOLDER)` with nothing set: a worker process, and the choices that the plugin makes
    served    `vllm serve FOLDER`, asked over HTTP

The first three answer the same seeded requests in one batch, in small steps that mix prompts with decoding, and one by
one.  A row counts the tokens whose id or logprob has another bit; the bar is none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks.arms import ENVIRONMENT, cache_options
from benchmarks.gpu_time import device_name
from benchmarks.report import Row, report, save

BLOCK = 16
"""Tokens of a page of the K/V cache."""
SIZES = [1, 2, 4, 8, 16, 32, 64]
"""Rows of a step that a CUDA graph is captured for."""
ENGINES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "pieces": {"compilation": {"mode": 3, "backend": "eager", "cudagraph_capture_sizes": SIZES}},
    "full": {"compilation": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": SIZES}},
}
"""Keywords of `jetgraph_vllm.engine.Engine`."""
USERS = ("spawned", "served")
STEPS: tuple[dict[str, Any], ...] = (
    {"name": "one batch", "do": "generate", "prompt_logprobs": True},
    {"name": "mixed steps", "do": "generate", "tokens": 37, "sequences": 5, "prompt_logprobs": True},
    {"name": "alone", "do": "generate", "one_at_a_time": True, "only": 3},
)


@dataclass(frozen=True)
class Asked:
    """Seeded requests, sampled at temperature 1 to exactly ``tokens`` tokens each."""

    prompts: list[list[int]]
    seeds: list[int]
    tokens: int

    @classmethod
    def random(cls, vocabulary: int, longest: int, tokens: int) -> Asked:
        draw = random.Random(0)
        lengths = [5, longest, *(draw.randint(5, longest) for _ in range(6))]
        prompts = [[draw.randrange(3, vocabulary) for _ in range(length)] for length in lengths]
        return cls(prompts, [100 + i for i in range(len(prompts))], tokens)

    @property
    def room(self) -> int:
        """Tokens that the K/V cache must hold."""
        return sum(len(prompt) + self.tokens + BLOCK for prompt in self.prompts)


@dataclass(frozen=True)
class Answer:
    """Of one request, as the engine gave them; ``prompt`` are logprobs of the prompt's tokens, if they were asked."""

    tokens: list[int]
    logprobs: list[float]
    prompt: list[float] | None = None

    def differs(self, other: Answer) -> int:
        """Tokens of which the id or the logprob is another."""
        mine, theirs = (list(zip(a.tokens, a.logprobs, strict=True)) for a in (self, other))
        if self.prompt is not None and other.prompt is not None:
            mine, theirs = [*mine, *self.prompt], [*theirs, *other.prompt]
        return sum(a != b for a, b in zip_longest(mine, theirs))


Answers = dict[str, list[Answer]]
"""By step."""


def environment(**more: str) -> dict[str, str]:
    return {**ENVIRONMENT, **os.environ, **more}


def in_process(arm: str, folder: Path, asked: Asked, work: Path) -> Answers:
    engine = {"model_dir": str(folder), "max_num_seqs": len(asked.prompts), **ENGINES[arm]}
    if torch.cuda.is_available():
        engine |= cache_options(folder, asked.room)
    elif "compilation" in engine:  # no CUDA graphs on a CPU, where vLLM makes mode 3 Inductor's mode 2
        given = engine["compilation"]
        engine["compilation"] = {"mode": 2, "backend": "eager"} if "mode" in given else {}
    job = {
        "engine": engine,
        "results": str(work / f"{arm}.results.json"),
        "prompts": asked.prompts,
        "seeds": asked.seeds,
        "max_tokens": asked.tokens,
        "steps": STEPS,
    }
    path = work / f"{arm}.json"
    path.write_text(json.dumps(job))
    subprocess.run([sys.executable, "-m", "jetgraph_vllm", str(path)], env=environment(), check=True)
    steps = json.loads(Path(job["results"]).read_text())["steps"]
    return {
        name: [Answer(c["tokens"], c["logprobs"], c["prompt_logprobs"]) for c in step["completions"]]
        for name, step in steps.items()
    }


def of_users(folder: Path, asked: Asked) -> dict[str, Any]:
    """What somebody who shares the machine sets of `vllm.LLM`: sizes, and nothing about how to compute."""
    longest = max(map(len, asked.prompts)) + asked.tokens + 1
    options: dict[str, Any] = {"max_model_len": longest, "max_num_seqs": len(asked.prompts)}
    if torch.cuda.is_available():
        return options | cache_options(folder, asked.room)
    return options | {"gpu_memory_utilization": 0.2}


def spawned(folder: Path, asked: Asked, work: Path) -> Answers:
    job, out = work / "spawned.json", work / "spawned.results.json"
    options = of_users(folder, asked) | {"model": str(folder), "skip_tokenizer_init": True}
    job.write_text(json.dumps({"llm": options, "asked": vars(asked), "out": str(out)}))
    more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    subprocess.run(
        [sys.executable, "-m", "benchmarks.jobs.plugin", "--spawn", str(job)], env=environment(**more), check=True
    )
    return {"one batch": [Answer(*answer) for answer in json.loads(out.read_text())]}


def spawn(job: dict[str, Any]) -> None:
    """The process of `spawned`, which starts vLLM's worker."""
    from vllm import LLM, SamplingParams

    asked = Asked(**job["asked"])
    llm = LLM(**job["llm"])
    client = type(llm.llm_engine.engine_core).__name__
    if client != "SyncMPClient":
        raise RuntimeError(f"the model runs in this process ({client}): expected a worker of its own")
    sampling = [
        SamplingParams(seed=seed, max_tokens=asked.tokens, ignore_eos=True, logprobs=0, detokenize=False)
        for seed in asked.seeds
    ]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked.prompts], sampling, use_tqdm=False)
    found = [output.outputs[0] for output in outputs]
    answers = [(list(o.token_ids), [e[t].logprob for e, t in zip(o.logprobs, o.token_ids, strict=True)]) for o in found]
    Path(job["out"]).write_text(json.dumps(answers))


def served(folder: Path, asked: Asked, work: Path) -> Answers:
    port = free_port()
    options = [
        word for name, value in of_users(folder, asked).items() for word in ("--" + name.replace("_", "-"), str(value))
    ]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(with_tokenizer(folder, work))]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), *options]
    server = subprocess.Popen(command, env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="1"))
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(server, f"{url}/health")
        with ThreadPoolExecutor(len(asked.prompts)) as pool:
            return {"one batch": list(pool.map(lambda i: complete(url, asked, i), range(len(asked.prompts))))}
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_for(server: subprocess.Popen, url: str) -> None:
    """Until the server answers; who calls sets the limit."""
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"vllm serve ended with status {server.returncode}")


def complete(url: str, asked: Asked, index: int) -> Answer:
    body = {
        "model": "m", "prompt": asked.prompts[index], "seed": asked.seeds[index], "max_tokens": asked.tokens,
        "temperature": 1.0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as reply:
        (choice,) = json.load(reply)["choices"]
    return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])


def with_tokenizer(folder: Path, work: Path) -> Path:
    """``folder``; or links to it and a made-up tokenizer: a server wants one, and a random model has none."""
    if (folder / "tokenizer.json").is_file():
        return folder
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    beside = work / "served"
    beside.mkdir(exist_ok=True)
    for file in folder.iterdir():
        (beside / file.name).symlink_to(file.resolve())
    words = WordLevel({f"t{i}": i for i in range(size)}, unk_token="t0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="t0").save_pretrained(beside)
    return beside


def rows(answers: dict[str, Answers]) -> list[Row]:
    """Of every arm and step against the first arm's one batch."""
    reference = next(iter(answers.values()))["one batch"]
    table = [Row.fact("tokens sampled in one batch", sum(len(a.tokens) for a in reference))]
    for arm, steps in answers.items():
        for step, found in steps.items():
            different = sum(a.differs(b) for a, b in zip(found, reference[: len(found)], strict=True))
            table.append(Row(f"{arm}, {step}: tokens that differ", different, "", "= 0", different == 0))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="a checkpoint that jetgraph exported")
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--arms", nargs="+", choices=(*ENGINES, *USERS), default=[*ENGINES, *USERS])
    parser.add_argument("--longest", type=int, default=300, help="tokens of the longest prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens sampled for each prompt")
    parser.add_argument("--together", type=int, default=8 if torch.cuda.is_available() else 1, help="arms at a time")
    parser.add_argument("--spawn", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.spawn is not None:
        spawn(json.loads(options.spawn.read_text()))
        return 0
    if options.folder is None:
        parser.error("which checkpoint?")
    vocabulary = json.loads((options.folder / "config.json").read_text())["vocab_size"]
    asked = Asked.random(vocabulary, options.longest, options.tokens)
    runs: dict[str, Callable[[Path], Answers]] = {
        **{arm: lambda work, arm=arm: in_process(arm, options.folder, asked, work) for arm in ENGINES},
        "spawned": lambda work: spawned(options.folder, asked, work),
        "served": lambda work: served(options.folder, asked, work),
    }
    device = device_name() if torch.cuda.is_available() else "cpu"
    answers: dict[str, Answers] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.together) as pool:
        waiting = {pool.submit(runs[arm], Path(folder)): arm for arm in options.arms}
        for done in as_completed(waiting):
            arm = waiting[done]
            try:
                answers[arm] = done.result()
            except (RuntimeError, OSError, subprocess.SubprocessError) as error:
                print(f"{arm}: left out: {type(error).__name__}: {error}", flush=True)
                continue
            table = rows({arm: answers[arm] for arm in options.arms if arm in answers})
            save(table, options.json, device)  # as they end: what is cut short keeps them
            print(f"{arm}: done", flush=True)
    if not answers:
        return 1
    return max(report(table, options.json, device), int(len(answers) < len(options.arms)))


if __name__ == "__main__":
    sys.exit(main())

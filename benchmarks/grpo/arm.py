"""One arm, all its seeds, in a process of its own:  python -m benchmarks.grpo.arm JOB.json

Trainer and engine share this process and its device, and nothing with another arm's.  A step is

    rollout   the engine samples `samples` answers to each of `prompts` problems, at temperature 1
    score     the trainer's logprobs of the very tokens: what the mismatch is measured on
    train     one update by GRPO
    sync      the new weights into the running engine

and one line of JSON in the seed's file, as soon as it is done.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.grpo import curves, journal
from benchmarks.grpo.actor import Actor, Answer, group_advantages, repeat
from benchmarks.grpo.journal import Lesson
from benchmarks.grpo.problems import Problems
from benchmarks.grpo.rollout import Rollout, Sampler
from jetgraph.mismatch import Difference, measure

SEED_STRIDE = 1_000_003
"""Seeds of rollouts: far enough apart that two runs share none."""
FIGURES = ("num_tokens", "mean", "p99", "p999", "max", "k1", "k3", "chi2", "ess_token", "fraction_exact",
           "sequence_log_ratio_mean", "sequence_log_ratio_max")  # fmt: skip
"""Of `jetgraph.mismatch.Difference`, what a row holds."""


@dataclass(frozen=True)
class Job:
    """What `benchmarks.rl` writes for this process.

    ``trainer`` and ``provider`` are `jetgraph.compile`'s policy and provider; ``served`` is the engine's folder and
    ``rollout`` the policy that our plugin serves there, None for a stock engine; ``engine`` are `vllm.LLM`'s options.
    ``until`` is a time (`time.time`) after which no step begins.  A seed's steps are lines of ``{rows}-{seed}.jsonl``,
    what it learned from those of ``{rows}-{seed}.journal``; the same job goes on from there, sooner where
    ``{rows}-{seed}.pt`` still has the trainer.  At the end of a seed only its steps stay.
    """

    name: str
    seeds: list[int]
    model: str
    trainer: str
    provider: str
    served: str
    rollout: str | None
    engine: dict[str, Any]
    problems: str
    tokenizer: str | None
    steps: int
    prompts: int
    samples: int
    length: int
    learning_rate: float
    micro_batch: int
    rows: str
    until: float | None = None

    @classmethod
    def load(cls, path: str) -> Job:
        return cls(**json.loads(Path(path).read_text()))

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))


class Phases:
    """Seconds of each phase of a step, the device's work included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[name] = time.perf_counter() - start


def mismatch(answers: list[Answer], scores: list[list[float]]) -> Difference:
    """Trainer against engine on every sampled token.

    Raises:
        ValueError: no token was sampled.
    """
    length = max(len(answer.tokens) for answer in answers)

    def table(rows: list[list[float]]) -> torch.Tensor:
        return torch.tensor([row + [0.0] * (length - len(row)) for row in rows], dtype=torch.float64)

    mask = torch.tensor([[i < len(answer.tokens) for i in range(length)] for answer in answers])
    found = measure(table(scores), table([answer.logprobs for answer in answers]), mask, by_position=False)
    if found.whole is None:
        raise ValueError("no token was sampled: there is nothing to compare")
    return found.whole.total


def step(
    job: Job, seed: int, number: int, problems: Problems, actor: Actor, engine: Rollout
) -> tuple[dict[str, Any], Lesson]:
    """One step: what it measured, and what it learned from."""
    phases = Phases()
    questions, right = problems.take(number, job.prompts)
    prompts = repeat(questions, job.samples)
    with phases("rollout"):
        answers = engine.sample(prompts, (seed + 1) * SEED_STRIDE + number)
    with phases("score"):
        scores = actor.score(answers)
    rewards = [problems.reward(a.tokens, right[i // job.samples]) for i, a in enumerate(answers)]
    advantages = group_advantages(rewards, job.samples)
    with phases("train"):
        grad_norm = actor.learn(answers, advantages)
    with phases("sync"):
        sync = engine.take(actor.model)
    found = mismatch(answers, scores)
    lengths = [len(answer.tokens) for answer in answers]
    row = {
        "arm": job.name,
        "seed": seed,
        "step": number + 1,
        "reward": sum(rewards) / len(rewards),
        "right": sum(reward == 1.0 for reward in rewards) / len(rewards),
        "answer_length": sum(lengths) / len(lengths),
        "cut_off": sum(length == job.length for length in lengths) / len(lengths),
        "grad_norm": grad_norm,
        "mismatch": {figure: getattr(found, figure) for figure in FIGURES},
        "seconds": phases.seconds,
        "sync": sync,
    }
    return row, Lesson(number + 1, [answer.tokens for answer in answers], advantages, grad_norm)


def go_on(job: Job, problems: Problems, actor: Actor, saved: Path, lessons: list[Lesson]) -> str:
    """Bring the trainer to where ``lessons`` end; how.

    A trainer that was ``saved`` is of a step that the journal has, and takes the updates after that one alone.
    """
    done = actor.resume(saved) if saved.exists() else 0
    if done == 0 or done > len(lessons):
        actor.restart()
        done = 0
    start, off = time.perf_counter(), 0.0
    for lesson in lessons[done:]:
        questions, _ = problems.take(lesson.step - 1, job.prompts)
        prompts = repeat(questions, job.samples)
        answers = [Answer(prompt, tokens, []) for prompt, tokens in zip(prompts, lesson.tokens, strict=True)]
        norm = actor.learn(answers, lesson.advantages)
        off = max(off, abs(norm - lesson.grad_norm) / max(lesson.grad_norm, 1e-30))
    return (
        f"goes on after step {len(lessons)}: {done} updates saved, {len(lessons) - done} taken again in "
        f"{time.perf_counter() - start:.0f} s, whose gradients' norms differ by {off:.1g} of themselves at most"
    )


def run(job: Job, say: Callable[[str], None] = print) -> None:
    start = time.perf_counter()
    seeds = [seed for seed in job.seeds if len(curves.read(Path(f"{job.rows}-{seed}.jsonl"))) < job.steps]
    if not seeds:
        return  # done by earlier calls
    problems = Problems.load(Path(job.problems), job.tokenizer)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = Rollout(job.served, job.rollout, Sampler(job.length, problems.stop), job.engine)
    actor = Actor(
        job.model, job.trainer, job.provider,
        learning_rate=job.learning_rate, micro_batch=job.micro_batch, device=device,
    )  # fmt: skip
    say(f"engine and trainer started in {time.perf_counter() - start:.0f} s")
    for seed in seeds:
        saved, rows, learned = (Path(f"{job.rows}-{seed}.{kind}") for kind in ("pt", "jsonl", "journal"))
        lessons = journal.read(learned)
        done = len(lessons)
        told = go_on(job, problems, actor, saved, lessons)
        if done:
            say(f"seed {seed} {told}")
        keep_rows(rows, done)
        journal.write(learned, lessons)
        engine.take(actor.model)
        with rows.open("a") as row_file, learned.open("a") as journal_file:
            for number in range(done, job.steps):
                if job.until is not None and time.time() > job.until:
                    actor.save(saved, number)
                    say(f"seed {seed}: out of time before step {number + 1}")
                    return
                row, lesson = step(job, seed, number, problems, actor, engine)
                for file, line in ((row_file, json.dumps(row) + "\n"), (journal_file, lesson.to_line())):
                    file.write(line)
                    file.flush()
                say(brief(row))
        engine.verify()
        saved.unlink(missing_ok=True)
        learned.unlink()


def keep_rows(path: Path, steps: int) -> None:
    """Only the first ``steps`` steps stay: a process that was killed may have written more than it saved."""
    kept = [row for row in curves.read(path) if row["step"] <= steps]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def brief(row: dict[str, Any]) -> str:
    found, seconds = row["mismatch"], row["seconds"]
    return (
        f"seed {row['seed']}, step {row['step']}: reward {row['reward']:.3f}, |Δ| {found['mean']:.2g} (max "
        f"{found['max']:.2g}), gradient {row['grad_norm']:.2g}, {found['num_tokens']} tokens; "
        + ", ".join(f"{name} {value:.1f}" for name, value in seconds.items())
        + " s"
    )


def main(arguments: list[str]) -> int:
    def say(text: str) -> None:
        print(f"rl: {text}", file=sys.stderr, flush=True)

    try:
        run(Job.load(arguments[0]), say)
    except Exception:
        # said here: what an engine prints while it is torn down would push it out of the last lines
        for line in traceback.format_exc().splitlines():
            say(line)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Train–inference mismatch of three pairs, sampled by live engines:  python -m benchmarks.mismatch [--json FILE]

Each arm is a trainer and an engine in processes of their own (`jetgraph.pair`): the engine samples at temperature 1 to
a fixed length, the trainer scores the very tokens in one forward per sequence.  All have the same prompts and seeds.

- bf16/bf16: stock vLLM and plain torch in BF16, the least that people accept today;
- naive FP8 rollout: BF16 training by plain torch, stock vLLM's dynamic quantisation of the same folder;
- stock FP8, followed: stock vLLM's own kernels on our codes, and training that computes what they compute; on a GPU;
- jet: one FP8 flow on both sides, our plugin; the bar is exactly 0 on every token.

Two models: a random one of Qwen3's shape with 8 layers, and SmolLM2's weights from a folder (``--smollm2``), whose 576
columns stock FP8 kernels refuse, so that its naive arm serves our exported FP8 codes.  Statistics are those of
`jetgraph.mismatch`: |Δlogprob| (mean, p99, p99.9, max), k1, k3, the log ratio of whole sequences, the share of tokens
that are exactly equal, and the mean by position, drawn as SVG.

Nothing here is timed, so on a GPU all pairs run at once (``--together``); the JSON and the plots are written as each
ends.  A pair that fails says why, and the others go on; the exit status is 1.

``--tiny`` runs the random model with two layers and a few tokens on any machine, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jetgraph_vllm import stock_settings

from benchmarks.arms import cache_options, give_back_memory, write_model
from benchmarks.gpu_time import device_name
from benchmarks.report import Row, report, save
from benchmarks.rollout import BLOCK
from jetgraph.engines import RolloutPlan
from jetgraph.export import export_checkpoint
from jetgraph.mismatch import Mismatch, Pairs, join, pair
from jetgraph.modes import Side, demo_prompts
from jetgraph.pair import run_engine, run_trainer
from jetgraph.scoring import Rollout

SEQUENCES, LENGTH, PROMPT = 8, 4096, 64
"""32,768 sampled tokens."""
WINDOW = 128
"""Tokens that a point of the plot is the mean of."""
FIGURES = {"mean": "nats", "p99": "nats", "p999": "nats", "max": "nats", "k1": "nats", "k3": "nats"}


@dataclass(frozen=True)
class Pairing:
    """A trainer and an engine; ``quantization`` is what a stock engine makes of the BF16 folder by itself.

    ``follows``: the engine runs its own kernels, and training follows it (`jetgraph.followed`).
    """

    trainer: Side
    engine: Side
    quantization: str | None = None
    follows: str | None = None


PAIRINGS = {
    "bf16/bf16": Pairing(Side("bf16", stock=True), Side("bf16", stock=True)),
    "naive FP8 rollout": Pairing(Side("bf16", stock=True), Side("bf16", stock=True), "fp8"),
    "stock FP8, followed": Pairing(Side("jet"), Side("jet", stock=True), follows="vllm-stock"),
    "jet": Pairing(Side("jet"), Side("jet")),
}
OUR_CODES = Pairing(Side("bf16", stock=True), Side("bf16_train_fp8_rollout"))
"""The naive arm where no stock FP8 kernel serves the model: on a CPU, and for SmolLM2's 576 columns."""


def random_prompts(vocabulary: int, count: int, length: int) -> list[list[int]]:
    return torch.randint(0, vocabulary, (count, length), generator=torch.Generator().manual_seed(5)).tolist()


@dataclass(frozen=True)
class Job:
    """One arm on one model."""

    label: str
    arm: str
    pairing: Pairing
    model: Path
    plan: RolloutPlan

    @property
    def name(self) -> str:
        return f"{self.label}, {self.arm}"


def measure(name: str, pairing: Pairing, model: Path, plan: RolloutPlan, work: Path, device: str) -> Pairs:
    """Sample with the pairing's engine and score with its trainer: log-probabilities of the sampled tokens."""

    def say(text: str) -> None:
        print(f"{name}: {text}", flush=True)

    options: dict[str, Any] = {"quantization": pairing.quantization} if pairing.quantization else {}
    if device == "cuda":
        tokens = sum(len(prompt) + plan.max_tokens + BLOCK for prompt in plan.prompts)
        options |= {**cache_options(model, tokens), **on_gpu(pairing, len(plan.prompts))}
    served = model
    if pairing.follows:
        served = work / pairing.follows
        export_checkpoint(model, served, pairing.trainer.policy, engine=pairing.follows, device=device)
        give_back_memory()
    engine = run_engine(
        served, pairing.engine.policy, "vllm", work,
        stock=pairing.engine.stock, plans=[plan], options=options, device=device, say=say,
    )  # fmt: skip
    rollouts = engine.rollouts[plan.name]
    provider = "stock" if pairing.trainer.stock else "reference"
    trainer = run_trainer(
        model, pairing.trainer.policy, provider,
        rollouts={plan.name: rollouts}, device=device, engine=pairing.follows, say=say,
    )  # fmt: skip
    return join([_pair(*both) for both in zip(rollouts, trainer.logprobs[plan.name], strict=True)])


def on_gpu(pairing: Pairing, rows: int) -> dict[str, Any]:
    """The configuration that rolls out: a stock engine's own default, or the one that is followed; CUDA graphs."""
    sizes = sorted({1 << i for i in range(rows.bit_length())} | {rows})
    if pairing.follows:
        compilation = {**stock_settings.COMPILATION, "cudagraph_capture_sizes": sizes}
        return {"compilation": compilation, "environment": stock_settings.ENVIRONMENT}
    if pairing.engine.stock:
        return {"custom_ops": [], "compilation": {"mode": 3, "cudagraph_capture_sizes": sizes}}
    return {"compilation": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": sizes}}


def _pair(rollout: Rollout, scored: Sequence[float]) -> Pairs:
    values = [torch.tensor([x], dtype=torch.float64) for x in (scored, rollout.logprobs)]
    return pair(*values, torch.ones(1, len(scored), dtype=torch.bool))


def by_position(pairs: Pairs, window: int) -> list[float]:
    """Mean |Δ| of each ``window`` of positions, over all sequences."""
    delta = torch.where(pairs.mask, (pairs.trainer - pairs.rollout).abs(), 0.0)
    sums, counts = delta.sum(0).split(window), pairs.mask.sum(0).split(window)
    return [(s.sum() / c.sum()).item() for s, c in zip(sums, counts, strict=True) if c.sum()]


def rows(label: str, found: Mismatch, means: Sequence[float], *, must_be_exact: bool) -> list[Row]:
    """
    Raises:
        ValueError: no token was sampled.
    """
    if found.whole is None:
        raise ValueError(f"{label}: no token was compared")
    d = found.whole.total
    exact = (d.max, d.fraction_exact)
    table = [Row.fact(f"{label}, tokens", d.num_tokens), Row.fact(f"{label}, sequences", d.num_sequences)]
    for figure, unit in FIGURES.items():
        bar = ("= 0", exact[0] == 0) if must_be_exact and figure == "max" else ("", None)
        table.append(Row(f"{label}, {figure}", getattr(d, figure), unit, *bar))
    bar = ("= 1", exact[1] == 1) if must_be_exact else ("", None)
    return [
        *table,
        Row(f"{label}, fraction exact", d.fraction_exact, "", *bar),
        Row.fact(f"{label}, log ratio of a sequence, mean", d.sequence_log_ratio_mean, "nats"),
        Row.fact(f"{label}, log ratio of a sequence, largest", d.sequence_log_ratio_max, "nats"),
        Row.fact(f"{label}, mean in the first window of positions", means[0], "nats"),
        Row.fact(f"{label}, mean in the last window of positions", means[-1], "nats"),
    ]


def draw(curves: dict[str, list[float]], window: int, path: Path) -> None:
    """Mean |Δlogprob| by position, one line an arm; exact arms lie on the axis."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for name, means in curves.items():
        axes.plot([(i + 0.5) * window for i in range(len(means))], means, label=name, linewidth=1.4)
    axes.set_xlabel("position in the answer, tokens")
    axes.set_ylabel("mean |Δlogprob|, nats")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="where the rows go")
    parser.add_argument("--picture", type=Path, default=Path("out/mismatch.svg"), help="the plot; one a model")
    parser.add_argument("--only", nargs="+", choices=list(PAIRINGS), default=list(PAIRINGS))
    parser.add_argument("--smollm2", type=Path, help="folder of SmolLM2's weights; without it only the random model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=SEQUENCES)
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens sampled for each sequence")
    parser.add_argument("--together", type=int, help="pairs at a time; all on a GPU, else 1")
    parser.add_argument("--work", type=Path, help="keeps the model folders there for the next run")
    parser.add_argument("--tiny", action="store_true", help="two small layers, on any machine: no measurement")
    options = parser.parse_args(arguments)
    if options.tiny:
        options.layers, options.sequences, options.length = 2, 3, 12
    elif not torch.cuda.is_available():
        parser.error("needs a CUDA device, and this machine has none; --tiny runs anywhere")
    options.together = options.together or (2 * len(PAIRINGS) if torch.cuda.is_available() else 1)
    return options


def jobs(options: argparse.Namespace, device: str) -> Iterator[Job]:
    """The arms of every model, ours first: what is cut short says most."""
    models = {"random": write_model(options.work / f"random-{options.layers}", options.layers, tiny=options.tiny,
                                    device=device)}  # fmt: skip
    prompts = {"random": random_prompts(512, options.sequences, PROMPT if not options.tiny else 9)}
    if options.smollm2:
        models["SmolLM2"] = options.smollm2
        questions = demo_prompts(options.smollm2)
        prompts["SmolLM2"] = [questions[i % len(questions)] for i in range(options.sequences)]
    seeds = [1000 + i for i in range(options.sequences)]
    for arm in sorted(options.only, key=list(PAIRINGS).index, reverse=True):
        for label, model in models.items():
            if PAIRINGS[arm].follows and (device == "cpu" or label == "SmolLM2"):
                continue  # no FP8 kernel of vLLM's own serves it
            plan = RolloutPlan("sampled", prompts[label], seeds, options.length, tokens=1024, prompt_logprobs=False)
            refused = arm == "naive FP8 rollout" and (device == "cpu" or label == "SmolLM2")
            yield Job(label, arm, OUR_CODES if refused else PAIRINGS[arm], model, plan)


def run(options: argparse.Namespace, device: str) -> tuple[list[Row], list[str]]:
    """Every job's rows, in the order of the jobs, and the names of those that failed; files are written as they end."""
    window = WINDOW if not options.tiny else 4
    todo = list(jobs(options, device))
    rows_of: dict[str, list[Row]] = {}
    curves: dict[str, dict[str, list[float]]] = {}
    failed = []
    with ThreadPoolExecutor(max_workers=options.together) as pool:
        waiting = {}
        for job in todo:
            work = options.work / f"{job.label}-{list(PAIRINGS).index(job.arm)}"
            waiting[pool.submit(measure, job.name, job.pairing, job.model, job.plan, work, device)] = job
        for done in as_completed(waiting):
            job = waiting[done]
            try:
                pairs = done.result()
            except (RuntimeError, ValueError) as error:
                print(f"{job.name}: left out: {type(error).__name__}: {error}", flush=True)
                failed.append(job.name)
                continue
            means = by_position(pairs, window)
            curves.setdefault(job.label, {})[job.arm] = means
            rows_of[job.name] = rows(job.name, pairs.measure(), means, must_be_exact=job.arm == "jet")
            draw(curves[job.label], window, options.picture.with_stem(f"{options.picture.stem}-{job.label}"))
            save(_in_order(rows_of, todo), options.json, device_in_words(device))
    return _in_order(rows_of, todo), failed


def _in_order(rows_of: dict[str, list[Row]], todo: Sequence[Job]) -> list[Row]:
    return [row for job in todo for row in rows_of.get(job.name, ())]


def device_in_words(device: str) -> str:
    return device_name() if device == "cuda" else "cpu, tiny: no measurement"


def main() -> int:
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        options.work = options.work or Path(folder)
        table, failed = run(options, device)
    return max(report(table, options.json, device_in_words(device)), int(bool(failed)))


if __name__ == "__main__":
    sys.exit(main())

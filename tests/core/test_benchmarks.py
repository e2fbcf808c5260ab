"""The parts of the engine benchmarks that need no engine: statistics, bars, and the pipe between the processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import arms, mismatch, rollout, sync
from benchmarks.arms import Arm, ArmFailed
from jetgraph.engines import EngineRun, RolloutPlan
from jetgraph.mismatch import Pairs, join
from jetgraph.pair import TrainerRun
from jetgraph.scoring import Rollout
from tests.core.small_models import random_model


def sampled(*logprobs: float) -> Rollout:
    return Rollout((1, 2), tuple(range(len(logprobs))), logprobs)


def test_mismatch_rows_are_those_of_the_pairs_and_jet_must_be_exact():
    pairs = join(
        [
            mismatch._pair(sampled(-1.0, -2.0, -3.0), [-1.0, -2.5, -3.0]),
            mismatch._pair(sampled(-0.5, -1.0), [-0.5, -1.0]),
        ]
    )
    means = mismatch.by_position(pairs, 2)
    assert means == [0.5 / 4, 0.0]  # the second window holds one token of the longer sequence
    table = {row.metric: row for row in mismatch.rows("x", pairs.measure(), means, must_be_exact=True)}
    assert table["x, tokens"].value == 5
    assert (table["x, max"].value, table["x, max"].bar, table["x, max"].ok) == (0.5, "= 0", False)
    assert (table["x, fraction exact"].value, table["x, fraction exact"].ok) == (0.8, False)
    assert table["x, log ratio of a sequence, largest"].value == 0.5
    loose = mismatch.rows("x", pairs.measure(), means, must_be_exact=False)
    assert all(row.ok is None for row in loose)
    equal = join([mismatch._pair(sampled(-0.5, -1.0), [-0.5, -1.0])])
    assert all(row.ok is not False for row in mismatch.rows("x", equal.measure(), [0.0], must_be_exact=True))


def test_a_pair_that_fails_is_named_and_the_rows_of_the_others_are_written_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    found = tmp_path / "m.json"
    written = []

    def measure(name: str, *_: object) -> Pairs:
        if "naive" in name:
            raise RuntimeError("vLLM ended")
        written.append(len(json.loads(found.read_text())["rows"]) if found.exists() else 0)
        return join([mismatch._pair(sampled(-1.0), [-1.5])])

    monkeypatch.setattr(mismatch, "measure", measure)
    monkeypatch.setattr(mismatch, "write_model", lambda folder, *_, **__: folder)
    monkeypatch.setattr(sys, "argv", ["mismatch", "--tiny", f"--json={found}", f"--picture={tmp_path / 'm.svg'}"])
    assert mismatch.main() == 1
    rows = [row["metric"] for row in json.loads(found.read_text())["rows"]]
    assert (rows[0], len([r for r in rows if r.endswith(", tokens")])) == ("random, jet, tokens", 2)
    assert "random, naive FP8 rollout: left out: RuntimeError: vLLM ended" in capsys.readouterr().out
    assert written[0] == 0


def test_the_followed_pair_serves_a_folder_without_us_and_trains_as_the_engine_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    seen: dict = {}

    def run_engine(folder: Path, policy: str, engine: str, work: Path, **options: object) -> EngineRun:
        seen["engine"] = folder, options["stock"]
        return EngineRun(1.0, None, {"sampled": [sampled(-1.0)]})

    def run_trainer(folder: Path, policy: str, provider: str, **options: object) -> TrainerRun:
        seen["trainer"] = folder, policy, provider, options["engine"]
        return TrainerRun(None, 1.0, 1, logprobs={"sampled": [[-1.25]]})

    random_model("qwen3", layers=1).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(mismatch, "run_engine", run_engine)
    monkeypatch.setattr(mismatch, "run_trainer", run_trainer)
    plan = RolloutPlan("sampled", [[1, 2]], [1], 1)
    pairing = mismatch.PAIRINGS["stock FP8, followed"]
    pairs = mismatch.measure("x", pairing, tmp_path / "model", plan, tmp_path, "cpu")
    assert pairs.measure().whole.total.max == 0.25
    assert seen["trainer"] == (tmp_path / "model", "jet", "reference", "vllm-stock")
    served, stock = seen["engine"]
    assert stock
    assert "jetgraph" not in (served / "config.json").read_text()
    on_gpu = mismatch.on_gpu(pairing, 4)
    assert on_gpu["environment"] == {"VLLM_USE_DEEP_GEMM_E8M0": "0"}
    assert on_gpu["compilation"]["cudagraph_capture_sizes"] == [1, 2, 4]


def test_a_rollout_benchmark_that_is_cut_short_leaves_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Cut(Arm):
        def __init__(self) -> None:
            self.asked = 0

        def ask(self, request: dict) -> dict:
            self.asked += 1
            if self.asked == 6:  # a warm turn and two more of batch 1, then the third turn of batch 3
                raise KeyboardInterrupt
            return {"seconds": 0.5, "tokens": 100 * request["batch"]}

    found = tmp_path / "r.json"
    monkeypatch.setattr(rollout, "started", lambda *_: {"fp8": Cut()})
    monkeypatch.setattr(sys, "argv", ["rollout", "--tiny", f"--json={found}"])
    with pytest.raises(KeyboardInterrupt):
        rollout.main()
    rows = {row["metric"]: row["value"] for row in json.loads(found.read_text())["rows"]}
    assert rows == {"batch 1, turns": 2, "batch 1, fp8": 200.0, "batch 3, turns": 1, "batch 3, fp8": 600.0}
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


def test_the_plot_has_a_line_an_arm(tmp_path: Path):
    path = tmp_path / "m.svg"
    mismatch.draw({"bf16/bf16": [0.1, 0.2], "jet": [0.0, 0.0]}, 128, path)
    assert path.read_text().count("<!-- ") > 5
    assert "svg" in path.read_text()[:400]


def test_rollout_ratios_are_of_each_turn_and_carry_their_bars():
    speeds = {"bf16": [100.0, 200.0, 100.0], "fp8": [130.0, 260.0, 120.0], "jet": [130.0, 258.0, 120.0]}
    table = {row.metric: row for row in rollout.rows(64, speeds, bars=True)}
    assert table["batch 64, jet"].value == 130.0
    assert table["batch 64, jet beside fp8"].value == 1.0
    assert table["batch 64, jet beside fp8"].ok
    assert table["batch 64, jet beside bf16"].value == 1.29  # of 1.3, 1.29 and 1.2; medians alone would say 1.3
    assert not any("invariant" in metric for metric in table)
    slow = rollout.rows(64, {"fp8": [100.0], "jet": [97.0]}, bars=True)
    assert [(row.metric, row.ok) for row in slow if row.ok is not None] == [("batch 64, jet beside fp8", False)]
    assert table["batch 64, turns"].value == 3
    assert all(row.ok is None for row in rollout.rows(64, speeds, bars=False))
    alone = {row.metric: row for row in rollout.rows(1, speeds, bars=True)}
    assert alone["batch 1, jet beside bf16"].ok is None  # no bar at batch 1


def test_sync_is_held_against_a_copy_of_the_same_turn():
    turns = [{"stall": s, "seconds": 9.0, "bytes": 8e9, "peak": 8e9, "copy": 1.0} for s in (1.5, 2.5, 1.9)]
    table = {row.metric: row for row in sync.rows("device", turns, bars=True)}
    stall = table["staged on the device: stall beside one copy of the bytes"]
    assert (stall.value, stall.bar, stall.ok) == (1.9, "< 2", True)
    assert table["staged on the device: copy within the device"].value == 8.0
    assert all(row.ok is None for row in sync.rows("cpu", turns, bars=True))


ECHO = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request.get("do") == "die":
        sys.exit("out of memory")
    answer = {"error": "ValueError: no such thing"} if request.get("do") == "refuse" else request
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Arm:
    """An arm whose process answers with what it was asked."""
    program = tmp_path / "echo.py"
    program.write_text(ECHO)
    launcher = tmp_path / "python"
    launcher.write_text(f"#!/bin/sh\nexec {sys.executable} {program}\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(arms.sys, "executable", str(launcher))
    return Arm("echo", {"ours": True, "folder": "x"})


def test_an_arm_answers_refuses_and_dies_with_a_reason(echo: Arm):
    with echo:
        assert echo.started == {"ours": True, "folder": "x"}
        assert echo.ask({"do": "it", "seed": 3}) == {"do": "it", "seed": 3}
        with pytest.raises(ArmFailed, match="echo: ValueError: no such thing"):
            echo.ask({"do": "refuse"})
        assert echo.ask({"n": 1}) == {"n": 1}
        with pytest.raises(ArmFailed, match="echo: the process ended: out of memory"):
            echo.ask({"do": "die"})


def test_stock_engines_read_the_same_tensors_without_a_word_of_jetgraph(tmp_path: Path):
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "model.safetensors").write_bytes(b"tensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "jetgraph": {"policy": "jet"}}
    (exported / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    folder = arms.without_plugin(exported, tmp_path / "stock")
    config = json.loads((folder / "config.json").read_text())
    assert config == {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert (folder / "model.safetensors").read_bytes() == b"tensors"


def test_the_arm_with_our_linears_alone_differs_in_one_word(tmp_path: Path):
    exported = tmp_path / "jet"
    exported.mkdir()
    (exported / "config.json").write_text(json.dumps({"quantization_config": {"jetgraph": {"ops": "exact", "a": 1}}}))
    (exported / "model.safetensors").write_bytes(b"weights")
    folder = arms.with_stock_operators(exported, tmp_path / "stock")
    config = json.loads((folder / "config.json").read_text())
    assert config == {"quantization_config": {"jetgraph": {"ops": "stock", "a": 1}}}
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_shared_gpus_cache_holds_the_tokens_that_are_asked_for(tmp_path: Path):
    sizes = {"num_hidden_layers": 36, "num_key_value_heads": 8, "hidden_size": 4096, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    per_token = 36 * 8 * 128 * 2 * 2  # K and V of a head of 128, two bytes a number
    found = arms.cache_options(tmp_path, 100_000)
    assert per_token * 100_000 < found["kv_cache_memory_bytes"] < per_token * 101_100
    assert arms.cache_options(tmp_path, 1)["kv_cache_memory_bytes"] == 1 << 28


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU these run")
@pytest.mark.parametrize("parse", [rollout.parse, mismatch.parse])
def test_real_sizes_are_refused_without_a_gpu(parse, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse([])
    assert "needs a CUDA device" in capsys.readouterr().err
    assert parse(["--tiny"]).layers == 2

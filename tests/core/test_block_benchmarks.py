"""The GPU programs of whole blocks, run on tiny ones: figures come from a GPU, that they work is tested here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import block, memory
from benchmarks.decoder import QWEN3_8B, TINY, Arm, make_model

REPOSITORY = Path(__file__).resolve().parents[2]


def run(program: str, *options: str) -> tuple[int, dict[str, dict]]:
    rows = Path(options[-1])
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{program}", "--tiny", *options],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert rows.exists(), done.stderr[-2000:]
    return done.returncode, {row["metric"]: row for row in json.loads(rows.read_text())["rows"]}


def test_the_linears_of_a_block_are_those_of_the_model():
    model = make_model(TINY, 1, torch.device("cpu"))
    found = {
        name.rpartition(".")[2].removesuffix("_proj"): (m.out_features, m.in_features)
        for name, m in model.model.layers[0].named_modules()
        if isinstance(m, torch.nn.Linear)
    }
    assert block.linears(TINY) == found
    assert sum(n * k for n, k in block.linears(QWEN3_8B).values()) == 4096 * (6144 + 4096 + 3 * 12288)


def test_kept_bytes_count_each_storage_once_and_no_parameter():
    arm = Arm("plain", make_model(TINY, 1, torch.device("cpu")))
    weight = arm.model.model.layers[0].mlp.up_proj.weight
    arm.forward = lambda x: torch.nn.functional.linear(x, weight).exp() * x.view(-1)[:256]  # type: ignore[method-assign]
    x = torch.randn(2, 128).bfloat16()
    total, by_dtype = memory.kept_bytes(arm, x)
    assert by_dtype == {"bfloat16": 2 * 128 * 2 + 2 * 256 * 2}  # x, once for two readers; exp's result, likewise
    assert total == sum(by_dtype.values())


@pytest.mark.slow
def test_the_block_program_runs_and_a_missing_peer_is_a_miss(tmp_path: Path):
    arms = ["--arm", "bf16", "--arm", "torchao", "--arm", "jet", "--turns", "1", "--repeats", "1"]
    status, rows = run("block", *arms, "--profile", str(tmp_path / "table.txt"), "--json", str(tmp_path / "rows.json"))
    assert rows["32 tokens, forward+backward: jet over BF16 torch.compile"]["value"] > 0
    assert rows["32 tokens, no_grad forward, limit: GEMMs"]["value"] > 0
    assert rows["32 tokens, jet: numbers that no_grad computes otherwise"]["value"] == 0
    assert "jetgraph::silu_mul_backward_quantize" in (tmp_path / "table.txt").read_text()
    missing = rows.get("peer torchao: torchao is not installed")
    assert (missing is None) or (status == 1 and missing["ok"] is False)


@pytest.mark.slow
def test_the_memory_and_scaling_programs_run(tmp_path: Path):
    arms = ["--arm", "bf16-default", "--arm", "jet-unfused", "--arm", "jet"]
    _, rows = run("memory", *arms, "--json", str(tmp_path / "memory.json"))
    names = ("jet, not fused", "BF16, default partitioner")
    kept = {a: rows[f"{a}: kept for backward a token and layer"]["value"] for a in names}
    fused = rows["jet: kept for backward a token and layer"]["value"]
    assert fused < kept["jet, not fused"] < kept["BF16, default partitioner"]
    status, rows = run("scaling", "--repeats", "1", "--json", str(tmp_path / "scaling.json"))
    assert status == 0
    assert 0 < rows["our Python a layer"]["value"] < 1e5

"""A checkpoint that jetgraph exported needs no setting: `vllm.LLM(folder)`, plugin and worker found by vLLM itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.conftest import run_job, run_python

pytestmark = pytest.mark.engine
ASKED = {"prompts": [[5, 6, 7, 8, 9], [11, 12, 13]], "seeds": [1, 2]}


def test_a_spawned_worker_with_nothing_set_computes_what_the_eager_engine_computes(jet_model: Path, tmp_path: Path):
    """vLLM's default, also on a CPU, is Inductor, whose numbers are others: the plugin takes its place."""
    out = tmp_path / "found.json"
    program = str(Path(__file__).with_name("as_users_do.py"))
    run_python(program, str(jet_model), json.dumps(ASKED), str(out), VLLM_ENABLE_V1_MULTIPROCESSING="1")
    found = json.loads(out.read_text())
    assert found["client"] == "SyncMPClient"  # the model runs in another process
    engine = {"model_dir": str(jet_model), "enforce_eager": True, "max_model_len": 256}
    steps = [{"name": "batch", "do": "generate"}]
    job = {"engine": engine, **ASKED, "max_tokens": 8, "steps": steps}
    completions = run_job(job, tmp_path)["steps"]["batch"]["completions"]
    assert found["tokens"] == [c["tokens"] for c in completions]
    assert found["logprobs"] == [c["logprobs"] for c in completions]

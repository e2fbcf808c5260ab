"""A small random model with awkward sizes, its exports, and engines in their own processes.

JETGRAPH_TEST_MODEL=/folder runs the same tests on a real bf16 Llama-like checkpoint instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def bf16_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's sizes (hidden 576 = 4.5 groups, K/V 192 rows = 1.5 blocks), two layers, a vocabulary vLLM pads."""
    if given := os.environ.get("JETGRAPH_TEST_MODEL"):
        return Path(given)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        initializer_range=0.08,
        rms_norm_eps=1e-5,
    )
    folder = tmp_path_factory.mktemp("bf16_model")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def jet_model(bf16_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from jetgraph.export import export_checkpoint

    return export_checkpoint(bf16_model, tmp_path_factory.mktemp("jet_model"), policy="jet")


@pytest.fixture(scope="session")
def exact_bf16_model(bf16_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from jetgraph.export import export_checkpoint

    return export_checkpoint(bf16_model, tmp_path_factory.mktemp("exact_bf16_model"), policy="bf16")


def run_job(job: dict, folder: Path, **environment: str) -> dict:
    """Run ``python -m jetgraph_vllm`` on a job in ``folder`` and return its results."""
    job = {**job, "results": str(folder / "results.json")}
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    run_python("-m", "jetgraph_vllm", str(path), **environment)
    return json.loads((folder / "results.json").read_text())


def run_python(*arguments: str, **environment: str) -> None:
    """Run python on the repository's packages; prints the engine's progress, and all of its output if it fails."""
    paths = [str(REPOSITORY), str(REPOSITORY / "integrations"), os.environ.get("PYTHONPATH", "")]
    settings = {
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **settings, **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    print("\n".join(line for line in done.stderr.splitlines() if line.startswith("jetgraph_vllm:")))
    if done.returncode:
        raise AssertionError(f"the engine process failed ({done.returncode}):\n{done.stderr[-4000:]}")

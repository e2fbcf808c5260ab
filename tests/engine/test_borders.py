"""A live engine held against training's graph at the borders of its linears: the first one that differs is named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetgraph.diverge import RecordingReport
from jetgraph.engines import get_engine
from jetgraph.export import export_checkpoint
from jetgraph.first_difference import in_live_engine, with_recording
from jetgraph.pair import run_trainer
from tests.engine.conftest import run_job

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
PROMPT = [*range(11, 60)]
CHUNK, SAMPLED = 16, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of SmolLM2's sizes with a vocabulary that vLLM does not pad."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, tie_word_embeddings=True, max_position_embeddings=1024,
        initializer_range=0.08,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_checkpoint(model, tmp_path_factory.mktemp("served"), "jet")


@pytest.fixture(scope="module")
def train(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    graph = tmp_path_factory.mktemp("train") / "train.json"
    run_trainer(model, "jet", "reference", graph=graph, backward=False)
    return graph


def held(train: Path, model: Path, folder: Path) -> RecordingReport:
    """The engine on ``folder`` against training's graph; the prompt in chunks of 16, then token by token."""
    recording = get_engine("vllm").record(folder, PROMPT, max_tokens=SAMPLED, tokens=CHUNK)
    assert recording.steps == (16, 16, 16, 1, *[1] * (SAMPLED - 1))
    return with_recording(train, None, model, recording)


def test_our_engine_holds_trainings_bits_at_every_border(train, model, served):
    report = held(train, model, served)
    assert (report.first, report.exit_status) == ("", 0)
    assert report.num_rows == len(PROMPT) + SAMPLED - 1
    assert report.num_borders == 1 + 2 * 2 * 7 + 1
    assert report.not_recorded == ("lm_head:output",)  # the engine computes it for the rows that it samples


def test_one_changed_weight_code_is_found_at_its_linear(train, model, served, tmp_path):
    """The sign of one code of the second layer's up_proj, the largest of its row."""
    folder = tmp_path / "changed"
    shutil.copytree(served, folder)
    tensors = load_file(folder / "model.safetensors")
    codes = tensors["model.layers.1.mlp.up_proj.weight"]
    column = int(codes[7].float().abs().argmax())
    codes.view(torch.uint8)[7, column] ^= 0x80
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    report = held(train, model, folder)
    assert report.first == "model.layers.1.mlp.up_proj:output"
    assert report.exit_status == 1
    assert 0 < report.num_different <= report.num_rows
    assert {report.train.nodes[i].op for i in report.between} == {"parameter", "quantize", "gemm", "round"}


def test_a_compiled_engine_is_told_apart_from_one_that_computes_nothing(served, tmp_path):
    step = {"name": "live", "do": "borders", "prompt": PROMPT, "seed": 1, "max_tokens": 2}
    with pytest.raises(AssertionError, match="a compiled engine passes hooks by, use enforce_eager"):
        run_job({"engine": {"model_dir": str(served)}, "steps": [step]}, tmp_path)


def test_a_stock_bf16_engine_parts_from_jet_training_at_the_first_gemm(train, model):
    report = held(train, model, model)
    assert report.first == "model.layers.0.self_attn.q_proj:output"
    assert report.after == "model.layers.0.self_attn.v_proj:input"
    assert (report.row, report.how) == (0, "in a step of 16 tokens")


def test_the_whole_command_on_a_live_pair(model, tmp_path):
    """Sampled, scored, recorded, and both captured graphs run: nothing differs anywhere."""
    found = in_live_engine(model, "jet", "vllm", tmp_path, prompt=PROMPT[:20], max_tokens=4)
    assert (found.mismatch.num_exact, found.mismatch.max) == (found.mismatch.num_tokens, 0.0)
    assert (found.recording.first, found.comparison.roots, found.exit_status) == ("", (), 0)
    assert found.comparison.num_compared > 150
    assert "no border differs" in found.text()
    assert found.to_plain()["live"]["tokens"] == 20 + 4 - 1

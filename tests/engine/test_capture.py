"""A capture names everything and agrees with itself; whether it means what training means is the lifter's question."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jetgraph_vllm.capture_format import EngineCapture

from tests.engine.conftest import run_job

pytestmark = pytest.mark.engine


def capture(model: Path, folder: Path, **environment: str) -> EngineCapture:
    path = folder / "capture.pt"
    job = {
        "engine": {"model_dir": str(model), "max_num_batched_tokens": 64, "max_num_seqs": 4},
        "steps": [{"name": "graph", "do": "capture", "path": str(path)}],
    }
    run_job(job, folder, **environment)
    return EngineCapture.load(path)


@pytest.fixture(scope="module")
def jet(jet_model: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineCapture:
    return capture(jet_model, tmp_path_factory.mktemp("jet"))


@pytest.fixture(scope="module")
def stock(bf16_model: Path, tmp_path_factory: pytest.TempPathFactory) -> EngineCapture:
    return capture(bf16_model, tmp_path_factory.mktemp("stock"), JETGRAPH_PLAIN_LINEAR="1")


@pytest.fixture(params=["jet", "stock"])
def either(request: pytest.FixtureRequest) -> EngineCapture:
    return request.getfixturevalue(request.param)


def test_every_input_is_named(either: EngineCapture) -> None:
    for graph in (either.body, *either.heads):
        for record in (graph.aten, graph.dynamo):
            assert sum(op.kind == "placeholder" for op in record) == len(graph.inputs)
        for described in graph.inputs:
            assert described.kind in ("parameter", "buffer", "input", "size", "object")
            if described.kind in ("parameter", "buffer"):
                assert tuple(either.tensors[described.fqn].shape) == described.shape
    assert {i.fqn for i in either.body.inputs if i.kind == "input"} == {"input_ids", "positions"}
    layers = [i.fqn for i in either.body.inputs if i.kind == "object"]
    assert layers == [attention.layer_name for attention in either.attention]
    assert either.aliases["lm_head.weight"] == "model.embed_tokens.weight"


def test_modules_have_their_live_names(either: EngineCapture) -> None:
    names = {op.fqn for op in either.body.aten if op.kind == "call"}
    assert "model.layers.0.self_attn.qkv_proj" in names
    assert not any("L[" in name for name in names)


def test_heads_for_one_row_and_for_many(either: EngineCapture) -> None:
    assert sorted(head.num_rows or 0 for head in either.heads) == [0, 1]
    assert either.head(1).num_rows == 1
    assert either.head(5).num_rows is None


def test_recorded_calls_fit_together(either: EngineCapture) -> None:
    assert len(either.body_calls) >= 6
    for call in either.body_calls:
        batch = call.batch
        assert batch.num_actual_tokens == batch.query_start_loc[-1] == len(batch.slot_mapping)
        assert call.output.shape[0] == call.inputs["input_ids"].shape[0] == call.inputs["positions"].shape[0]
        for i, length in enumerate(batch.seq_lens):
            last = call.inputs["positions"][batch.query_start_loc[i + 1] - 1]
            assert int(last) == length - 1
        assert set(call.attention_outputs) == {attention.layer_name for attention in either.attention}
    rows = torch.cat([call.output for call in either.body_calls])
    for call in either.head_calls:
        assert all((rows == row).all(1).any() for row in call.hidden)
        assert either.heads[call.graph].num_rows in (None, call.hidden.shape[0])
        assert call.logits.shape == (call.hidden.shape[0], either.config["vocab_size"])


def test_parts_of_merged_weights(jet: EngineCapture, stock: EngineCapture) -> None:
    layer = "model.layers.0.self_attn"
    ours, theirs = jet.linears[f"{layer}.qkv_proj"], stock.linears[f"{layer}.qkv_proj"]
    assert [part.name for part in ours] == [f"{layer}.{name}_proj" for name in "qkv"]
    assert [(p.name, p.rows) for p in ours] == [(p.name, p.rows) for p in theirs]
    scale_rows = [part.scale_rows for part in ours]
    assert scale_rows[0][0] == 0
    assert all(a[1] == b[0] for a, b in zip(scale_rows, scale_rows[1:], strict=False))
    assert jet.tensors[f"{layer}.qkv_proj.weight_scale_inv"].shape[0] == scale_rows[-1][1]
    assert jet.tensors[f"{layer}.qkv_proj.weight_scale_inv"].dtype == torch.float32


def test_what_runs_is_ours_in_one_and_vllms_in_the_other(jet: EngineCapture, stock: EngineCapture) -> None:
    def targets(graph: EngineCapture) -> set[str]:
        return {op.target for op in graph.body.aten if op.kind == "call"}

    assert {"jetgraph.quantize.default", "jetgraph.fp8_gemm.default"} <= targets(jet)
    assert "aten.mm.default" in targets(stock)
    assert not any("jetgraph" in target for target in targets(stock))
    assert jet.attention[0].impl.endswith("ExactAttentionImpl")
    assert stock.attention[0].impl.endswith("CPUAttentionBackendImpl")


def test_sampler_trace(either: EngineCapture) -> None:
    targets = [op.target for op in either.sampler]
    assert targets[0] == "logits"
    assert "token_ids" in targets
    assert targets[-1] == "output"
    assert any("log_softmax" in target for target in targets)
    assert either.settings["device_type"] == "cpu"
    assert either.settings["compilation_mode"] == 2
    assert not either.settings["enforce_eager"]

"""The body in pieces without an engine: a decoder of the plugin's formulas, attention as vLLM's two operators.

The operators are named like vLLM's but live in this test; the cuts find them by name.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from jetgraph_vllm import formulas, pieces
from torch import Tensor, nn

from jetgraph.lowering import fused_ops, torch_ops  # noqa: F401  (define torch.ops.jetgraph)
from tests.engine.conftest import run_python

pytestmark = pytest.mark.slow  # compiles for a CPU
HEADS, GROUPS, SIZE, WIDTH, INNER, LAYERS = 4, 2, 32, 128, 256, 3
RULE = (448.0, 1e-12, "div", False)


@pytest.fixture(scope="module", autouse=True)
def operators():
    """Attention that reads nothing of the past: enough to see where the graph is cut."""
    library = torch.library.Library("jgtest", "DEF")
    library.define("unified_kv_cache_update(Tensor key, Tensor value, str layer) -> Tensor")
    library.define(
        "unified_attention_with_output(Tensor query, Tensor key, Tensor value, Tensor(a!) output, str layer, *, "
        "Tensor? kv_cache_dummy_dep=None) -> ()"
    )

    def attend(query, key, value, output, layer, *, kv_cache_dummy_dep=None):
        output.copy_(query * key.repeat_interleave(HEADS // GROUPS, 1) + value.repeat_interleave(HEADS // GROUPS, 1))

    for key in ("CPU", "Meta"):
        library.impl("unified_kv_cache_update", lambda k, v, layer: k.new_empty(0), key)
    library.impl("unified_attention_with_output", attend, "CPU")
    library.impl("unified_attention_with_output", lambda *_, **__: None, "Meta")
    yield
    library._destroy()


class Linear(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        weight = (torch.randn(num_out, num_in) / num_in**0.5).bfloat16()
        codes, scale = torch.ops.jetgraph.quantize(weight, 128, 128, *RULE)
        self.weight, self.scale = (nn.Parameter(t, requires_grad=False) for t in (codes, scale))

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = torch.ops.jetgraph.quantize(x, 1, 128, *RULE)
        return torch.ops.jetgraph.fp8_gemm(codes, scale, self.weight, self.scale, None, 128, 128)


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.qkv, self.out = Linear(WIDTH, (HEADS + 2 * GROUPS) * SIZE), Linear(HEADS * SIZE, WIDTH)
        self.up, self.down = Linear(WIDTH, 2 * INNER), Linear(INNER, WIDTH)
        norms = [(1 + torch.randn(n) / 8).bfloat16() for n in (WIDTH, WIDTH, SIZE)]
        self.before, self.after, self.q_norm = (nn.Parameter(w, requires_grad=False) for w in norms)

    def forward(
        self, hidden: Tensor, residual: Tensor | None, table: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        x = formulas.rms_norm(residual, self.before, 1e-6)
        q, k, v = self.qkv(x).split([HEADS * SIZE, GROUPS * SIZE, GROUPS * SIZE], -1)
        q = formulas.rms_norm(q.view(-1, HEADS, SIZE), self.q_norm, 1e-6).view(q.shape)
        rows, half = table.index_select(0, positions.flatten()).to(x.dtype), SIZE // 2
        cos, sin = (torch.cat((t, t), -1).unsqueeze(0).unsqueeze(1) for t in (rows[..., :half], rows[..., half:]))
        heads = (t.view(1, t.shape[0], -1, SIZE).transpose(1, 2) for t in (q, k))
        q, k = (formulas.rotate(t, cos, sin).transpose(1, 2).reshape(t.shape[2], -1) for t in heads)
        output = torch.empty(torch.Size((q.shape[0], HEADS * SIZE)), dtype=q.dtype).view(-1, HEADS, SIZE)
        q, k, v = (t.view(-1, n, SIZE) for t, n in ((q, HEADS), (k, GROUPS), (v, GROUPS)))
        dep = torch.ops.jgtest.unified_kv_cache_update(k, v, self.name)
        torch.ops.jgtest.unified_attention_with_output(q, k, v, output, self.name, kv_cache_dummy_dep=dep)
        residual = self.out(output.view(-1, HEADS * SIZE)) + residual
        return self.down(formulas.silu_and_mul(self.up(formulas.rms_norm(residual, self.after, 1e-6)))), residual


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(50, WIDTH).bfloat16(), requires_grad=False)
        self.table = nn.Parameter(torch.randn(99, SIZE), requires_grad=False)
        self.layers = nn.ModuleList(Layer(f"layer.{i}") for i in range(LAYERS))
        self.last = nn.Parameter((1 + torch.randn(WIDTH) / 8).bfloat16(), requires_grad=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden, residual = nn.functional.embedding(ids, self.embed), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, self.table, positions)
        return formulas.rms_norm(hidden + residual, self.last, 1e-6)


@pytest.fixture(scope="module")
def compiled():
    """(body, pieces by codegen): compiled once for all sizes, as vLLM does."""
    torch.manual_seed(0)
    body, found = Body(), {}

    def make(codegen: str):
        def backend(module, inputs, **_):
            assert pieces.is_exact(module)
            found[codegen] = pieces.Pieces(module, codegen)
            return found[codegen]

        compiled = torch.compile(body, backend=backend, fullgraph=True, dynamic=False)
        ids, positions = inputs_of(7)
        for t in (ids, positions):
            torch._dynamo.mark_dynamic(t, 0)
        with torch.inference_mode():
            compiled(ids, positions)
        return compiled

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "CUTS", tuple(name.replace("vllm::", "jgtest::") for name in pieces.CUTS))
        yield body, {codegen: make(codegen) for codegen in ("fx", "inductor")}, found


def inputs_of(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    return tuple(torch.randint(0, n, (count,), generator=generator) for n in (50, 99))


@pytest.mark.parametrize("count", [7, 2, 65])
def test_pieces_give_the_bits_of_the_graph(compiled, count):
    body, runs, _ = compiled
    with torch.inference_mode():
        expected = body(*inputs_of(count))
        for run in runs.values():
            assert torch.equal(run(*inputs_of(count)), expected)


def test_who_ran_is_said(compiled):
    """Of the last piece, whose norm feeds no quantiser, ATen's mean would be Inductor's own sum: it stays with ATen."""
    _, _, found = compiled
    assert found["fx"].executed_by == "fx"
    assert found["inductor"].executed_by == "inductor-exact"


def test_equal_layers_share_an_executable_and_everything_is_fused(compiled):
    _, _, found = compiled
    made = found["fx"]
    assert made.num_pieces == LAYERS + 1
    assert len(made._executions) == 3  # before the first attention, between two, behind the last
    assert not [f for f in made.fusions if f.refusal]
    fused = [f.operator for f in made.fusions]
    # one executable between attentions: two norms, one activation and the norm of q; the last norm feeds no quantiser
    assert fused.count("jetgraph::rms_norm_quantize") == 1 + 2 + 1
    assert fused.count("jetgraph::silu_mul_quantize") == 2
    assert fused.count("jetgraph::inverse_rms") == 1 + 1 + 1
    assert fused.count("jetgraph::rms_norm_rotary") == 2 * 2  # q with its norm, and k


def test_angles_are_looked_up_once(compiled):
    _, _, found = compiled
    calls = [str(n.target) for e in found["fx"]._executions.values() for n in e.graph.graph.nodes]
    assert calls.count("aten.index_select.default") == 1


@pytest.mark.engine
def test_an_engine_in_pieces_with_merged_products_replays(jet_model, tmp_path):
    """What was computed in each recorded call is what the graph of separate linears says, from token ids to logits."""
    steps = [{"name": "graph", "do": "graph", "path": str(tmp_path / "infer.json")}]
    job = {"engine": {"model_dir": str(jet_model)}, "steps": steps, "results": str(tmp_path / "results.json")}
    (tmp_path / "job.json").write_text(json.dumps(job))
    run_python(str(Path(__file__).with_name("merged_products.py")), str(tmp_path / "job.json"), JETGRAPH_PIECES="fx")
    found = json.loads((tmp_path / "results.json").read_text())
    assert "jetgraph::silu_mul_quantize" in found["engine"]["pieces"]
    assert found["steps"]["graph"]["replayed"].endswith("all equal")
    rules = json.loads((tmp_path / "infer.json").read_text())["meta"]["rules"]
    assert rules["merged weight is its linears"] == 2  # gate and up of each layer; a block straddles k and v

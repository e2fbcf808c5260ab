"""What a checkpoint may declare, the exporter that writes it, and the versions of vLLM that may read it."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import jetgraph_vllm
import pytest
import torch
from jetgraph_vllm.declaration import Declaration
from safetensors.torch import load_file

from jetgraph.export import declare, declared_policy, export_checkpoint
from jetgraph.policy import get_policy

LINEAR = "model.layers.0.mlp.up_proj"


def declared(policy: str) -> dict:
    chosen = get_policy(policy)
    return declare(chosen, "exact", {LINEAR: chosen.linear(LINEAR, rollout=True)})


JET = declared("jet")
TENSORWISE = declared("fp8_tensorwise")


def changed(**own: str) -> dict:
    config = copy.deepcopy(JET)
    config["jetgraph"].update(own)
    return config


@pytest.mark.parametrize("policy", ["jet", "jet_ue8m0", "bf16_train_fp8_rollout"])
def test_what_the_exporter_declares_is_what_the_engine_reads(policy: str) -> None:
    config = json.loads(json.dumps(declared(policy)))
    declaration = Declaration.parse(config)
    wanted = get_policy(policy).linear(LINEAR, rollout=True)
    assert (declaration.activation, declaration.weight) == (wanted.activation, wanted.weight)
    assert declared_policy(config["jetgraph"]) == get_policy(policy)
    assert declaration.is_fp8
    assert declaration.unconverted == ("lm_head",)
    assert not Declaration.parse(declared("bf16")).is_fp8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "fp8"}, "has no 'jetgraph' entry"),
        ({"jetgraph": {"policy": "jet", "ops": "exact"}}, "lacks activation, weight"),
        (changed(ops="fast"), "expected one of exact, stock"),
        (changed(activation="bf16"), "an FP8 weight needs an FP8 activation"),
        (changed(weight="bf16"), "expected bf16 for both, or FP8 for both"),
        (changed(activation=JET["jetgraph"]["activation"].replace("1x128", "1x64")), "of the same G"),
        (changed(weight=JET["jetgraph"]["weight"].replace("128x128", "*x*")), "of the same G"),
        (changed(weight=JET["jetgraph"]["weight"].replace(" f32 ", " e8m0 ")), "expected f32 scales"),
        (changed(activation=JET["jetgraph"]["activation"].replace(" dyn ", " static ")), "expected dynamic"),
        ({**JET, "weight_block_size": [64, 128]}, "contradicts the declared weight"),
        (TENSORWISE, r"depend on the other tokens of the call \(JG019\), so policy 'fp8_tensorwise' is not served"),
    ],
)
def test_declarations_that_nothing_here_can_run(config: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Declaration.parse(config)


def test_exported_folder(bf16_model: Path, jet_model: Path, tmp_path: Path) -> None:
    before = {k: v for file in bf16_model.glob("*.safetensors") for k, v in load_file(file).items()}
    after = load_file(jet_model / "model.safetensors")
    for name, value in before.items():
        if "_proj." not in name:
            assert torch.equal(after[name], value)
            continue
        codes, scale = torch.ops.jetgraph.quantize(value, 128, 128, 448.0, 1e-12, "div", False)
        assert torch.equal(after[name].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(after[f"{name}_scale_inv"], scale)
        assert after[f"{name}_scale_inv"].dtype == torch.float32
    with pytest.raises(ValueError, match="already quantised"):
        export_checkpoint(jet_model, tmp_path)


@pytest.mark.parametrize("version", ["0.24.0", "0.27.1", "0.27.1+cpu"])
def test_supported_versions(version: str) -> None:
    jetgraph_vllm.check_version(version)


@pytest.mark.parametrize("version", ["0.23.9", "0.28.0", "0.2", "1.0.0", "dev"])
def test_other_versions_are_refused_with_the_list(version: str) -> None:
    with pytest.raises(jetgraph_vllm.UnsupportedEngine, match="install one of 0.24, 0.25, 0.26, 0.27"):
        jetgraph_vllm.check_version(version)

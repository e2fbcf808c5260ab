"""The exporter: what it writes, and every policy, model or folder that it refuses rather than half-quantises."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from jetgraph.export import declared_policy, export_checkpoint
from jetgraph.model_linears import linears_of_config, linears_of_model
from jetgraph.policy import FP8Recipe, Policy, PolicyError, Rule, get_policy, policies
from tests.core.small_models import random_model

DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def model():
    return random_model("llama", tied=True)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bf16")
    model.save_pretrained(path)
    return path


def exported(folder: Path, out: Path, policy: str | Policy) -> tuple[dict, dict]:
    """(tensors, quantization_config)"""
    path = export_checkpoint(folder, out, policy)
    return load_file(path / "model.safetensors"), json.loads((path / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("name", ["jet", "jet_ue8m0", "fp8_tensorwise"])
def test_every_linear_of_a_block_is_stored_as_the_codes_of_training(name, folder, model, tmp_path):
    tensors, config = exported(folder, tmp_path, name)
    assert declared_policy(config["jetgraph"]) == get_policy(name)
    for fqn, parameter in model.named_parameters():
        module = fqn.removesuffix(".weight")
        precision = get_policy(name).linear(module, rollout=True)
        if not precision.quantized or not module.endswith("_proj"):
            assert torch.equal(tensors[fqn], parameter)
            continue
        scale = tensors[f"{fqn}_scale_inv"]
        assert tensors[fqn].dtype is torch.float8_e4m3fn
        assert scale.dtype is torch.float32
        wanted = precision.weight.scale.granularity.scale_shape(tuple(parameter.shape))
        assert tuple(scale.shape) == wanted
        rows, cols = (-(-n // s) for n, s in zip(parameter.shape, wanted, strict=True))
        full = scale.repeat_interleave(128 if wanted[0] > 1 else rows, 0)[: parameter.shape[0]]
        full = full.repeat_interleave(128 if wanted[1] > 1 else cols, 1)[:, : parameter.shape[1]]
        error = (tensors[fqn].float() * full - parameter.float()).norm() / parameter.float().norm()
        assert 0.015 < error < 0.04
        if name == "jet_ue8m0":
            assert (torch.frexp(scale)[0] == 0.5).all()
    block = {"jet": [128, 128], "jet_ue8m0": [128, 128], "fp8_tensorwise": None}[name]
    assert config.get("weight_block_size") == block


def test_tied_embeddings_are_one_bf16_tensor_before_and_after(folder, tmp_path):  # [T9, W17]
    before = load_file(folder / "model.safetensors")
    tensors, _ = exported(folder, tmp_path, "jet")
    assert "lm_head.weight" not in tensors
    assert tensors["model.embed_tokens.weight"].dtype is torch.bfloat16
    assert torch.equal(tensors["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    again, _ = exported(folder, tmp_path / "bf16", "bf16")
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    del config["quantization_config"]  # transformers has no reader for it, and nothing in the folder is quantised
    (tmp_path / "bf16" / "config.json").write_text(json.dumps(config))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert len({id(p) for p in loaded.parameters()}) == len(again)


def test_an_override_reaches_the_checkpoint(folder, tmp_path):  # [Q15]
    chosen = get_policy("jet").override(DOWN, None)
    tensors, config = exported(folder, tmp_path, chosen)
    kept = [name for name, value in tensors.items() if name.endswith("_proj.weight") and value.dtype is torch.bfloat16]
    assert kept == [f"{DOWN}.weight"]
    assert f"{DOWN}.weight_scale_inv" not in tensors
    assert config["modules_to_not_convert"] == ["lm_head", DOWN]
    assert declared_policy(config["jetgraph"]) == chosen


@pytest.mark.parametrize(
    ("pattern", "recipe", "message"),
    [
        ("model.layers.0.mlp.gate", None, "'model.layers.0.mlp.gate' matches no linear"),  # [N1, W12]
        ("model.layers.0.self_attn.q_proj", None, "self_attn.qkv_proj: q_proj bf16"),  # [W13]
        ("model.layers.0.mlp.gate_proj", FP8Recipe(64), "mlp.gate_up_proj: gate_proj f8e4m3"),  # [W13]
        ("lm_head", FP8Recipe(), "quantises lm_head, the output head"),  # [W15]
        (DOWN, FP8Recipe(64), "has 2 FP8 recipes; a checkpoint declares one"),
    ],
)
def test_policies_that_no_checkpoint_can_hold(pattern, recipe, message, folder, tmp_path):
    with pytest.raises(PolicyError, match=message):
        export_checkpoint(folder, tmp_path / "out", get_policy("jet").override(pattern, recipe))
    assert not (tmp_path / "out").exists()


def test_names_with_a_prefix_are_an_error_not_a_bf16_rollout(folder, tmp_path):  # [N1, W11]
    """The folder calls its tensors otherwise than the model: nothing may be left in BF16 for that."""
    other = shutil.copytree(folder, tmp_path / "prefixed")
    tensors = load_file(other / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()}
    save_file(renamed, other / "model.safetensors", metadata={"format": "pt"})
    for name in ("jet", "fp8_tensorwise", "bf16_train_fp8_rollout"):
        with pytest.raises(PolicyError, match=r"does not have under that name; nearest: model.language_model.layers"):
            export_checkpoint(other, tmp_path / "out", name)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_fp8_that_came_without_a_scale_is_refused(name, folder, tmp_path):  # [N1, W11]
    other = shutil.copytree(folder, tmp_path / "half")
    tensors = load_file(other / "model.safetensors")
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{name} is torch.float8_e4m3fn already"):
        export_checkpoint(other, tmp_path / "out", "jet")


def test_masters_of_another_dtype_are_refused(folder, tmp_path):
    other = shutil.copytree(folder, tmp_path / "wide")
    save_file({n: t.float() for n, t in load_file(other / "model.safetensors").items()}, other / "model.safetensors")
    with pytest.raises(ValueError, match="is torch.float32, expected bfloat16"):
        export_checkpoint(other, tmp_path / "out", "jet")


def test_linears_of_a_config_are_those_of_the_model(folder, model, tmp_path):
    assert linears_of_config(folder) == linears_of_config(folder / "config.json") == linears_of_model(model)
    assert linears_of_config(folder).head == "lm_head"
    for content, message in [
        (None, "neither a model folder"),
        ("{}", "no causal LM"),
        ('{"model_type": "vit"}', "no causal LM"),
    ]:
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            linears_of_config(tmp_path)


def test_a_policy_file_travels_to_the_engine(folder, tmp_path):
    rules = (Rule("re:.*mlp.*", FP8Recipe()), Rule("*", None))
    file = tmp_path / "mine.json"
    file.write_text(Policy("mine", "only the MLPs", rules).to_json())
    tensors, config = exported(folder, tmp_path / "out", str(file))
    assert sum(value.dtype is torch.float8_e4m3fn for value in tensors.values()) == 6
    assert "mine" not in policies()
    assert declared_policy(config["jetgraph"]) == get_policy(str(file))

"""`jetgraph diverge` on files: its exit statuses, the engine's own codes, and prompts that it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from jetgraph.cli import app
from jetgraph.export import export_checkpoint
from jetgraph.first_difference import padded, prompt_ids, read_ids
from jetgraph.interpret import Quantized
from tests.core.test_diverge import captured, mutated
from tests.verify.toy_transformer import with_meta


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["diverge", *map(str, arguments)])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights under the names and in the shapes of the toy graphs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return captured("train").save(tmp_path / "train.json"), captured("infer").save(tmp_path / "infer.json")


def test_nothing_differs_is_0(pair, model):
    status, text = run(*pair, "--model", model)
    assert status == 0, text
    assert "no edge differs" in text
    assert "CONTAINED" in text


def test_a_difference_is_1_and_named(pair, model):
    mutated("silu not rounded").save(pair[1])
    status, text = run(*pair, "--model", model, "--ids", "5,6,7,8,9")
    assert status == 1
    assert "first edge that differs: silu at model.layers.1.mlp, layer 1" in text
    assert "explained by JG004" in text
    status, text = run(*pair, "--model", model, "--ids", "5,6,7,8,9", "--json")
    found = json.loads(text)
    assert (status, found["exit_status"], found["live"]) == (1, 1, None)
    (root,) = found["graphs"]["roots"]
    assert (root["fqn"], root["layer"]) == ("model.layers.1.mlp", 1)
    assert root["difference"]["elements"] == 5 * 512


def test_every_root_on_request(pair, model):
    mutated("silu not rounded", layer=None).save(pair[1])
    status, text = run(*pair, "--model", model, "--every")
    assert status == 1
    assert "2 roots, 0 without an entry" in text


def test_what_cannot_be_run_is_3(pair, model):
    with_meta(captured("infer"), replay={"passed": False, "cases": [], "injected": []}).save(pair[1])
    status, text = run(*pair, "--model", model)
    assert status == 3
    assert "unknown: infer: its replay was never done" in text
    mutated("one bit of one code").save(pair[1])
    status, text = run(*pair, "--model", model)
    assert status == 3
    assert text.startswith("unknown: ")
    assert "v_proj" in text


def test_the_engines_own_codes_are_looked_at(pair, model, tmp_path):
    served = export_checkpoint(model, tmp_path / "served", "jet")
    assert run(*pair, "--model", model, "--served", served)[0] == 0
    tensors = load_file(served / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.weight"].view(torch.uint8)[2, 9] ^= 1
    save_file(tensors, served / "model.safetensors", metadata={"format": "pt"})
    status, text = run(*pair, "--model", model, "--served", served)
    assert status == 1
    assert "1 of 131,072 codes differ; the first at [2, 9]" in text
    assert "explained by no entry of the verification report (CONTAINED)" in text  # its digest in the graph is older


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("{train}",), "give the rollout's graph too"),
        (("{train}", "{infer}"), "graphs hold no weights"),
        (("{infer}", "{train}", "--model", "{model}"), "give the training graph first"),
        (("{train}", "{infer}", "--model", "nowhere"), "nowhere does not exist"),
        (("{train}", "nothing.json", "--model", "{model}"), "nothing.json"),
        (("{train}", "{infer}", "--model", "{model}", "--ids", "1,x"), "expected numbers with commas between"),
        (("{train}", "{infer}", "--model", "{model}", "--ids", "1,5000"), "token ids below 1000"),
        (("{model}", "{infer}"), "either a model folder or two graph files"),
    ],
)
def test_bad_input_is_2_in_one_sentence(pair, model, arguments, message):
    places = {"train": pair[0], "infer": pair[1], "model": model}
    status, text = run(*(a.format(**places) for a in arguments))
    assert status == 2
    assert text.startswith("error: ")
    assert message in text
    assert len(text.strip().splitlines()) == 1


def test_prompts(model, tmp_path):
    assert prompt_ids(model, None).tolist() == prompt_ids(model, None).tolist()
    assert prompt_ids(model, [3, 4]).tolist() == [3, 4]
    assert read_ids("3, 4") == [3, 4]
    file = tmp_path / "ids.json"
    file.write_text("[7, 8]")
    assert read_ids(str(file)) == [7, 8]
    with pytest.raises(ValueError, match="whole numbers"):
        read_ids("1.5,2")


def test_a_padded_vocabulary_is_zeros_below_and_codes_stay():
    graph = captured("infer")
    name = "model.embed_tokens.weight"
    nodes = tuple(
        replace(n, type=replace(n.type, shape=(1024, 256))) if n.op == "parameter" and n.attr("name") == name else n
        for n in graph.nodes
    )
    weight, codes = torch.ones(1000, 256), Quantized(torch.zeros(1, 1), torch.zeros(1, 1))
    found = padded(replace(graph, nodes=nodes), {name: weight, "model.layers.0.mlp.up_proj.weight": codes})
    assert found[name].shape == (1024, 256)
    assert torch.equal(found[name][:1000], weight)
    assert not found[name][1000:].any()
    assert found["model.layers.0.mlp.up_proj.weight"] is codes

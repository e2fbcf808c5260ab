"""The command line: what it prints, and its four exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jetgraph.cli import app
from tests.verify.mutations import MUTATIONS, apply
from tests.verify.toy_transformer import build, with_meta

runner = CliRunner()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return build("train").save(tmp_path / "train.json"), build("infer").save(tmp_path / "infer.json")


def run(*arguments: object) -> tuple[int, str]:
    result = runner.invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.output


def test_the_version_is_the_packages():
    assert run("--version") == (0, f"{metadata.version('jetgraph')}\n")


def test_contained_is_0_and_the_certificate_checks(pair, tmp_path):
    certificate = tmp_path / "cert.json"
    status, text = run("verify", *pair, "-o", certificate)
    assert status == 0
    assert "CONTAINED" in text
    assert run("check", certificate, *pair)[0] == 0
    pair[1].write_text(pair[1].read_text().replace("bf16", "f32", 1))
    assert run("check", certificate, *pair)[0] == 1


def test_violated_is_1_and_names_the_fault(pair):
    mutation = MUTATIONS["eps"]
    apply(build("infer"), mutation.edit).save(pair[1])
    status, text = run("verify", *pair)
    assert status == 1
    assert mutation.rule in text
    report = json.loads(run("verify", *pair, "--json")[1])
    assert report["verdict"] == "VIOLATED"


def test_unknown_is_3_never_0(pair):
    with_meta(build("infer"), replay={"passed": False, "cases": [], "injected": []}).save(pair[1])
    status, text = run("verify", *pair)
    assert status == 3
    assert "JG093" in text


@pytest.mark.parametrize("content", ["", "{", "[]", '{"jetgraph": 1}', "\x00\xff"])
def test_unreadable_is_2_in_one_sentence(pair, content):
    pair[1].write_text(content)
    status, text = run("verify", *pair)
    assert status == 2
    assert text.startswith("error: ")
    assert "Traceback" not in text
    assert len(text.strip().splitlines()) == 1


@pytest.mark.parametrize("order", [(0, 0), (1, 1), (1, 0)], ids=["train twice", "rollout twice", "swapped"])
def test_a_graph_is_not_verified_against_its_own_side(pair, order):
    """It is contained in itself: one wrong path in a workflow would be a green build."""
    status, text = run("verify", *(pair[i] for i in order))
    assert status == 2
    assert "give the training graph first" in text
    assert len(text.strip().splitlines()) == 1


def test_usage_errors_are_2(pair, tmp_path):
    assert run("verify", pair[0])[0] == 2
    assert run("verify", tmp_path / "nothing.json", pair[1])[0] == 2
    assert run("verify", tmp_path, pair[1])[0] == 2
    assert run("export", tmp_path / "nothing", "-o", tmp_path / "out")[0] == 2
    assert run("nonsense")[0] == 2
    assert "has no config.json" in run("verify", tmp_path)[1]
    assert "policy 'nope' does not exist" in run("capture", tmp_path, "-p", "nope", "-o", tmp_path / "g.json")[1]


def test_extract_keeps_the_observables(pair, tmp_path):
    status, text = run("extract", pair[0], "-o", tmp_path / "expected.json")
    assert status == 0
    assert build("infer").semantic_digest in text


def test_show_inspect_and_doctor(pair, tmp_path):
    page = tmp_path / "page.html"
    assert run("show", *pair, "-o", page)[0] == 0
    assert "://" not in page.read_text().replace("http://www.w3.org", "")
    status, text = run("inspect", pair[0])
    assert status == 0
    assert "q_proj" in text
    assert json.loads(run("inspect", pair[0], "--json")[1])
    status, text = run("doctor")
    assert status == 0
    assert "3840): ok" in text


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The config of a small Llama; no weights are needed to say what a policy makes of its linears."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=192, num_hidden_layers=3, num_attention_heads=2
    ).save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_policy_show_names_the_rule_of_every_linear(config, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, text = run("policy", "show", "jet", "--model", config)
    assert status == 0
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "model.layers.0–2.mlp.down_proj     128 x 192  FP8 1x128 · 128x128     2" in text
    assert "lm_head" in text
    shown = json.loads(run("policy", "show", "jet", "--model", config.parent, "--json")[1])
    assert len(shown["linears"]) == 3 * 7 + 1
    decided = {row["name"]: row for row in shown["linears"]}
    assert decided["lm_head"]["train"] == decided["lm_head"]["rollout"]
    assert decided["lm_head"]["train"]["rule"] == 1
    assert decided["lm_head"]["train"]["weight"] == "bf16"
    assert decided["model.layers.1.mlp.up_proj"]["rollout"]["weight"].startswith("f8e4m3[128x128")
    assert shown["misfit"] is None


def test_policy_show_reads_files_and_refuses_what_does_not_fit(config, tmp_path):  # [N1, W13]
    text = run("policy", "show", "bf16_train_fp8_rollout")[1]
    assert "rules for training" in text
    assert "rules for rollout" in text
    shown = json.loads(run("policy", "show", "jet", "--json")[1])["policy"]
    file = tmp_path / "mine.json"
    for pattern, message in [
        ("model.layers.0.mlp.gate", "nearest: model.layers.0.mlp.gate_proj"),
        ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.qkv_proj: q_proj bf16"),
    ]:
        rules = [{"pattern": pattern, "fp8": None}, *shown["train"]]
        file.write_text(json.dumps({**shown, "name": "mine", "train": rules}))
        assert run("policy", "show", file)[0] == 0
        status, text = run("policy", "show", file, "--model", config)
        assert status == 2
        assert message in text
    file.write_text("{}")
    assert run("policy", "show", file) == (2, f"error: policy {file}: name is missing\n")
    assert run("policy", "show", "nope")[0] == 2
    assert run("policy", "show", "jet", "--model", tmp_path / "nowhere")[0] == 2


def test_help_names_every_arrow():
    text = run("--help")[1]
    for command in (
        "compile",
        "capture",
        "inspect",
        "extract",
        "export",
        "verify",
        "check",
        "show",
        "diverge",
        "policy",
        "diff",
        "audit",
        "attest",
        "doctor",
    ):
        assert command in text


def test_verification_imports_no_torch(pair):
    code = (
        "import sys\nfrom jetgraph.graph import PrecisionGraph\nfrom jetgraph.verify import verify\n"
        f"r = verify(PrecisionGraph.load({str(pair[0])!r}), PrecisionGraph.load({str(pair[1])!r}))\n"
        "assert str(r.verdict) == 'CONTAINED'\nassert 'torch' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""`jetgraph inspect`: a tree and a table in 80 columns without colour, and a JSON form that stays as it is."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from jetgraph.cli import app
from jetgraph.viz import as_json, text

from .conftest import tiny

KEYS = ["format", "version", "name", "policy", "nodes", "edges", "semantic_digest", "phases", "ops", "values"]
KEYS += ["sections", "linears", "rules", "saved", "unknown", "dead"]


def run(*args, **env) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "80", **env}).invoke(app, [str(a) for a in args])
    return result.exit_code, result.output


@pytest.fixture
def file(tmp_path):
    return tiny(layers=30).save(tmp_path / "graph.json")


def test_the_tree_folds_equal_layers_and_names_each_linears_precisions(file):
    shown = text(tiny(layers=30))
    assert "layers 0–29, equal ×30" in shown
    assert "├── proj  f8e4m3[1x128] × f8e4m3[128x128] → bf16" in shown
    assert shown.count("f8e4m3[1x128] × f8e4m3[128x128] → bf16") == 1


def test_the_tree_says_where_values_are_rounded_and_quantised():
    shown = text(tiny())
    assert "norm  sq, mean, add, mul; rounds to bf16" in shown


def test_layers_that_differ_stand_apart():
    shown = text(tiny(layers=4, odd=2))
    assert "layers 0–1, 3, equal ×3" in shown
    assert "── layer 2" in shown


@pytest.mark.parametrize("prefix", ["model.layers", "somebodys.very_long_module_name.of_an_inner_model.decoder.layers"])
def test_80_columns_without_colour_lose_nothing(prefix, tmp_path):
    path = tiny(layers=12, prefix=prefix).save(tmp_path / "g.json")
    status, shown = run("inspect", path, NO_COLOR="1")
    assert status == 0
    assert "\x1b" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "f8e4m3[1x128] × f8e4m3[128x128]" in shown
    assert "proj (0–11)" in shown
    assert "aten::odd" in shown


def test_40_columns_wrap_and_still_lose_nothing():
    shown = text(tiny(layers=12), width=40)
    assert max(map(len, shown.splitlines())) <= 40
    assert "f8e4m3[128x128]" in shown


def test_json_has_the_documented_shape(file):
    status, shown = run("inspect", file, "--json")
    facts = json.loads(shown)
    assert status == 0
    assert list(facts) == KEYS
    assert (facts["format"], facts["version"]) == ("jetgraph-inspect", 1)
    assert [s["title"] for s in facts["sections"]] == ["embedding", "layers 0–29", "head"]
    layers = facts["sections"][1]
    assert set(layers) == {"title", "equal", "layers", "nodes", "backward_nodes", "modules"}
    assert layers["layers"] == list(range(30))
    module = next(m for m in layers["modules"] if m["path"] == "proj")
    assert module == {
        "path": "proj",
        "ops": {"quantize": 2, "gemm": 1, "round": 1},
        "roundings": {"bf16": 1},
        "quantises": ["f8e4m3[1x128]", "f8e4m3[128x128]"],
        "gemms": [{"role": "FPROP", "operands": ["f8e4m3[1x128]", "f8e4m3[128x128]"], "result": "bf16"}],
        "unknown": [],
    }


def test_the_sections_count_every_node_once():
    for graph in (tiny(layers=5), tiny(layers=5, odd=1, backward=False)):
        total = sum(s["nodes"] * s["equal"] for s in as_json(graph)["sections"])
        assert total == sum(n.op != "const" for n in graph.nodes)

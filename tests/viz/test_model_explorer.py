"""Files for Model Explorer: the viewer's own schema, every edge with its λ (Z6), layers as namespaces (Z1)."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from jetgraph.graph import PrecisionGraph
from jetgraph.viz.model_explorer import graphs, node_data, sync_navigation, write_model_explorer
from jetgraph.viz.study import study

from .conftest import tiny
from .test_pictures import differing


@pytest.fixture(scope="module")
def one():
    return graphs(study(tiny(layers=4)))["graphs"][0]


def test_z1_equal_layers_are_nested_in_one_namespace(one):
    top = {node["namespace"].split("/")[0] for node in one["nodes"]}
    assert top == {"embedding", "layers 0-3, equal x4", "head", "backward"}
    gemm = next(n for n in one["nodes"] if n["label"] == "gemm FPROP")
    assert gemm["namespace"] == "layers 0-3, equal x4/layer 0/proj"


def test_edges_name_nodes_that_exist_and_nothing_is_lost(one):
    graph = tiny(layers=4)
    ids = [node["id"] for node in one["nodes"]]
    assert len(ids) == len(set(ids))
    edges = [(edge["sourceNodeId"], node["id"]) for node in one["nodes"] for edge in node["incomingEdges"]]
    assert {end for edge in edges for end in edge} <= set(ids)
    assert len(edges) == graph.num_edges
    assert {str(i) for i, n in enumerate(graph.nodes) if n.op != "const"} <= set(ids)


def test_a_constant_ties_no_two_layers_together(one):
    readers = [e["sourceNodeId"] for n in one["nodes"] for e in n["incomingEdges"] if "@" in e["sourceNodeId"]]
    assert len(readers) == len(set(readers)) == 4


def test_z6_every_edge_carries_its_precision_weights_included(one):
    graph = tiny(layers=4)
    shown = {(e["sourceNodeId"].split("@")[0], e["targetNodeId"], e["label"])
             for o in one["tasksData"]["edgeOverlaysDataListLeftPane"][0]["overlays"] for e in o["edges"]}  # fmt: skip
    assert shown == {(str(e.producer), str(e.consumer), e.precision.short()) for e in graph.edges()}
    for node in one["nodes"]:
        facts = {a["key"]: a["value"] for a in node["outputsMetadata"][0]["attrs"]}
        assert facts["λ"].startswith(facts["dtype"])
        assert facts["tensor_shape"]


def test_a_quantise_node_says_dtype_granularity_and_scale_rule(one):
    quantise = next(n for n in one["nodes"] if n["label"] == "quantize f8e4m3[128x128]")
    facts = {a["key"]: a["value"] for a in quantise["attrs"]}
    assert (facts["dtype"], facts["granularity"]) == ("f8e4m3", "128x128")
    assert facts["scale rule"] == "div qmax=448 floor=1e-12"


def test_what_the_viewer_draws_is_ascii_where_the_names_are(one):
    """Its labels are drawn with a font atlas of ASCII: anything else becomes a question mark."""
    assert all((node["label"] + node["namespace"]).isascii() for node in one["nodes"])


def test_a_slash_in_a_name_does_not_nest():
    graph = tiny()
    nodes = tuple(replace(n, fqn=n.fqn.replace("proj", "pr/oj")) for n in graph.nodes)
    found = graphs(study(PrecisionGraph("slash", nodes, graph.outputs)))["graphs"][0]["nodes"]
    assert {n["namespace"] for n in found if n["label"] == "gemm FPROP"} >= {"layers 0-2, equal x3/layer 0/pr∕oj"}


def test_a_pair_has_partners_and_marks(tmp_path):
    train, infer, found = differing()
    known = study(train, infer, found)
    entries = sync_navigation(known)["mappingEntries"]
    assert known.matching is not None
    for entry in entries:
        (a,), (b,) = entry["leftNodeIds"], entry["rightNodeIds"]
        assert known.matching.train_of[int(b)] == int(a)
    assert len(entries) == sum(n.op != "const" for n in infer.nodes)
    marks = node_data(known)
    assert {i: r["value"] for i, r in marks["infer"]["results"].items()} == {str(d.infer): "JG001" for d in found}
    files = write_model_explorer(tmp_path / "pair.json", known)
    assert [f.name for f in files] == ["pair.json", "pair.nodes.json", "pair.sync.json"]
    assert [g["id"] for g in json.loads(files[0].read_text(encoding="utf-8"))["graphs"]] == ["train", "infer"]


def test_node_data_of_one_graph_is_its_precisions():
    results = node_data(study(tiny()))["train"]["results"]
    assert {r["value"] for r in results.values()} >= {"bf16", "f32", "f8e4m3[1x128]", "i64"}


def test_z1_in_a_large_graph_one_of_equal_layers_stands_for_all(monkeypatch):
    monkeypatch.setattr("jetgraph.viz.model_explorer.MAX_NODES", 50)
    graph = tiny(layers=80)
    found = graphs(study(graph))["graphs"][0]
    nodes = {node["id"]: node for node in found["nodes"]}
    assert len(nodes) == len(found["nodes"]) < len(tiny(layers=1).nodes) + 2 * 79 + 5
    assert nodes["layer 7"]["attrs"][0]["value"] == "layer 0, which is drawn in full"
    sources = {e["sourceNodeId"] for e in nodes["layer 7"]["incomingEdges"]}
    assert sources == {"layer 6"}
    assert {e["sourceNodeId"] for e in nodes["layer 7, backward"]["incomingEdges"]} == {"layer 7", "layer 8, backward"}
    ends = {end for node in found["nodes"] for end in (e["sourceNodeId"] for e in node["incomingEdges"])}
    overlays = found["tasksData"]["edgeOverlaysDataListLeftPane"][0]["overlays"]
    drawn = {end for o in overlays for e in o["edges"] for end in (e["sourceNodeId"], e["targetNodeId"])}
    assert ends | drawn <= set(nodes)
    pair = study(graph, tiny(layers=80, fp8=False))
    assert {"leftNodeIds": ["layer 7"], "rightNodeIds": ["layer 7"]} in sync_navigation(pair)["mappingEntries"]

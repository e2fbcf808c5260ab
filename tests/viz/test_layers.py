"""Sections, folding and partners."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jetgraph.graph import PrecisionGraph
from jetgraph.viz import Difference
from jetgraph.viz.apart import why_apart
from jetgraph.viz.condense import condense
from jetgraph.viz.layers import blocks, forward_view, path_of, places, spans
from jetgraph.viz.matching import match
from jetgraph.viz.study import study

from .conftest import tiny


def without(graph: PrecisionGraph, dropped: int) -> PrecisionGraph:
    """The graph with one rounding left out: its readers read what it rounded."""
    moved = {i: i - (i > dropped) for i in range(len(graph.nodes))} | {dropped: graph.nodes[dropped].inputs[0]}
    keep = [n for i, n in enumerate(graph.nodes) if i != dropped]
    nodes = tuple(replace(n, inputs=tuple(moved[i] for i in n.inputs)) for n in keep)
    return PrecisionGraph("unrounded", nodes, {k: moved[i] for k, i in graph.outputs.items()})


def titles(*args, **kwargs):
    return [section.title for section in study(*args, **kwargs).sections]


def test_equal_layers_fold_to_one_section():
    assert titles(tiny(layers=4)) == ["embedding", "layers 0–3", "head"]


@pytest.mark.parametrize(("odd", "expected"), [(0, "layers 1–3"), (2, "layers 0–1, 3"), (3, "layers 0–2")])
def test_a_layer_with_another_eps_stands_apart(odd, expected):
    assert {expected, f"layer {odd}"} < set(titles(tiny(layers=4, odd=odd)))


def test_a_layer_that_stands_apart_says_why():
    known = study(tiny(layers=4, odd=2))
    why = "it has add f32 1e-06 in norm for add f32 1e-05 in norm"
    assert [why_apart(known, section) for section in known.sections] == ["", "", why, ""]
    train = tiny(layers=4, backward=False)
    dropped = next(i for i, n in enumerate(train.nodes) if n.op == "round" and n.fqn == "model.layers.1")
    known = study(train, without(train, dropped))
    assert {s.title: why_apart(known, s) for s in known.sections} == {
        "embedding": "",
        "layers 0, 3": "",
        "layer 1": "in infer it lacks round bf16 in residual",
        "layer 2": "in infer it has a value in f32 entering for a value in bf16 entering",
        "head": "",
    }


def test_equal_blocks_number_the_same_things_alike():
    graph = tiny(layers=3)
    paths = [path_of(graph, i) for i in range(len(graph.nodes))]
    cut = blocks(graph, places(graph, paths), paths)
    for a, b in zip(cut[0].numbering, cut[2].numbering, strict=True):
        if a in cut[0].nodes:
            assert graph.nodes[a].op == graph.nodes[b].op
            assert graph.nodes[a].type == graph.nodes[b].type


def test_a_difference_sets_its_layer_apart_but_not_the_layers_above():
    train = tiny(layers=4)
    infer = tiny(layers=4, odd=1, backward=False)
    wrong = next(i for i, n in enumerate(infer.nodes) if n.op == "add" and n.fqn == "model.layers.1.norm")
    partner = match(train, infer).train_of[wrong]
    known = study(train, infer, [Difference(partner, wrong, "JG011", "eps of model.layers.1.norm")])
    assert [s.title for s in known.sections] == ["embedding", "layers 0, 2–3", "layer 1", "head"]
    assert known.differences[0].where == "layer 1 · model.layers.1.norm"


def test_equal_differences_of_several_layers_are_one_line():
    train, infer = tiny(), tiny(fp8=False, backward=False)
    gemms = [[i for i, n in enumerate(g.nodes) if n.op == "gemm" and n.role == "FPROP"][:3] for g in (train, infer)]
    found = [
        Difference(t, i, "JG001", f"gemm at model.layers.{k}.proj") for k, (t, i) in enumerate(zip(*gemms, strict=True))
    ]
    (line,) = study(train, infer, found).differences
    assert (line.where, line.text, len(line.members)) == (
        "layers 0–2 · model.layers.*.proj",
        "gemm at model.layers.*.proj",
        3,
    )


def test_a_part_of_the_graph_matches_by_digest_and_keeps_its_place():
    train = tiny()
    infer = train.restrict({"logits": train.outputs["logits"]})
    found = match(train, infer)
    assert len(found.equal) == len(infer.nodes)
    assert len(titles(train, infer)) == 3


def test_partners_are_kept_past_a_difference():
    found = match(tiny(), tiny(fp8=False, backward=False))
    assert None not in found.train_of


def test_a_missing_rounding_leaves_the_rest_with_partners():
    train = tiny(backward=False)
    dropped = next(i for i, n in enumerate(train.nodes) if n.op == "round" and n.fqn == "model.layers.1")
    infer = without(train, dropped)
    found = match(train, infer)
    assert None not in found.train_of
    assert found.infer_of[dropped] is None


def test_an_engines_own_module_names_do_not_matter_where_terms_are_equal():
    infer = tiny(backward=False, prefix="engine.stack_of", weights="model.layers")
    known = study(tiny(), infer)
    assert [s.title for s in known.sections] == ["embedding", "layers 0–2", "head"]
    assert known.infer.paths[infer.outputs["k.1"]] == "model.layers.1.proj"


def test_a_graph_without_layers_is_one_section():
    assert titles(tiny(layers=0, backward=False)) == ["model"]


def test_forward_view_leaves_out_what_only_gradients_need():
    graph = tiny()
    view = forward_view(graph)
    assert all(graph.nodes[i].phase == "forward" for i in view)
    assert graph.outputs["grad.model.embed.weight"] not in view


@pytest.mark.parametrize("fp8", [True, False])
def test_condensing_keeps_quantise_gemm_and_round_visible_and_stays_acyclic(fp8):
    graph = tiny(fp8=fp8)
    paths = [path_of(graph, i) for i in range(len(graph.nodes))]
    placed = places(graph, paths)
    members = [i for i, p in enumerate(placed) if p == 1 and i in forward_view(graph)]
    result = condense(graph, members, paths, lambda i: "in", {})
    kinds = [box.kind for box in result.boxes]
    assert kinds.count("quantize") == (2 if fp8 else 0)
    assert kinds.count("gemm") == 1
    assert kinds.count("round") == 1
    assert any(box.title == "norm: 5 ops" for box in result.boxes)
    inner = [n for box in result.boxes if box.kind != "port" for n in box.nodes]
    assert sorted(inner) == [i for i in members if graph.nodes[i].op != "const"]
    assert _acyclic(len(result.boxes), result.edges)


def _acyclic(count, edges) -> bool:
    left = set(range(count))
    while free := {v for v in left if not any(b == v and a in left for a, b, _ in edges)}:
        left -= free
    return not left


def test_spans():
    assert spans([3, 0, 1, 2, 7]) == "0–3, 7"

"""DOT: every label renders as it is (Z4), with Graphviz itself where it is installed and with a parser everywhere."""

from __future__ import annotations

import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import pydot
import pytest

from jetgraph.viz.dot import dot, quoted
from jetgraph.viz.study import study

from .conftest import tiny
from .test_pictures import differing

HOSTILE = [
    "a->b{c}|<d>",
    'einsum "bij,bjk->bik"',
    "&amp; & &lt;",
    "\\N \\G \\l \\\\ \\",
    "ünïcode → λ 中",
    "two\nlines",
    "]; x [label=gone",
    "<b>html</b>",
    "",
]


def unquoted(label: str) -> str:
    """What Graphviz shows of a quoted label, by its grammar: escString, then entities."""
    assert label[0] == label[-1] == '"'
    shown, rest = "", label[1:-1]
    while rest:
        if rest[0] == "\\":
            shown, rest = shown + {"n": "\n"}.get(rest[1], rest[1]), rest[2:]
        else:
            shown, rest = shown + rest[0], rest[1:]
    return shown.replace("&amp;", "&")


@pytest.mark.parametrize("label", HOSTILE)
def test_z4_a_parser_reads_back_the_label(label):
    (parsed,) = pydot.graph_from_dot_data(f"digraph {{ n0 [label={quoted(label)}]; }}")
    (node,) = (n for n in parsed.get_nodes() if n.get_name() == "n0")
    assert unquoted(node.get_label()) == label


@pytest.mark.skipif(shutil.which("dot") is None, reason="Graphviz is not installed")
@pytest.mark.parametrize("label", [label for label in HOSTILE if label])
def test_z4_graphviz_renders_the_label_literally(label):
    source = f"digraph {{ n0 [shape=box, label={quoted(label)}]; }}"
    drawn = subprocess.run(["dot", "-Tsvg"], input=source, capture_output=True, text=True, check=True)
    texts = [t.text for t in ElementTree.fromstring(drawn.stdout).iter("{http://www.w3.org/2000/svg}text")]
    assert [t.replace("\u00a0", " ") for t in texts if t] == label.split("\n")
    assert drawn.stderr == ""


def test_z4_hostile_module_names_keep_every_node_and_edge():
    plain, hostile = (dot(study(tiny(prefix=prefix))) for prefix in ("model.layers", 'm<{|}>&"\\N\u2192.layers'))
    parsed, expected = (pydot.graph_from_dot_data(text)[0] for text in (hostile, plain))
    assert counts(parsed) == counts(expected)
    assert counts(parsed)[1] > 10


def counts(graph) -> tuple[int, int]:
    nodes = [n for n in graph.get_nodes() if n.get_name() not in ("node", "edge", "graph")]
    below = [counts(sub) for sub in graph.get_subgraphs()]
    return len(nodes) + sum(n for n, _ in below), len(graph.get_edges()) + sum(e for _, e in below)


def test_layers_are_folded_and_one_layer_can_be_drawn():
    overview = dot(study(tiny(layers=6)))
    assert '"layers 0–5 · equal ×6"' in overview
    assert overview.count("GEMM proj") == 1
    assert "GEMM proj" in dot(study(tiny(layers=6)), layer=4)
    with pytest.raises(ValueError, match="layer 9: tiny has no such layer"):
        dot(study(tiny()), layer=9)


def test_every_edge_names_its_precision_weights_included():
    (parsed,) = pydot.graph_from_dot_data(dot(study(tiny()), layer=0))
    labels = [e.get_label() for e in edges(parsed)]
    assert None not in labels
    assert '"f8e4m3[128x128]"' in labels


def edges(graph):
    return graph.get_edges() + [e for sub in graph.get_subgraphs() for e in edges(sub)]


def test_backward_is_drawn_on_demand_and_differences_are_marked():
    train, infer, found = differing()
    known = study(train, infer, found)
    assert dot(known).count("≠") == 2
    assert "DGRAD" not in dot(study(train))
    assert "DGRAD" in dot(study(train), backward=True)

"""Still pictures: the window of a counterexample, PNG, the forms of `jetgraph show`, and a graph in a notebook."""

from __future__ import annotations

import struct
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from jetgraph.cli import app
from jetgraph.graph import PrecisionGraph
from jetgraph.viz import Difference
from jetgraph.viz.compare import compare
from jetgraph.viz.png import PictureError, png
from jetgraph.viz.study import study
from jetgraph.viz.svg import layer_svg, overview_svg
from jetgraph.viz.window import window, window_svg

from .conftest import tiny
from .test_pictures import differing


def words(svg: str) -> list[str]:
    return ["".join(t.itertext()) for t in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def size(picture: bytes) -> tuple[int, int]:
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", picture[16:24])


def run(*args) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, [str(a) for a in args])
    return result.exit_code, result.output


# -------------------------------------------------------------------------------------------------------- the window


def test_a_window_shows_both_sides_of_the_difference_and_what_is_missing():
    svg = window_svg(study(*differing()), 1)
    shown = words(svg)
    assert shown.count("GEMM proj") == 2
    assert shown.count("quantise") == 4
    assert svg.count('class="box ghost"') == 2
    assert {"train", "infer", "expected f8; got bf16"} <= set(shown)
    assert "JG001 · layers 0–2 · model.layers.*.proj, first of 3" in shown
    assert svg.count("≠") == 2
    assert {"from mean norm", "layer input", "to residual"} <= set(shown), "where it was cut is named"


def test_a_window_draws_each_op_and_only_those_near_the_difference():
    train, infer, found = differing()
    known = study(train, infer, found)
    (scene,) = window(known, known.differences[0])
    boxes = [item.boxes[0] for item in scene.items if item.boxes[0] and item.boxes[0].kind not in ("port", "exit")]
    assert all(len(box.nodes) == 1 for box in boxes)
    shown = {train.nodes[n].op for box in boxes for n in box.nodes}
    assert {"gemm", "quantize", "round", "parameter"} <= shown
    assert "sq" not in shown
    assert all(train.nodes[n].phase == "forward" for box in boxes for n in box.nodes)


def test_a_window_in_backward_stays_in_backward():
    found = compare(tiny(), tiny(fp8=False))
    known = study(*found.graphs, found.differences, ("A", "B"))
    number = next(k for k, d in enumerate(known.differences, 1) if "dy of gemm DGRAD" in d.text)
    (scene,) = window(known, known.differences[number - 1])
    ops = [
        found.graphs[0].nodes[n] for item in scene.items if (b := item.boxes[0]) and b.kind == "gemm" for n in b.nodes
    ]
    assert {node.role.value for node in ops} == {"DGRAD"}


def test_a_window_that_cannot_be_drawn_says_why():
    train, infer, found = differing()
    with pytest.raises(ValueError, match="difference 2: there is 1"):
        window_svg(study(train, infer, found), 2)
    with pytest.raises(ValueError, match="difference 1: there are none"):
        window_svg(study(train, infer), 1)
    nowhere = Difference(None, None, "JG016", "weights differ", "model.layers.0.proj")
    with pytest.raises(ValueError, match="at no node"):
        window_svg(study(train, infer, [nowhere]), 1)


# --------------------------------------------------------------------------------------------------------------- PNG


@pytest.mark.parametrize("picture", ["overview", "layer", "window"])
def test_png_is_the_svg_at_twice_its_size(picture):
    known = study(*differing())
    svg = {
        "overview": lambda: overview_svg(known, "tiny"),
        "layer": lambda: layer_svg(known, 1),
        "window": lambda: window_svg(known, 1),
    }[picture]()
    root = ElementTree.fromstring(svg)
    width, height = size(png(svg))
    assert abs(width - 2 * float(root.get("width"))) <= 2
    assert abs(height - 2 * float(root.get("height"))) <= 2


@pytest.mark.parametrize("family", ["sans-serif", "monospace"])
def test_letters_leave_a_trace(family):
    """Also where nothing tells resvg which font a machine takes for the word."""
    blank = '<svg xmlns="http://www.w3.org/2000/svg" width="60" height="20"></svg>'
    assert png(blank.replace("><", f'><text x="2" y="16" font-family="{family}">fp8</text><')) != png(blank)


def test_png_without_its_package_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(PictureError, match=r"resvg-py, which is not installed: pip install 'jetgraph\[viz\]'"):
        png("<svg/>")


def test_png_without_a_font_says_so_instead_of_leaving_the_letters_out(monkeypatch):
    monkeypatch.setattr("jetgraph.viz.png._families", lambda: None)
    with pytest.raises(PictureError, match="needs a font"):
        png("<svg/>")


# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def pair(tmp_path):
    train, infer, _ = differing()
    return train.save(tmp_path / "train.json"), infer.save(tmp_path / "infer.json")


@pytest.mark.parametrize(
    ("name", "start", "files"),
    [
        ("p.html", b"<!doctype html>", 1),
        ("p.svg", b"<svg", 1),
        ("p.png", b"\x89PNG", 1),
        ("p.dot", b"digraph", 1),
        ("p.json", b'{"label":', 3),
        ("p.onnx", b"\x08\x0a", 2),
    ],
)
def test_show_writes_the_form_that_the_name_says(pair, tmp_path, name, start, files):
    status, said = run("show", *pair, "-o", tmp_path / "out" / name)
    assert status == 0
    assert len(said.split()) == files
    for path in said.split():
        assert path.startswith(str(tmp_path / "out" / "p."))
    assert (tmp_path / "out" / name).read_bytes()[: len(start)].lower() == start.lower()


def test_show_takes_a_layer_a_difference_and_a_format(pair, tmp_path):
    assert run("show", pair[0], "--layer", 1, "-o", tmp_path / "l.svg")[0] == 0
    assert "layer 1, forward" in (tmp_path / "l.svg").read_text(encoding="utf-8")
    assert run("show", pair[0], "--layer", 1, "--backward", "-o", tmp_path / "b.svg")[0] == 0
    assert "GEMM proj" in (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert "DGRAD" in (tmp_path / "b.svg").read_text(encoding="utf-8")
    assert run("show", *pair, "--difference", 1, "--format", "svg", "-o", tmp_path / "picture")[0] == 0
    assert "layers 0–2" in (tmp_path / "picture").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-o", "x.bmp"], "give --format, one of html"),
        (["-o", "x.svg", "--format", "gif"], "format 'gif': expected one of html"),
        (["-o", "x.html", "--layer", "1"], "--layer chooses a part of svg, png, dot"),
        (["-o", "x.dot", "--difference", "1"], "--difference chooses a part of svg, png"),
        (["-o", "x.svg", "--difference", "1", "--layer", "1"], "either a layer or a difference"),
        (["-o", "x.svg", "--backward"], "--backward is for one layer"),
        (["-o", "x.svg", "--layer", "9"], "layer 9: tiny has no such layer"),
    ],
)
def test_show_refuses_in_one_sentence(pair, options, words):
    status, said = run("show", *pair, *options)
    assert status == 2
    assert said.startswith("error: ")
    assert words in said


# -------------------------------------------------------------------------------------------------------- a notebook


def test_a_picture_is_not_written_over_its_graph(pair, tmp_path):
    before = [path.read_bytes() for path in pair]
    (tmp_path / "link.json").symlink_to(pair[0])
    for command in (
        ("show", pair[0], "-o", pair[0]),
        ("show", *pair, "-o", pair[1]),
        ("show", pair[0], "-o", tmp_path / "link.json"),
        ("diff", *pair, "--html", pair[1]),
    ):
        status, said = run(*command)
        assert status == 2
        assert "is the graph file itself" in said
    assert [path.read_bytes() for path in pair] == before


def test_a_graph_shows_itself_in_a_notebook():
    bundle = tiny(layers=30, prefix="m<script>.layers")._repr_mimebundle_()
    assert set(bundle) == {"text/html", "text/plain"}
    assert "<script" not in bundle["text/html"]
    assert "layers 0–29" in bundle["text/html"]
    assert len(bundle["text/html"]) < 20_000
    assert bundle["text/plain"].splitlines()[1] == "embedding → layers 0–29, equal ×30 → head"
    ElementTree.fromstring(bundle["text/html"])


def test_a_graph_that_holds_one_constant_shows_itself_too():
    node = tiny().nodes[next(i for i, n in enumerate(tiny().nodes) if n.op == "const")]
    assert "1 nodes" in PrecisionGraph("one", (node,), {"c": 0})._repr_mimebundle_()["text/plain"]

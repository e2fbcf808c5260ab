"""The page, the SVG files and the terminal view: well formed, self-contained, and literal about hostile names."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jetgraph.graph import PrecisionGraph, Role
from jetgraph.precision import BF16
from jetgraph.viz import Difference, as_json, render_html, text, write_html, write_layer_svg, write_overview_svg
from jetgraph.viz.html import for_script
from jetgraph.viz.scene import scenes
from jetgraph.viz.study import study

from .conftest import BROWSER, Builder, tiny

HOSTILE = "m</script><b>&amp;|{}$x\"'\u2028ünïcode\u2192.layers"


class Reader(HTMLParser):
    """Counts what matters and keeps the data script's text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.stack: list[str] = []
        self.data = ""
        self.text = ""
        self.ids: list[str] = []
        self.in_data = False

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        values = dict(attrs)
        self.in_data = values.get("id") == "data"
        self.ids += [values["id"]] if "id" in values else []
        if tag not in ("meta", "input", "path", "rect"):
            self.stack.append(tag)

    def handle_endtag(self, tag):
        self.in_data = False
        if self.stack and self.stack[-1] == tag:
            self.stack.pop()

    def handle_data(self, data):
        if self.in_data:
            self.data += data
        else:
            self.text += data


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    assert reader.stack == []
    assert len(reader.ids) == len(set(reader.ids))
    return reader


def differing():
    train, infer = tiny(), tiny(fp8=False, backward=False)
    gemms = [[i for i, n in enumerate(g.nodes) if n.op == "gemm" and n.role == "FPROP"][:3] for g in (train, infer)]
    return train, infer, [Difference(t, i, "JG001", "expected f8; got bf16") for t, i in zip(*gemms, strict=True)]


def test_page_names_every_section_and_points_every_box_at_real_nodes():
    train, infer, found = differing()
    page = read(render_html(train, infer, found))
    assert page.tags.count("details") == 3
    data = json.loads(page.data)
    for section in data["sections"]:
        for instance in section["instances"]:
            for view in section["views"]:
                for boxes in view:
                    for side, box in enumerate(boxes):
                        if box:
                            nodes = [instance["nodes"][side][k] for k in box["ordinals"]]
                            assert all(0 <= n < len(data["sides"][side]["op"]) for n in nodes)


def test_page_shows_every_forward_and_backward_node_in_exactly_one_box():
    train = tiny()
    data = json.loads(read(render_html(train)).data)
    shown = []
    for section in data["sections"]:
        for instance in section["instances"]:
            boxes = [box for view in section["views"] for (box, *_) in view if box and box["own"]]
            shown += [instance["nodes"][0][k] for box in boxes for k in box["ordinals"]]
    assert sorted(shown) == [i for i, n in enumerate(train.nodes) if n.op != "const"]


def test_page_needs_nothing_but_itself():
    page = render_html(*differing())
    outside = re.findall(r"(?:src|href)\s*=|@import|https?://(?!www\.w3\.org/2000/svg)", page)
    assert outside == []


def test_hostile_names_stand_literally():
    graph = tiny(prefix=HOSTILE)
    page = read(render_html(graph, graph, [Difference(3, 3, "JG<1>", f"at {HOSTILE}.0.x <i>")], title=HOSTILE))
    assert page.tags.count("script") == 2
    assert page.tags.count("i") == 0
    assert page.tags.count("b") == page.tags.count("details")
    assert any(HOSTILE in s for s in json.loads(page.data)["strings"])
    assert HOSTILE in page.text


def test_script_data_survives_and_cannot_close_its_element():
    value = {"a</script>": "<!--\u2028&"}
    assert json.loads(for_script(value)) == value
    assert not set("<>&\u2028") & set(for_script(value))


def test_page_is_deterministic():
    assert render_html(*differing()) == render_html(*differing())


def test_svg_files_are_well_formed_and_self_contained(tmp_path):
    train, infer, found = differing()
    for path in (
        write_overview_svg(tmp_path / "o.svg", train, infer, found, title=HOSTILE.replace("\u2028", "")),
        write_layer_svg(tmp_path / "l.svg", train, infer, 1, found),
        write_layer_svg(tmp_path / "one.svg", train),
    ):
        root = ElementTree.parse(path).getroot()
        assert "var(--" not in path.read_text(encoding="utf-8")
        assert float(root.get("width")) > 100
    assert "differs" in (tmp_path / "l.svg").read_text(encoding="utf-8")


def test_sides_whose_orders_contradict_each_other_are_laid_out_apart():
    train, infer = (in_order(*order) for order in ("pq", "qp"))
    known = study(train, infer)
    assert len(scenes(known, 0)) == 2
    assert read(render_html(train, infer)).text.count("GEMM p") >= 2


def in_order(*names):
    b = Builder()
    x = b("input", precision=BF16, name="x")
    for name in names:
        weight = b.parameter(f"m.layers.0.{name}.weight")
        x = b("gemm", x, weight, fqn=f"m.layers.0.{name}", role=Role.FPROP, contraction="nt")
        x = b("round", x, precision=BF16, fqn=f"m.layers.0.{name}", format="bf16")
    return PrecisionGraph("chain", tuple(b.nodes), {"y": x})


def test_missing_layer_is_named():
    with pytest.raises(ValueError, match="layer 9: tiny has no such layer"):
        write_layer_svg("unwritten.svg", tiny(), layer=9)


def test_terminal_view_fits_80_columns_and_folds():
    shown = text(tiny(layers=12))
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    assert "proj (0–11)" in shown
    assert "f8e4m3[1x128] × f8e4m3[128x128]" in shown
    assert "aten::odd" in shown


def test_terminal_json_is_plain():
    facts = json.loads(json.dumps(as_json(tiny())))
    assert facts["linears"][0]["operands"] == ["f8e4m3[1x128]", "f8e4m3[128x128]"]
    assert facts["linears"][0]["layers"] == [0, 1, 2]
    assert facts["unknown"] == ["aten::odd"]


def test_pictures_need_no_torch():
    code = "import sys, jetgraph.viz; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --------------------------------------------------------------------------------------------------------- a browser

STEPS = """
const assert = (name, ok) => results.push([name, Boolean(ok)]);
const $$ = (s) => [...document.querySelectorAll(s)];
assert("ready", document.documentElement.dataset.ready === "1");
assert("folded at first", $$(".section[open]").length === 0);
document.getElementById("fold-all").click();
assert("unfolded", $$(".section[open]").length === $$(".section").length);
document.getElementById("fold-all").click();
assert("folded again", $$(".section[open]").length === 0);
document.querySelector("#differences button").click();
assert("jumped to a difference", document.querySelector(".section[open] .chosen.differs"));
assert("partner marked", document.querySelector(".section[open] .twin"));
assert("panel names it", document.querySelector("#detail .fqn").textContent === "model.layers.0.proj");
document.querySelector("#differences button").click();
assert("next layer", document.querySelector("#detail .fqn").textContent === "model.layers.1.proj");
const field = document.getElementById("search");
field.value = "layers.2.proj quantize"; field.dispatchEvent(new Event("input"));
assert("found", document.querySelectorAll("#found button").length === 1);
document.querySelector("#found button").click();
assert("search selects", document.querySelector("#detail .fqn").textContent === "model.layers.2.proj");
assert("backward hidden", $$(".back").every((e) => e.offsetParent === null));
document.getElementById("backward").click();
assert("backward shown", $$(".section[open] .back").some((e) => e.offsetParent !== null));
const theme = document.documentElement.dataset.theme;
document.getElementById("theme").click();
assert("theme", document.documentElement.dataset.theme !== theme);
"""


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
def test_page_in_a_browser(tmp_path: Path):
    page = write_html(tmp_path / "page.html", *differing()).read_text(encoding="utf-8")
    watch = "<script>const results = []; addEventListener('error', (e) => results.push([e.message, false]));</script>"
    drive = f"<script>{STEPS}document.body.textContent = JSON.stringify(results);</script></body>"
    probe = tmp_path / "probe.html"
    probe.write_text(page.replace("<head>", "<head>" + watch, 1).replace("</body>", drive), encoding="utf-8")
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--dump-dom",
        f"--user-data-dir={tmp_path}/profile",
    ]
    done = subprocess.run([*command, probe.as_uri()], capture_output=True, text=True, timeout=120, check=True)
    match = re.search(r"<body[^>]*>(\[\[.*?\]\])\s*</body>", done.stdout, re.DOTALL)
    assert match, done.stdout[-2000:]
    results = json.loads(match[1])
    assert [name for name, ok in results if not ok] == []
    assert len(results) == STEPS.count("assert(")

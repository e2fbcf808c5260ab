"""The page as text: every node and edge is in it, it needs nothing but itself, and hostile names stand literally."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser

import pytest

from jetgraph.graph import PrecisionGraph
from jetgraph.viz import Difference, render_html
from jetgraph.viz.html import VIEWS, for_script
from jetgraph.viz.scene import FORWARD, scenes
from jetgraph.viz.study import study

from .conftest import HOSTILE, differing, in_order, tiny


class Reader(HTMLParser):
    """Counts what matters, checks nesting, and keeps the text of the data script."""

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
        if tag not in ("meta", "input", "path", "rect", "circle"):
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        self.in_data = False
        assert self.stack.pop() == tag

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


def data_of(*args, **kwargs):
    return json.loads(read(render_html(*args, **kwargs)).data)


def test_every_section_is_named_and_every_box_and_wire_points_at_real_nodes():
    page = read(render_html(*differing()))
    assert page.tags.count("details") == len(["embedding", "layers 0–2", "head", "where this comes from"])
    data = json.loads(page.data)
    for section in data["sections"]:
        for instance in section["instances"]:
            for view in section["views"]:
                named = [(s, box[2]) for item in view["items"] for s, box in enumerate(item) if box]
                named += [(s, [o]) for wire in view["wires"] for s, o in enumerate(wire[2:]) if o >= 0]
                for side, ordinals in named:
                    nodes = [instance["nodes"][side][k] for k in ordinals]
                    assert all(0 <= n < len(data["sides"][side]["op"]) for n in nodes)


@pytest.mark.parametrize("every_op", [0, 2])
def test_every_node_is_in_exactly_one_box_of_its_section(every_op):
    train = tiny()
    shown = []
    for section in data_of(train)["sections"]:
        boxes = [
            box for view in section["views"][every_op : every_op + 2] for (box,) in view["items"] if box and box[1]
        ]
        for instance in section["instances"]:
            shown += [instance["nodes"][0][k] for box in boxes for k in box[2]]
    assert sorted(shown) == [i for i, n in enumerate(train.nodes) if n.op != "const"]


def test_with_every_op_shown_every_edge_is_a_wire():
    train, infer, found = differing()
    data = data_of(train, infer, found)
    for side, graph in enumerate((train, infer)):
        drawn = set()
        for section in data["sections"]:
            for view in section["views"][2:]:
                for _, target, *values in view["wires"]:
                    reader = view["items"][target][side]
                    if reader and reader[1] and values[side] >= 0:
                        for instance in section["instances"]:
                            nodes = instance["nodes"][side]
                            drawn |= {(nodes[values[side]], nodes[k]) for k in reader[2]}
        expected = {(i, n) for n, node in enumerate(graph.nodes) for i in node.inputs if graph.nodes[i].op != "const"}
        assert drawn == expected


@pytest.mark.parametrize(("view", "every_op"), VIEWS)
def test_every_wire_of_weights_and_inputs_too_says_its_precision_where_it_starts(view, every_op):
    """Z6: dtype visible on every edge.  Wires that leave one outlet share the label there."""
    known = study(*differing())
    for section in known.sections:
        for scene in scenes(known, section.first, view, every_op):
            for side in (0, 1):
                starts = {w.points[0] for w in scene.wires if w.values[side] is not None}
                labelled = {w.points[0] for w in scene.wires if w.values[side] is not None and w.labels}
                assert starts == labelled


def test_a_constant_is_written_with_its_format_where_it_is_read():
    known = study(tiny())
    (scene,) = scenes(known, 0, FORWARD, every_op=True)
    assert "add f32 1e-05" in {box.title for item in scene.items for box in item.boxes if box}


def test_page_needs_nothing_but_itself():
    page = render_html(*differing())
    outside = re.findall(r"(?:src|href)\s*=|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    assert outside == []
    assert "default-src 'none'" in page


def test_hostile_names_stand_literally():
    """Z4: labels with <>{}|&, quotes and other scripts' characters."""
    graph = tiny(prefix=HOSTILE)
    graph = PrecisionGraph(graph.name, graph.nodes, graph.outputs, {"model": HOSTILE, "versions": {"<b>": "<i>"}})
    page = render_html(
        graph, graph, [Difference(3, 3, "JG<1>", f"at {HOSTILE}.0.x <i>")], HOSTILE, "<b>", ("<a>", "&b")
    )
    reader = read(page)
    assert reader.tags.count("script") == 2
    assert not {"i", "a"} & set(reader.tags)
    assert reader.tags.count("b") == reader.tags.count("details")
    assert any(HOSTILE in s for s in json.loads(reader.data)["strings"])
    assert HOSTILE in reader.text
    assert "<a>" in reader.text
    assert "&b" in reader.text


def test_script_data_survives_and_cannot_close_its_element():
    value = {"a</script>": "<!--\u2028&"}
    assert json.loads(for_script(value)) == value
    assert not set("<>&\u2028") & set(for_script(value))


def test_a_page_of_eight_thousand_nodes_is_written_in_seconds_and_folds_them():
    """Z1: graphs of 5-8k nodes hang viewers; equal layers are one section, so they cost what one costs."""
    train, infer = tiny(layers=320), tiny(layers=320, backward=False)
    assert len(train.nodes) + len(infer.nodes) > 8000
    start = time.process_time()
    page = render_html(train, infer)
    assert time.process_time() - start < 10
    assert len(page) < 5e6
    assert re.findall(r'<div class="title"><b>(.*?)</b>', page) == ["embedding", "layers 0–319", "head"]


def test_an_empty_graph_has_a_page():
    assert read(render_html(PrecisionGraph("nothing", (), {}))).tags.count("details") == 1


def test_page_is_deterministic():
    assert render_html(*differing()) == render_html(*differing())


def test_sides_whose_orders_contradict_each_other_are_laid_out_apart():
    train, infer = (in_order(*order) for order in ("pq", "qp"))
    known = study(train, infer)
    drawn = scenes(known, 0)
    assert len(drawn) == 2
    assert read(render_html(train, infer)).text.count("GEMM p") >= 2
    view = data_of(train, infer)["sections"][1]["views"][0]
    assert len(view["items"]) == sum(len(scene.items) for scene in drawn)
    assert all(
        view["items"][target][side] for _, target, *values in view["wires"] for side in (0, 1) if values[side] >= 0
    )


def test_two_trainings_stand_side_by_side_in_both_phases_under_their_own_names():
    page = render_html(tiny(), tiny(fp8=False), names=("jet", "bf16"))
    captions = re.findall(r"<figcaption>(\w+) <span>· (\w+)</span>", page)
    assert {("jet", "forward"), ("bf16", "forward"), ("jet", "backward"), ("bf16", "backward")} <= set(captions)
    assert not {"train", "infer"} & {name for name, _ in captions}


def test_two_sides_of_one_name_are_refused():
    with pytest.raises(ValueError, match="both sides are named 'a': give two names"):
        render_html(tiny(), tiny(), names=("a", "a"))


def test_panel_data_says_what_is_kept_for_backward():
    train = tiny(layers=1)
    data = data_of(train)
    (side,) = data["sides"]
    kept = {train.nodes[i].op: data["strings"][s] for i, s in side["kept"]}
    # its backward reads the quantised weight alone: 256 x 256 codes and 2 x 2 FP32 scales
    assert kept == {"quantize": "65,552 B"}


def test_the_overview_shows_backward_gemms_in_rows_of_their_own():
    page = render_html(tiny())
    rows = re.findall(r'<div class="strip of-backward">(.*?)</svg>', page)
    assert len(rows) == 1
    assert ">DGRAD</text>" in rows[0]
    assert "f8e4m3[1x128]" in rows[0]

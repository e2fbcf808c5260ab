"""The page in a real Chromium: it opens from disk without a word on the console, and controls do what they say."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import pytest

from jetgraph.graph import PrecisionGraph
from jetgraph.viz import Difference, write_html

from .conftest import BROWSER, HOSTILE, differing, in_order, tiny

STOCK = Path(__file__).parents[1] / "data" / "stock_vllm"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium (Debian: apt-get install chromium)"),
]
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (pip install '.[dev]')")


@pytest.fixture(scope="module")
def chromium():
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def pair_file(tmp_path_factory):
    return write_html(tmp_path_factory.mktemp("pair") / "pair.html", *differing())


@pytest.fixture(scope="module")
def tab(chromium):
    """One tab for all tests, and what it says: messages, errors, dialogs and addresses asked for."""
    page, heard = chromium.new_page(), []
    page.on("console", lambda message: heard.append(message.text))
    page.on("pageerror", lambda error: heard.append(str(error)))
    page.on("request", lambda request: heard.append(request.url))
    page.on("dialog", lambda dialog: (heard.append(dialog.message), dialog.dismiss()))
    return page, heard


@pytest.fixture
def open_page(tab):
    """Opens a file; in the whole test it must say nothing and ask for nothing but itself."""
    page, heard = tab
    heard.clear()
    opened = []

    def open_file(path, color_scheme="light", size=(1440, 900)):
        page.emulate_media(media="screen", color_scheme=color_scheme)
        page.set_viewport_size({"width": size[0], "height": size[1]})
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        opened.append(path.as_uri())
        return page

    yield open_file
    assert heard == opened


@pytest.fixture
def pair(open_page, pair_file):
    return open_page(pair_file)


def unfold(page, title: str):
    section = page.locator(".section", has=page.locator(f'.title b:text-is("{title}")'))
    section.locator(".title").click()
    return section


def box(section, side: int, title: str, view: int = 0):
    pane = section.locator(f'.pane[data-pane$=".{view}.{side}"]')
    return pane.locator(".box[data-box]", has_text=title).first


def rows(page) -> dict[str, list[str]]:
    """The panel's table: cells by the name of the row."""
    found = page.locator("#detail tr").all()
    return {tr.locator("th").first.inner_text(): tr.locator("td").all_inner_texts() for tr in found}


def test_sections_fold_and_unfold(pair):
    assert pair.locator(".section[open]").count() == 0
    section = unfold(pair, "layers 0–2")
    assert section.locator(".viewport").first.is_visible()
    pair.click("#fold-all")
    assert pair.locator(".section[open]").count() == pair.locator(".section").count() == 3
    pair.click("#fold-all")
    assert pair.locator(".section[open]").count() == 0


def test_a_difference_is_jumped_to_on_both_sides_and_again_in_the_next_layer(pair):
    line = pair.locator("#differences [data-difference]")
    assert "×3" in line.inner_text()
    line.click()
    assert pair.locator(".section[open] .chosen.differs").count() == 1
    assert pair.locator(".section[open] .pane .twin").count() >= 1
    assert pair.locator(".chosen").bounding_box()["y"] > pair.locator("header").bounding_box()["height"]
    assert pair.inner_text("#detail .fqn") == "model.layers.0.proj"
    line.click()
    assert pair.inner_text("#detail .fqn") == "model.layers.1.proj"
    pair.keyboard.press("N")
    assert pair.inner_text("#detail .fqn") == "model.layers.2.proj"
    assert pair.inner_text("#counter") == "1 / 1 · 3 of 3"
    pair.keyboard.press("P")
    assert pair.inner_text("#detail .fqn") == "model.layers.1.proj"


def test_keys_walk_through_the_lines_of_differences(open_page, tmp_path):
    train, infer, found = differing()
    head = [next(i for i, n in enumerate(g.nodes) if n.fqn == "lm_head") for g in (train, infer)]
    page = open_page(write_html(tmp_path / "two.html", train, infer, [*found, Difference(*head, "JG002", "the head")]))
    shown = []
    for key in ("n", "n", "n", "p"):
        page.keyboard.press(key)
        shown.append((page.inner_text("#counter")[:5], page.inner_text("#detail .fqn")))
    first, second = ("1 / 2", "model.layers.0.proj"), ("2 / 2", "lm_head")
    assert shown == [first, second, first, second]
    assert page.locator('[data-difference][aria-current="true"]').count() == 1


def test_selection_is_the_same_place_on_both_sides_and_the_panel_compares_them(pair):
    section = unfold(pair, "layers 0–2")
    box(section, 0, "GEMM proj").click()
    assert "GEMM proj" in section.locator('.pane[data-pane$=".0.1"] .twin').text_content()
    shown = rows(pair)
    assert shown["operands"] == ["train: f8e4m3[1x128] × f8e4m3[128x128]\ninfer: bf16 × bf16"]
    assert pair.locator("#detail tr.differs th").all_inner_texts() == ["operands"]
    assert shown["kernel"] == ["k::mm"]
    assert shown["policy rule"] == ["jet: *"]
    assert shown["source"][0].startswith("model.py:")
    assert pair.inner_text("#detail .badge") == "differs"


def test_folded_layers_are_named_one_by_one(pair):
    section = unfold(pair, "layers 0–2")
    box(section, 0, "GEMM proj").click()
    section.locator("select").select_option(label="layer 2")
    assert pair.inner_text("#detail .fqn") == "model.layers.2.proj"


def test_what_backward_reads_says_its_bytes(pair):
    section = unfold(pair, "layers 0–2")
    section.locator('.pane[data-pane$=".0.0"] .box.quantize', has_text="128x128").click()
    assert rows(pair)["kept for backward"][0] == "f8e4m3[128x128]: 65,552 B"
    assert rows(pair)["λ"][0] == "f8e4m3[128x128 f32 dyn div qmax=448 floor=1e-12]"


def test_hover_marks_box_and_edges_on_both_sides(pair):
    section = unfold(pair, "layers 0–2")
    box(section, 1, "GEMM proj").hover()
    assert section.locator(".box.hot").count() == 2
    assert section.locator('.pane[data-pane$=".0.0"] .wire.hot').count() >= 3
    pair.locator("h1").hover()
    assert section.locator(".hot").count() == 0


def test_an_edge_can_be_selected_and_says_who_makes_and_reads_it(pair):
    """Z6: an edge of a weight is as addressable as any."""
    section = unfold(pair, "layers 0–2")
    section.locator('.pane[data-pane$=".0.0"] .wire text', has_text="bf16").first.click()
    assert pair.inner_text("#detail h2") == "Edge"
    assert rows(pair)["λ"][0] == "bf16"
    assert pair.locator("#detail .ops li").count() >= 2
    assert section.locator(".wire.lit").count() >= 2


def test_search_finds_selects_and_closes(pair):
    pair.keyboard.press("/")
    pair.keyboard.type("layers.2.proj quantize")
    assert pair.locator("#found button").count() == 1
    pair.keyboard.press("Enter")
    assert pair.inner_text("#detail .fqn") == "model.layers.2.proj"
    assert pair.locator("#found").is_hidden()
    pair.fill("#search", "no such thing")
    assert pair.inner_text("#found") == "Nothing has this name."
    pair.fill("#search", "layers")
    assert "model.layers.*.proj" in pair.locator("#found .name").all_inner_texts()
    pair.locator("#found button", has_text="model.layers.*.proj gemm FPROP").click()
    assert pair.inner_text("#detail .fqn") == "model.layers.0.proj"
    pair.locator("#found button", has_text="model.layers.*.proj gemm FPROP").click()
    assert pair.inner_text("#detail .fqn") == "model.layers.1.proj"
    pair.press("#search", "Escape")
    assert pair.locator("#found").is_hidden()


def test_backward_is_hidden_dimmed_or_shown(pair):
    section = unfold(pair, "layers 0–2")
    stage = section.locator(".stage.of-backward")
    assert stage.is_hidden()
    pair.keyboard.press("b")
    assert float(stage.evaluate("e => getComputedStyle(e).opacity")) < 0.5
    pair.click('[data-phase="backward"]')
    assert float(stage.evaluate("e => getComputedStyle(e).opacity")) == 1
    assert section.locator(".strip.of-backward").is_visible()
    box(section, 0, "GEMM proj", view=1).click()
    assert rows(pair)["role"][0] == "DGRAD"


def test_every_op_gets_a_box_of_its_own_and_the_selection_stays(pair):
    section = unfold(pair, "layers 0–2")
    box(section, 0, "norm: 5 ops").click()
    before = section.locator('.pane[data-pane$=".0.0"] .box').count()
    pair.keyboard.press("o")
    after = section.locator('.pane[data-pane$=".0.0"] .box')
    assert after.count() > before
    titles = after.locator(".t").all_text_contents()
    assert {"sq", "mul", "mean 256", "add f32 1e-05"} <= {title.strip().removesuffix(" norm") for title in titles}
    assert pair.locator(".chosen").count() == 1
    assert pair.inner_text("#detail .fqn") == "model.layers.0.norm"


def test_filters_dim_what_does_not_match(pair):
    section = unfold(pair, "layers 0–2")
    left = section.locator('.pane[data-pane$=".0.0"]')
    pair.click('[data-format="f8"]')
    assert left.locator(".wire.f8:not(.dim) path").count() > 0
    assert left.locator(".wire.bf16:not(.differs):not(.dim)").count() == 0
    assert "dim" not in box(section, 0, "GEMM proj").get_attribute("class")
    assert "dim" in box(section, 0, "norm: 5 ops").get_attribute("class")
    pair.click("#clear")
    assert left.locator(".dim").count() == 0
    pair.click('[data-role="DGRAD"]')
    assert section.locator(".stage.of-backward").is_visible()
    assert "dim" in box(section, 0, "GEMM proj").get_attribute("class")
    assert "dim" not in box(section, 0, "GEMM proj", view=1).get_attribute("class")


def test_keys_walk_along_edges(pair):
    section = unfold(pair, "layers 0–2")
    box(section, 0, "GEMM proj").click()
    pair.keyboard.press("ArrowDown")
    assert pair.locator(".chosen .t").text_content() == "round bf16"
    pair.keyboard.press("ArrowUp")
    assert pair.locator(".chosen .t").text_content() == "GEMM proj"
    pair.keyboard.press("ArrowUp")
    assert "quantise" in pair.locator(".chosen .t").text_content()
    pair.keyboard.press("ArrowRight")
    assert pair.locator(".chosen").count() == 1
    pair.keyboard.press("Escape")
    assert pair.locator(".chosen").count() == 0
    section.locator(".viewport").first.focus()
    pair.keyboard.press("Enter")
    assert pair.locator(".chosen").count() == 1


def test_zoom_and_pan_move_both_sides_together(pair):
    section = unfold(pair, "layers 0–2")
    for _ in range(6):
        pair.keyboard.press("+")
    playwright.expect(section.locator(".scale")).to_have_text("299%")
    left, right = section.locator(".viewport").all()[:2]
    spot = left.bounding_box()
    before = left.evaluate("e => [e.scrollLeft, e.scrollTop]")
    pair.mouse.move(spot["x"] + 60, spot["y"] + 60)
    pair.mouse.down()
    pair.mouse.move(spot["x"] + 20, spot["y"] + 30, steps=4)
    pair.mouse.up()
    pair.wait_for_timeout(100)
    after = left.evaluate("e => [e.scrollLeft, e.scrollTop]")
    assert after != before
    assert right.evaluate("e => [e.scrollLeft, e.scrollTop]") == after
    pair.keyboard.press("0")
    playwright.expect(section.locator(".scale")).to_have_text("100%")


def test_focus_shows_one_section_alone(pair):
    unfold(pair, "layers 0–2")
    pair.keyboard.press("f")
    assert pair.locator(".section:visible").count() == 1
    pair.keyboard.press("Escape")
    assert pair.locator(".section:visible").count() == 3


def test_theme_follows_the_system_and_the_button(open_page, pair_file):
    page = open_page(pair_file, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(ground) == "rgb(18, 22, 28)"
    page.keyboard.press("t")
    assert page.evaluate(ground) == "rgb(255, 255, 255)"


def test_print_shows_drawings_whole_and_no_controls(open_page, pair_file, tmp_path):
    page = open_page(pair_file)
    unfold(page, "layers 0–2")
    page.emulate_media(media="print")
    assert page.locator(".tools").is_hidden()
    view = page.locator(".section[open] .viewport").first
    assert view.evaluate("e => e.scrollHeight <= e.clientHeight + 1 && e.scrollWidth <= e.clientWidth + 1")
    assert page.pdf(prefer_css_page_size=True).startswith(b"%PDF")


@pytest.mark.parametrize("size", [(1440, 900), (1024, 768)])
def test_nothing_is_wider_than_the_window_and_no_text_is_cut(open_page, pair_file, size):
    page = open_page(pair_file, size=size)
    page.locator("#differences [data-difference]").click()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    cut = page.evaluate(
        """[...document.querySelectorAll('header button, #differences button, #legend text:not(.flag *), .bar button')]
             .filter(e => e.getBoundingClientRect().width).filter(e => {
             const a = e.getBoundingClientRect();
             const b = (e.ownerSVGElement || e.parentElement).getBoundingClientRect();
             return e.scrollWidth > e.clientWidth + 1 && e.clientWidth || a.right > b.right + 1 || a.left < b.left - 1;
           }).map(e => e.textContent)"""
    )
    assert cut == []


OUTSIDE = """() => {
  const place = (e) => e.getBoundingClientRect();
  return [...document.querySelectorAll('.stage .box:not(.port):not(.exit)')].flatMap(box => {
    const r = place(box.querySelector('rect'));
    return [...box.querySelectorAll('.t, .s')].filter(t => {
      const b = place(t);
      return b.width && (b.left < r.left - .5 || b.right > r.right + .5);
    }).map(t => t.textContent);
  });
}"""
COVERED = """() => {
  const place = (e) => e.getBoundingClientRect();
  const over = (a, b) => a.width && b.width && a.left < b.right - 1 && b.left < a.right - 1
    && a.top < b.bottom - 2 && b.top < a.bottom - 2;
  return [...document.querySelectorAll('.stage svg')].flatMap(svg => {
    const boxes = [...svg.querySelectorAll('.box:not(.port):not(.exit) > rect')].map(place);
    const labels = [...svg.querySelectorAll('.wire text')];
    const places = labels.map(place);
    const covers = (i) => boxes.some(b => over(places[i], b)) || places.some((b, j) => j < i && over(places[i], b));
    return labels.filter((_, i) => covers(i)).map(t => t.textContent);
  });
}"""


def two_trainings():
    """Two captured trainings of one Qwen3, with other scale rules."""
    names = ("train_jet", "train_vllm_arithmetic")
    packed = [(STOCK / f"{name}.json.gz").read_bytes() for name in names]
    return [PrecisionGraph.from_json(gzip.decompress(data).decode()) for data in packed]


@pytest.mark.parametrize("graphs", [differing, two_trainings])
def test_text_stays_inside_its_box_and_labels_cover_nothing(open_page, tmp_path, graphs):
    page = open_page(write_html(tmp_path / "page.html", *graphs()))
    page.click("#fold-all")
    if page.locator("#phase").is_visible():
        page.click('[data-phase="backward"]')
    for detail in (0, 1):
        page.click(f'[data-detail="{detail}"]')
        assert page.evaluate(OUTSIDE) == []
        assert page.evaluate(COVERED) == []


def test_hostile_names_are_shown_literally_and_run_nothing(open_page, tmp_path):
    """Z4, and no script through FQNs, sources, kernels, rules, metadata or titles."""
    attack = '<img src=x onerror="alert(1)">'
    graph = tiny(prefix=HOSTILE, backward=False)
    nodes = tuple(
        replace(n, source=attack, kernel=f"{attack}</script>", reason=f"javascript:{attack}") if n.op == "gemm" else n
        for n in graph.nodes
    )
    graph = replace(graph, nodes=nodes, meta={"model": attack, "policy": attack, "versions": {attack: attack}})
    index = next(i for i, n in enumerate(nodes) if n.op == "gemm")
    found = [Difference(index, index, attack, attack)]
    page = open_page(write_html(tmp_path / "x.html", graph, graph, found, attack, attack, (attack, HOSTILE)))
    assert page.title() == attack
    assert page.inner_text("h1") == attack
    page.locator("[data-difference]").click()
    assert page.inner_text("#detail .fqn") == f"{HOSTILE}.0.proj"
    assert attack in page.inner_text("#detail")
    assert f"{HOSTILE.split('.')[0]}" in page.locator(".fqn").inner_text()
    page.fill("#search", attack)
    page.fill("#search", HOSTILE)
    assert HOSTILE in page.inner_text("#found")
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


def test_sides_drawn_apart_are_still_selected_together(open_page, tmp_path):
    train, infer = (in_order(*order) for order in ("pq", "qp"))
    page = open_page(write_html(tmp_path / "apart.html", train, infer))
    section = unfold(page, "layer 0")
    box(section, 0, "GEMM p").click()
    assert "GEMM p" in section.locator('.pane[data-pane$=".0.1"] .twin').text_content()


def test_an_empty_graph_opens(open_page, tmp_path):
    page = open_page(write_html(tmp_path / "empty.html", PrecisionGraph("nothing", (), {})))
    for key in "e", "n", "o", "b", "f", "+", "ArrowDown", "Escape":
        page.keyboard.press(key)
    assert page.locator(".section").count() == 0


def test_one_graph_alone(open_page, tmp_path):
    page = open_page(write_html(tmp_path / "one.html", tiny()))
    section = unfold(page, "layers 0–2")
    assert section.locator(".stage.of-forward .pane").count() == 1
    box(section, 0, "GEMM proj").click()
    assert rows(page)["operands"] == ["f8e4m3[1x128] × f8e4m3[128x128]"]

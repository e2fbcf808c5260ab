"""The layout: nothing overlaps, everything flows down."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jetgraph.viz import layered
from jetgraph.viz.layered import layout


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 14))
    sizes = [(draw(st.integers(10, 120)), draw(st.sampled_from([20, 36]))) for _ in range(count)]
    pairs = [(u, v) for v in range(count) for u in range(v)]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=24, unique=True)) if pairs else []
    return sizes, edges, draw(st.sets(st.integers(0, count - 1)))


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_boxes_do_not_overlap_and_edges_go_down(case):
    sizes, edges, loose = case
    check(sizes, edges, layout(sizes, edges, loose))


def check(sizes, edges, drawing):
    corners = [(x - w / 2, y, x + w / 2, y + h) for (x, y), (w, h) in zip(drawing.boxes, sizes, strict=True)]
    for u, v in edges:
        assert corners[u][3] < corners[v][1]
    for i, a in enumerate(corners):
        assert a[0] >= -1e-6
        assert a[2] <= drawing.width + 1e-6
        for b in corners[:i]:
            assert a[2] <= b[0] + 1e-6 or b[2] <= a[0] + 1e-6 or a[3] <= b[1] or b[3] <= a[1]


def test_a_chain_is_a_straight_column():
    drawing = layout([(80, 36)] * 4, [(0, 1), (1, 2), (2, 3)])
    assert len({round(x, 3) for x, _ in drawing.boxes}) == 1


def test_a_long_edge_is_straight():
    drawing = layout([(80, 36)] * 5, [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)])
    assert len({round(x, 3) for x, _, _ in drawing.routes[4]}) == 1


def test_empty():
    assert layout([], []).boxes == ()


def test_a_large_graph_which_gets_fewer_rounds_is_still_in_order(monkeypatch):
    monkeypatch.setattr(layered, "IN_FULL", 100)
    pairs = [(n, n + 2) for n in range(78)] + [(n, 79 - n) for n in range(0, 30, 2)]
    sizes = [(80, 21)] * 80
    check(sizes, pairs, layout(sizes, pairs))

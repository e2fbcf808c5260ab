"""One section as boxes and wires with positions: training and rollout share one layout, so their drawings align.

What only one side has leaves a ghost on the other: a missing quantisation is seen as a hole.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from heapq import heappop, heappush

from jetgraph.viz.condense import FLOWS, Box, Condensed, condense, port_titles
from jetgraph.viz.layered import layout
from jetgraph.viz.layers import Place, relative
from jetgraph.viz.study import Side, Study

FORWARD, BACKWARD = "forward", "backward"
TITLE, SMALL = 6.4, 5.75
"""Width of a character of a title and of a label, on the wide side: no font is measured here."""
TALL, LOW = 36.0, 21.0
LOW_KINDS = frozenset({"round", "op", "port", "exit", "weight", "input"})
_layout = lru_cache(maxsize=64)(layout)
"""Sections that are apart for what is drawn elsewhere (the first and the last layer) often have one drawing."""
LONG_RANKS = 3
"""A wire that passes more ranks than this names its λ again where it arrives."""


@dataclass(frozen=True)
class Item:
    """A place in the drawing: the box of either side or both; x, y is the top left corner."""

    boxes: tuple[Box | None, Box | None]
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Wire:
    """A value used: ``values`` per side (node index or None); ``points`` are knots with vertical tangents."""

    source: int
    target: int
    values: tuple[int | None, int | None]
    points: tuple[tuple[float, float], ...]
    labels: tuple[tuple[float, float, str], ...]
    """x, y and text anchor: beside the start, away from where the wire turns"""


@dataclass(frozen=True)
class Scene:
    view: str
    width: float
    height: float
    items: tuple[Item, ...]
    wires: tuple[Wire, ...]


def scenes(study: Study, place: Place, view: str = FORWARD, every_op: bool = False) -> tuple[Scene, ...]:
    """The drawing of a section: one scene for both sides, or (if their orders contradict each other) one per side.

    ``every_op`` draws one box a node; otherwise runs of pointwise ops are one box.
    """
    return arrange(study, [_condensed(side, place, view, every_op) for side in study.sides], view)


def arrange(study: Study, parts: Sequence[Condensed], view: str = FORWARD) -> tuple[Scene, ...]:
    """The boxes of one side or of both (in the order of the study's sides), laid out as `scenes` says."""
    if len(parts) == 1 or not parts[1].boxes:
        return (_arrange(view, _alone(parts[0], 0), [parts[0], Condensed()], study),)
    joined = _topological(_pair(study, *parts), parts)
    if joined is not None:
        return (_arrange(view, joined, parts, study),)
    return tuple(_arrange(view, _alone(part, s), parts, study) for s, part in enumerate(parts))


def _alone(part: Condensed, side: int) -> list[tuple[int | None, int | None]]:
    """One side's boxes with no partners, in topological order (contraction kept them acyclic)."""
    pairs = [(n, None) if side == 0 else (None, n) for n in range(len(part.boxes))]
    order = _topological(pairs, [part, Condensed()] if side == 0 else [Condensed(), part])
    assert order is not None, "condensing made a cycle"
    return order


def _condensed(side: Side, place: Place, view: str, every_op: bool) -> Condensed:
    block = side.blocks.get(place)
    if block is None:
        return Condensed()
    members = [i for i in block.nodes if (i in side.forward) is (view == FORWARD)]
    inside = set(members)
    used: set[int] = set()
    for index, node in enumerate(side.graph.nodes):
        if side.placed[index] != place and (index in side.forward) is (view == FORWARD):
            used.update(i for i in node.inputs if i in inside)
    exits: dict[int, str] = {}
    for index in sorted(used):
        if side.graph.nodes[index].inputs:
            exits[index] = "to next" if view == FORWARD else "gradient out"
    for name, index in side.graph.outputs.items():
        if index in inside:
            exits[index] = f"output {relative(name)}" if view == FORWARD else _gradient(name)
    titles = port_titles(side.graph, place, side.placed, side.paths, side.forward)
    return condense(side.graph, members, side.paths, titles, exits, every_op)


def _gradient(name: str) -> str:
    """``grad.model.layers.3.mlp.up_proj.weight`` → ``grad up_proj``."""
    return "grad " + name.removesuffix(".weight").rsplit(".", 1)[-1]


def _pair(study: Study, left: Condensed, right: Condensed) -> list[tuple[int | None, int | None]]:
    """Boxes of both sides that hold the same nodes; ports and exits by their titles."""
    assert study.matching is not None
    holder = {n: b for b, box in enumerate(left.boxes) if box.kind not in ("port", "exit") for n in box.nodes}
    named = {(box.kind, box.title): b for b, box in enumerate(left.boxes) if box.kind in ("port", "exit")}
    partner: dict[int, int] = {}
    taken: set[int] = set()
    for b, box in enumerate(right.boxes):
        if box.kind in ("port", "exit"):
            found = named.get((box.kind, box.title))
        else:
            partners = [study.matching.train_of[n] for n in box.nodes]
            votes = Counter(holder[p] for p in partners if p in holder)
            found = votes.most_common(1)[0][0] if votes else None
        if found is not None and found not in taken:
            partner[b] = found
            taken.add(found)
    pairs: list[tuple[int | None, int | None]] = [(a, None) for a in range(len(left.boxes))]
    for b in range(len(right.boxes)):
        if b in partner:
            pairs[partner[b]] = (partner[b], b)
        else:
            pairs.append((None, b))
    return pairs


def _union_edges(pairs, parts: Sequence[Condensed]) -> dict[tuple[int, int], None]:
    where = [{pair[s]: k for k, pair in enumerate(pairs) if pair[s] is not None} for s in (0, 1)]
    edges: dict[tuple[int, int], None] = {}
    for s, part in enumerate(parts):
        for u, v, _ in part.edges:
            if u in where[s] and v in where[s]:
                edges[where[s][u], where[s][v]] = None
    return edges


def _topological(pairs, parts: Sequence[Condensed]):
    """The pairs in an order that both sides allow, or None."""
    edges = _union_edges(pairs, parts)
    waiting = Counter(v for _, v in edges)
    after: dict[int, list[int]] = defaultdict(list)
    for u, v in edges:
        after[u].append(v)
    ready = [k for k in range(len(pairs)) if not waiting[k]]
    order = []
    while ready:
        k = heappop(ready)
        order.append(k)
        for v in after[k]:
            waiting[v] -= 1
            if not waiting[v]:
                heappush(ready, v)
    return [pairs[k] for k in order] if len(order) == len(pairs) else None


def _arrange(view: str, pairs, parts: Sequence[Condensed], study: Study) -> Scene:
    where = [{pair[s]: k for k, pair in enumerate(pairs) if pair[s] is not None} for s in (0, 1)]
    outlets, wires = _outlets(where, parts, study)
    graphs = [side.graph for side in study.sides]
    labels = [[_widest_label(graphs, values) for values in outlets[k]] for k in range(len(pairs))]
    boxes = [[parts[s].boxes[pair[s]] for s in (0, 1) if pair[s] is not None] for pair in pairs]
    sizes = [(max(sum(labels[k]), *map(_width, both)), max(map(_height, both))) for k, both in enumerate(boxes)]
    loose = {k for k, both in enumerate(boxes) if all(map(_loose, both))}
    drawing = _layout(tuple(sizes), tuple((u, v) for u, v, _ in wires), frozenset(loose))
    items = tuple(
        Item((_at(parts, 0, a), _at(parts, 1, b)), x - w / 2, y, w, h)
        for (a, b), (x, y), (w, h) in zip(pairs, drawing.boxes, sizes, strict=True)
    )
    drawn = _route(items, wires, outlets, labels, drawing.routes)
    reach = [(x, x + w) if a == "start" else (x - w, x) for (x, _, a), w in _label_extents(drawn, graphs)]
    left = min((0.0, *(a for a, _ in reach)))
    right = max((drawing.width, *(b for _, b in reach)))
    items = tuple(replace(item, x=item.x - left) for item in items)
    drawn = tuple(_moved(wire, -left) for wire in drawn)
    return Scene(view, right - left, drawing.height + 4, items, drawn)


def _label_extents(wires: Sequence[Wire], graphs) -> list[tuple[tuple[float, float, str], float]]:
    found = []
    for wire in wires:
        width = _widest_label(graphs, wire.values) - 8
        found += [(label, width) for label in wire.labels]
    return found


def _moved(wire: Wire, dx: float) -> Wire:
    points = tuple((x + dx, y) for x, y in wire.points)
    return replace(wire, points=points, labels=tuple((x + dx, y, anchor) for x, y, anchor in wire.labels))


def _outlets(where, parts, study: Study):
    """Per item its values (train, infer), and per wire (source, target, outlet) the sides that have it."""
    outlets: dict[int, list[list[int | None]]] = defaultdict(list)
    wires: dict[tuple[int, int, int], set[int]] = {}
    infer_of = study.matching.infer_of if study.matching else ()
    for s, part in enumerate(parts):
        for u, v, value in part.edges:
            if u not in where[s] or v not in where[s]:
                continue
            there = outlets[where[s][u]]
            slot = next((k for k, pair in enumerate(there) if pair[s] == value), None)
            if slot is None and s == 1:
                free = [k for k, pair in enumerate(there) if pair[1] is None]
                alike = [k for k in free if (twin := there[k][0]) is not None and infer_of[twin] == value]
                slot = alike[0] if alike else free[0] if len(free) == 1 else None
            if slot is None:
                there.append([None, None])
                slot = len(there) - 1
            there[slot][s] = value
            wires.setdefault((where[s][u], where[s][v], slot), set()).add(s)
    return outlets, dict(sorted(wires.items()))


def _route(items, wires, outlets, labels, routes) -> tuple[Wire, ...]:
    """Where wires start (one outlet a value, in the order of where they lead), pass, end, and carry their λ."""
    centre = [item.x + item.width / 2 for item in items]
    heading: dict[tuple[int, int], list[float]] = defaultdict(list)
    for w, (u, v, slot) in enumerate(wires):
        heading[u, slot].append(routes[w][0][0] if routes[w] else centre[v])
    starts = {}
    for u in range(len(items)):
        x = centre[u] - sum(labels[u]) / 2
        for slot in sorted(range(len(outlets[u])), key=lambda k: sum(heading[u, k]) / len(heading[u, k])):
            starts[u, slot] = centre[u] if len(outlets[u]) == 1 else x + min(14.0, labels[u][slot] / 2)
            x += labels[u][slot]
    arriving: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for w, (u, v, slot) in enumerate(wires):
        arriving[v].append((routes[w][-1][0] if routes[w] else starts[u, slot], w))
    ends = {}
    for v, group in arriving.items():
        step = min(26.0, items[v].width * 0.7 / len(group))
        for k, (_, w) in enumerate(sorted(group)):
            ends[w] = centre[v] + (k - (len(group) - 1) / 2) * step
    marks: list[list[tuple[float, float, str]]] = []
    labelled: set[tuple[int, int, int]] = set()
    taken = [(item.x, item.y, item.x + item.width, item.y + item.height) for item in items]
    for (u, _, slot), having in wires.items():
        start = (starts[u, slot], items[u].y + items[u].height)
        turns = [x - start[0] for x in heading[u, slot]]
        fresh = {(u, slot, s) for s in having} - labelled
        places = _beside(start, turns, len(outlets[u]) == 1)
        marks.append([_free(places, labels[u][slot] - 12, taken) or places[0]] if fresh else [])
        taken += [_extent(mark, labels[u][slot] - 12) for mark in marks[-1]]
        labelled |= fresh
    drawn: list[Wire] = []
    for w, ((u, v, slot), having) in enumerate(wires.items()):
        if len(routes[w]) > LONG_RANKS and (mark := _free(_along(routes[w]), labels[u][slot] - 12, taken)):
            marks[w].append(mark)
            taken.append(_extent(mark, labels[u][slot] - 12))
        start = (starts[u, slot], items[u].y + items[u].height)
        through = [point for x, top, bottom in routes[w] for point in ((x, top), (x, bottom))]
        train, infer = outlets[u][slot]
        values = (train if 0 in having else None, infer if 1 in having else None)
        drawn.append(Wire(u, v, values, (start, *through, (ends[w], items[v].y)), tuple(marks[w])))
    return tuple(drawn)


def _extent(mark: tuple[float, float, str], width: float) -> tuple[float, float, float, float]:
    """Left, top, right and bottom of a label."""
    x, y, anchor = mark
    left = x if anchor == "start" else x - width
    return left, y - 9, left + width, y + 3


def _free(
    places: Iterable[tuple[float, float, str]], width: float, taken: Sequence[tuple[float, float, float, float]]
) -> tuple[float, float, str] | None:
    """The first place where a label covers nothing."""
    for mark in places:
        left, top, right, low = _extent(mark, width)
        if not any(a < right and left < c and b < low and top < d for a, b, c, d in taken):
            return mark
    return None


def _along(route: Sequence[tuple[float, float, float]]) -> list[tuple[float, float, str]]:
    """Places of a long wire's second label, nearest to where it arrives first."""
    return [mark for x, _, y in reversed(route) for mark in ((x - 4, y - 2, "end"), (x + 4, y - 2, "start"))]


def _beside(start: tuple[float, float], turns: Sequence[float], alone: bool) -> list[tuple[float, float, str]]:
    """Places of a label where a wire starts: first the side to which fewer of the wires turn, then lower."""
    x, y = start
    right, left = sum(turn > 12 for turn in turns), sum(turn < -12 for turn in turns)
    sides = [(x + 4, "start"), (x - 4, "end")]
    if alone and right > left:
        sides.reverse()
    return [(at, y + down, anchor) for down in (11, 17, 23) for at, anchor in sides[: 1 + alone]]


def _widest_label(graphs, values: Sequence[int | None]) -> float:
    names = [graph.nodes[v].type.precision.short() for graph, v in zip(graphs, values, strict=False) if v is not None]
    return max((len(name) for name in names), default=0) * SMALL + 12


def _at(parts: Sequence[Condensed], side: int, box: int | None) -> Box | None:
    return None if box is None else parts[side].boxes[box]


def _loose(box: Box) -> bool:
    """Leaves that need not stand at the top; the value that flows through the section does."""
    return box.kind in ("weight", "input") or (box.kind == "port" and box.title not in FLOWS)


def _width(box: Box) -> float:
    if box.kind in LOW_KINDS:
        return len(f"{box.title} {box.subtitle}".strip()) * SMALL + 20
    return max(len(box.title) * TITLE, len(box.subtitle) * SMALL) + 18


def _height(box: Box) -> float:
    return LOW if box.kind in LOW_KINDS else TALL

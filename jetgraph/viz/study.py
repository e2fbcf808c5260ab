"""What every picture of one graph, or of two side by side, needs to know; computed once.

The rollout's nodes are placed where their partners of training are, so an engine's own module names do not tear apart
what is equal.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jetgraph.graph import PrecisionGraph
from jetgraph.viz.differences import Difference
from jetgraph.viz.layers import Block, Place, blocks, forward_view, layer_of, path_of, places, relative, spans
from jetgraph.viz.matching import Matching, match

_LAYER_IN_TEXT = re.compile(r"(?<=[A-Za-z_]\.)\d+(?=\.[A-Za-z_])")


NAMES = ("train", "infer")


@dataclass(frozen=True)
class Side:
    """One graph, cut up: ``paths`` and ``placed`` per node."""

    name: str
    graph: PrecisionGraph
    paths: tuple[str, ...]
    placed: tuple[Place, ...]
    blocks: dict[Place, Block]
    forward: frozenset[int]


@dataclass(frozen=True)
class Section:
    """One card of the overview: equal layers, or one part outside them."""

    title: str
    places: tuple[Place, ...]

    @property
    def first(self) -> Place:
        return self.places[0]


@dataclass(frozen=True)
class FoldedDifference:
    """Differences that say the same of several layers."""

    rule: str
    text: str
    where: str
    members: tuple[Difference, ...]


@dataclass(frozen=True)
class Study:
    train: Side
    infer: Side | None
    matching: Matching | None
    sections: tuple[Section, ...]
    differences: tuple[FoldedDifference, ...]
    marked: dict[str, frozenset[int]]
    """per side's name the nodes at which a difference is"""

    @property
    def sides(self) -> tuple[Side, ...]:
        return (self.train,) if self.infer is None else (self.train, self.infer)

    def status(self, side: str, index: int) -> str:
        """equal, partner (same op, but something before it differs) or alone; "" without a second graph."""
        if self.matching is None or self.infer is None:
            return ""
        right = side == self.infer.name
        if self.matching.is_equal("infer" if right else "train", index):
            return "equal"
        partner = (self.matching.train_of if right else self.matching.infer_of)[index]
        return "alone" if partner is None else "partner"


def study(
    train: PrecisionGraph,
    infer: PrecisionGraph | None = None,
    differences: Iterable[Difference] = (),
    names: tuple[str, str] = NAMES,
) -> Study:
    """Everything known about one graph or two; ``names`` are what people call the left and the right one.

    Raises:
        ValueError: both sides have the same name.
    """
    if names[0] == names[1]:
        raise ValueError(f"both sides are named {names[0]!r}: give two names that tell the graphs apart")
    differences = tuple(differences)
    left = _side(names[0], train, [path_of(train, i) for i in range(len(train.nodes))])
    right, matching = None, None
    if infer is not None:
        matching = match(train, infer)
        paths = [path_of(infer, i) if p is None else left.paths[p] for i, p in enumerate(matching.train_of)]
        right = _side(names[1], infer, paths)
    marked = {
        names[0]: frozenset(d.train for d in differences if d.train is not None),
        names[1]: frozenset(d.infer for d in differences if d.infer is not None),
    }
    draft = Study(left, right, matching, (), _fold_differences(differences, left, right), marked)
    return Study(left, right, matching, _sections(draft), draft.differences, marked)


def _side(name: str, graph: PrecisionGraph, paths: Sequence[str]) -> Side:
    placed = places(graph, paths)
    return Side(name, graph, tuple(paths), tuple(placed), blocks(graph, placed, paths), forward_view(graph))


def _sections(study: Study) -> tuple[Section, ...]:
    """Layers with equal blocks, partners and differences share a section.  That something lower differs, and so every
    digest above it, does not set a layer apart."""
    order = dict.fromkeys(place for side in study.sides for place in side.blocks)
    rank = {"embedding": (0, 0), "model": (0, 0), "head": (2, 0), "loss": (3, 0)}
    groups: dict[tuple, list[Place]] = defaultdict(list)
    for place in sorted(order, key=lambda p: (1, p) if isinstance(p, int) else rank[p]):
        signature: list = [isinstance(place, int) or place]
        for side in study.sides:
            block = side.blocks.get(place)
            signature.append(block and block.signature)
            nodes = block.nodes if block else ()
            marked = study.marked[side.name]
            signature.append(tuple((study.status(side.name, n) == "alone", n in marked) for n in nodes))
        groups[tuple(signature)].append(place)
    return tuple(Section(_title(group), tuple(group)) for group in groups.values())


def _title(group: Sequence[Place]) -> str:
    layers = [place for place in group if isinstance(place, int)]
    if not layers:
        return str(group[0])
    return f"layers {spans(layers)}" if len(layers) > 1 else f"layer {layers[0]}"


def _place_of(difference: Difference, left: Side, right: Side | None) -> Place:
    if difference.train is not None:
        return left.placed[difference.train]
    if difference.infer is not None and right is not None:
        return right.placed[difference.infer]
    layer = layer_of(difference.fqn)
    return "" if layer is None else layer


def _fold_differences(
    differences: Sequence[Difference], left: Side, right: Side | None
) -> tuple[FoldedDifference, ...]:
    groups: dict[tuple, list[tuple[Place, Difference, str]]] = defaultdict(list)
    for d in differences:
        place = _place_of(d, left, right)
        side, index = (left, d.train) if d.train is not None else (right, d.infer)
        path = side.paths[index] if side is not None and index is not None else d.fqn
        key = (d.rule, _LAYER_IN_TEXT.sub("*", d.text), relative(path), isinstance(place, int) or place)
        groups[key].append((place, d, path))
    found = []
    for (rule, text, path, _), group in groups.items():
        layers = sorted({p for p, _, _ in group if isinstance(p, int)})
        where = _title(layers) if layers else str(group[0][0]) or "graph"
        members = tuple(d for _, d, _ in group)
        words, path = (members[0].text, group[0][2]) if len(members) == 1 else (text, path)
        found.append(FoldedDifference(rule, words, f"{where} · {path}" if path else where, members))
    return tuple(found)

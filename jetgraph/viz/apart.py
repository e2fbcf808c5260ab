"""Why a layer stands apart from the layers that are folded: the first thing that it has and they have not."""

from __future__ import annotations

from collections import Counter

from jetgraph.viz.condense import leaf, op_words
from jetgraph.viz.layers import Block
from jetgraph.viz.study import Section, Side, Study


def why_apart(study: Study, section: Section) -> str:
    """A few words, "" for a section that is no layer, or that is the largest of them."""
    layers = [s for s in study.sections if isinstance(s.first, int)]
    if section not in layers or len(layers) < 2:
        return ""
    usual = max(layers, key=lambda s: len(s.places))
    if usual is section:
        return ""
    for describe in (_values, _entering):
        for side in study.sides:
            here, there = (describe(side, side.blocks.get(s.first)) for s in (section, usual))
            words = _change(here, there)
            if words:
                return f"in {side.name} it {words}" if len(study.sides) > 1 else f"it {words}"
    if any(_marks(study, side, section) != _marks(study, side, usual) for side in study.sides):
        return "differs elsewhere than the other layers do"
    return "wired otherwise than the other layers"


def _change(here: Counter[str], there: Counter[str]) -> str:
    more, less = list((here - there).elements()), list((there - here).elements())
    if more and less:
        rest = f", and {max(len(more), len(less)) - 1} more" if max(len(more), len(less)) > 1 else ""
        return f"has {more[0]} for {less[0]}{rest}"
    if more or less:
        rest = f" and {len(more or less) - 1} more" if len(more or less) > 1 else ""
        return f"{'also has' if more else 'lacks'} {(more or less)[0]}{rest}"
    return ""


def _values(side: Side, block: Block | None) -> Counter[str]:
    found: Counter[str] = Counter()
    for index in block.nodes if block else ():
        node = side.graph.nodes[index]
        where = leaf(side.paths[index]) if side.paths[index] else ""
        precision = node.type.precision.short()
        words = op_words(side.graph, node)
        made = words if precision in words.split() else f"{words} → {precision}"
        found[f"{made} in {where}" if where else made] += 1
    return found


def _entering(side: Side, block: Block | None) -> Counter[str]:
    nodes = [side.graph.nodes[i] for i in (block.externals if block else ())]
    return Counter(f"a value in {node.type.precision.short()} entering" for node in nodes)


def _marks(study: Study, side: Side, section: Section) -> tuple[tuple[bool, bool], ...]:
    block, marked = side.blocks.get(section.first), study.marked[side.name]
    return tuple((study.status(side.name, n) == "alone", n in marked) for n in (block.nodes if block else ()))

"""A layered drawing of a small directed acyclic graph (Sugiyama): ranks, few crossings, straight long edges.

Knows nothing of precision: sizes and edges in, positions and polylines out.  Tens to a few hundred boxes.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

GAP_X, GAP_Y, LANE = 16.0, 32.0, 10.0
"""Space between boxes of a rank, between ranks (an edge's label fits in), and the width of a passing edge."""
SWEEPS, PATIENCE = 16, 4
"""Sweeps from each start, and how many of them may bring no improvement."""
MAX_MOVES, STILL = 60, 0.4
"""Rounds of placing, and the largest movement (in pixels) that counts as none."""
IN_FULL = 3000
"""Pieces of edges between two ranks up to which all those rounds are made; a larger graph gets fewer in proportion, so
that time grows with size alone."""
UNTIED = 0.1
"""How much a node without neighbours resists being moved."""


@dataclass(frozen=True)
class Drawing:
    """``boxes``: centre x and top y per node; ``routes``: per edge the x at each rank it passes, with that rank's top
    and bottom: [(x, top, bottom), …]."""

    width: float
    height: float
    boxes: tuple[tuple[float, float], ...]
    routes: tuple[tuple[tuple[float, float, float], ...], ...]


def layout(
    sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]], loose: Collection[int] = ()
) -> Drawing:
    """Nodes must be numbered in a topological order.  ``loose`` sources, and what depends on them alone (a weight and
    its quantisation), are drawn next to their reader instead of at the top."""
    if not sizes:
        return Drawing(0, 0, (), ())
    ranks = _ranks(len(sizes), edges, loose)
    widths = [w for w, _ in sizes]
    links: list[tuple[int, int]] = []
    chains: list[list[int]] = []
    level = list(ranks)
    for u, v in edges:
        chain = [u]
        for rank in range(ranks[u] + 1, ranks[v]):
            chain.append(len(widths))
            widths.append(LANE)
            level.append(rank)
        links += zip(chain, [*chain[1:], v], strict=True)
        chains.append(chain[1:])
    rows = _order(level, links)
    xs = _place(rows, links, widths, len(sizes))
    _straighten(chains, rows, xs, widths)
    left = min(x - w / 2 for x, w in zip(xs, widths, strict=True))
    right = max(x + w / 2 for x, w in zip(xs, widths, strict=True))
    tops, bottoms, y = [], [], 0.0
    for row in rows:
        height = max((sizes[n][1] for n in row if n < len(sizes)), default=0.0)
        tops.append(y)
        bottoms.append(y + height)
        y += height + GAP_Y
    middle = [(t + b) / 2 for t, b in zip(tops, bottoms, strict=True)]
    boxes = tuple((xs[n] - left, middle[level[n]] - sizes[n][1] / 2) for n in range(len(sizes)))
    routes = tuple(tuple((xs[n] - left, tops[level[n]], bottoms[level[n]]) for n in chain) for chain in chains)
    return Drawing(right - left, bottoms[-1], boxes, routes)


def _ranks(count: int, edges: Sequence[tuple[int, int]], loose: Collection[int]) -> list[int]:
    """Longest path from the sources; loose nodes then move down."""
    before: dict[int, list[int]] = defaultdict(list)
    after: dict[int, list[int]] = defaultdict(list)
    for u, v in edges:
        before[v].append(u)
        after[u].append(v)
    ranks = [0] * count
    hanging = [False] * count
    for v in range(count):
        ranks[v] = max((ranks[u] + 1 for u in before[v]), default=0)
        hanging[v] = all(hanging[u] for u in before[v]) if before[v] else v in loose
    for v in range(count - 1, -1, -1):
        if hanging[v] and after[v]:
            ranks[v] = min(ranks[w] for w in after[v]) - 1
    lowest = min(ranks)
    return [rank - lowest for rank in ranks]


def _rounds(most: int, num_links: int) -> int:
    return max(2, most * min(IN_FULL, num_links) // num_links) if num_links else most


def _order(level: Sequence[int], links: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Rows of nodes, left to right, by barycentres swept down and up; the best of all sweeps and starts is kept."""
    up: dict[int, list[int]] = defaultdict(list)
    down: dict[int, list[int]] = defaultdict(list)
    for u, v in links:
        up[v].append(u)
        down[u].append(v)
    best: list[list[int]] = []
    fewest = -1
    for start in (list(range(len(level))), _walk(len(level), up, down), _walk(len(level), down, up)):
        rows: list[list[int]] = [[] for _ in range(max(level) + 1)]
        for node in start:
            rows[level[node]].append(node)
        idle, least = 0, -1
        for sweep in range(_rounds(SWEEPS, len(links))):
            crossings = _crossings(rows, down)
            if fewest < 0 or crossings < fewest:
                best, fewest = [list(row) for row in rows], crossings
            idle = 0 if least < 0 or crossings < least else idle + 1
            least = crossings if least < 0 else min(least, crossings)
            if not crossings or idle == PATIENCE:
                break
            _sweep(rows, up if sweep % 2 == 0 else down, downwards=sweep % 2 == 0)
            _swap_neighbours(rows, up, down)
    return best


def _sweep(rows: list[list[int]], near, downwards: bool) -> None:
    at = {n: float(i) for row in rows for i, n in enumerate(row)}
    for row in rows if downwards else reversed(rows):
        row.sort(key=lambda n: sum(at[m] for m in near[n]) / len(near[n]) if near[n] else at[n])
        at.update((n, i) for i, n in enumerate(row))


def _walk(count: int, up, down) -> list[int]:
    """Depth first from the sources, so that a chain starts as a column."""
    seen: dict[int, None] = {}
    stack = [n for n in range(count - 1, -1, -1) if not up[n]]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            stack.extend(reversed(down[node]))
    return list(seen)


def _swap_neighbours(rows: list[list[int]], up, down) -> None:
    at = {n: i for row in rows for i, n in enumerate(row)}
    for row in rows:
        for i in range(len(row) - 1):
            a, b = row[i], row[i + 1]
            if _pair(a, b, up, at) + _pair(a, b, down, at) > _pair(b, a, up, at) + _pair(b, a, down, at):
                row[i], row[i + 1] = b, a
                at[a], at[b] = i + 1, i


def _pair(left: int, right: int, near, at) -> int:
    return sum(at[a] > at[b] for a in near[left] for b in near[right])


def _crossings(rows: list[list[int]], down) -> int:
    total = 0
    at = {n: i for row in rows for i, n in enumerate(row)}
    for row in rows:
        seen: list[int] = []
        for n in row:
            ends = sorted(at[m] for m in down[n])
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def _place(rows: list[list[int]], links, widths: Sequence[float], real: int) -> list[float]:
    """x of every node: near the weighted mean of its neighbours, long edges straight, no overlap."""
    near: dict[int, list[tuple[int, float]]] = defaultdict(list)
    fans_out, fans_in = Counter(u for u, _ in links), Counter(v for _, v in links)
    for u, v in links:
        weight = (1.0, 3.0, 12.0)[(u >= real) + (v >= real)] + 10.0 * (fans_out[u] == 1 and fans_in[v] == 1)
        near[u].append((v, weight))
        near[v].append((u, weight))
    xs = [0.0] * len(widths)
    mass = [sum(w for _, w in near[n]) for n in range(len(widths))]
    offsets = [0.0] * len(widths)
    for row in rows:
        for left, n in zip(row, row[1:], strict=False):
            offsets[n] = offsets[left] + (widths[left] + widths[n]) / 2 + GAP_X
        for n in row:
            xs[n] = offsets[n] + widths[row[0]] / 2
    for sweep in range(_rounds(MAX_MOVES, len(links))):
        moved = 0.0
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = []
            for n in row:
                total = 0.0
                for m, w in near[n]:
                    total += xs[m] * w
                wanted.append(total / mass[n] if mass[n] else xs[n])
            for n, x in zip(row, _separate(row, wanted, mass, offsets), strict=True):
                moved = max(moved, abs(x - xs[n]))
                xs[n] = x
        if moved < STILL:
            break
    return xs


def _straighten(chains: Sequence[Sequence[int]], rows, xs: list[float], widths: Sequence[float]) -> None:
    """Moves a long edge to as few x as the boxes beside it allow."""
    beside = {}
    for row in rows:
        for left, n, right in zip([None, *row], row, [*row[1:], None], strict=False):
            beside[n] = (left, right)

    def room(n: int) -> tuple[float, float]:
        left, right = beside[n]
        low = float("-inf") if left is None else xs[left] + (widths[left] + widths[n]) / 2 + GAP_X / 2
        high = float("inf") if right is None else xs[right] - (widths[right] + widths[n]) / 2 - GAP_X / 2
        return low, high

    for chain in chains:
        run: list[int] = []
        low, high = float("-inf"), float("inf")
        for n in [*chain, None]:
            below, above = (float("inf"), float("-inf")) if n is None else room(n)
            if run and max(low, below) > min(high, above):
                middle = sum(xs[m] for m in run) / len(run)
                for m in run:
                    xs[m] = min(max(middle, low), high)
                run, low, high = [], float("-inf"), float("inf")
            if n is not None:
                run.append(n)
                low, high = max(low, below), min(high, above)


def _separate(
    row: Sequence[int], wanted: Sequence[float], mass: Sequence[float], offsets: Sequence[float]
) -> list[float]:
    """Least-squares positions that keep order and distance (pooling adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for n, x in zip(row, wanted, strict=True):
        pool = x - offsets[n], mass[n] or UNTIED, 1
        while pools and pools[-1][0] > pool[0]:
            x1, m1, c1 = pools.pop()
            x2, m2, c2 = pool
            pool = (x1 * m1 + x2 * m2) / (m1 + m2), m1 + m2, c1 + c2
        pools.append(pool)
    flat = [x for x, _, count in pools for _ in range(count)]
    return [x + offsets[n] for n, x in zip(row, flat, strict=True)]

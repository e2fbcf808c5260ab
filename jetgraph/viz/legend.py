"""The palette, and the legend of the page: line styles by format, kinds of boxes, and how a difference looks.

Colours start from Okabe and Ito's and were moved until text in them reads on paper and tints (4.5 : 1 at least) and any
two stay apart with every kind of colour vision; tests/viz/test_palette.py measures both.  Colour is never alone: λ is
written on every wire, and formats differ in line style.
"""

from __future__ import annotations

from collections import Counter
from html import escape

from jetgraph.precision import Precision
from jetgraph.viz.study import Study

PALETTE = {
    "bf16": "#0d71b2",
    "f8": "#b25000",
    "f32": "#09633b",
    "int": "#6a6b6a",
    "differs": "#a4047a",
}
"""Colour by class of format, and of what differs, on white; scene.css has the same values (a test compares them)."""
FORMAT_CLASS = {"bf16": "bf16", "f32": "f32", "f64": "f32", "f8e4m3": "f8"}
"""The class of a format; all others are "int"."""
CLASS_NAMES = {"bf16": "bf16", "f8": "FP8", "f32": "f32", "int": "integer"}
_WORDS = {"bf16": "rounded to BF16", "f32": "FP32, not rounded yet", "f64": "FP64", "i64": "integers"}
BOXES = (
    ("quantize", "quantise"),
    ("gemm", "GEMM"),
    ("attention", "attention"),
    ("round", "round"),
    ("weight low", "weight"),
    ("pointwise", "several ops"),
)
PAIR_BOXES = (("differs", "differs"), ("ghost", "not here"))
WIDTH, COLUMN, BOX, ROW, LINE, WORDS_AT = 324, 107, 96, 31, 21, 156


def format_class(precision: Precision) -> str:
    """The palette's key for a precision.

    >>> format_class(Precision.parse("bf16")), format_class(Precision.parse("i64"))
    ('bf16', 'int')
    """
    return FORMAT_CLASS.get(precision.format.value, "int")


def precisions(study: Study) -> list[Precision]:
    """Every λ of the graphs once by its short form: by format in the palette's order, then the most frequent first."""
    counts: Counter[str] = Counter()
    first: dict[str, Precision] = {}
    for side in study.sides:
        for node in side.graph.nodes:
            short = node.type.precision.short()
            counts[short] += 1
            first.setdefault(short, node.type.precision)
    order = list(PALETTE)
    return sorted(first.values(), key=lambda p: (order.index(format_class(p)), -counts[p.short()]))


def in_words(precision: Precision) -> str:
    """
    >>> in_words(Precision.parse("f8e4m3[128x128 f32 dyn div qmax=448 floor=1e-12]"))
    'FP8, a scale per 128×128'
    """
    if precision.scale is None:
        return _WORDS.get(precision.format.value, "")
    granularity = precision.scale.granularity
    names = {(None, None): "tensor", (1, None): "token"}
    block = names.get((granularity.rows, granularity.cols), str(granularity).replace("x", "×"))
    return f"FP8, a scale per {block}"


def flag_at(x: float) -> str:
    """The badge ≠ on the corner of a box that differs."""
    return f'<g class="flag" transform="translate({x - 1:.1f} 0)"><circle r="6.5"/><text y="4">≠</text></g>'


def legend(study: Study) -> str:
    """An ``<svg>`` of what occurs in these graphs."""
    rows = []
    found = precisions(study)
    for k, precision in enumerate(found):
        y = 12 + LINE * k
        wire = f'<path d="M2 {y}h40"/><text x="50" y="{y + 4}">{escape(precision.short())}</text>'
        rows.append(f'<g class="wire {format_class(precision)}">{wire}</g>')
        rows.append(f'<text class="n" x="{WORDS_AT}" y="{y + 4}">{escape(in_words(precision))}</text>')
    boxes = BOXES + (PAIR_BOXES if len(study.sides) > 1 else ())
    top = LINE * len(found) + 12
    for k, (cls, label) in enumerate(boxes):
        x, y = 2 + COLUMN * (k % 3), top + ROW * (k // 3)
        text = f'<text class="t" x="{BOX / 2:g}" y="15">{label}</text>{flag_at(BOX) if cls == "differs" else ""}'
        rows.append(f'<g class="box {cls}" transform="translate({x} {y})"><rect width="{BOX}" height="22"/>{text}</g>')
    height = top + ROW * -(-len(boxes) // 3)
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return f'<svg class="jg" {size} role="img" aria-label="legend">{"".join(rows)}</svg>'

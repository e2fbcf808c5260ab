"""The legend of the page: line styles by format, kinds of boxes, and how a difference looks."""

from __future__ import annotations

WIRES = (
    ("bf16", "bf16", "rounded"),
    ("f8", "f8e4m3[1x128]", "FP8, a scale per 1×128"),
    ("f32", "f32", "not rounded yet"),
)
BOXES = (
    ("quantize", "quantise"),
    ("gemm", "GEMM"),
    ("attention", "attention"),
    ("round", "round"),
    ("weight low", "weight"),
    ("pointwise", "several ops"),
)
PAIR_BOXES = (("differs", "differs"), ("ghost", "other side only"))
WIDTH, COLUMN, ROW = 326, 108, 30


def legend(pair: bool) -> str:
    """An ``<svg>``; ``pair`` adds what only two graphs side by side can show."""
    rows = []
    for k, (cls, label, words) in enumerate(WIRES):
        y = 12 + 20 * k
        rows.append(f'<g class="wire {cls}"><path d="M2 {y}h46"/><text x="56" y="{y + 4}">{label}</text></g>')
        rows.append(f'<text class="n" x="152" y="{y + 4}">{words}</text>')
    boxes = BOXES + (PAIR_BOXES if pair else ())
    for k, (cls, label) in enumerate(boxes):
        x, y = 2 + COLUMN * (k % 3), 72 + ROW * (k // 3)
        flag = '<text class="flag" x="92" y="-2">≠</text>' if cls == "differs" else ""
        text = f'<text class="t" x="49" y="15">{label}</text>{flag}'
        rows.append(f'<g class="box {cls}" transform="translate({x} {y})"><rect width="98" height="22"/>{text}</g>')
    height = 72 + ROW * -(-len(boxes) // 3)
    size = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
    return f'<svg class="jg" {size} role="img" aria-label="legend">{"".join(rows)}</svg>'

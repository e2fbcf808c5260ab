"""The palette: one set of values, readable text, and colours that stay apart with every kind of colour vision."""

from __future__ import annotations

import re
from itertools import combinations

import pytest

from jetgraph.viz.html import page_file
from jetgraph.viz.legend import PALETTE
from jetgraph.viz.svg import css

# Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB
VISIONS = {
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
MIN_CONTRAST = 4.5
"""WCAG 2 AA, for text of any size."""
MIN_DISTANCE = 15.0
"""CIE76 in Lab; about 2.3 is just noticeable."""


def linear(colour: str) -> tuple[float, ...]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)


def luminance(colour: str) -> float:
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def lab(rgb: tuple[float, ...]) -> tuple[float, float, float]:
    rows = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
    white = (0.95047, 1.0, 1.08883)
    xyz = [sum(m * c for m, c in zip(row, rgb, strict=True)) / w for row, w in zip(rows, white, strict=True)]
    f = [v ** (1 / 3) if v > 216 / 24389 else (24389 / 27 * v + 16) / 116 for v in xyz]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def seen(colour: str, vision: str) -> tuple[float, float, float]:
    rgb = linear(colour)
    return lab(tuple(min(1.0, max(0.0, sum(m * c for m, c in zip(row, rgb, strict=True)))) for row in VISIONS[vision]))


def variables(text: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", text))


LIGHT = variables(css("scene.css"))
DARK = LIGHT | variables(page_file("page.css").split('[data-theme="dark"] {')[1].split("}")[0])


def test_the_style_sheet_has_the_palettes_values():
    assert {name: LIGHT[name] for name in PALETTE} == PALETTE


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_labels_read_on_paper_and_on_their_tints(theme):
    for name in PALETTE:
        for ground in ("paper", "card", f"{name}-tint"):
            assert contrast(theme[name], theme[ground]) >= MIN_CONTRAST, (name, ground)
    for name in ("ink", "soft"):
        assert contrast(theme[name], theme["card"]) >= MIN_CONTRAST


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_formats_and_differences_stay_apart_with_any_colour_vision(theme, vision):
    for a, b in combinations(PALETTE, 2):
        distance = sum((x - y) ** 2 for x, y in zip(seen(theme[a], vision), seen(theme[b], vision), strict=True)) ** 0.5
        assert distance >= MIN_DISTANCE, (a, b)

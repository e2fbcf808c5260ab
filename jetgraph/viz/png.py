"""SVG text to PNG, by resvg: one wheel without system libraries (cairosvg needs libcairo, a browser is a browser).

Letters need a font.  The system's are used; where there is none, those that matplotlib carries, if it is installed.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

ZOOM = 2.0
"""Pixels per unit of the SVG: sharp on paper and on dense screens."""
INSTALL = "pip install 'jetgraph[viz]'"
FAMILIES = ((None, None), ("DejaVu Sans", "DejaVu Sans Mono"))
"""Sans-serif and monospace: what the machine says, or what matplotlib carries."""


class PictureError(RuntimeError):
    """What a picture needs is not installed."""


def png(svg: str, zoom: float = ZOOM) -> bytes:
    """The picture of an SVG text (one that `jetgraph.viz` wrote: variables resolved, fonts named by family).

    Raises:
        PictureError: resvg-py is not installed, or there is no font on this machine.
    """
    try:
        import resvg_py  # noqa: F401
    except ImportError as error:
        raise PictureError(f"PNG needs the package resvg-py, which is not installed: {INSTALL}") from error
    families = _families()
    if families is None:
        raise PictureError("PNG needs a font and found none: install one (Debian: fonts-dejavu-core) or matplotlib")
    return _drawn(svg, families, zoom)


def _drawn(svg: str, families: tuple[str | None, str | None], zoom: float = 1.0) -> bytes:
    import resvg_py

    sans, mono = families
    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=svg, zoom=zoom, font_dirs=_font_folders(), sans_serif_family=sans, monospace_family=mono
        )
    )


def _font_folders() -> list[str]:
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        return []
    fonts = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    return [str(fonts)] if fonts.is_dir() else []


@cache
def _families() -> tuple[str | None, str | None] | None:
    """Those of `FAMILIES` with which letters leave a trace; None if there are none.

    resvg draws text without a font as nothing, and says nothing; without fontconfig both words are fonts of Windows.
    """
    sheet = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
    letter = '<text x="2" y="16" font-family="{}">m</text>'
    for families in FAMILIES:
        blank = _drawn(sheet.format(""), families)
        if all(_drawn(sheet.format(letter.format(word)), families) != blank for word in ("sans-serif", "monospace")):
            return families
    return None

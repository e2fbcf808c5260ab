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


class PictureError(RuntimeError):
    """What a picture needs is not installed."""


def png(svg: str, zoom: float = ZOOM) -> bytes:
    """The picture of an SVG text (one that `jetgraph.viz` wrote: variables resolved, fonts named by family).

    Raises:
        PictureError: resvg-py is not installed, or there is no font on this machine.
    """
    try:
        import resvg_py
    except ImportError as error:
        raise PictureError(f"PNG needs the package resvg-py, which is not installed: {INSTALL}") from error
    if not _draws_letters():
        raise PictureError("PNG needs a font and found none: install one (Debian: fonts-dejavu-core) or matplotlib")
    return bytes(resvg_py.svg_to_bytes(svg_string=svg, zoom=zoom, font_dirs=_font_folders()))


def _font_folders() -> list[str]:
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        return []
    fonts = Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf"
    return [str(fonts)] if fonts.is_dir() else []


@cache
def _draws_letters() -> bool:
    """Whether a letter leaves a trace: resvg draws text without a font as nothing, and says nothing."""
    import resvg_py

    sheet = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
    letter = '<text x="2" y="16" font-family="sans-serif" font-size="16">m</text>'
    blank, drawn = (resvg_py.svg_to_bytes(svg_string=sheet.format(s), font_dirs=_font_folders()) for s in ("", letter))
    return bytes(blank) != bytes(drawn)

"""Every form in which one graph, or training beside rollout, is written for looking at (`jetgraph show`).

Of two graphs the differences are those that `jetgraph.verify` finds.
"""

from __future__ import annotations

from pathlib import Path

from jetgraph.graph import PrecisionGraph
from jetgraph.verify import Result, verify
from jetgraph.verify.meta import require_form
from jetgraph.viz import from_faults, write_html
from jetgraph.viz.compare import Comparison
from jetgraph.viz.dot import dot
from jetgraph.viz.model_explorer import write_model_explorer
from jetgraph.viz.netron import write_netron
from jetgraph.viz.png import png
from jetgraph.viz.scene import BACKWARD, FORWARD
from jetgraph.viz.study import Study, study
from jetgraph.viz.svg import layer_svg, overview_svg
from jetgraph.viz.window import window_svg

FORMATS = {
    "html": ".html",
    "svg": ".svg",
    "png": ".png",
    "dot": ".dot",
    "model-explorer": ".json",
    "netron": ".onnx",
}
"""The forms by name, with the end of the file's name that chooses them."""
TAKES_LAYER, TAKES_DIFFERENCE = ("svg", "png", "dot"), ("svg", "png")


def format_of(path: Path, format: str | None) -> str:
    """The form asked for, or else the one that the file's name says.

    Raises:
        ValueError: there is no such form, or the name says none.
    """
    known = ", ".join(FORMATS)
    if format is not None:
        if format not in FORMATS:
            raise ValueError(f"format {format!r}: expected one of {known}")
        return format
    for name, suffix in FORMATS.items():
        if path.suffix == suffix:
            return name
    raise ValueError(f"{path}: the name does not say which form to write; give --format, one of {known}")


def write(
    path: Path,
    train: PrecisionGraph,
    infer: PrecisionGraph | None = None,
    *,
    format: str | None = None,
    layer: int | None = None,
    difference: int | None = None,
    backward: bool = False,
) -> tuple[Path, ...]:
    """Write one form; returns the paths of all its files.  ``layer`` and ``difference`` (by number, from 1) choose the
    part of a still picture; without them it is the overview.  ``backward`` draws a layer's backward instead of its
    forward; DOT has both.

    Raises:
        ValueError: the form is unknown or has no such part.
        PictureError: a package that the form needs is not installed.
    """
    format = format_of(path, format)
    for name, value, takes in (("layer", layer, TAKES_LAYER), ("difference", difference, TAKES_DIFFERENCE)):
        if value is not None and format not in takes:
            raise ValueError(f"--{name} chooses a part of {', '.join(takes)}; {format} holds all of the graph")
    if layer is not None and difference is not None:
        raise ValueError("give either a layer or a difference")
    if backward and format != "dot" and layer is None:
        raise ValueError("--backward is for one layer (--layer) of svg or png, and for dot")
    path.parent.mkdir(parents=True, exist_ok=True)
    if format == "html":
        return (write_page(path, train, infer),)
    known = study(train, infer, () if infer is None else from_faults(_verified(train, infer).faults))
    if format == "model-explorer":
        return write_model_explorer(path, known)
    if format == "netron":
        return write_netron(path, known)
    if format == "dot":
        path.write_text(dot(known, layer, backward), encoding="utf-8")
        return (path,)
    text = _still(known, layer, difference, BACKWARD if backward else FORWARD)
    if format == "png":
        path.write_bytes(png(text))
    else:
        path.write_text(text, encoding="utf-8")
    return (path,)


def _still(known: Study, layer: int | None, difference: int | None, view: str) -> str:
    if difference is not None:
        return window_svg(known, difference)
    if layer is not None:
        return layer_svg(known, layer, view=view)
    return overview_svg(known, _title(known.train.graph))


def write_page(path: Path, train: PrecisionGraph, infer: PrecisionGraph | None = None) -> Path:
    """Write the page; returns its path."""
    if infer is None:
        return write_html(path, train, title=_title(train))
    result = _verified(train, infer)
    return write_html(path, train, infer, from_faults(result.faults), title=_title(train), verdict=str(result.verdict))


def write_comparison(path: Path, comparison: Comparison) -> Path:
    """Write the page of `jetgraph diff`: both graphs with every change, and no verdict."""
    left, right = comparison.graphs
    names = comparison.study.train.name, comparison.study.infer.name if comparison.study.infer else ""
    title = f"{_title(left)}: what changed from {names[0]} to {names[1]} (not a verification)"
    return write_html(path, left, right, comparison.differences, title=title, names=names)


def _verified(train: PrecisionGraph, infer: PrecisionGraph) -> Result:
    for graph in (train, infer):
        require_form(dict(graph.meta))
    return verify(train, infer)


def _title(train: PrecisionGraph) -> str:
    return f"Precision flow of {train.meta.get('model', train.name)}"

"""The ways `jetgraph verify` writes a result, one module each: for people, for tools, for CI.

`deliver` is all a command needs.  A format is a function (Result, Files) → text; it adds nothing to the result, so
every format tells the same faults.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from jetgraph.verify.formats import concise, github, junit, sarif
from jetgraph.verify.formats.place import Files
from jetgraph.verify.result import Result

__all__ = ["FORMATS", "Files", "deliver", "require_format"]

FORMATS: dict[str, Callable[[Result, Files], str]] = {
    "full": lambda result, files: result.text(),
    "concise": concise.write,
    "json": lambda result, files: result.to_json(),
    "sarif": sarif.write,
    "junit": junit.write,
    "github": github.write,
}


def require_format(name: str) -> str:
    """``name``.

    Raises:
        ValueError: there is no such format.
    """
    if name not in FORMATS:
        raise ValueError(f"output format {name!r} does not exist; choose one of {', '.join(FORMATS)}")
    return name


def deliver(result: Result, name: str, files: Files, path: Path | None) -> None:
    """Write the result in the format called ``name`` to ``path``, to stdout if there is none."""
    text = FORMATS[require_format(name)](result, files)
    if path is not None:
        path.write_text(text, encoding="utf-8")
        return
    sys.stdout.write(text)

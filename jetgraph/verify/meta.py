"""The form of what graphs carry beside their nodes, checked before anything reads it: a hostile file ends here.

Only what this room reads and prints; a key that is missing is a matter of the rules (JG091, JG093 …), not of the form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jetgraph.graph import GraphError

MAX_TEXT = 4096


def _text(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_TEXT and value.isprintable()


def _texts(value: Any) -> bool:
    return type(value) is list and all(map(_text, value))


def _table(*texts: str) -> Callable[[Any], bool]:
    """A form: names → objects whose fields ``texts``, where they are there, are text."""

    def holds(value: Any) -> bool:
        return type(value) is dict and all(
            _text(name) and type(row) is dict and all(_text(row[key]) for key in texts if key in row)
            for name, row in value.items()
        )

    return holds


def _scope(value: Any) -> bool:
    rows = value.values() if _table("activation", "weight")(value) else ({},)
    return all({"activation", "weight"} <= set(row) for row in rows)


def _replay(value: Any) -> bool:
    return value is None or (type(value) is dict and all(_texts(value.get(k, [])) for k in ("cases", "injected")))


FORMS: dict[str, Callable[[Any], bool]] = {
    "side": _text,
    "device": lambda value: value is None or _text(value),
    "compiler": lambda value: value is None or _text(value),
    "versions": lambda value: type(value) is dict and all(map(_text, [*value, *value.values()])),
    "parameters": _table("digest", "format"),
    "operands": _table("digest", "precision"),
    "kernels": _table(),
    "scope": _scope,
    "dead": _texts,
    "guards": lambda value: value is None or _texts(value),
    "replay": _replay,
}


def require_form(meta: dict[str, Any]) -> None:
    """
    Raises:
        GraphError: a field of ``meta`` has another form than `FORMS` says.
    """
    for key, holds in FORMS.items():
        if key in meta and not holds(meta[key]):
            raise GraphError(f"meta {key!r} has another form than a graph file's: {str(meta[key])[:60]!r}")

"""Frozen dataclasses as JSON and back, by their type hints: nothing ignored, and an error names its place.

Supported: dataclasses of str, bool, int, float, `Enum`, ``X | None``, ``tuple[X, ...]`` and dataclasses.
"""

from __future__ import annotations

import difflib
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
_NAMES = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}


def to_plain(value: Any) -> Any:
    """The value as dicts, lists, strings, numbers, booleans and None."""
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple):
        return [to_plain(item) for item in value]
    return value.value if isinstance(value, Enum) else value


def from_plain(cls: type[T], data: Any, place: str = "") -> T:
    """A ``cls`` from what `to_plain` gave.  A field with a default may be left out; no other key is accepted.

    Raises:
        ValueError: the data is not that of a ``cls``; says where (``place`` is the path so far), what was expected and
            what was got.
    """
    return _decode(cls, data, place)


def _decode(hint: Any, data: Any, place: str) -> Any:
    if get_origin(hint) is UnionType:
        (inner,) = (option for option in get_args(hint) if option is not NoneType)
        return None if data is None else _decode(inner, data, place)
    if get_origin(hint) is tuple:
        items = _expect(isinstance(data, list), data, "a list", place)
        return tuple(_decode(get_args(hint)[0], item, f"{place}[{i}]") for i, item in enumerate(items))
    if is_dataclass(hint):
        return _object(hint, _expect(isinstance(data, dict), data, "an object", place), place)
    if issubclass(hint, Enum):
        choices = [member.value for member in hint]
        return hint(_expect(data in choices, data, f"one of {', '.join(map(repr, choices))}", place))
    if hint is float and type(data) is int and abs(data) < 2**53:
        return float(data)
    return _expect(type(data) is hint, data, _NAMES[hint], place)


def _object(cls: Any, data: dict[str, Any], place: str) -> Any:
    stem = f"{place}." if place else ""
    known = {field.name: field for field in fields(cls)}
    for key in data:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
            raise ValueError(f"{stem}{key} is not known: {hint}")
    for name, field in known.items():
        if name not in data and field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{stem}{name} is missing")
    hints = get_type_hints(cls)
    values = {key: _decode(hints[key], value, f"{stem}{key}") for key, value in data.items()}
    try:
        return cls(**values)
    except ValueError as error:  # the class checks its own values
        raise ValueError(f"{place}: {error}" if place else str(error)) from error


def _expect(holds: bool, data: Any, expected: str, place: str) -> Any:
    if not holds:
        shown = repr(data) if len(repr(data)) < 80 else f"a {type(data).__name__}"
        raise ValueError(f"{place or 'the file'} is {shown}: expected {expected}")
    return data

"""Reading JSON that may be hostile: bounded memory, one meaning, one sentence when refused.

Graph files and certificates come from other machines.  Python's parser executes nothing, but it accepts what the JSON
standard leaves open (duplicate keys, NaN) and builds whatever a file describes, so size and number of values are capped
*before* parsing.  The caps are generous: a graph of a million edges has about 150 MB and ten million values.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

MAX_BYTES = 512 * 1024 * 1024
MAX_VALUES = 40_000_000
"""A parsed value takes up to about 100 bytes besides its text: the parser stays below 5 GB whatever the file says."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Unreadable(ValueError):
    """A file is missing, too large, or not JSON in the strict sense; the message is one sentence."""


def read_bytes(path: str | Path) -> bytes:
    """The file's bytes, at most `MAX_BYTES` of them.

    Raises:
        Unreadable: the file cannot be opened or is larger.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(data) > MAX_BYTES:
        raise Unreadable(f"{path} is larger than {MAX_BYTES // 2**20} MiB, the most that is read")
    return data


def parse(data: bytes) -> Any:
    """The value that ``data`` describes.

    Raises:
        Unreadable: not UTF-8, not JSON, or JSON with duplicate keys, NaN or Infinity, lone surrogates, numbers of
            thousands of digits, more than a few hundred levels of nesting, or more than `MAX_VALUES` values.
    """
    if len(data) > MAX_BYTES or data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_VALUES:
        raise Unreadable(f"more than {MAX_BYTES // 2**20} MiB or {MAX_VALUES} values, the most that is read")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant)
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode("utf-8")  # a pair has become one character, a lone one raises
    except UnicodeError as error:
        raise Unreadable("not UTF-8, or with half of a surrogate pair") from error
    except RecursionError as error:
        raise Unreadable("nested too deeply") from error
    except ValueError as error:
        raise Unreadable(f"not JSON: {str(error)[:100]}") from error
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("an object has the same key twice")
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number")

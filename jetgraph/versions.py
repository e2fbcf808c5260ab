"""What a graph says of the software it ran under, as the plain text that its file will hold."""

from __future__ import annotations

import importlib
import platform


def versions(*packages: str) -> dict[str, str]:
    """The version of each of ``packages`` (importable, with a ``__version__``), and Python's own.

    torch's version is a ``TorchVersion`` that compares by number; a live graph holds the text, like its file.
    """
    found = {name: str(importlib.import_module(name).__version__) for name in packages}
    return found | {"python": platform.python_version()}

"""A run in a process of its own, which speaks on its standard error while it goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

LAST = 31
"""Lines that are kept for whoever must say why a process failed."""
FAREWELL = "nanobind: leaked"
"""Whatever follows it says nothing of the failure: Triton's bindings count what a process that ends did not free."""


def run_module(
    module: str,
    argument: str | Path,
    environment: Mapping[str, str],
    prefix: str,
    say: Callable[[str], None],
    *,
    stdout: int | None = None,
) -> tuple[int, list[str]]:
    """Run ``python -m module argument`` to its end; lines that begin with ``prefix`` go to ``say`` as they come.

    ``stdout`` as of `subprocess.Popen`: None shares ours.  Returns the exit status and the last `LAST` lines.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(argument)],
        env=environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    over = False
    for line in process.stderr:
        over = over or line.startswith(FAREWELL)
        if not over:
            lines = [*lines[1 - LAST :], line.rstrip()]
        if line.startswith(prefix):
            say(line.removeprefix(prefix).strip())
    return process.wait(), lines

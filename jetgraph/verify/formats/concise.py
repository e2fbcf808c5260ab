"""One line a fault, `path:line: rule severity: …`, as editors and `grep` like it; the verdict last."""

from __future__ import annotations

from jetgraph.verify.formats.place import Files, engine, one_line
from jetgraph.verify.result import Result


def write(result: Result, files: Files) -> str:
    lines = [f"{engine(f, files)}: {f.first.rule} {f.first.severity}: {one_line(f)}" for f in result.folded]
    return "\n".join([*lines, result.headline()]) + "\n"

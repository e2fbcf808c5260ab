"""Where a fault is, for formats that point into files: ``modeling_llama.py:65``, a node's source, or the graph file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from jetgraph.verify.fold import Folded

_SOURCE = re.compile(r"(?P<path>.+):(?P<line>[1-9]\d{0,8})")


@dataclass(frozen=True)
class Files:
    """The two graph files, as they were given to the command."""

    train: str = "train.json"
    infer: str = "infer.json"


@dataclass(frozen=True)
class Place:
    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


def engine(folded: Folded, files: Files) -> Place:
    """What to change: the engine's source line; the trainer's if the fault is in training alone; else a graph file."""
    fault = folded.first
    sources = (fault.infer_source, fault.train_source) if fault.infer_source or fault.infer is not None else (
        fault.train_source,
    )  # fmt: skip
    found = next((place for source in sources if (place := parse(source))), None)
    return found or Place(_relative(files.train if fault.op == "train" else files.infer), 1)


def trainer(folded: Folded) -> Place | None:
    """What it is compared with, where the fault has both sides."""
    return parse(folded.first.train_source) if folded.first.infer_source else None


def parse(source: str) -> Place | None:
    """``path:line`` as a lifter wrote it; None if it is no such thing."""
    match = _SOURCE.fullmatch(source)
    return Place(_relative(match["path"]), int(match["line"])) if match else None


def _relative(path: str) -> str:
    """Without a leading slash or steps upwards: CI systems place locations under the checkout."""
    parts = [part for part in PurePosixPath(path.replace("\\", "/")).parts if part not in ("/", "..", ".")]
    return "/".join(parts) or "graph"


def one_line(folded: Folded) -> str:
    """The fault in one sentence without its place."""
    fault = folded.first
    where = " ".join(part for part in (f"{folded.where}:" if folded.where else "", folded.fqn, fault.op) if part)
    times = f" (×{folded.count})" if folded.count > 1 else ""
    return f"{where}: expected {folded.text(fault.expected)}; got {folded.text(fault.got)}{times}"

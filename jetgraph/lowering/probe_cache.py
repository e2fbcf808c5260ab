"""What slow self-tests found on this machine, kept on disk: half a minute of compiling and comparing once, not in every
process of every rank.

A finding is recalled only for the same sources of this package's kernels, the same torch, triton and CUDA, and the same
kind of GPU; only success is kept, so a refusal is always found anew.  ``JETGRAPH_CACHE`` names another folder than
``~/.cache/jetgraph``; empty, nothing is kept.  `jetgraph doctor` never recalls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from functools import cache
from pathlib import Path

import torch

from jetgraph.lowering.provider import UNKNOWN_VERSION, Finding, Provider, triton_version

SLOW = frozenset({"triton_fused", "triton_exact"})


def probe(provider: Provider, device: torch.device, *, fresh: bool = False) -> Finding:
    """``provider.probe(device)``, or what it found before; ``fresh``: never the latter."""
    path = _path(provider.name, device) if provider.name in SLOW and device.type == "cuda" else None
    if path is None:
        return provider.probe(device)
    if not fresh and (found := _read(path)) is not None:
        return found
    finding = provider.probe(device)
    if finding.ok:
        _write(path, finding)
    return finding


def _path(name: str, device: torch.device) -> Path | None:
    folder = os.path.expanduser(os.environ.get("JETGRAPH_CACHE", "~/.cache/jetgraph"))
    if not folder or folder.startswith("~") or not torch.cuda.is_available():  # "~" stays where a user has no home
        return None
    triton = triton_version()
    if triton in (None, UNKNOWN_VERSION):
        return None
    capability = torch.cuda.get_device_capability(device)
    machine = torch.cuda.get_device_name(device), capability, torch.__version__, torch.version.cuda, triton
    key = hashlib.sha256(repr((name, machine, sources())).encode()).hexdigest()[:32]
    return Path(folder) / "probes" / f"{name}-{key}.json"


@cache
def sources() -> str:
    """Digest of every module beside this one: a kernel's bits, and how its results lie, depend on no other code."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _read(path: Path) -> Finding | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Finding(**(fields | {"versions": tuple(map(tuple, fields["versions"]))}))
    except (OSError, ValueError, TypeError, KeyError):  # never written, or by somebody else
        return None


def _write(path: Path, finding: Finding) -> None:
    """Whole or not at all; a folder that cannot be written costs the next process the self-test, nothing more."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(dataclasses.asdict(finding), file)
        os.replace(file.name, path)

"""What a run was admitted with, pinned in its folder: digests of both graphs, versions, kernels, certificate, waivers.

A later start captures and verifies again whatever this file says; the file tells what is no longer what it was, by
name, so that nobody takes the old certificate for the new run's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jetgraph import bounded_json
from jetgraph.verify import Result
from jetgraph.verify.source import Source

FORMAT = 1
FILE = "admission.json"


class ManifestError(ValueError):
    """A run's manifest that cannot be read."""


@dataclass(frozen=True)
class RunManifest:
    """``graphs`` and ``environment`` have one entry a side, "train" and "infer"."""

    verdict: str
    bitwise: bool
    policy: str
    graphs: dict[str, dict[str, str]]
    """Per side: sha256 of the file, semantic and execution digest."""
    environment: dict[str, dict[str, Any]]
    """Per side: versions, device and kernels."""
    certificate: str | None
    """Digest of the certificate; None if the run was admitted without one."""
    waivers: tuple[str, ...]
    version: int
    """Weight version on which both graphs were captured."""
    admitted: str
    """Time, ISO 8601, UTC."""

    @classmethod
    def of(
        cls, train: Source, infer: Source, result: Result, waivers: tuple[str, ...], version: int, admitted: str
    ) -> RunManifest:
        sides = {"train": train, "infer": infer}
        return cls(
            str(result.verdict),
            result.bitwise,
            str(train.graph.meta.get("policy", "")),
            {
                side: {
                    "sha256": source.read.file,
                    "semantic": source.graph.semantic_digest,
                    "execution": source.graph.execution_digest,
                }
                for side, source in sides.items()
            },
            {
                side: {
                    "versions": source.graph.meta.get("versions") or {},
                    "device": source.graph.meta.get("device"),
                    "kernels": sorted(source.graph.meta.get("kernels") or {}),
                }
                for side, source in sides.items()
            },
            result.certificate.digest if result.certificate else None,
            waivers,
            version,
            admitted,
        )

    def save(self, folder: Path) -> Path:
        """Whole or not at all: a run that dies while writing leaves the old manifest."""
        path = folder / FILE
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
        os.replace(partial, path)
        return path

    @classmethod
    def load(cls, folder: Path) -> RunManifest | None:
        """The manifest of an earlier start in this folder; None if there was none.

        Raises:
            ManifestError: the file is there and cannot be read.
        """
        path = folder / FILE
        if not path.exists():
            return None
        try:
            data = bounded_json.parse(bounded_json.read_bytes(path))
            if data.pop("format") != FORMAT:
                raise ValueError("another format")
            found = cls(**{**data, "waivers": tuple(data["waivers"])})
            _require_sides(found)
            return found
        except (bounded_json.Unreadable, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ManifestError(
                f"{path} is no manifest of a run ({error}); move it away: the run is verified again anyway"
            ) from error

    def changes(self, later: RunManifest) -> list[str]:
        """By name, what differs at a later start: each of these voids the certificate of the earlier one."""
        return list(_changes(self, later))


def _require_sides(manifest: RunManifest) -> None:
    """
    Raises:
        ValueError, TypeError, AttributeError: what `_changes` compares is not there, or not of its type.
    """
    for side in ("train", "infer"):
        graph, environment = manifest.graphs[side], manifest.environment[side]
        if not all(isinstance(graph[digest], str) for digest in ("semantic", "execution")):
            raise ValueError(f"digests of {side} are no text")
        if not isinstance(environment["versions"], dict) or not isinstance(environment["device"], str | None):
            raise ValueError(f"versions or device of {side}")
        if not isinstance(environment["kernels"], list) or not all(isinstance(k, str) for k in environment["kernels"]):
            raise ValueError(f"kernels of {side} are no list of names")


def _changes(old: RunManifest, new: RunManifest) -> Iterator[str]:
    if old.policy != new.policy:
        yield f"policy {old.policy} → {new.policy}"
    for side in ("train", "infer"):
        before, after = old.environment[side], new.environment[side]
        ours, theirs = before["versions"], after["versions"]
        for package in sorted({*ours, *theirs}):
            if ours.get(package) != theirs.get(package):
                yield f"{side}: {package} {ours.get(package, 'absent')} → {theirs.get(package, 'absent')}"
        if before["device"] != after["device"]:
            yield f"{side}: device {before['device']} → {after['device']}"
        gone, came = (set(a["kernels"]) - set(b["kernels"]) for a, b in ((before, after), (after, before)))
        if gone or came:
            yield f"{side}: kernels " + ", ".join([*(f"−{k}" for k in sorted(gone)), *(f"+{k}" for k in sorted(came))])
        was, now = old.graphs[side], new.graphs[side]
        if was["semantic"] != now["semantic"]:
            yield f"{side}: another precision graph"
        elif was["execution"] != now["execution"] and before == after:
            yield f"{side}: the same kernels at other places"
    if old.bitwise != new.bitwise:
        yield f"bitwise: {'yes' if old.bitwise else 'no'} → {'yes' if new.bitwise else 'no'}"

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
            return cls(**{**data, "waivers": tuple(data["waivers"])})
        except (bounded_json.Unreadable, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ManifestError(
                f"{path} is no manifest of a run ({error}); move it away: the run is verified again anyway"
            ) from error

    def changes(self, later: RunManifest) -> list[str]:
        """By name, what differs at a later start: each of these voids the certificate of the earlier one."""
        return list(_changes(self, later))


def _changes(old: RunManifest, new: RunManifest) -> Iterator[str]:
    if old.policy != new.policy:
        yield f"policy {old.policy} → {new.policy}"
    for side in ("train", "infer"):
        before, after = (m.environment.get(side, {}) for m in (old, new))
        ours, theirs = before.get("versions") or {}, after.get("versions") or {}
        for package in sorted({*ours, *theirs}):
            if ours.get(package) != theirs.get(package):
                yield f"{side}: {package} {ours.get(package, 'absent')} → {theirs.get(package, 'absent')}"
        if before.get("device") != after.get("device"):
            yield f"{side}: device {before.get('device')} → {after.get('device')}"
        gone, came = (
            set(a.get("kernels") or ()) - set(b.get("kernels") or ()) for a, b in ((before, after), (after, before))
        )
        if gone or came:
            yield f"{side}: kernels " + ", ".join([*(f"−{k}" for k in sorted(gone)), *(f"+{k}" for k in sorted(came))])
        if old.graphs.get(side, {}).get("semantic") != new.graphs.get(side, {}).get("semantic"):
            yield f"{side}: another precision graph"

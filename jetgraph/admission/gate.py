"""The gate in front of step 1: CONTAINED goes through, anything else stops the run with its counterexample."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from jetgraph.admission.manifest import RunManifest
from jetgraph.admission.waivers import Waiver, apply_waivers, draft
from jetgraph.verify import Fault, Result, verify
from jetgraph.verify.source import Source

CERTIFICATE, REPORT, ALL_FAULTS = "certificate.json", "counterexample.txt", "counterexample.json"
DRAFT = "waivers-draft.json"
"""In a refused run's folder: an unsigned waiver of each fault.  Every start removes the earlier one's."""


class Enforcement(str, Enum):
    """When two graphs are captured and verified, and whether a run without containment stops."""

    OFF = "off"
    """nothing is captured"""
    WARN = "warn"
    """before step 1; the run goes on and says so"""
    START = "start"
    """before step 1; the run stops"""
    ALWAYS = "always"
    """before step 1 and after every weight sync; the run stops"""

    def __str__(self) -> str:
        return self.value


class NotAdmitted(RuntimeError):
    """The run may not go on: the message is the verdict, the counterexample and where both graphs lie."""


@dataclass(frozen=True)
class Admission:
    """What was decided, and on what.  ``left`` are the faults that no waiver covers; they are empty unless WARN."""

    result: Result
    manifest: RunManifest
    waived: tuple[Waiver, ...]
    left: tuple[Fault, ...]
    void: tuple[str, ...]
    """What changed since the folder's earlier start: why its certificate does not count for this one."""

    def lines(self) -> list[str]:
        """What a run prints when it starts."""
        told = [self.result.headline()]
        if self.void:
            told.append("the certificate of the earlier start is void: " + "; ".join(self.void))
        told += [f"waived: {waiver}" for waiver in self.waived]
        if self.left:
            told.append(f"NOT ENFORCED: the run goes on with faults that no waiver covers: {len(self.left)}")
        return told


def admit(
    train: Path,
    infer: Path,
    folder: Path,
    *,
    enforcement: Enforcement | str = Enforcement.START,
    waivers: Sequence[Waiver] = (),
    version: int = 0,
    now: datetime.datetime | None = None,
) -> Admission:
    """Verify two captured graph files and decide; the certificate and the manifest go to ``folder``.

    Args:
        train, infer: graph files of the live trainer and the live engine.
        folder: the run's; an earlier manifest in it is compared with this start and then replaced.  A start that is
            refused leaves it: it says what last ran here.
        version: the weight version on which both graphs were captured.

    Raises:
        NotAdmitted: VIOLATED or UNKNOWN, with a fault that no valid waiver covers, and enforcement is not WARN.
        GraphError: a file is no graph of its side.
        ManifestError: the folder holds a manifest that cannot be read.
    """
    enforcement = Enforcement(enforcement)
    if enforcement is Enforcement.OFF:
        raise ValueError("enforcement 'off' captures nothing, so there is nothing to admit")
    now = now or datetime.datetime.now(datetime.UTC)
    folder.mkdir(parents=True, exist_ok=True)
    earlier = RunManifest.load(folder)
    for stale in (CERTIFICATE, REPORT, ALL_FAULTS, DRAFT):
        (folder / stale).unlink(missing_ok=True)  # of the earlier start
    sources = Source.load(train, "train"), Source.load(infer, "infer")
    result = verify(*sources)
    left, used, expired = apply_waivers(result.faults, waivers, now.date())
    if used and not left:  # what a waived fault explained has no other explanation now, and stands for itself
        left, more, late = apply_waivers(result.echoes, waivers, now.date())
        used, expired = used + more, expired + late
    manifest = RunManifest.of(*sources, result, tuple(map(str, used)), version, now.isoformat(timespec="seconds"))
    void = tuple(earlier.changes(manifest)) if earlier else ()
    if result.certificate is not None:
        result.certificate.save(folder / CERTIFICATE)
    else:
        (folder / REPORT).write_text(result.text(), encoding="utf-8")
        (folder / ALL_FAULTS).write_text(result.to_json(), encoding="utf-8")
        (folder / DRAFT).write_text(draft((*result.faults, *result.echoes)), encoding="utf-8")
    if left and enforcement is not Enforcement.WARN:
        raise NotAdmitted(_refusal(result, left, expired, void, folder, train, infer))
    manifest.save(folder)
    return Admission(result, manifest, tuple(used), tuple(left), void)


def _refusal(
    result: Result,
    left: list[Fault],
    expired: list[Waiver],
    void: tuple[str, ...],
    folder: Path,
    train: Path,
    infer: Path,
) -> str:
    faults = "1 fault stands" if len(left) == 1 else f"{len(left)} faults stand"
    lines = [f"this run may not start: {faults} between training and rollout.", result.text().rstrip()]
    if not set(left) <= set(result.faults):
        lines += [f"behind the waived faults: {f.rule} at {f.fqn}: expected {f.expected}; got {f.got}" for f in left]
    lines += [f"expired: {waiver}" for waiver in expired]
    lines += ["changed since the start that was admitted here: " + "; ".join(void)] if void else []
    lines.append(f"both graphs: {train} and {infer}; `jetgraph show {train} {infer}` draws them")
    lines.append(f"{folder / DRAFT} has a waiver of each fault: sign a copy; enforcement 'warn' goes on without one")
    return "\n".join(lines)

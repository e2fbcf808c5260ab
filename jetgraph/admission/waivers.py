"""Exceptions from the verdict, each for one rule at one place, with a reason and a last day.

    [{"rule": "JG004", "node": "model.layers.3.mlp.up_proj", "expires": "2027-01-31",
      "reason": "FP8 rollout of this layer is on trial, see the run log of 12 January"}]

There are no patterns: a waiver that could match what nobody looked at is a hole, not an exception.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetgraph import bounded_json
from jetgraph.verify import Fault
from jetgraph.verify.rules import RULES, Severity

FIELDS = ("rule", "node", "expires", "reason")


class WaiverError(ValueError):
    """A waiver file that cannot be read, or a waiver that says too little or too much."""


@dataclass(frozen=True)
class Waiver:
    """``node`` is the FQN that the counterexample names; "" for a fault of the graphs as a whole."""

    rule: str
    node: str
    expires: datetime.date
    reason: str

    @classmethod
    def parse(cls, entry: Any) -> Waiver:
        """
        Raises:
            WaiverError: a field is missing, unknown or malformed; a rule that does not exist or needs no waiver.
        """
        if not isinstance(entry, dict) or set(entry) != set(FIELDS):
            got = ", ".join(entry)[:200] if isinstance(entry, dict) else type(entry).__name__
            raise WaiverError(f"a waiver has the fields {', '.join(FIELDS)}; got {got}")
        if not all(isinstance(entry[field], str) for field in FIELDS):
            raise WaiverError(f"the fields of a waiver are text; got {entry}"[:300])
        rule, node, reason = entry["rule"], entry["node"], " ".join(entry["reason"].split())
        if rule not in RULES:
            raise WaiverError(f"waiver for {rule[:20]!r}: no such rule; `jetgraph verify` names the rule of each fault")
        if RULES[rule].severity not in BLOCKING:
            raise WaiverError(f"waiver for {rule}: faults of this rule do not stop a run, so there is nothing to waive")
        if re.search(r"[*?\[\]]", node):
            raise WaiverError(f"waiver for {rule}: node {node[:200]!r} is a pattern; write one waiver for each node")
        if not reason:
            raise WaiverError(f"waiver for {rule} at {node!r} has no reason: say who decided this, and why")
        try:
            expires = datetime.date.fromisoformat(entry["expires"])
            if entry["expires"] != str(expires):
                raise ValueError("a week, or without dashes: a date that people misread")
        except ValueError as error:
            got = entry["expires"][:20]
            raise WaiverError(f"waiver for {rule}: expires {got!r} is not a date YYYY-MM-DD") from error
        return cls(rule, node, expires, reason)

    def is_valid(self, today: datetime.date) -> bool:
        """The last day counts."""
        return today <= self.expires

    def __str__(self) -> str:
        return f"{self.rule} at {self.node or 'the graphs'} until {self.expires}: {self.reason}"


BLOCKING = (Severity.VIOLATION, Severity.UNKNOWN)
"""What stops a run unless it is waived."""


def load_waivers(path: str | Path) -> tuple[Waiver, ...]:
    """The waivers of a JSON file.

    Raises:
        WaiverError: see `Waiver.parse`; or the file cannot be read, is no list, or waives one fault twice.
    """
    try:
        entries = bounded_json.parse(bounded_json.read_bytes(path))
    except bounded_json.Unreadable as error:
        raise WaiverError(f"waivers {path}: {error}") from error
    if not isinstance(entries, list):
        raise WaiverError(f"waivers {path}: expected a list of waivers, got {type(entries).__name__}")
    waivers = tuple(map(Waiver.parse, entries))
    places = Counter((waiver.rule, waiver.node) for waiver in waivers)
    if twice := [place for place, count in places.items() if count > 1]:
        raise WaiverError(f"waivers {path}: {twice[0][0]} at {twice[0][1]!r} is waived twice; keep one")
    return waivers


def apply_waivers(
    faults: Sequence[Fault], waivers: Sequence[Waiver], today: datetime.date
) -> tuple[list[Fault], list[Waiver], list[Waiver]]:
    """Faults that still stop the run; waivers that were used; those that would have covered a fault, but expired."""
    blocking = [fault for fault in faults if fault.severity in BLOCKING]
    found = {(fault.rule, fault.fqn) for fault in blocking}
    applying = [waiver for waiver in waivers if (waiver.rule, waiver.node) in found]
    used = [waiver for waiver in applying if waiver.is_valid(today)]
    covered = {(waiver.rule, waiver.node) for waiver in used}
    left = [fault for fault in blocking if (fault.rule, fault.fqn) not in covered]
    return left, used, [waiver for waiver in applying if not waiver.is_valid(today)]

"""Exceptions from the verdict, each for one fault as it was printed, with a reason and a last day.

    [{"rule": "JG011", "node": "model.layers.3.input_layernorm", "op": "add", "expected": "const 1e-05",
      "got": "const 1e-06", "expires": "2027-01-31", "reason": "an epsilon on trial; A. Nother, run log of 12 January"}]

There are no patterns, and another fault of the same rule at the same node is not covered: a waiver that could match
what nobody looked at is a hole, not an exception.  A refused start drafts the entries; people add day and reason.
"""

from __future__ import annotations

import datetime
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetgraph import bounded_json
from jetgraph.verify import Fault
from jetgraph.verify.rules import RULES, Severity

FIELDS = ("rule", "node", "op", "expected", "got", "expires", "reason")

Place = tuple[str, str, str, str, str]
"""What a waiver and a fault have in common: rule, node, op, expected, got."""


class WaiverError(ValueError):
    """A waiver file that cannot be read, or a waiver that says too little or too much."""


@dataclass(frozen=True)
class Waiver:
    """``node`` is the FQN that the counterexample names; "" for a fault of the graphs as a whole.

    ``op``, ``expected`` and ``got`` are the counterexample's words for one layer, not folded over several.
    """

    rule: str
    node: str
    op: str
    expected: str
    got: str
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
        return cls(rule, node, entry["op"], entry["expected"], entry["got"], expires, reason)

    @property
    def place(self) -> Place:
        return self.rule, self.node, self.op, self.expected, self.got

    def is_valid(self, today: datetime.date) -> bool:
        """The last day counts."""
        return today <= self.expires

    def __str__(self) -> str:
        at = " ".join(f"{self.rule} at {self.node or 'the graphs'} {self.op}".split())
        difference = " ".join(f"expected {self.expected}; got {self.got}".split())  # no line of its own in a log
        return f"{at} ({difference}) until {self.expires}: {self.reason}"


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
    places = Counter(waiver.place for waiver in waivers)
    if twice := [place for place, count in places.items() if count > 1]:
        raise WaiverError(f"waivers {path}: {twice[0][0]} at {twice[0][1][:200]!r} is waived twice; keep one")
    return waivers


def apply_waivers(
    faults: Sequence[Fault], waivers: Sequence[Waiver], today: datetime.date
) -> tuple[list[Fault], list[Waiver], list[Waiver]]:
    """Faults that still stop the run; waivers that were used; those that would have covered a fault, but expired."""
    blocking = [fault for fault in faults if fault.severity in BLOCKING]
    found = set(map(place_of, blocking))
    applying = [waiver for waiver in waivers if waiver.place in found]
    used = [waiver for waiver in applying if waiver.is_valid(today)]
    covered = {waiver.place for waiver in used}
    left = [fault for fault in blocking if place_of(fault) not in covered]
    return left, used, [waiver for waiver in applying if not waiver.is_valid(today)]


def place_of(fault: Fault) -> Place:
    return fault.rule, fault.fqn, fault.op, fault.expected, fault.got


def draft(faults: Iterable[Fault]) -> str:
    """Waivers of ``faults`` as JSON, each without day and reason: `load_waivers` refuses it until somebody signs."""
    places = dict.fromkeys(place_of(fault) for fault in faults if fault.severity in BLOCKING)
    entries = [dict(zip(FIELDS, (*place, "", ""), strict=True)) for place in places]
    return json.dumps(entries, ensure_ascii=False, indent=1) + "\n"

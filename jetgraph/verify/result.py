"""The answer of a verification: one of three verdicts, the root faults, and a certificate if contained."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING

from jetgraph.verify.fault import Fault
from jetgraph.verify.fold import Folded, fold
from jetgraph.verify.rules import RULES, Severity
from jetgraph.verify.weights import Weights

if TYPE_CHECKING:
    from jetgraph.verify.certificate import Certificate

MAX_LINES = 20
"""Folded faults printed as text; more are counted and stand in the JSON report."""


class Verdict(str, Enum):
    """Three answers that are never confused; UNKNOWN is not success."""

    CONTAINED = "CONTAINED"
    VIOLATED = "VIOLATED"
    UNKNOWN = "UNKNOWN"

    def __str__(self) -> str:
        return self.value

    @property
    def exit_status(self) -> int:
        """What a command exits with; 2 is kept for usage and unreadable input."""
        return {"CONTAINED": 0, "VIOLATED": 1, "UNKNOWN": 3}[self.value]

    @classmethod
    def of(cls, faults: tuple[Fault, ...]) -> Verdict:
        severities = {fault.severity for fault in faults}
        if Severity.VIOLATION in severities:
            return cls.VIOLATED
        return cls.UNKNOWN if Severity.UNKNOWN in severities else cls.CONTAINED


@dataclass(frozen=True)
class Result:
    """``bitwise`` says that both sides run the same row-invariant kernels; it needs ``verdict`` CONTAINED."""

    train: str
    infer: str
    faults: tuple[Fault, ...]
    guards: tuple[str, ...] = ()
    certificate: Certificate | None = None
    weights: Weights = Weights()
    echoes: tuple[Fault, ...] = ()
    """Not reported, because a root fault among ``faults`` explains them; whoever waives that fault meets them."""

    @cached_property
    def verdict(self) -> Verdict:
        return Verdict.of(self.faults)

    @property
    def bitwise(self) -> bool:
        return self.verdict is Verdict.CONTAINED and not self.faults

    @cached_property
    def modulo(self) -> tuple[str, ...]:
        """What containment holds modulo; () if it holds as it stands or not at all."""
        qualified = {RULES[fault.rule].modulo for fault in self.faults} - {""}
        return tuple(sorted(qualified)) if self.verdict is Verdict.CONTAINED else ()

    @cached_property
    def folded(self) -> tuple[Folded, ...]:
        return fold(self.faults)

    @property
    def exit_status(self) -> int:
        return self.verdict.exit_status

    def by_severity(self) -> list[Folded]:
        """The folded faults, violations first."""
        order = list(Severity)
        return sorted(self.folded, key=lambda f: order.index(f.first.severity))

    def headline(self) -> str:
        """The verdict in one line."""
        head = f"{self.verdict}: infer {self.infer!r} ⊑ train {self.train!r}"
        if self.verdict is Verdict.CONTAINED:
            head += f" modulo {' and '.join(self.modulo)}" if self.modulo else ""
            head += ", bitwise" if self.bitwise else ", not bitwise: one precision flow on kernels that may differ"
        if self.faults:
            head += f"  ({_count(len(self.faults), 'fault')} in {_count(len(self.folded), 'line')})"
        return head

    def text(self) -> str:
        """A short report for people; violations come first."""
        folded = self.by_severity()
        lines = [self.headline(), *(line for f in folded[:MAX_LINES] for line in _lines(f))]
        if len(folded) > MAX_LINES:
            lines.append(f"… and {len(folded) - MAX_LINES} more lines; the JSON report has all")
        if self.verdict is Verdict.CONTAINED and self.guards:
            lines.append("holds under: " + "; ".join(self.guards))
        lines.append(self.weights.text())
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        folded = [
            {"rule": f.first.rule, "count": f.count, "layers": list(f.layers), "fqn": f.fqn, "op": f.first.op}
            | {"expected": f.text(f.first.expected), "got": f.text(f.first.got), "remedy": f.remedy}
            for f in self.folded
        ]
        report = {"verdict": str(self.verdict), "bitwise": self.bitwise, "exit_status": self.exit_status}
        report |= {"train": self.train, "infer": self.infer, "guards": list(self.guards), "folded": folded}
        report["weights"] = self.weights.to_dict()
        return json.dumps(report | {"faults": [f.to_dict() for f in self.faults]}, ensure_ascii=False, indent=1) + "\n"


def _lines(folded: Folded) -> list[str]:
    fault = folded.first
    place = " ".join(part for part in (f"{folded.where}:" if folded.where else "", folded.fqn, fault.op) if part)
    times = f"  ×{folded.count}" if folded.count > 1 else ""
    lines = [
        f"{fault.rule} {RULES[fault.rule].title} ({fault.severity}) — {place}{times}",
        f"    expected {folded.text(fault.expected)}; got {folded.text(fault.got)}",
    ]
    sources = [f"{side} {s}" for side, s in (("train", fault.train_source), ("infer", fault.infer_source)) if s]
    if sources:
        lines.append("    at " + ", ".join(sources))
    return [*lines, f"    do: {folded.remedy}"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

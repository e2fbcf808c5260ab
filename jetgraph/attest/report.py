"""What an attestation found: one `Check` per operator, definition and kind of input; JSON and a table of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Outcome(str, Enum):
    """Three answers that are never confused: what could not be run has not been attested."""

    HOLDS = "holds"
    FAILS = "FAILS"
    NOT_RUN = "not run"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Check:
    """One operator on one kind of input.

    ``claim`` says what is compared with what; ``declared`` is False for the definitions that are tried beside the
    declared one so that a failure shows what holds instead: they decide nothing.
    """

    op: str
    claim: str
    rows: str
    outcome: Outcome
    num_values: int = 0
    num_differing: int = 0
    worst: float | None = None
    """Largest error as a fraction of its bound, where there is a bound."""
    declared: bool = True
    note: str = ""

    @classmethod
    def compared(cls, op: str, claim: str, rows: str, differing: int, total: int, **more: Any) -> Check:
        outcome = Outcome.HOLDS if differing == 0 and total > 0 else Outcome.FAILS
        return cls(op, claim, rows, outcome, total, differing, **more)


@dataclass
class Attestation:
    """All checks of one run, and where it ran."""

    side: str
    device: str
    versions: dict[str, str]
    checks: list[Check] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        """0 all declared definitions hold, 1 one does not, 3 nothing fails but something was not run."""
        outcomes = {check.outcome for check in self.checks if check.declared}
        if Outcome.FAILS in outcomes:
            return 1
        return 3 if Outcome.NOT_RUN in outcomes or not outcomes else 0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1, default=str) + "\n"

    @classmethod
    def parse(cls, text: str) -> Attestation:
        data = json.loads(text)
        checks = [Check(**{**c, "outcome": Outcome(c["outcome"])}) for c in data.pop("checks")]
        return cls(**data, checks=checks)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    def text(self, *, alternatives: bool = False) -> str:
        """The checks of the declared definitions as aligned columns, one a line; others only where asked for."""
        chosen = [c for c in self.checks if c.declared or alternatives]
        lines = [f"{self.side} on {self.device} · " + ", ".join(f"{k} {v}" for k, v in self.versions.items())]
        return "\n".join([*lines, *_aligned(map(_cells, chosen)), self._summary()])

    def _summary(self) -> str:
        declared = [c for c in self.checks if c.declared]
        counts = {outcome: sum(c.outcome is outcome for c in declared) for outcome in Outcome}
        return ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count) or "nothing was attested"


def _cells(check: Check) -> tuple[str, ...]:
    if check.outcome is Outcome.NOT_RUN:
        measured = check.note
    elif check.worst is not None:
        measured = f"{check.num_values} values, worst {check.worst:.2g} of the bound"
    else:
        measured = f"{check.num_differing} of {check.num_values} values differ"
    mark = str(check.outcome) if check.declared else f"({check.outcome})"
    return mark, check.op, check.claim, check.rows, measured


def _aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = list(rows)
    if not table:
        return []
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in table]

"""A policy's annotation and an engine's rows as two sets of facts; what is in one of them only is a difference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jetgraph.audit.rows import TRAINING, UNKNOWN, Fact, Quantiser, Role, Row
from jetgraph.policy import Policy

ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """The same difference of several layers, and the engine's setting that would remove it (empty: none is known)."""

    operand: str
    field: str
    expected: str
    got: str
    layers: tuple[str, ...]
    remedy: str = ""

    @property
    def unknown(self) -> bool:
        """Nobody could read what the engine does: neither equal nor different."""
        return self.got == UNKNOWN


Advice = Callable[[Difference, Sequence[Row]], str]
"""The remedy for a difference; gets the rows of its layers too."""


def annotation(policy: Policy, linears: Iterable[str], rows: Iterable[Row]) -> set[Fact]:
    """What ``policy``'s rollout says of a model with these linears.

    Of the other layers (from ``rows``) it says that weights and KV cache are BF16 and that they compute as training.
    """
    facts: set[Fact] = set()
    for name in linears:
        precision = policy.linear(name, rollout=True)
        activation, weight = Quantiser.of(precision.activation), Quantiser.of(precision.weight)
        facts |= set(Row(name, Role.LINEAR, "", "", weight, activation).facts())
    known = {fact.layer for fact in facts}
    for row in rows:
        if row.role in (Role.LINEAR, Role.HEAD):
            continue
        bf16 = Quantiser("bf16") if row.weight is not None and row.name not in known else None
        kv_cache, arithmetic = "bf16" if row.kv_cache else "", TRAINING if row.arithmetic else ""
        facts |= set(Row(row.name, row.role, "", "", bf16, None, kv_cache, arithmetic).facts())
    return facts


def compare(policy: Policy, linears: Sequence[str], rows: Sequence[Row], advise: Advice) -> tuple[Difference, ...]:
    """Every difference between the annotation and the rows, folded over layers that differ alike."""
    expected = _values(annotation(policy, linears, rows))
    got = _values(fact for row in rows for fact in row.facts())
    layers: dict[tuple[str, str, str, str], dict[str, None]] = {}
    for key in sorted(expected.keys() | got.keys()):
        name, operand, field = key
        if field != "format" and expected.get((name, operand, "format")) != got.get((name, operand, "format")):
            continue  # granularity and rule follow from the format, which is listed
        wanted, found = expected.get(key, {ABSENT}), got.get(key, {ABSENT})
        (demanded,) = wanted
        for value in sorted(found - wanted):
            layers.setdefault((operand, field, demanded, value), {})[name] = None
    by_name = {row.name: row for row in rows}
    return tuple(
        Difference(*found, advise(Difference(*found), [by_name[n] for n in found[-1] if n in by_name]))
        for found in ((*key, tuple(names)) for key, names in layers.items())
    )


def _values(facts: Iterable[Fact]) -> dict[tuple[str, str, str], set[str]]:
    """(layer, operand, field) → its values: several where ranks of one engine differ."""
    values: dict[tuple[str, str, str], set[str]] = {}
    for fact in facts:
        values.setdefault(fact[:3], set()).add(fact.value)
    return values

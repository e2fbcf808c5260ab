"""One refutation and one just-valid twin per rule: `JGnnn_name.py` beside this file has `refuted()` and `twin()`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from jetgraph.verify import RULES, Severity, Verdict, verify

CASES = {path.name[:5]: path for path in sorted(Path(__file__).parent.glob("JG*.py"))}
VERDICTS = {
    Severity.VIOLATION: Verdict.VIOLATED,
    Severity.UNKNOWN: Verdict.UNKNOWN,
    Severity.QUALIFIED: Verdict.CONTAINED,
    Severity.BITWISE: Verdict.CONTAINED,
}


def load(rule: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(CASES[rule].stem, CASES[rule])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rule", CASES)
def test_refuted(rule: str) -> None:
    case = load(rule)
    result = verify(*case.refuted())
    assert {fault.rule for fault in result.faults} - getattr(case, "EXTRA", set()) == {rule}, result.text()
    assert result.verdict is VERDICTS[RULES[rule].severity]
    assert not result.bitwise
    assert result.modulo == getattr(case, "MODULO", ())
    assert (result.certificate is not None) == (result.verdict is Verdict.CONTAINED)


@pytest.mark.parametrize("rule", CASES)
def test_twin_is_contained(rule: str) -> None:
    result = verify(*load(rule).twin())
    assert result.verdict is Verdict.CONTAINED, result.text()
    assert result.bitwise, result.text()
    assert result.modulo == ()
    assert result.certificate is not None


def test_every_rule_has_a_refutation() -> None:
    assert set(CASES) == set(RULES)

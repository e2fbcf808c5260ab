"""SARIF 2.1.0 (OASIS), as code-scanning services read it: one result a folded fault, one rule a rule page.

The location is the engine's source line, which is what to change; the trainer's line is a related location.  A
fingerprint holds what the fault says, not where it stands: it is equal across runs, machines and moved lines, and the
digests of weights, which change with every step, are left out of it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from typing import Any
from urllib.parse import quote

from jetgraph.verify.fold import Folded
from jetgraph.verify.formats.place import Files, Place, engine, one_line, trainer
from jetgraph.verify.pages import page
from jetgraph.verify.result import Result
from jetgraph.verify.rules import RULES, Rule, Severity

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
MAX_RESULTS = 24_999
"""GitHub refuses a run of 25,000 results or more; what is left out is counted in a notification."""

_LEVELS = {Severity.VIOLATION: "error", Severity.UNKNOWN: "warning"}
_DIGEST = re.compile(r"\b[0-9a-f]{12,64}\b")


def write(result: Result, files: Files, limit: int = MAX_RESULTS) -> str:
    ordered = result.by_severity()
    shown, ids = ordered[:limit], list(RULES)
    seen: Counter[str] = Counter()
    results = [_result(folded, files, ids.index(folded.first.rule), seen) for folded in shown]
    invocation: dict[str, Any] = {
        "executionSuccessful": True,
        "exitCode": result.exit_status,
        "exitCodeDescription": result.headline(),
    }
    if len(ordered) > len(shown):
        text = f"{len(ordered) - len(shown)} of {len(ordered)} results are left out; the JSON report has all."
        invocation["toolExecutionNotifications"] = [{"level": "warning", "message": {"text": text}}]
    driver = {"name": "jetgraph", "rules": [_rule(rule) for rule in RULES.values()]}
    run: dict[str, Any] = {"tool": {"driver": driver}, "invocations": [invocation], "results": results}
    run["columnKind"] = "unicodeCodePoints"
    run["properties"] = {"verdict": str(result.verdict), "bitwise": result.bitwise}
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, ensure_ascii=False, indent=1) + "\n"


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.id,
        "name": "".join(word.capitalize() for word in re.findall(r"\w+", rule.title)),
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.meaning},
        "help": {"text": f"{rule.meaning} Example: {rule.example}", "markdown": page(rule)},
        "defaultConfiguration": {"level": _LEVELS.get(rule.severity, "note")},
        "properties": {"tags": ["precision", str(rule.severity)]},
    }


def _result(folded: Folded, files: Files, rule_index: int, seen: Counter[str]) -> dict[str, Any]:
    fault, mark = folded.first, fingerprint(folded)
    seen[mark] += 1
    result: dict[str, Any] = {
        "ruleId": fault.rule,
        "ruleIndex": rule_index,
        "level": _LEVELS.get(fault.severity, "note"),
        "message": {"text": f"{one_line(folded)}. To do: {folded.remedy}."},
        "locations": [_location(engine(folded, files), folded.fqn)],
        "partialFingerprints": {"jetgraph/v1": f"{mark}:{seen[mark]}"},
        "occurrenceCount": folded.count,
    }
    other = trainer(folded)
    if other is not None:
        result["relatedLocations"] = [{"id": 1, "message": {"text": "in training"}, **_location(other, "")}]
    return result


def fingerprint(folded: Folded) -> str:
    """32 hex digits of rule, op, path and words, layers and weight digests left out."""
    fault = folded.first
    words = [fault.rule, fault.op, folded.fqn, folded.text(fault.expected), folded.text(fault.got)]
    return hashlib.sha256(_DIGEST.sub("…", json.dumps(words)).encode()).hexdigest()[:32]


def _location(place: Place, fqn: str) -> dict[str, Any]:
    artifact = {"uri": quote(place.path), "uriBaseId": "%SRCROOT%"}
    location: dict[str, Any] = {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": place.line}}}
    if fqn:
        location["logicalLocations"] = [{"fullyQualifiedName": fqn, "kind": "module"}]
    return location

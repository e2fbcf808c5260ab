"""Prints `docs/rules/JGnnn.md` from the rows of `rules`:  python -m jetgraph.verify.pages docs/rules"""

from __future__ import annotations

import sys
from pathlib import Path

from jetgraph.verify.rules import RULES, Rule, Severity, Stage

_VERDICT = {
    Severity.VIOLATION: "VIOLATED (exit status 1)",
    Severity.UNKNOWN: "UNKNOWN (exit status 3)",
    Severity.QUALIFIED: "CONTAINED modulo {modulo} (exit status 0), `bitwise: false`",
    Severity.BITWISE: "CONTAINED (exit status 0), but `bitwise: false`",
}
_STAGE = {
    Stage.FINDER: "the finder, by comparing terms",
    Stage.CONFORMANCE: "conformance to the policy, on each side",
    Stage.EVIDENCE: "the evidence that comes with the graphs",
    Stage.REDUCTION: "the finder, by comparing how each matrix product is added up",
    Stage.DECLARED: "what the graphs declare beside their nodes, decided in integers",
}


def page(rule: Rule) -> str:
    names = {"fqn": "*module*", "op": "*op*", "expected": "*expected*", "got": "*got*"}
    change = rule.remedy.format(**names)
    return (
        f"# {rule.id} {rule.title}\n\n{rule.meaning}\n\n"
        f"**Verdict:** {_VERDICT[rule.severity].format(modulo=rule.modulo)}. **Found by:** {_STAGE[rule.stage]}. "
        f"**Meaning:** [spec](../spec.md) §{rule.spec}.\n\n"
        f"## Example\n\n{rule.example}\n\n"
        f"## What to change\n\n{change[0].upper()}{change[1:]}.\n\n"
        f"A graph that breaks this rule and one that just does not: `tests/refutations/{rule.id}_*.py`.\n"
    )


def write(folder: Path) -> None:
    """Write every page; a page of a rule that no longer exists is left for a person to remove."""
    folder.mkdir(parents=True, exist_ok=True)
    for rule in RULES.values():
        (folder / f"{rule.id}.md").write_text(page(rule), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "docs/rules"))

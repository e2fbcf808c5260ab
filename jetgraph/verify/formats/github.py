"""GitHub workflow commands: annotations beside the lines of a pull request.

Source of the escapes: the toolkit's `packages/core/src/command.ts` (data: % CR LF; properties also : and ,).
GitHub shows ten annotations of a kind a step, so violations come first.
"""

from __future__ import annotations

from jetgraph.verify.formats.place import Files, engine, one_line
from jetgraph.verify.result import Result, Verdict
from jetgraph.verify.rules import RULES, Severity

_COMMANDS = {Severity.VIOLATION: "error", Severity.UNKNOWN: "warning"}


def write(result: Result, files: Files) -> str:
    lines = []
    for folded in result.by_severity():
        place, rule = engine(folded, files), RULES[folded.first.rule]
        properties = {"file": place.path, "line": str(place.line), "title": f"{rule.id} {rule.title}"}
        command = _COMMANDS.get(folded.first.severity, "notice")
        lines.append(_command(command, properties, f"{one_line(folded)}\ndo: {folded.remedy}"))
    kind = "notice" if result.verdict is Verdict.CONTAINED else "error"
    return "\n".join([*lines, _command(kind, {"title": "jetgraph verify"}, result.headline())]) + "\n"


def _command(name: str, properties: dict[str, str], message: str) -> str:
    pairs = [f"{key}={_data(value).replace(':', '%3A').replace(',', '%2C')}" for key, value in properties.items()]
    return f"::{name} {','.join(pairs)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")

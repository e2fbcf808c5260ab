"""SARIF 2.1.0 for the objects that jetgraph writes: a subset, transcribed from the OASIS schema, nothing else allowed.

Not the official file, which has many more optional properties; types, required fields, enums and minima are the same.
"""

from __future__ import annotations

from typing import Any


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": required, "properties": properties, "additionalProperties": False}


def _array(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


TEXT = {"type": "string"}
BAG = {"type": "object"}
LEVEL = {"enum": ["none", "note", "warning", "error"]}
MESSAGE = _object(["text"], text=TEXT, markdown=TEXT)
ARTIFACT = _object([], uri={"type": "string", "pattern": r"^[^\s\\]+$"}, uriBaseId=TEXT, index={"type": "integer"})
REGION = _object([], startLine={"type": "integer", "minimum": 1})
PHYSICAL = _object(["artifactLocation"], artifactLocation=ARTIFACT, region=REGION)
LOGICAL = _object([], fullyQualifiedName=TEXT, kind=TEXT, name=TEXT)
LOCATION = _object(
    [],
    id={"type": "integer", "minimum": -1},
    physicalLocation=PHYSICAL,
    message=MESSAGE,
    logicalLocations=_array(LOGICAL),
)
RULE = _object(
    ["id"], id=TEXT, name=TEXT, shortDescription=MESSAGE, fullDescription=MESSAGE, help=MESSAGE, properties=BAG,
    defaultConfiguration=_object([], level=LEVEL),
)  # fmt: skip
RESULT = _object(
    ["message"], ruleId=TEXT, ruleIndex={"type": "integer", "minimum": -1}, level=LEVEL, message=MESSAGE,
    locations=_array(LOCATION, minItems=1), relatedLocations=_array(LOCATION, uniqueItems=True),
    partialFingerprints={"type": "object", "additionalProperties": TEXT},
    occurrenceCount={"type": "integer", "minimum": 1},
)  # fmt: skip
NOTIFICATION = _object(["message"], level=LEVEL, message=MESSAGE)
INVOCATION = _object(
    ["executionSuccessful"], executionSuccessful={"type": "boolean"}, exitCode={"type": "integer"},
    exitCodeDescription=TEXT, toolExecutionNotifications=_array(NOTIFICATION),
)  # fmt: skip
RUN = _object(
    ["tool"], tool=_object(["driver"], driver=_object(["name"], name=TEXT, rules=_array(RULE, uniqueItems=True))),
    invocations=_array(INVOCATION), results=_array(RESULT), properties=BAG,
    columnKind={"enum": ["utf16CodeUnits", "unicodeCodePoints"]},
)  # fmt: skip
SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    **_object(["version", "runs"], **{"$schema": TEXT, "version": {"enum": ["2.1.0"]}, "runs": _array(RUN)}),
}

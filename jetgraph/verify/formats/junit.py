"""JUnit XML: the verdict and every folded fault as a test case, for CI systems that show tests.

A violation is a failure, what is unknown is an error, and a fault that only costs the word "bitwise" passes with its
text in `system-out`; so the suite is green exactly when the rollout is contained.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from jetgraph.verify.fold import Folded
from jetgraph.verify.formats.place import Files, engine, one_line
from jetgraph.verify.result import Result, Verdict
from jetgraph.verify.rules import RULES, Severity

_TAGS = {Severity.VIOLATION: "failure", Severity.UNKNOWN: "error"}
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def write(result: Result, files: Files) -> str:
    suite = ET.Element("testsuite", name="jetgraph verify", time="0")
    verdict = ET.SubElement(suite, "testcase", classname="jetgraph.verify", name=_text(result.headline()), time="0")
    if result.verdict is not Verdict.CONTAINED:
        tag = "failure" if result.verdict is Verdict.VIOLATED else "error"
        ET.SubElement(verdict, tag, message=_text(result.headline()), type=str(result.verdict))
    for folded in result.by_severity():
        _case(suite, folded, files)
    counts = {"tests": "testcase", "failures": "testcase/failure", "errors": "testcase/error"}
    for name, path in counts.items():
        suite.set(name, str(len(suite.findall(path))))
    suite.set("skipped", "0")
    root = ET.Element("testsuites", {k: suite.attrib[k] for k in ("name", "tests", "failures", "errors", "time")})
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(suite: ET.Element, folded: Folded, files: Files) -> None:
    fault = folded.first
    place = engine(folded, files)
    name = " ".join(part for part in (folded.where, folded.fqn, fault.op) if part) or RULES[fault.rule].title
    case = ET.SubElement(suite, "testcase", classname=f"jetgraph.{fault.rule}", name=_text(name), time="0")
    case.set("file", _text(place.path))
    case.set("line", str(place.line))
    text = _text(f"{one_line(folded)}\nat {place}\ndo: {folded.remedy}")
    if fault.severity in _TAGS:
        message = _text(f"{fault.rule} {RULES[fault.rule].title}: {one_line(folded)}")
        ET.SubElement(case, _TAGS[fault.severity], message=message, type=fault.rule).text = text
    else:
        ET.SubElement(case, "system-out").text = text


def _text(text: str) -> str:
    return _NOT_XML.sub("�", text)

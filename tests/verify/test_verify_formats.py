"""The formats for people, tools and CI: valid by their own rules, equal across runs, and the same faults in each."""

from __future__ import annotations

import json
import re
import shlex
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from jetgraph.cli import app
from jetgraph.verify import Fault, Result, verify
from jetgraph.verify.formats import FORMATS, Files, deliver, github, junit, sarif
from tests.verify.mutations import MUTATIONS, apply
from tests.verify.sarif_subset import SCHEMA
from tests.verify.toy_transformer import build, with_meta

FILES = Files("graphs/train.json", "graphs/infer.json")
EXAMPLES = Path(__file__).parents[2] / "examples" / "ci"
NASTY = Fault("JG011", "a::b,c%", "x, y: 100 %", '1 < 2 & 3 > 2 "quoted"', "line one\nline two\r\x00]]>", infer=0)


def eps() -> Result:
    return verify(build("train"), apply(build("infer"), MUTATIONS["eps"].edit))


RESULTS = {
    "contained": lambda: verify(build("train"), build("infer")),
    "violated": eps,
    "unknown": lambda: verify(build("train"), with_meta(build("infer"), compiler="inductor")),
    "nasty": lambda: Result("t", "i", (NASTY,)),
}


@pytest.fixture(scope="module", params=RESULTS)
def result(request: pytest.FixtureRequest) -> Result:
    return RESULTS[request.param]()


# --------------------------------------------------------------------------------------------------------------- SARIF


def test_sarif_is_valid(result: Result) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    log = json.loads(sarif.write(result, FILES))
    jsonschema.validate(log, SCHEMA)
    run = log["runs"][0]
    rules = run["tool"]["driver"]["rules"]
    assert len({rule["id"] for rule in rules}) == len(rules)
    for entry in run["results"]:
        assert rules[entry["ruleIndex"]]["id"] == entry["ruleId"]
    assert len(run["results"]) == len(result.folded)
    assert run["invocations"][0]["exitCode"] == result.exit_status


def test_sarif_points_at_the_engine_and_back_at_the_trainer() -> None:
    first = json.loads(sarif.write(eps(), FILES))["runs"][0]["results"][0]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "engine.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 30}
    assert first["relatedLocations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "modeling.py"
    assert first["occurrenceCount"] == 2
    assert first["level"] == "error"


def test_locations_stay_under_the_checkout_and_fall_back_to_the_graph_file() -> None:
    def uri(**changes: object) -> str:
        result = Result("t", "i", (replace(NASTY, **changes),))  # type: ignore[arg-type]
        entry = json.loads(sarif.write(result, FILES))["runs"][0]["results"][0]
        return entry["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]

    assert uri() == "graphs/infer.json"
    assert uri(infer_source="/home/me/../a b.py:7") == "home/me/a%20b.py"
    assert uri(infer_source="nonsense") == "graphs/infer.json"


def test_fingerprints_are_equal_across_runs_lines_and_weights_and_differ_between_faults() -> None:
    def prints(result: Result) -> list[str]:
        entries = json.loads(sarif.write(result, FILES))["runs"][0]["results"]
        return [entry["partialFingerprints"]["jetgraph/v1"] for entry in entries]

    once = prints(eps())
    assert once == prints(eps())
    assert len(set(once)) == 3
    moved = tuple(replace(f, infer_source="engine.py:99", infer=7) for f in eps().faults)
    assert prints(Result("t", "i", moved)) == once
    step = [Fault("JG017", "operand", "w", f"codes {d * 12}", "codes 000000000000") for d in "ab"]
    assert prints(Result("t", "i", (step[0],))) == prints(Result("t", "i", (step[1],)))
    twice = prints(Result("t", "i", tuple(step)))
    assert len(set(twice)) == 2  # two results of one run never share a fingerprint


def test_more_than_the_limit_is_counted_not_hidden() -> None:
    faults = tuple(Fault("JG011", "add", f"module_{'x' * i}", "a", "b") for i in range(12))
    run = json.loads(sarif.write(Result("t", "i", faults), FILES, limit=5))["runs"][0]
    assert len(run["results"]) == 5
    (note,) = run["invocations"][0]["toolExecutionNotifications"]
    assert note["message"]["text"].startswith("7 of 12 results are left out")
    assert sarif.MAX_RESULTS < 25_000


# ------------------------------------------------------------------------------------------------- JUnit and GitHub


def test_junit_is_xml_whose_counts_are_right_and_green_iff_contained(result: Result) -> None:
    root = ET.fromstring(junit.write(result, FILES).encode())
    (suite,) = root
    counts = {"tests": "testcase", "failures": "testcase/failure", "errors": "testcase/error"}
    for node in (root, suite):
        for name, path in counts.items():
            assert int(node.attrib[name]) == len(suite.findall(path))
    red = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    assert (red == 0) == (result.exit_status == 0)
    assert all(case.attrib["classname"] and case.attrib["name"] for case in suite)


def test_github_commands_are_one_line_each_and_unescape_to_what_was_said(result: Result) -> None:
    lines = github.write(result, FILES).splitlines()
    assert len(lines) == len(result.folded) + 1
    for line in lines:
        command = re.fullmatch(r"::(error|warning|notice) ([^:]*)::(.*)", line)
        assert command, line
        properties = dict(pair.split("=", 1) for pair in command[2].split(","))
        assert set(properties) in ({"file", "line", "title"}, {"title"})
    if result.faults == (NASTY,):
        message = lines[0].split("::", 2)[2]
        assert "100 %25" in message
        assert "line one%0Aline two%0D" in message


def test_concise_has_a_place_and_a_rule_on_every_line() -> None:
    *lines, verdict = FORMATS["concise"](eps(), FILES).splitlines()
    assert all(re.match(r"engine\.py:\d+: JG011 violation: ", line) for line in lines)
    assert verdict.startswith("VIOLATED: ")


# ----------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "graphs"
    folder.mkdir()
    build("train").save(folder / "train.json")
    build("infer").save(folder / "infer.json")
    return folder


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_keeps_the_exit_status(graphs: Path, name: str) -> None:
    pair = ("graphs/train.json", "graphs/infer.json")
    assert run("verify", *pair, "--output-format", name)[0] == 0
    apply(build("infer"), MUTATIONS["eps"].edit).save(graphs / "infer.json")
    status, text = run("verify", *pair, "--output-format", name)
    assert status == 1
    assert "JG011" in text
    file = graphs / "report"
    assert run("verify", *pair, "--output-format", name, "--output-file", str(file), "--exit-zero")[0] == 0
    assert file.read_text() == text


def test_an_unknown_format_is_a_usage_error(graphs: Path) -> None:
    status, text = run("verify", "graphs/train.json", "graphs/infer.json", "--output-format", "yaml")
    assert status == 2
    assert "choose one of full, concise, json, sarif, junit, github" in text


def test_delivery_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    deliver(eps(), "concise", FILES, None)
    assert capsys.readouterr().out == FORMATS["concise"](eps(), FILES)


# ------------------------------------------------------------------------------------------------- examples/ci


def command_lines(file: str) -> list[str]:
    content = yaml.safe_load((EXAMPLES / file).read_text())
    if "jobs" in content:
        steps = [step for job in content["jobs"].values() for step in job["steps"]]
        return [step["run"] for step in steps if step.get("run", "").startswith("jetgraph ")]
    return [hook["entry"] for repo in content["repos"] for hook in repo["hooks"]]


@pytest.mark.parametrize("file", ["github-actions.yml", "pre-commit-config.yaml"])
def test_the_examples_run_as_they_are_written(graphs: Path, file: str) -> None:
    lines = command_lines(file)
    assert lines
    assert [run(*shlex.split(line)[1:])[0] for line in lines] == [0] * len(lines)
    apply(build("infer"), MUTATIONS["eps"].edit).save(graphs / "infer.json")
    assert run(*shlex.split(lines[0])[1:])[0] == 1

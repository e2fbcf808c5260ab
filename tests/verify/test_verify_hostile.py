"""Files from elsewhere: unreadable, truncated, cyclic, huge or hostile ones end with status 2 and one sentence."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from jetgraph import bounded_json
from jetgraph.cli import app
from jetgraph.graph import GraphError
from jetgraph.verify import Source, verify
from tests.verify.toy_transformer import build

TRAIN, INFER = (build(side, layers=1).to_json().encode() for side in ("train", "infer"))


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return result.exit_code, result.output


def changed(change: Callable[[dict], object]) -> bytes:
    graph = json.loads(INFER)
    change(graph)
    return json.dumps(graph).encode()


def last(graph: dict) -> list:
    return graph["nodes"][-1]


HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON"),
    "truncated": (INFER[: len(INFER) // 2], "not JSON"),
    "not UTF-8": (INFER.replace(b"toy-infer", b"toy-\xff\xfe"), "not UTF-8"),
    "a BOM": (b"\xef\xbb\xbf" + INFER, "not JSON"),
    "deep nesting": (b"[" * 200_000 + b"]" * 200_000, "nested too deeply"),
    "deep nesting within": (
        INFER.replace(b'"meta": {', b'"meta": {"x": ' + b"[" * 9999 + b"]" * 9999 + b", "),
        "deeply",
    ),
    "a huge number": (INFER.replace(b'"nodes": [\n[', b'"nodes": [\n[' + b"9" * 6000 + b", "), "not JSON"),
    "a key twice": (INFER.replace(b'"name":', b'"name": "x", "name":'), "same key twice"),
    "NaN": (INFER.replace(b'"meta": {', b'"meta": {"x": NaN, '), "NaN is not a number"),
    "Infinity": (INFER.replace(b'"meta": {', b'"meta": {"x": -Infinity, '), "-Infinity is not a number"),
    "overflow": (INFER.replace(b'"scale": 0.125', b'"scale": 1e999'), "printable text"),
    "a lone surrogate": (INFER.replace(b"toy-infer", b"toy-\\ud800"), "surrogate"),
    "an escape sequence": (INFER.replace(b"toy-infer", b"toy-\\u001b[31m"), "printable"),
    "an escape sequence in meta": (changed(lambda g: g["meta"].update(a=[{"b": "\x1b[31m"}])), "printable"),
    "unknown that is a number": (changed(lambda g: g["meta"].update(unknown=5)), "meta 'unknown' must be a list"),
    "saved that is no text": (changed(lambda g: g["meta"].update(saved=[5])), "meta 'saved' must be a list of text"),
    "a long name": (INFER.replace(b"toy-infer", b"x" * 5000), "at most 4096"),
    "a cycle": (changed(lambda g: last(g).__setitem__(3, len(g["nodes"]) - 1)), "does not come before it"),
    "a negative index": (changed(lambda g: last(g).__setitem__(3, -1)), "does not come before it"),
    "a float as index": (changed(lambda g: last(g).__setitem__(3, 0.0)), "does not come before it"),
    "a bool as index": (changed(lambda g: last(g).__setitem__(3, True)), "does not come before it"),
    "a term that is not there": (changed(lambda g: last(g).__setitem__(0, 10**6)), "IndexError"),
    "a node that is text": (changed(lambda g: g["nodes"].append("node")), "not a jetgraph graph file"),
    "an output elsewhere": (changed(lambda g: g["outputs"].update(logits=10**9)), "does not exist"),
    "an output that is text": (changed(lambda g: g["outputs"].update(logits="1")), "node numbers"),
    "a size below 0": (changed(lambda g: g["terms"][0].__setitem__(2, [-5])), "a size is"),
    "a precision of its own": (changed(lambda g: g["terms"][0].__setitem__(3, "f3[x]")), "f3"),
    "meta that is a list": (changed(lambda g: g.update(meta=[])), "meta an object"),
    "parameters that are a list": (changed(lambda g: g["meta"].update(parameters=["w"])), "meta 'parameters'"),
    "digests that are numbers": (changed(lambda g: g["meta"].update(operands={"w": {"digest": 1}})), "meta 'operands'"),
    "a scope without weights": (changed(lambda g: g["meta"].update(scope={"a": {}})), "meta 'scope'"),
    "guards that are numbers": (changed(lambda g: g["meta"].update(guards=[1])), "meta 'guards'"),
    "replay that is text": (changed(lambda g: g["meta"].update(replay="passed")), "meta 'replay'"),
    "a version of tomorrow": (INFER.replace(b'"jetgraph": 2', b'"jetgraph": 3'), "has version 3"),
    "a program": (b"import os; os.system('touch executed')", "not JSON"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_graph_is_2_in_one_sentence(tmp_path: Path, name: str) -> None:
    data, reason = HOSTILE[name]
    train, infer = tmp_path / "train.json", tmp_path / "infer.json"
    train.write_bytes(TRAIN)
    infer.write_bytes(data)
    for pair in ((train, infer), (infer, train)):
        status, text = run("verify", *pair)
        assert status == 2, text
        assert reason in text
        assert len(text.strip().splitlines()) == 1
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_graph_is_looked_at_without_harm(tmp_path: Path, name: str) -> None:
    """Each command that only shows either refuses in one sentence or shows; it never fails, and prints no control."""
    good, bad, page = tmp_path / "good.json", tmp_path / "bad.json", tmp_path / "page.html"
    good.write_bytes(TRAIN)
    bad.write_bytes(HOSTILE[name][0])
    for command in (("inspect", bad), ("diff", bad, good), ("show", good, bad, "-o", page)):
        status, text = run(*command)
        assert "\x1b" not in text
        if status == 2:
            assert text.startswith("error: ")
            assert len(text.strip().splitlines()) == 1


def test_folders_missing_files_and_files_without_permission(tmp_path: Path) -> None:
    train = tmp_path / "train.json"
    train.write_bytes(TRAIN)
    assert run("verify", train, tmp_path)[0] == 2
    assert run("verify", train, tmp_path / "missing")[0] == 2
    assert run("check", tmp_path, train, train)[0] == 2
    assert run("check", train, train, tmp_path / "missing")[0] == 2
    if os.geteuid() != 0:
        train.chmod(0)
        assert run("verify", train, train)[0] == 2


def test_size_and_number_of_values_are_capped_before_parsing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Path("/dev/zero")
    monkeypatch.setattr(bounded_json, "MAX_BYTES", 1_000_000)
    if endless.exists():
        with pytest.raises(bounded_json.Unreadable, match="larger than"):
            bounded_json.read_bytes(endless)
    monkeypatch.setattr(bounded_json, "MAX_VALUES", 1000)
    data = b"[" + b"{}," * 300_000 + b"{}]"
    tracemalloc.start()
    with pytest.raises(bounded_json.Unreadable, match="1000 values"):
        bounded_json.parse(data)
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


# ---------------------------------------------------------------------------------------------------------------- fuzz


@st.composite
def mutated(draw: st.DrawFn, original: bytes) -> bytes:
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data) - 1))
        span = draw(st.integers(0, 12))
        data[at : at + span] = draw(
            st.sampled_from([b"", b"0", b"-1", b"1e9", b"null", b"[]", b"{}", b'"T"', b"true", b",", b'"', b"\\u0000"])
            | st.binary(max_size=6)
        )
        if not data:
            return b""
    return bytes(data)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(mutated(INFER))
def test_fuzzed_graphs_never_crash_the_verifier(data: bytes) -> None:
    """What is read at all is judged: 0, 1 or 3; everything else is one GraphError."""
    try:
        infer = Source.parse(data, "infer")
    except GraphError:
        return
    for result in (verify(Source.parse(TRAIN, "train"), infer), verify(infer, Source.parse(INFER, "infer"))):
        assert result.exit_status in (0, 1, 3)
        assert result.text()
        assert result.to_json()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=mutated(INFER), certificate=st.booleans())
def test_fuzzed_files_through_the_command(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, certificate: bool
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    train, infer = folder / "train.json", folder / "infer.json"
    train.write_bytes(TRAIN)
    infer.write_bytes(data)
    status, text = run("check", infer, train, infer) if certificate else run("verify", train, infer)
    assert status in (0, 1, 2, 3), text

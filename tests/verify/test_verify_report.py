"""Folding, the three verdicts, the short text report and the JSON report; rules and their pages stay in step."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jetgraph.verify import RULES, Fault, Result, Severity, Verdict, fold, verify
from jetgraph.verify.fold import spans
from jetgraph.verify.pages import page
from tests.verify.mutations import MUTATIONS, apply, eps, next_layers_key
from tests.verify.toy_transformer import build, with_meta

ROOT = Path(__file__).parents[2]


def test_sixty_one_faults_are_three_lines() -> None:
    train, infer = build("train", layers=30), build("infer", layers=30)
    result = verify(train, apply(infer, eps))
    assert [(f.where, f.count) for f in result.folded] == [("layers 0–29", 30), ("layers 0–29", 30), ("", 1)]
    assert result.text().splitlines()[:5] == [
        "VIOLATED: infer 'toy-infer' ⊑ train 'toy-train'  (61 faults in 3 lines)",
        "JG011 op or attribute (violation) — layers 0–29: model.layers.*.input_layernorm add  ×30",
        "    expected const 1e-05; got const 1e-06",
        "    at train modeling.py:30, infer engine.py:30",
        "    do: make add at model.layers.*.input_layernorm use const 1e-05 instead of const 1e-06 in the engine",
    ]


def test_an_exception_stands_apart() -> None:
    """Every layer takes the next one's K weight, the last takes the first's: two lines, told apart by the offset."""
    result = verify(build("train", layers=4), apply(build("infer", layers=4), next_layers_key))
    assert [(f.where, f.count) for f in result.folded] == [("layers 0–2", 3), ("layer 3", 1)]
    assert "parameter model.layers.*+1.self_attn.k_proj.weight" in result.text()


def test_equal_words_elsewhere_do_not_fold() -> None:
    faults = [Fault("JG011", "add", f"model.layers.{i}.norm", "a", "b" if i != 2 else "c") for i in range(5)]
    assert [(f.where, f.count) for f in fold(faults)] == [("layers 0–1, 3–4", 4), ("layer 2", 1)]
    assert spans([1]) == "1"


def test_three_verdicts_and_their_exit_status() -> None:
    train, infer = build("train"), build("infer")
    contained = verify(train, infer)
    violated = verify(train, apply(infer, eps))
    unknown = verify(train, with_meta(infer, replay={"passed": False}))
    assert [r.verdict for r in (contained, violated, unknown)] == list(Verdict)
    assert [r.exit_status for r in (contained, violated, unknown)] == [0, 1, 3]
    assert contained.text().startswith("CONTAINED: infer 'toy-infer' ⊑ train 'toy-train', bitwise\n")


def test_a_violation_outweighs_what_is_unknown() -> None:
    result = verify(build("train"), with_meta(apply(build("infer"), eps), compiler="inductor"))
    assert result.verdict is Verdict.VIOLATED
    assert {f.rule for f in result.faults} == {"JG011", "JG092"}
    assert result.text().index("JG011") < result.text().index("JG092")


def test_json_report() -> None:
    result = verify(build("train"), apply(build("infer"), MUTATIONS["activation 1x64"].edit))
    report = json.loads(result.to_json())
    assert (report["verdict"], report["exit_status"], len(report["faults"])) == ("VIOLATED", 1, 8)
    assert report["folded"][0]["expected"] == "block 1x128"
    fault = report["faults"][0]
    assert fault["infer_source"].startswith("engine.py:")
    assert fault["train_source"].startswith("modeling.py:")


def test_a_long_report_is_cut() -> None:
    faults = tuple(Fault("JG011", "add", f"place_{chr(97 + i)}", "a", "b") for i in range(26))
    text = Result("t", "i", faults).text()
    assert "… and 6 more lines" in text


def test_guards_are_said() -> None:
    result = verify(build("train"), with_meta(build("infer"), guards=["T <= 8192"]))
    assert "holds under: infer: T <= 8192" in result.text()


def test_no_torch() -> None:
    program = "import sys, jetgraph.verify as v; assert not {'torch', 'sympy', 'networkx'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


# -------------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize("rule", RULES)
def test_page_in_step(rule: str) -> None:
    """Run `python -m jetgraph.verify.pages docs/rules` after changing a row."""
    assert (ROOT / "docs" / "rules" / f"{rule}.md").read_text(encoding="utf-8") == page(RULES[rule])


@pytest.mark.parametrize("rule", RULES)
def test_the_page_names_the_paragraph_that_names_the_rule(rule: str) -> None:
    spec = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    start = re.search(rf"^(?:> )?\*\*{re.escape(RULES[rule].spec)}\b", spec, re.MULTILINE)
    assert start is not None, f"docs/spec.md has no paragraph {RULES[rule].spec}"
    paragraph = re.split(r"^(?:> )?\*\*\d+\.\d+\b|^## ", spec[start.end() :], maxsplit=1, flags=re.MULTILINE)[0]
    assert rule in paragraph


def test_paragraphs_are_numbered_in_order() -> None:
    spec = (ROOT / "docs" / "spec.md").read_text(encoding="utf-8")
    numbers = [tuple(map(int, n.split("."))) for n in re.findall(r"^(?:> )?\*\*(\d+\.\d+)\b", spec, re.MULTILINE)]
    assert numbers == sorted(set(numbers))
    assert len(numbers) == 39


def test_no_page_without_a_rule() -> None:
    assert {p.stem for p in (ROOT / "docs" / "rules").glob("JG*.md")} == set(RULES)


def test_ids_and_severities() -> None:
    assert set(RULES) == {f"JG{n:03}" for n in [*range(1, 23), *range(90, 96)]}
    assert all((r.severity is Severity.UNKNOWN) == (r.id >= "JG090") for r in RULES.values())
    assert {r.id for r in RULES.values() if r.severity is Severity.BITWISE} == {"JG015"}
    assert {r.id for r in RULES.values() if r.severity is Severity.QUALIFIED} == {"JG016", "JG018"}
    assert all(bool(r.modulo) == (r.severity is Severity.QUALIFIED) for r in RULES.values())
    for rule in RULES.values():
        assert rule.remedy.format(fqn="f", op="o", expected="e", got="g")

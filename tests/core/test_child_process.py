"""A run in a process of its own: what it says arrives, and what it said last is kept."""

from __future__ import annotations

import os
import subprocess

from jetgraph.child_process import LAST, run_module

CHILD = """
import sys
print("out of the way")
for i in range(40):
    print(f"child: {i}" if i % 20 == 0 else f"noise {i}", file=sys.stderr)
sys.exit(int(open(sys.argv[1]).read()))
"""


def test_lines_status_and_the_last_words(tmp_path):
    (tmp_path / "speaks.py").write_text(CHILD)
    (tmp_path / "status").write_text("3")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said: list[str] = []
    argument = tmp_path / "status"
    status, lines = run_module("speaks", argument, environment, "child:", said.append, stdout=subprocess.DEVNULL)
    assert (status, said) == (3, ["0", "20"])
    assert len(lines) == LAST
    assert lines[-1] == "noise 39"


def test_what_bindings_say_when_a_process_ends_does_not_push_its_error_out(tmp_path):
    farewell = [f"nanobind: leaked {n} instances!" for n in range(3)] + [f" - leaked type {i}" for i in range(60)]
    lines = ["error: the GPU is gone", *farewell]
    (tmp_path / "fails.py").write_text(f"import sys\nfor line in {lines}: print(line, file=sys.stderr)\nsys.exit(1)\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    status, last = run_module("fails", "-", environment, "child:", lambda text: None)
    assert (status, last) == (1, ["error: the GPU is gone"])

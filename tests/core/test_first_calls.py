"""No function of MKL is first called by several threads at once (pytorch/pytorch#188792)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

IMPORTED = """
import json, sys, torch
from torch.utils._python_dispatch import TorchDispatchMode

class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor):
            found.append((function._schema.name, str(args[0].dtype), args[0].numel()))
        return function(*args, **kwargs or {})

found = []
with Calls():
    __import__(sys.argv[1])
print(json.dumps(found))
"""
VECTOR_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "erf", "erfc", "erfinv", "exp", "log"),
    *("log10", "log1p", "log2", "sin", "sqrt", "tan", "tanh", "trunc"),
)
"""Those that ATen's vml.h gives to MKL, by ATen's names."""


@pytest.mark.parametrize("module", ["jetgraph.compiler", "jetgraph.interpret", "jetgraph_vllm.formulas"])
def test_whoever_computes_has_called_each_on_one_number(module):
    run = subprocess.run([sys.executable, "-c", IMPORTED, module], capture_output=True, text=True, check=True)
    called = {tuple(call) for call in json.loads(run.stdout.splitlines()[-1])}
    expected = {(f"aten::{f}", f"torch.{d}", 1) for f in VECTOR_FUNCTIONS for d in ("float32", "float64")}
    assert expected <= called

"""The shortest whole VeRL run that says something, one start: admitted, exact, and stopped once training drifts.

Real VeRL, real vLLM, SmolLM2's first two layers, on this machine's CPU.  `test_run` has the long ones.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.verl.whole_run import REPOSITORY, Run, require_exact, steps

pytestmark = [pytest.mark.engine, pytest.mark.model, pytest.mark.timeout(2 * 900)]

DRIFT = """
import sys

import torch

actor = sys.modules.get("jetgraph_verl.actor")
if actor is not None and not hasattr(actor, "num_syncs"):
    actor.num_syncs = 0
    send = actor.JetgraphEngine.get_per_tensor_param

    def send_and_drift(engine, **options):
        actor.num_syncs += 1
        if actor.num_syncs == 4:  # before step 1, after step 1, after step 2, after step 3
            engine.module.model.layers[0].mlp.act_fn = torch.nn.GELU(approximate="tanh")
        return send(engine, **options)

    actor.JetgraphEngine.get_per_tensor_param = send_and_drift
"""
"""Imported by VeRL's workers: from the sync after step 3 on, training's first layer has another activation."""


def test_a_run_is_admitted_bitwise_steps_exactly_and_stops_when_training_drifts(two_layers, tmp_path):
    (tmp_path / "drift.py").write_text(DRIFT)
    options = ["--steps", "5", "--response-length", "16", "--enforcement", "always"]
    run = Run(tmp_path, two_layers, *options, "actor_rollout_ref.model.external_lib=drift")
    try:
        run.until(lambda: "jetgraph: CONTAINED" in run.log.read_text())  # and the next capture is a step away
        require_admitted(tmp_path / "jetgraph-run")
        output = run.wait()
    finally:
        run.kill()
    assert run.process.returncode != 0
    assert output.count("jetgraph: CONTAINED") == 3, output[-3000:]  # before step 1, after steps 1 and 2
    logged = steps(tmp_path)
    assert {step: values["jetgraph/admitted"] for step, values in logged.items()} == {1: 1.0, 2: 1.0, 3: 0.0}
    require_exact(logged)
    assert logged[1]["jetgraph/sync/changed/float8_e4m3fn"] > 0.0  # so step 2 samples from other weights
    assert "this run may not start" in output
    refusal = (tmp_path / "jetgraph-run/counterexample.txt").read_text()
    assert refusal.startswith("VIOLATED")
    assert "expected gelu at model.layers.0.mlp.act_fn; got silu at model.layers.0.mlp.act_fn" in refusal


def require_admitted(folder: Path) -> None:
    manifest = json.loads((folder / "admission.json").read_text())
    assert (manifest["verdict"], manifest["bitwise"], manifest["policy"]) == ("CONTAINED", True, "jet")
    graphs = [str(folder / name) for name in ("certificate.json", "train.json", "infer.json")]
    check = subprocess.run(
        [sys.executable, "-I", "-S", REPOSITORY / "jetgraph/verify/checker.py", *graphs], check=False
    )
    assert check.returncode == 0  # by the checker alone: no torch, no site-packages

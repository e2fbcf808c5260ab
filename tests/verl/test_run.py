"""Whole VeRL runs on this machine's CPU: admitted, killed, resumed, refused.

SmolLM2's first two layers; the reward is a number made of the answer's letters, so that advantages are not all zero.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.rl, pytest.mark.timeout(2 * 900)]
REPOSITORY = Path(__file__).parents[2]
LIMIT = 800
"""Seconds for one start, on a machine that is busy with other things too."""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 7
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Two layers of the real model, with its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from jetgraph.models import write_smollm2

    source = write_smollm2(REPOSITORY / ".cache" / "smollm2")
    folder = tmp_path_factory.mktemp("cut")
    config = AutoConfig.from_pretrained(source)
    config.num_hidden_layers = 2
    AutoModelForCausalLM.from_pretrained(source, config=config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    return folder


class Run:
    """One start of the recipe in a process group of its own; its output goes to a file."""

    def __init__(self, folder: Path, model: Path, *arguments: str) -> None:
        (folder / "reward.py").write_text(REWARD)
        self.log = folder / f"log-{len(list(folder.glob('log-*')))}.txt"
        command = [
            sys.executable,
            str(REPOSITORY / "examples/rl/grpo.py"),
            "--folder",
            str(folder),
            "--model",
            str(model),
        ]
        command += ["--lr", "1e-4", *arguments, f"reward.custom_reward_function.path={folder / 'reward.py'}"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=folder, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ
            )

    def wait(self) -> str:
        """The output, once it has ended."""
        try:
            self.process.wait(LIMIT)
        finally:
            self.kill()
        return self.log.read_text()

    def kill(self) -> None:
        """-9 to the whole group: driver, Ray, workers, engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


def steps(folder: Path) -> dict[int, dict[str, float]]:
    """What VeRL's own logger wrote since the last start, by step."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {entry["step"]: entry["data"] for entry in map(json.loads, lines)}


def served(folder: Path, version: int) -> dict:
    return json.loads((folder / f"jetgraph-run/sync/version-{version:06d}-replica-0.json").read_text())


@pytest.fixture(scope="module")
def killed_and_resumed(model, tmp_path_factory) -> tuple[Path, dict, dict, str]:
    """A run killed after its first checkpoint, what it had sent and logged by then, and the run that goes on."""
    folder = tmp_path_factory.mktemp("run")
    first = Run(folder, model, "--steps", "50", "--save-every", "1")
    tracker = folder / "checkpoints/latest_checkpointed_iteration.txt"
    deadline = time.monotonic() + LIMIT
    try:
        while not tracker.exists() or int(tracker.read_text() or 0) not in steps(folder):
            assert first.process.poll() is None, first.log.read_text()[-3000:]
            assert time.monotonic() < deadline, first.log.read_text()[-3000:]
            time.sleep(0.5)
    finally:
        first.kill()
    saved = int(tracker.read_text())
    before, logged = served(folder, saved), steps(folder)
    assert saved >= 1
    manifest = folder / "jetgraph-run/admission.json"
    earlier = json.loads(manifest.read_text())
    earlier["environment"]["infer"]["versions"]["vllm"] = "0.26.0"  # as if vLLM had been changed since
    manifest.write_text(json.dumps(earlier))
    output = Run(folder, model, "--steps", str(saved + 1), "--save-every", "1").wait()
    return folder, before, logged, output


def test_the_run_is_admitted_bitwise(killed_and_resumed):
    folder, _, _, output = killed_and_resumed
    assert "jetgraph: CONTAINED" in output, output[-3000:]
    manifest = json.loads((folder / "jetgraph-run/admission.json").read_text())
    assert (manifest["verdict"], manifest["bitwise"], manifest["policy"]) == ("CONTAINED", True, "jet")
    graphs = [str(folder / "jetgraph-run" / name) for name in ("certificate.json", "train.json", "infer.json")]
    check = subprocess.run(
        [sys.executable, "-I", "-S", REPOSITORY / "jetgraph/verify/checker.py", *graphs], check=False
    )
    assert check.returncode == 0  # by the checker alone: no torch, no site-packages


def test_every_token_has_trainings_logprob_also_after_updates(killed_and_resumed):
    folder, _, logged, output = killed_and_resumed
    logged = logged | steps(folder)  # VeRL's file logger begins a new file at every start
    assert len(logged) >= 2, output[-3000:]
    for step, values in logged.items():
        assert values["jetgraph/num_tokens"] > 100, step
        assert values["jetgraph/total/max"] == 0.0, step
        assert values["jetgraph/total/fraction_exact"] == 1.0, step
        assert values["jetgraph/alarms"] == 0.0, step
        assert values["jetgraph/sync/version"] == step
        assert values["actor/grad_norm"] > 0.0, step
    assert any(values["jetgraph/sync/changed/float8_e4m3fn"] > 0.0 for values in logged.values())


def test_kill_9_and_resume_go_on_with_the_very_weights(killed_and_resumed):
    folder, before, logged, output = killed_and_resumed
    saved = before["version"]
    assert served(folder, saved)["served"] == before["served"]
    assert list(steps(folder)) == [saved + 1], output[-3000:]
    assert saved in logged


def test_a_changed_engine_voids_the_certificate_by_name(killed_and_resumed):
    _, _, _, output = killed_and_resumed
    assert "the certificate of the earlier start is void: infer: vllm 0.26.0 → 0.27.1" in output, output[-3000:]


def test_what_people_run_today_is_refused_before_step_1(model, tmp_path):
    run = Run(tmp_path, model, "--steps", "1", "--policy", "bf16_train_fp8_rollout")
    output = run.wait()
    assert run.process.returncode != 0
    assert "this run may not start" in output
    assert "JG014" in output
    assert steps(tmp_path) == {}
    assert not (tmp_path / "jetgraph-run/admission.json").exists()
    assert "JG014" in (tmp_path / "jetgraph-run/counterexample.txt").read_text()

"""Whole VeRL runs on this machine's CPU: admitted, killed, resumed, refused, ended by the death of a process.

SmolLM2's first two layers; the reward is a number made of the answer's letters, so that advantages are not all zero.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
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

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait for something that this start does; whatever goes wrong ends it."""
        deadline = time.monotonic() + LIMIT
        try:
            while not reached():
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < deadline, self.log.read_text()[-3000:]
                time.sleep(0.5)
        except BaseException:
            self.kill()
            raise

    def end_by_death_of(self, title: str) -> tuple[str, float]:
        """-9 to the process of this title alone; the output, and the seconds until all had ended."""
        try:
            os.kill(self.find(title), signal.SIGKILL)
            start = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(120)
            return self.log.read_text(), time.monotonic() - start
        finally:
            self.kill()

    def find(self, title: str) -> int:
        """The pid of this start's process that goes by ``title``."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                mine = os.getsid(int(folder.name)) == self.process.pid
                if mine and (folder / "cmdline").read_bytes().startswith(title.encode()):
                    return int(folder.name)
        raise LookupError(f"no process {title} in this run")

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


def served(folder: Path, version: int, replica: int = 0) -> dict:
    return json.loads((folder / f"jetgraph-run/sync/version-{version:06d}-replica-{replica}.json").read_text())


@dataclass
class Story:
    """A run killed after its first checkpoint, and the start that goes on until its rollout server is killed."""

    folder: Path
    before: dict
    """What the killed run had sent when it saved."""
    logged: dict[int, dict[str, float]]
    """What the killed run had logged."""
    output: str
    """Of the start that went on."""
    seconds: float
    """From the server's death to the end of the run."""


@pytest.fixture(scope="module")
def killed_and_resumed(model, tmp_path_factory) -> Story:
    folder = tmp_path_factory.mktemp("run")
    first = Run(folder, model, "--steps", "50", "--save-every", "1")
    tracker = folder / "checkpoints/latest_checkpointed_iteration.txt"
    try:
        first.until(lambda: tracker.exists() and int(tracker.read_text() or 0) in steps(folder))
    finally:
        first.kill()
    saved = int(tracker.read_text())
    before, logged = served(folder, saved), steps(folder)
    assert saved >= 1
    manifest = folder / "jetgraph-run/admission.json"
    earlier = json.loads(manifest.read_text())
    earlier["environment"]["infer"]["versions"]["vllm"] = "0.26.0"  # as if vLLM had been changed since
    manifest.write_text(json.dumps(earlier))
    second = Run(folder, model, "--steps", "50", "--save-every", "1")
    second.until(lambda: saved + 1 in steps(folder))
    return Story(folder, before, logged, *second.end_by_death_of("ray::JetgraphServer"))


def require_exact(logged: dict[int, dict[str, float]]) -> None:
    for step, values in logged.items():
        assert values["jetgraph/num_tokens"] > 100, step
        assert values["jetgraph/total/max"] == 0.0, step
        assert values["jetgraph/total/fraction_exact"] == 1.0, step
        assert values["jetgraph/alarms"] == 0.0, step
        assert values["jetgraph/sync/version"] == step
        assert values["actor/grad_norm"] > 0.0, step


def test_the_run_is_admitted_bitwise(killed_and_resumed):
    folder = killed_and_resumed.folder
    assert "jetgraph: CONTAINED" in killed_and_resumed.output, killed_and_resumed.output[-3000:]
    manifest = json.loads((folder / "jetgraph-run/admission.json").read_text())
    assert (manifest["verdict"], manifest["bitwise"], manifest["policy"]) == ("CONTAINED", True, "jet")
    graphs = [str(folder / "jetgraph-run" / name) for name in ("certificate.json", "train.json", "infer.json")]
    check = subprocess.run(
        [sys.executable, "-I", "-S", REPOSITORY / "jetgraph/verify/checker.py", *graphs], check=False
    )
    assert check.returncode == 0  # by the checker alone: no torch, no site-packages


def test_every_token_has_trainings_logprob_also_after_updates(killed_and_resumed):
    story = killed_and_resumed
    logged = story.logged | steps(story.folder)  # VeRL's file logger begins a new file at every start
    assert len(logged) >= 2, story.output[-3000:]
    require_exact(logged)
    assert any(values["jetgraph/sync/changed/float8_e4m3fn"] > 0.0 for values in logged.values())


def test_kill_9_and_resume_go_on_with_the_very_weights(killed_and_resumed):
    story = killed_and_resumed
    saved = story.before["version"]
    assert served(story.folder, saved)["served"] == story.before["served"]
    assert next(iter(steps(story.folder))) == saved + 1, story.output[-3000:]
    assert saved in story.logged


def test_a_changed_engine_voids_the_certificate_by_name(killed_and_resumed):
    output = killed_and_resumed.output
    assert "the certificate of the earlier start is void: infer: vllm 0.26.0 → 0.27.1" in output, output[-3000:]


def test_a_rollout_server_that_dies_ends_the_run_by_name(killed_and_resumed):
    """VeRL alone pads the failed prompts, or speaks of trajectories."""
    require_ended(killed_and_resumed.output, killed_and_resumed.seconds, "rollout server 0")


def require_ended(output: str, seconds: float, name: str) -> None:
    assert seconds < 60, output[-3000:]
    assert re.search(rf"jetgraph_verl\.watch\.ProcessDied: {name} died: ", output), output[-3000:]


def test_fp32_masters_over_two_ranks_are_verified_after_every_sync_until_a_worker_dies(model, tmp_path):
    """VeRL's default masters with a reference policy, two replicas; the rank that is left waits in a collective."""
    kl = ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.01"]
    run = Run(tmp_path, model, "--steps", "50", "--gpus", "2", "--masters", "float32", "--enforcement", "always", *kl)
    run.until(lambda: 2 in steps(tmp_path))
    logged = steps(tmp_path)
    admitted = json.loads((tmp_path / "jetgraph-run/admission.json").read_text())
    output, seconds = run.end_by_death_of("ray::WorkerDict")
    require_ended(output, seconds, r"training worker [01]")
    assert output.count("jetgraph: CONTAINED") >= 3  # before step 1, and after each step's sync
    assert "bitwise" in output
    assert (admitted["verdict"], admitted["bitwise"]) == ("CONTAINED", True)
    assert admitted["version"] >= 2
    require_exact(logged)
    assert served(tmp_path, 2)["served"] == served(tmp_path, 2, replica=1)["served"]
    assert logged[1]["actor/kl_loss"] == 0.0  # the reference is the policy itself
    assert logged[2]["actor/kl_loss"] > 0.0


def test_what_people_run_today_is_refused_before_step_1(model, tmp_path):
    run = Run(tmp_path, model, "--steps", "1", "--policy", "bf16_train_fp8_rollout")
    output = run.wait()
    assert run.process.returncode != 0
    assert "this run may not start" in output
    assert "JG014" in output
    assert steps(tmp_path) == {}
    assert not (tmp_path / "jetgraph-run/admission.json").exists()
    assert "JG014" in (tmp_path / "jetgraph-run/counterexample.txt").read_text()

"""Long VeRL runs on this machine's CPU: killed, resumed, over two ranks, ended by the death of a process.

`test_short_run` is what every `make test` does; these are `make test-rl`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.verl.whole_run import Run, require_exact, served, steps

pytestmark = [pytest.mark.rl, pytest.mark.timeout(2 * 900)]


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
def killed_and_resumed(two_layers, tmp_path_factory) -> Story:
    folder = tmp_path_factory.mktemp("run")
    first = Run(folder, two_layers, "--steps", "50", "--save-every", "1")
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
    second = Run(folder, two_layers, "--steps", "50", "--save-every", "1")
    second.until(lambda: saved + 1 in steps(folder))
    return Story(folder, before, logged, *second.end_by_death_of("ray::JetgraphServer"))


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


def test_fp32_masters_over_two_ranks_are_verified_after_every_sync_until_a_worker_dies(two_layers, tmp_path):
    """VeRL's default masters with a reference policy, two replicas; the rank that is left waits in a collective."""
    kl = ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.01"]
    run = Run(
        tmp_path, two_layers, "--steps", "50", "--gpus", "2", "--masters", "float32", "--enforcement", "always", *kl
    )
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


def test_what_people_run_today_is_refused_before_step_1(two_layers, tmp_path):
    run = Run(tmp_path, two_layers, "--steps", "1", "--policy", "bf16_train_fp8_rollout")
    output = run.wait()
    assert run.process.returncode != 0
    assert "this run may not start" in output
    assert "JG014" in output
    assert steps(tmp_path) == {}
    assert not (tmp_path / "jetgraph-run/admission.json").exists()
    assert "JG014" in (tmp_path / "jetgraph-run/counterexample.txt").read_text()

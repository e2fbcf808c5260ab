"""The trainer's own decisions, on an object that never started: which syncs it believes, what it does not measure."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from jetgraph.policy import get_policy

OmegaConf = pytest.importorskip("omegaconf").OmegaConf

pytestmark = pytest.mark.slow  # importing VeRL's trainer takes some ten seconds


@pytest.fixture
def trainer(verl_on_cpu, tmp_path):
    """A trainer at step 3 with two rollout replicas."""
    from jetgraph_verl.trainer import JetgraphTrainer

    trainer = object.__new__(JetgraphTrainer)
    options = {"rules": get_policy("jet").to_plain(), "enforcement": "off", "folder": str(tmp_path)}
    trainer.config = OmegaConf.create({"actor_rollout_ref": {"jetgraph": options}, "algorithm": {}})
    trainer.global_steps = 3
    trainer.llm_server_manager = SimpleNamespace(get_replicas=lambda: [None, None])
    trainer._processes = dict  # none to watch
    return trainer


def report(trainer, replica: int, *, version: int = 3, served: str = "a") -> None:
    from jetgraph_verl.rollout import sync_report_path

    path = sync_report_path(trainer.folder, version, replica)
    path.parent.mkdir(exist_ok=True)
    content = {"version": version, "bytes": 8, "seconds": 1.0, "stall_seconds": 0.5, "changed": {}, "served": served}
    path.write_text(json.dumps(content))


def test_every_replica_must_have_reported_this_version(trainer):
    report(trainer, 0)
    report(trainer, 1, version=2)
    with pytest.raises(RuntimeError, match="rollout replica 1 never reported version 3"):
        trainer._check_sync()
    report(trainer, 1)
    assert trainer._check_sync()["jetgraph/sync/version"] == 3.0


def test_replicas_must_serve_the_same_bytes(trainer):
    report(trainer, 0)
    report(trainer, 1, served="b")
    with pytest.raises(RuntimeError, match="serve different bytes as version 3"):
        trainer._check_sync()


@pytest.mark.parametrize("hook", ["on_init_end", "on_step_end"])
def test_reports_of_an_earlier_start_do_not_stand_in_for_a_sync(trainer, monkeypatch, hook):
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    for replica in (0, 1):
        report(trainer, replica)
        report(trainer, replica, version=2)
    monkeypatch.setattr(PPOTrainerSync, hook, lambda self: None)  # a sync that reaches nobody
    with pytest.raises(RuntimeError, match="never reported version 3"):
        getattr(trainer, hook)()
    assert len(list((trainer.folder / "sync").iterdir())) == 2  # the history before this version stays


@pytest.mark.parametrize("admitted", [True, False])
def test_a_step_after_which_the_pair_is_refused_is_in_the_log(trainer, monkeypatch, admitted):
    """VeRL writes a step's metrics only after `on_step_end`, which ends the run."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from jetgraph.admission import NotAdmitted

    def admit(trainer) -> None:
        if not admitted:
            raise NotAdmitted("this run may not start")

    logged = []
    trainer.config.actor_rollout_ref.jetgraph.enforcement = "always"
    trainer.logger = SimpleNamespace(log=lambda data, step: logged.append((step, data)))
    monkeypatch.setattr(type(trainer), "_admit", admit)
    monkeypatch.setattr(PPOTrainerSync, "step", lambda self, metrics, timing: metrics.update({"actor/grad_norm": 2.0}))
    monkeypatch.setattr(PPOTrainerSync, "on_step_end", lambda self: [report(self, replica) for replica in (0, 1)])
    trainer.step({}, {})
    if admitted:
        trainer.on_step_end()
        assert trainer._consume_sync_metrics()["jetgraph/admitted"] == 1.0
        assert logged == []  # VeRL does
        return
    with pytest.raises(NotAdmitted):
        trainer.on_step_end()
    ((step, data),) = logged
    assert step == 3
    assert (data["actor/grad_norm"], data["jetgraph/sync/version"], data["jetgraph/admitted"]) == (2.0, 3.0, 0.0)


def test_a_mismatch_that_is_0_by_construction_is_not_measured(trainer, monkeypatch):
    """With VeRL's bypass mode training's logprobs are a copy of the rollout's."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    trainer.config.algorithm = {"rollout_correction": {"bypass_mode": True}}
    monkeypatch.setattr(PPOTrainerSync, "_compute_old_log_prob", lambda self, batch, metrics: batch)
    metrics: dict[str, float] = {}
    batch = object()  # reading anything of it would raise
    assert trainer._compute_old_log_prob(batch, metrics) is batch
    assert metrics == {}


def test_a_capture_is_finished_once(verl_on_cpu):
    from jetgraph_verl.engine_worker import EngineWorker

    with pytest.raises(RuntimeError, match="finish_capture without start_capture"):
        object.__new__(EngineWorker).finish_capture("nowhere.json")

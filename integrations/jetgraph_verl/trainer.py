"""VeRL's synchronous trainer with the gate before step 1, verified values after every sync, and mismatch metrics."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

import ray
import transfer_queue as tq
from transfer_queue import KVBatchMeta
from transfer_queue import interface as queue
from verl.experimental.agent_loop import AgentLoopManager
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from jetgraph.admission import Enforcement, NotAdmitted, admit, load_waivers
from jetgraph.mismatch import Alarms
from jetgraph_verl import metrics as mismatch_metrics
from jetgraph_verl.options import Options, limits
from jetgraph_verl.rollout import sync_report_path
from jetgraph_verl.watch import Ping, watched
from jetgraph_verl.worker import JetgraphWorker

ADMITTED = "jetgraph/admitted"
"""Under ``always``: 1 if the pair was admitted after the step's weight sync, 0 in the step that ends the run."""
ROLES = (Role.Actor, Role.ActorRollout, Role.ActorRolloutRef, Role.RefPolicy)


class JetgraphTrainer(PPOTrainerSync):
    """The run's options are those that `jetgraph_verl.options.prepare` left in its configuration."""

    @property
    def options(self) -> Options:
        return Options.of(self.config.actor_rollout_ref)

    @property
    def folder(self) -> Path:
        return Path(self.options.folder)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            if role in ROLES:
                self.role_worker_mapping[role] = ray.remote(JetgraphWorker)

    def on_init_end(self) -> None:
        """Weights are in the engine for the first time: now both sides can be captured as they will run.

        Raises:
            NotAdmitted: the run stops here, before its first step.
        """
        self._forget_reports()
        with watched(self._processes()):
            super().on_init_end()
            self._check_sync()
            if self.options.enforcement != Enforcement.OFF:
                self._admit()

    def fit(self, agent_loop_manager: AgentLoopManager) -> None:
        """
        Raises:
            ProcessDied: one of the run's processes is gone.
        """
        workers = agent_loop_manager.agent_loop_workers
        loops = {f"agent loop worker {index}": worker.__ray_ready__.remote for index, worker in enumerate(workers)}
        with watched(self._processes() | loops):
            super().fit(agent_loop_manager)

    def _processes(self) -> dict[str, Ping]:
        """Every process that this run cannot go on without, by name, and a call that it answers when it can."""
        groups = {"training worker": self.actor_rollout_wg.workers, "reward worker": self.get_reward_handles() or ()}
        for kind in ("critic", "ref_policy"):
            group = getattr(self, f"{kind}_wg", self.actor_rollout_wg)
            if group is not self.actor_rollout_wg:
                groups[f"{kind} worker"] = group.workers
        groups["transfer queue"] = [queue._TQ_CONTROLLER]
        groups["transfer queue storage"] = list(((queue._TQ_STORAGE or {}).get("SimpleStorage") or {}).values())
        pings: dict[str, Ping] = {
            f"{kind} {index}": worker.__ray_ready__.remote
            for kind, workers in groups.items()
            for index, worker in enumerate(workers)
        }
        for index, replica in enumerate(self.llm_server_manager.get_replicas()):
            pings |= {f"rollout server {index}": server.check_engine.remote for server in replica.servers}
        return pings

    def step(self, metrics: dict, timing_raw: dict) -> KVBatchMeta:
        batch = super().step(metrics, timing_raw)
        self._step_metrics = dict(metrics)
        return batch

    def on_step_end(self) -> None:
        """
        Raises:
            NotAdmitted: under ``always``; the step is in the log, which VeRL would write after this.
        """
        self._forget_reports()
        super().on_step_end()
        self._pending_sync_metrics = self._check_sync()
        if self.options.enforcement == Enforcement.ALWAYS:
            try:
                self._admit()
            except NotAdmitted:
                refused = self._step_metrics | self._pending_sync_metrics | {ADMITTED: 0.0}
                self.logger.log(data=refused, step=self.global_steps)
                raise
            self._pending_sync_metrics[ADMITTED] = 1.0

    def _admit(self) -> None:
        """Capture both live sides and verify them; see `jetgraph.admission.admit`."""
        train, infer = self.folder / "train.json", self.folder / "infer.json"
        self.folder.mkdir(parents=True, exist_ok=True)
        server = self.llm_server_manager.get_replicas()[0].servers[0]
        captured = server.capture_rollout_graph.remote(str(infer))  # meanwhile training's side is captured
        self.actor_rollout_wg.capture_training_graph(str(train))
        ray.get(captured)
        options = self.options
        waivers = () if options.waivers is None else load_waivers(options.waivers)
        admission = admit(
            train,
            infer,
            self.folder,
            enforcement=options.enforcement,
            waivers=waivers,
            version=self.global_steps,
        )
        for line in admission.lines():
            print(f"jetgraph: {line}", flush=True)

    def _forget_reports(self) -> None:
        """Reports of this version that an earlier start left say nothing of the sync to come."""
        for path in sync_report_path(self.folder, self.global_steps, 0).parent.glob(
            f"version-{self.global_steps:06d}-*"
        ):
            path.unlink()

    def _check_sync(self) -> dict[str, float]:
        """What the last sync reported, for the log.

        Raises:
            RuntimeError: a replica has no report of this version, or two replicas serve different bytes.
        """
        reports = []
        for replica in range(len(self.llm_server_manager.get_replicas())):
            path = sync_report_path(self.folder, self.global_steps, replica)
            if not path.is_file():
                raise RuntimeError(
                    f"rollout replica {replica} never reported version {self.global_steps} ({path}): the weights that "
                    "it serves are not those of this step"
                )
            reports.append(json.loads(path.read_text()))
        if len({report["served"] for report in reports}) != 1:
            raise RuntimeError(f"rollout replicas serve different bytes as version {self.global_steps}")
        return mismatch_metrics.of_sync(reports)

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        if (self.config.algorithm.get("rollout_correction") or {}).get("bypass_mode", False):
            return batch  # VeRL took the rollout's logprobs for training's: 0 would be no measurement
        fields = ["old_log_probs", "rollout_log_probs", "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        actor = self.config.actor_rollout_ref.actor
        found = mismatch_metrics.of_batch(
            data.to_padded_tensor(),
            [int(tag["min_global_steps"]) for tag in batch.tags],
            self.global_steps - 1,
            (float(actor.clip_ratio_low), float(actor.clip_ratio_high)),
        )
        alarms = self._alarms.observe(found)
        for alarm in alarms:
            print(f"jetgraph: ALARM at step {self.global_steps}: {alarm}", flush=True)
        metrics.update(found.scalars() | {"jetgraph/alarms": float(len(alarms))})
        return batch

    @cached_property
    def _alarms(self) -> Alarms:
        return Alarms(limits(self.options.baseline))


def install() -> None:
    """In this process VeRL's trainer for the mode "sync" is `JetgraphTrainer`."""
    trainer_base.TRAINER_REGISTRY["sync"] = JetgraphTrainer

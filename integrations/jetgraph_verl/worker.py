"""The process of the training side: VeRL's hybrid worker, with jetgraph's engine and rollout in its registries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.engine_workers import ActorRolloutRefWorker

from jetgraph.sync import remove_orphans
from jetgraph_verl import actor, rollout
from jetgraph_verl.options import Options


class JetgraphWorker(ActorRolloutRefWorker):
    """`verl.workers.engine_workers.ActorRolloutRefWorker` under a policy, and with one more method."""

    def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
        remove_orphans()  # of a run that was killed while it sent weights
        options = Options.of(config)
        actor.install(options)
        rollout.install_adapter(options)
        super().__init__(config, *args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def capture_training_graph(self, path: str) -> dict[str, Any]:
        """See `JetgraphEngine.capture`; every rank takes part."""
        return self.actor.engine.capture(Path(path))

"""The rollout side as VeRL sees it: who sends weights, the server actor that receives them, and the replica of both.

An update travels as files in shared memory (`jetgraph.sync.files`): its manifest appears last and whole, and the engine
is asked to take it by one call that returns a report or raises.  Nobody waits for a peer that may have died.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import ray
from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from jetgraph.sync import transfer_folder, write_update
from jetgraph_verl.actor import Weights
from jetgraph_verl.options import Options


class JetgraphAdapter(ServerAdapter):
    """A training rank's handle on its rollout server."""

    options: Options

    async def update_weights(self, weights: Weights, global_steps: int | None = None, **_: Any) -> None:
        """Quantise the masters, send them as one transaction, and leave the engine's report in the run's folder.

        Raises:
            RayTaskError: the engine refused the update and serves the old weights.
        """
        if global_steps is None:
            raise ValueError("weights without a version: the trainer must say at which step they are")
        start = time.perf_counter()
        serves = self._ensure_server_handle()
        with transfer_folder(weights.num_bytes) as folder:
            # every rank streams: gathering a sharded parameter takes all of them
            manifest = await asyncio.to_thread(write_update, weights.at(global_steps), folder)
            if not serves:
                return
            report = await self.server_handle.take_weights.remote(str(folder))
        await self.server_handle.set_global_steps.remote(global_steps)
        report |= {"seconds": time.perf_counter() - start, "manifest": manifest.digest}
        path = sync_report_path(Path(self.options.folder), global_steps, self.replica_rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report) + "\n")


def sync_report_path(folder: Path, version: int, replica: int) -> Path:
    """Where the report of one sync lies: version, digests, bytes, seconds, what changed."""
    return folder / "sync" / f"version-{version:06d}-replica-{replica}.json"


def install_adapter(options: Options) -> None:
    """In a worker's process: VeRL's vLLM rollout is `JetgraphAdapter`."""
    JetgraphAdapter.options = options
    base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.{JetgraphAdapter.__name__}"


def install_replica() -> None:
    """In the driver's process: VeRL's vLLM replicas start jetgraph's server."""
    RolloutReplicaRegistry.register("vllm", _load_replica)


def _load_replica() -> type:
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

    from jetgraph_verl.server import JetgraphServer

    class JetgraphReplica(vLLMReplica):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if not (self.is_reward_model or self.is_teacher_model):
                self.server_class = ray.remote(JetgraphServer)

    return JetgraphReplica

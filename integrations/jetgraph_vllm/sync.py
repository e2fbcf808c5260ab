"""Weight sync into a running vLLM: `attach` once, then `update` after every training step.

    live = attach(llm)                                # a `vllm.LLM`, or a `jetgraph_vllm.engine.Engine`
    report = live.update(publish(model, version=1))   # all of it, or SyncRefused and the old weights serve on
    live.verify_values().require()                    # the engine's bytes, read again: digests, version, addresses
    output = llm.generate(...)[0].outputs[0]
    output.weight_versions                            # of each token of output.token_ids

The protocol is `jetgraph.sync`; here is what only vLLM knows: where tensors live (`sync_slots`), how to stop between
two steps and forget the KV cache, how tokens learn their version (`token_versions`), and sleep.

The prefix cache is **reset** inside the flip, not salted by version.  A salt is part of a request's block hashes, made
when the request arrives: a request that waits over a flip would store blocks computed by the new weights under the old
version's hash.  A reset depends on no caller, frees the blocks, and an old version never serves again, so nothing of
value is lost.  Requests that are running are preempted by the same call: their cache is computed again by the
new weights, so each token's logprob is that of one version over its whole prefix and no rule for mixed caches (JG018)
is needed.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from jetgraph.sync import CommitReport, Receiver, SleepGuard, Source, SyncRefused, Transaction, ValueReport, send
from jetgraph_vllm import check_version
from jetgraph_vllm.collect import live_tensors
from jetgraph_vllm.sync_slots import slots_of
from jetgraph_vllm.token_versions import TokenVersions


def attach(llm: Any, *, version: int = 0, staging: torch.device | str | None = None) -> LiveWeights:
    """The weight sync of one engine; the weights that it has loaded become ``version``.  A second call gives the same.

    Args:
        llm: runs in this process (``VLLM_ENABLE_V1_MULTIPROCESSING=0``) on one rank.
        staging: where an update waits until it is whole, and what it replaces until it is in; None is the engine's
            device (two more copies of its weights), "cpu" spares the device that and makes the flip as long as the
            copy from the host.

    Raises:
        UnsupportedEngine: a vLLM whose internals are not known here.
        SyncRefused: the engine runs in other processes, or holds weights in a form that cannot be written in place.
    """
    llm = getattr(llm, "llm", llm)
    known = getattr(llm, "jetgraph_weights", None)
    if known is None:
        known = llm.jetgraph_weights = LiveWeights(llm, version, staging)
    return known


class LiveWeights:
    """Weight sync of one live `vllm.LLM`; see `attach`."""

    def __init__(self, llm: Any, version: int, staging: torch.device | str | None) -> None:
        import vllm

        check_version(vllm.__version__)
        self.llm = llm
        self._core = core_of(llm)
        model = self._core.model_executor.driver_worker.worker.model_runner.get_model()
        store = VllmStore(self._core, model)
        self.receiver = Receiver(store, version, staging)
        if self._core.vllm_config.model_config.enable_sleep_mode:
            guard_sleep(self._core.model_executor, self.receiver, store.rest())
        TokenVersions(self._core.scheduler, llm.llm_engine.output_processor, self._serving_version)
        llm.llm_engine.add_request = _guarded(llm.llm_engine.add_request, self.receiver)

    def _serving_version(self) -> int:
        self.receiver.require_serving()
        return self.version

    @property
    def version(self) -> int:
        return self.receiver.version

    def begin(self, version: int) -> Transaction:
        """For a trainer that streams by itself; `jetgraph.sync.send` is the usual way."""
        return self.receiver.begin(version)

    def update(self, update: Source, *, verify: bool = True) -> CommitReport:
        """Stage, verify and flip; then, if ``verify``, read every live byte again.

        Raises:
            SyncRefused: see `jetgraph.sync`; the old weights serve on.
            WeightsLost: what was read again is not what was written; the engine refuses to generate.
        """
        report = send(update, self)
        if verify:
            self.receiver.require_values()
        return report

    def verify_values(self) -> ValueReport:
        """Digests, version and addresses of what the engine holds now."""
        return self.receiver.verify_values()

    def sleep(self, level: int = 1) -> None:
        """`vllm.LLM.sleep`, which is as good, but refused where it would do nothing.

        Level 1 gives the weights back on waking, level 2 discards them: then an update must come first.

        Raises:
            ValueError: the engine cannot sleep; nothing happened.
        """
        if not self._core.vllm_config.model_config.enable_sleep_mode:
            from vllm.platforms import current_platform

            why = "build it with enable_sleep_mode=True"
            if not current_platform.is_sleep_mode_available():
                why = f"vLLM has no sleep mode on {current_platform.device_type}: its worker ignores the call"
            raise ValueError(f"the engine cannot sleep at level {level}: {why}")
        self.llm.sleep(level=level)

    def wake_up(self) -> None:
        """See `jetgraph.sync.SleepGuard.wake_up`."""
        self.llm.wake_up()


class ModelStore:
    """`jetgraph.sync.WeightStore` over a worker's model, for a caller who has stopped the engine and empties its cache.

    A worker in a process of its own cannot reach the scheduler, whose business both are.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.slots, self.aliases = slots_of(model)
        methods = [(getattr(module, "quant_method", None), module) for module in model.modules()]
        self._ours = [(m, module) for m, module in methods if type(m).__module__.startswith("jetgraph_vllm.")]

    def rest(self) -> dict[str, torch.Tensor]:
        """Live tensors that no update writes, by name: rotary tables, scales of the KV cache."""
        covered = {slot.live.untyped_storage().data_ptr() for slot in self.slots.values()}
        live, _, _ = live_tensors(self.model)
        return {name: t.data for name, t in live.items() if t.untyped_storage().data_ptr() not in covered}

    def stop(self) -> None:
        """Nothing to do: an executor runs one call at a time, so no batch is in flight during an update."""

    def refresh(self) -> None:
        """Our methods keep images of their weights; stock ones that `slots_of` accepts keep nothing."""
        for method, module in self._ours:
            method.renew(module)


class VllmStore(ModelStore):
    """The model of one worker in this process, whose scheduler is at hand."""

    def __init__(self, core: Any, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.core = core
        self._step = core.step_fn
        self._finished: deque[Any] = deque()
        """What batches brought that `stop` waited for: the engine's next steps hand it out, in order."""
        core.step_fn = self._next_output

    def _next_output(self) -> Any:
        return self._finished.popleft() if self._finished else self._step()

    def stop(self) -> None:
        """No batch in flight, and no KV entry of the old weights that anyone can read again."""
        if self.core.model_executor.is_sleeping:
            raise SyncRefused("the engine sleeps: wake it, then send and commit")
        self._finish_batches()
        if not self.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise SyncRefused("the prefix cache, or a KV connector, could not be reset and would serve the old weights")
        self.core.reset_encoder_cache()

    def _finish_batches(self) -> None:
        """Wait for what was scheduled ahead.

        vLLM does so by default on a GPU: a batch is in flight between any two steps, an empty one after the last
        request.  A step of an engine that believes it has no requests schedules nothing and waits for the oldest batch.
        """
        if not self.core.batch_queue:
            return
        scheduler = self.core.scheduler
        has_requests, scheduler.has_requests = scheduler.has_requests, lambda: False
        try:
            while self.core.batch_queue:
                self._finished.append(self._step())
        finally:
            scheduler.has_requests = has_requests


def guard_sleep(engine: Any, receiver: Receiver, rest: Mapping[str, torch.Tensor]) -> None:
    """Whoever puts the engine to sleep or wakes it passes through a `SleepGuard`: `vllm.LLM`, a server, or `sleep`.

    ``engine`` is vLLM's executor, or a worker in a process of its own.
    """
    guard = SleepGuard(receiver, rest, engine.sleep, engine.wake_up)
    engine.sleep, engine.wake_up = guard.sleep, guard.wake_up


def core_of(llm: Any) -> Any:
    """The engine core, if it runs in this process."""
    client = llm.llm_engine.engine_core
    core = getattr(client, "engine_core", None)
    if core is None or not hasattr(core, "scheduler"):
        raise SyncRefused(
            f"the engine runs in another process ({type(client).__name__}): set VLLM_ENABLE_V1_MULTIPROCESSING=0 "
            "before vLLM is imported"
        )
    ranks = core.vllm_config.parallel_config.world_size
    if ranks != 1:
        raise SyncRefused(f"the engine has {ranks} ranks: weight sync writes one, use tensor_parallel_size=1")
    return core


def _guarded(add_request: Any, receiver: Receiver) -> Any:
    @functools.wraps(add_request)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        receiver.require_serving()  # before it is queued: a refused request must leave nothing behind
        return add_request(*args, **kwargs)

    return guarded

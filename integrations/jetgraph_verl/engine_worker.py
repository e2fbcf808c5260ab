"""Inside vLLM's worker process: receives updates, and records, lifts and replays what the engine executes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from jetgraph.sync import Receiver, StoredUpdate, remove_orphans, send

BEFORE_THE_FIRST = -1
"""The weight version of an engine that was started without weights."""


class EngineWorker(vLLMColocateWorkerExtension):
    """What vLLM mixes into its worker class, so ``self`` is a worker: it has ``model_runner`` and ``vllm_config``."""

    _receiver: Receiver | None = None
    _heads: list[Any] | None = None
    _recording: contextlib.ExitStack | None = None
    _recorded: tuple[Any, Any] | None = None

    # ------------------------------------------------------------------------------------------------ VeRL's own calls

    def monkey_patch_model(self, vocab_size: int, banned_token_ids: list[int] | None = None) -> None:
        """VeRL masks token ids that the tokenizer lacks; where there are none its patch would only change the graph.

        VeRL calls this when the engine has been built, before its first sleep: from here on sleep is guarded.
        """
        if banned_token_ids or vocab_size < self.model_runner.model_config.get_vocab_size():
            super().monkey_patch_model(vocab_size, banned_token_ids)
        self._attach()

    def update_weights_from_ipc(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("weights reach this engine through jetgraph's transaction only: call take_weights")

    # ----------------------------------------------------------------------------------------------------------- sync

    def _attach(self) -> Receiver:
        from jetgraph_vllm.sync import ModelStore, guard_sleep

        if self._receiver is None:
            remove_orphans()  # updates of a run that was killed
            store = ModelStore(self.model_runner.get_model())
            self._receiver = Receiver(store, BEFORE_THE_FIRST)
            if self.vllm_config.model_config.enable_sleep_mode:
                guard_sleep(self, self._receiver, store.rest())
        return self._receiver

    def take_weights(self, folder: str) -> dict[str, Any]:
        """One update, whole or not at all; see `jetgraph.sync`.  VeRL has paused generation and emptied the cache."""
        receiver = self._attach()
        report = send(StoredUpdate(Path(folder)), receiver)
        values = receiver.require_values()
        return {
            "version": report.version,
            "bytes": report.num_bytes,
            "stall_seconds": report.stall_seconds,
            "changed": {dtype: list(counts) for dtype, counts in report.changed.items()},
            "served": values.manifest,
            "tensors": len(values.digests),
        }

    # -------------------------------------------------------------------------------------------------------- capture

    def start_capture(self) -> None:
        from jetgraph_vllm import capture, sampler_trace

        model = self.model_runner.get_model()
        if self._heads is None:
            self._heads = capture.watch(model)
        self._recording = contextlib.ExitStack()
        recorder = self._recording.enter_context(capture.recording(model))
        sampler = self._recording.enter_context(sampler_trace.tracing(self.model_runner.sampler))
        self._recorded = recorder, sampler

    def finish_capture(self, path: str) -> dict[str, Any]:
        """Write the graph of what ran since `start_capture`; returns the replay gate's outcome."""
        from jetgraph_vllm import capture, collect
        from jetgraph_vllm.lift import lift_engine
        from jetgraph_vllm.replay import replay_capture

        if self._recording is None or self._recorded is None or self._heads is None:
            raise RuntimeError("finish_capture without start_capture")
        self._recording.close()
        recorder, sampler = self._recorded
        self._recording = self._recorded = None  # what was recorded is large, and of this capture only
        view = EngineView(self.model_runner.get_model(), self.model_runner.vllm_config)
        captured = collect.collect(view, capture.RECORDER.bodies, self._heads, recorder, sampler, with_values=True)
        graph = replay_capture(captured, lift_engine)
        graph.save(path)
        return graph.meta["replay"]


class EngineView:
    """The parts of `jetgraph_vllm.engine.Engine` that a collection reads, of an engine that somebody else started."""

    def __init__(self, model: torch.nn.Module, config: Any) -> None:
        self.model = model
        self.config = config
        self.model_dir = Path(config.model_config.model)

    @property
    def checkpoint_config(self) -> dict[str, Any]:
        """The model's configuration with what was declared at the start instead of in the folder."""
        from jetgraph_vllm.engine import read_config

        declared = self.config.model_config.hf_config.quantization_config
        return read_config(self.model_dir) | {"quantization_config": dict(declared)}

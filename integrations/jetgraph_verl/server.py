"""VeRL's vLLM server actor with two more calls: take an update, and show what the engine executes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from jetgraph_vllm.__main__ import gate_prompts
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm import SamplingParams
from vllm.inputs import TokensPrompt

from jetgraph_verl import engine_worker


class JetgraphServer(vLLMHttpServer):
    """`vLLMHttpServer` whose engine runs jetgraph's worker extension; one rank."""

    _has_weights = False
    """An engine starts without any, and discards them when it sleeps at level 2."""

    def _get_worker_extension_cls(self) -> str:
        return f"{engine_worker.__name__}.{engine_worker.EngineWorker.__name__}"

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            RuntimeError: no weights have arrived since the engine was started, or since it discarded them to sleep.
        """
        if not self._has_weights:
            since = "it was started" if self.global_steps is None else f"it discarded version {self.global_steps}"
            raise RuntimeError(f"the rollout engine was asked to generate before weights arrived since {since}")
        return await super().generate(*args, **kwargs)

    async def take_weights(self, folder: str) -> dict[str, Any]:
        """Stage, check and flip the update that lies in ``folder``; then read every live byte again.

        The KV cache is emptied before, so that nothing of the old weights is read after.

        Raises:
            Exception: with the reason of `jetgraph.sync.SyncRefused`; the old weights serve.
        """
        await self.clear_kv_cache()
        (report,) = await self.engine.collective_rpc("take_weights", args=(folder,))
        self._has_weights = True
        await self.clear_kv_cache()
        return report

    async def _sleep_hybrid(self) -> None:
        if self._resolve_sleep_level() == 2:
            self._has_weights = False
        await super()._sleep_hybrid()

    async def check_engine(self) -> None:
        """
        Raises:
            EngineDeadError: a process of the engine is gone, though this one, its server, lives.
        """
        await self.engine.check_health()

    async def capture_rollout_graph(self, path: str) -> dict[str, Any]:
        """Generate from the gate's prompts while recording; the worker lifts, replays and writes the graph."""
        await self.engine.collective_rpc("start_capture")
        prompts = gate_prompts()
        await asyncio.gather(*(self._greedy(prompt) for prompt in prompts))
        for prompt in prompts:
            await self._greedy(prompt)
        (replay,) = await self.engine.collective_rpc("finish_capture", args=(path,))
        return replay

    async def _greedy(self, prompt: Sequence[int]) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        request = TokensPrompt(prompt_token_ids=list(prompt))
        async for _ in self.engine.generate(request, sampling, request_id=f"jetgraph-{uuid.uuid4().hex}"):
            pass

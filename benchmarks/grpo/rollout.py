"""The engine of the loop: a live vLLM in this process, which samples answers and takes new weights while it runs.

How weights arrive is what the arms differ in:

- our plugin: jetgraph's transaction (`jetgraph_vllm.sync`): training's own codes and scales, every digest compared;
- stock vLLM: its own `reload_weights` with the BF16 parameters, from which a quantised engine quantises again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.grpo.actor import Answer


@dataclass(frozen=True)
class Sampler:
    """What of the engine's setting the loop decides; ``stop`` are token ids that end an answer."""

    max_tokens: int
    stop: list[int]


class Rollout:
    """``policy`` is the rollout's where our plugin serves; None is a stock engine.  ``options`` are `vllm.LLM`'s."""

    def __init__(self, folder: str, policy: str | None, sampler: Sampler, options: dict[str, Any]) -> None:
        if policy is not None:
            import jetgraph_vllm

            jetgraph_vllm.register()  # also where the project is on the path and not installed
        from vllm import LLM

        self.llm = LLM(model=folder, dtype="bfloat16", skip_tokenizer_init=True, seed=0, **options)
        self.policy, self.sampler = policy, sampler
        self.version = 0

    def sample(self, prompts: Sequence[list[int]], seed: int) -> list[Answer]:
        """One answer a prompt at temperature 1; logprobs are of the raw logits, which is the same there.

        The seed is the whole rollout's: with one a request vLLM draws row by row.  Arms draw with the same numbers
        until an answer ends sooner in one than in another.
        """
        from vllm import SamplingParams

        asked = {"max_tokens": self.sampler.max_tokens, "stop_token_ids": self.sampler.stop or None, "ignore_eos": True}
        sampling = SamplingParams(temperature=1.0, logprobs=0, detokenize=False, **asked)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        torch.manual_seed(seed)  # the engine lives in this process
        return [_answer(output) for output in self.llm.generate(requests, sampling, use_tqdm=False)]

    def take(self, model: torch.nn.Module) -> dict[str, float]:
        """The weights of ``model``, from the next request on; what the engine reports of it.

        Raises:
            SyncRefused: our transaction did not take place; the old weights serve on.
        """
        self.version += 1
        if self.policy is None:
            weights = ((name, parameter.detach()) for name, parameter in model.named_parameters())
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            self.llm.reset_prefix_cache()
            return {}
        import jetgraph_vllm.sync as live

        from jetgraph.sync import publish

        report = live.attach(self.llm).update(publish(model, self.version, self.policy), verify=False)
        shares = {f"changed/{dtype}": changed / total for dtype, (changed, total) in report.changed.items() if total}
        return {"stall_seconds": report.stall_seconds, "bytes": report.num_bytes, **shares}

    def verify(self) -> None:
        """Read every byte that our plugin serves again, if it serves; the transaction itself compared what it staged.

        Raises:
            WeightsLost: the engine does not hold what was sent.
        """
        if self.policy is not None:
            import jetgraph_vllm.sync as live

            live.attach(self.llm).receiver.require_values()


def _answer(output: Any) -> Answer:
    sampled = output.outputs[0]
    tokens = list(sampled.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(sampled.logprobs, tokens, strict=True)]
    return Answer(list(output.prompt_token_ids), tokens, logprobs)

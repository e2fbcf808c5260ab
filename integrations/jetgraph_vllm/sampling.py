"""Seeded requests under chunked prefill on CPU.

At every step vLLM draws a token for each request, also for those whose prompt is not finished, and takes such a draw
back with ``generator.set_offset(generator.get_offset() - 4)``.  A CPU generator has no offset, so stock vLLM stops with
"CPU Generator does not use offset".  Here each request's generator remembers its state at the start of the step and
goes back to it: right for a first prefill and also for one after a preemption, when tokens were drawn already.

Stock vLLM has one more trap that this does not change: if some requests of a step have a seed and others have none, the
seeds of that step are ignored (`TopKTopPSampler.forward_cpu`).  Give every request a seed, or none.
"""

from __future__ import annotations

import functools

import torch

_OFFSET_OF_A_DRAW = 4
"""What vLLM subtracts to take one draw back; only the difference matters."""


class RewindableGenerator(torch.Generator):
    """A CPU generator that can take back the draws since the last `remember`."""

    _remembered: torch.Tensor | None = None

    @classmethod
    def continuing(cls, generator: torch.Generator) -> RewindableGenerator:
        """A generator that draws what ``generator`` would draw next."""
        own = cls(device="cpu")
        own.manual_seed(generator.initial_seed())
        own.set_state(generator.get_state())
        return own

    def remember(self) -> None:
        self._remembered = self.get_state()

    def get_offset(self) -> int:
        return _OFFSET_OF_A_DRAW

    def set_offset(self, offset: int) -> None:
        """Take back the draws of this step; any other offset has no meaning on a CPU."""
        if offset != 0:
            raise ValueError(
                f"generator offset {offset}: a CPU generator can only take back the draws of the last step"
            )
        if self._remembered is None:
            raise RuntimeError("generator was asked to take back a draw before the first step")
        self.set_state(self._remembered)


def prepare_generators(runner) -> None:
    """Before a step: make every seeded request's generator rewindable, and remember where it stands."""
    batch = runner.input_batch
    for index, generator in list(batch.generators.items()):
        if not isinstance(generator, RewindableGenerator):
            generator = RewindableGenerator.continuing(generator)
            batch.generators[index] = generator
            runner.requests[batch.req_ids[index]].generator = generator
        generator.remember()


def register() -> None:
    """Hook the CPU runner's `_update_states`, the one place through which every step passes before it samples."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    update_states = CPUModelRunner._update_states

    @functools.wraps(update_states)
    def update_states_then_remember(self, scheduler_output):
        result = update_states(self, scheduler_output)
        prepare_generators(self)
        return result

    CPUModelRunner._update_states = update_states_then_remember

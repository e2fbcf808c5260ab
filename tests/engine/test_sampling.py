"""Draws that vLLM takes back, with a stand-in for its runner."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from jetgraph_vllm.sampling import RewindableGenerator, prepare_generators


def draw(generator: torch.Generator) -> list[float]:
    return torch.empty(8).exponential_(generator=generator).tolist()


def seeded(seed: int) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed(seed)
    return generator


def take_back(generator: torch.Generator) -> None:
    """As `GPUModelRunner._bookkeeping_sync` does for the draw of an unfinished prompt."""
    generator.set_offset(generator.get_offset() - 4)


def test_stock_generator_cannot_take_back_a_draw() -> None:
    with pytest.raises(RuntimeError, match="offset"):
        take_back(seeded(1))


def test_draws_are_those_of_a_plain_generator() -> None:
    own, plain = RewindableGenerator.continuing(seeded(7)), seeded(7)
    for _ in range(3):
        own.remember()
        assert draw(own) == draw(plain)


def test_continues_a_generator_that_has_drawn() -> None:
    plain = seeded(7)
    draw(plain)
    own = RewindableGenerator.continuing(plain)
    assert draw(own) == draw(plain)


@pytest.mark.parametrize("kept_before", [0, 3])
def test_discarded_draws_leave_no_trace(kept_before: int) -> None:
    """First prefill in chunks (nothing kept before) and prefill after a preemption (three tokens kept)."""
    own, plain = RewindableGenerator.continuing(seeded(7)), seeded(7)
    for _ in range(kept_before):
        own.remember()
        assert draw(own) == draw(plain)
    for _ in range(4):
        own.remember()
        draw(own)
        take_back(own)
    own.remember()
    assert draw(own) == draw(plain)


def test_only_the_last_step_can_be_taken_back() -> None:
    own = RewindableGenerator.continuing(seeded(7))
    with pytest.raises(RuntimeError, match="before the first step"):
        take_back(own)
    own.remember()
    with pytest.raises(ValueError, match="can only take back the draws of the last step"):
        own.set_offset(own.get_offset() + 4)


def test_a_request_keeps_its_generator_over_a_preemption() -> None:
    """The runner drops the request from the batch and puts it back from its cached state."""
    request = SimpleNamespace(generator=seeded(7))
    batch = SimpleNamespace(generators={0: request.generator}, req_ids=["a"])
    runner = SimpleNamespace(input_batch=batch, requests={"a": request})
    plain = seeded(7)
    prepare_generators(runner)
    assert draw(batch.generators[0]) == draw(plain)
    batch.generators = {}
    prepare_generators(runner)
    batch.generators = {2: request.generator}
    batch.req_ids = ["c", "b", "a"]
    prepare_generators(runner)
    draw(batch.generators[2])
    take_back(batch.generators[2])
    prepare_generators(runner)
    assert draw(batch.generators[2]) == draw(plain)

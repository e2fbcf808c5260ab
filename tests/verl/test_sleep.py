"""An engine that sleeps in VeRL's order: what no update writes comes back, and nothing is generated without weights."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch

from jetgraph.sync import SyncRefused, WeightsLost, publish, write_update
from tests.core.fake_engine import FakeEngine
from tests.core.small_models import random_family

pytestmark = pytest.mark.slow  # importing VeRL's vLLM rollout takes some ten seconds


class Store:
    """A `FakeEngine` as `jetgraph_vllm.sync.ModelStore` shows a vLLM model."""

    def __init__(self, engine: FakeEngine) -> None:
        self.slots, self.aliases = engine.slots, engine.aliases
        self.stop, self.refresh = engine.stop, engine.refresh
        self.rest = lambda: engine.rest


class VllmWorker:
    """Level 2 spoils every tensor, and waking brings nothing back."""

    def __init__(self, model: torch.nn.Module, sleeps: bool) -> None:
        self.engine = FakeEngine(model, "jet")
        config = SimpleNamespace(get_vocab_size=lambda: 500)
        self.model_runner = SimpleNamespace(model_config=config, get_model=lambda: self.engine)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=sleeps))

    def sleep(self, level: int = 1) -> None:
        for slot in self.engine.slots.values():
            slot.live.view(torch.uint8).fill_(0xFF)
        for tensor in self.engine.rest.values():
            tensor.fill_(torch.nan)

    def wake_up(self, tags: list[str] | None = None) -> None:
        pass


@pytest.fixture(scope="module")
def model():
    return random_family("qwen2", layers=1, vocab_size=500, intermediate_size=448)


@pytest.fixture
def started(verl_on_cpu, model, monkeypatch):
    """``started(sleeps)``: a worker as VeRL has it when its engine has been built."""
    from jetgraph_verl.engine_worker import EngineWorker
    from jetgraph_vllm import sync

    monkeypatch.setattr(sync, "ModelStore", Store)

    class Worker(VllmWorker, EngineWorker):  # vLLM mixes an extension in behind its own class
        pass

    def started(sleeps: bool = True) -> VllmWorker:
        worker = object.__new__(Worker)  # VeRL's `__new__` binds the process to its parent and patches vLLM
        worker.__init__(model, sleeps)
        worker.monkey_patch_model(vocab_size=500)  # VeRL's call
        return worker

    return started


@pytest.fixture
def update(model, tmp_path):
    def update(version: int) -> str:
        write_update(publish(model, version, "jet"), tmp_path)
        return str(tmp_path)

    return update


def rest_is_there(worker: VllmWorker) -> bool:
    rest = worker.engine.rest
    return torch.equal(rest["rotary"], torch.arange(64.0)) and rest["k_scale"] == 1.5


def test_verls_first_sleep_comes_before_the_first_weights_and_is_guarded(started, update):  # [W7]
    """VeRL: build, sleep(2), load the trainer's checkpoint, wake the weights, sync, wake the cache."""
    worker = started()
    worker.sleep(level=2)
    assert not rest_is_there(worker)
    worker.wake_up(tags=["weights"])
    assert rest_is_there(worker)
    assert worker.take_weights(update(0))["version"] == 0
    worker.wake_up(tags=["kv_cache"])
    assert rest_is_there(worker)
    worker.sleep(level=2)
    worker.wake_up(tags=["weights"])
    assert worker.take_weights(update(1))["version"] == 1
    assert rest_is_there(worker)


def test_weights_are_refused_while_the_engine_sleeps(started, update):
    worker = started()
    worker.sleep(level=2)
    worker.wake_up(tags=["kv_cache"])  # the wrong half
    with pytest.raises(SyncRefused, match="sleeps at level 2: wake it"):
        worker.take_weights(update(0))


def test_level_1_that_brings_back_garbage_is_found(started, update):  # [W7]
    worker = started()
    worker.take_weights(update(0))
    worker.sleep(level=1)
    with pytest.raises(WeightsLost, match="not the bytes of version 0"):
        worker.wake_up(tags=["weights"])


def test_an_engine_without_sleep_mode_is_left_alone(started):
    worker = started(sleeps=False)
    assert worker.sleep.__func__ is VllmWorker.sleep
    assert worker.wake_up.__func__ is VllmWorker.wake_up


# ----------------------------------------------------------------------------------------------------------- the server


@pytest.fixture
def server(verl_on_cpu, monkeypatch):
    """A server of a hybrid replica that never started; its engine takes every call, its level is what VeRL chooses."""
    from jetgraph_verl.server import JetgraphServer
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    server = object.__new__(JetgraphServer)
    server.node_rank, server.rollout_mode, server.global_steps = 0, RolloutMode.HYBRID, None
    server.config = SimpleNamespace(free_cache_engine=True)
    monkeypatch.setattr(vLLMHttpServer, "lora_as_adapter", False)
    server.refuses = None

    class Engine:
        def __getattr__(self, name: str):
            async def call(*_, **__):
                if name == "collective_rpc" and server.refuses:
                    raise server.refuses
                return [{"version": 1}]

            return call

    async def generate(self, *_, **__) -> str:
        return "an answer"

    server.engine = Engine()
    monkeypatch.setattr(vLLMHttpServer, "generate", generate)
    return server


def run(call):
    return asyncio.run(call)


def test_nothing_is_generated_without_weights(server):
    with pytest.raises(RuntimeError, match="before weights arrived since it was started"):
        run(server.generate())
    run(server.take_weights("folder"))
    run(server.set_global_steps(0))
    assert run(server.generate()) == "an answer"
    run(server.sleep())
    with pytest.raises(RuntimeError, match="before weights arrived since it discarded version 0"):
        run(server.generate())
    run(server.wake_up(tags=["weights"]))
    server.refuses = SyncRefused("one bit differs")
    with pytest.raises(SyncRefused):
        run(server.take_weights("folder"))
    with pytest.raises(RuntimeError, match="since it discarded version 0"):
        run(server.generate())
    server.refuses = None
    run(server.take_weights("folder"))
    assert run(server.generate()) == "an answer"


def test_level_1_keeps_the_weights(server, monkeypatch):
    run(server.take_weights("folder"))
    monkeypatch.setattr(type(server), "_resolve_sleep_level", lambda self: 1)
    run(server.sleep())
    run(server.wake_up())
    assert run(server.generate()) == "an answer"


def test_a_server_that_never_sleeps_keeps_its_weights(server):
    """VeRL on a CPU: free_cache_engine=False."""
    server.config.free_cache_engine = False
    run(server.take_weights("folder"))
    run(server.sleep())
    assert run(server.generate()) == "an answer"

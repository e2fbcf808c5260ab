"""What weight sync hangs into vLLM, piece by piece on fakes with vLLM's own call order; `test_sync` runs it live."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace as Fake

import pytest
import torch
from jetgraph_vllm.capture_format import LinearPart
from jetgraph_vllm.sync import VllmStore, core_of, guard_sleep
from jetgraph_vllm.sync_slots import linear_slots
from jetgraph_vllm.token_versions import TokenVersions

from jetgraph.sync import Receiver, Slot, SyncRefused, WeightsLost

# ------------------------------------------------------------------------------------------------- versions of tokens


class Engine:
    """Scheduler and output processor of one engine; requests by id, each sampling one token a batch."""

    def __init__(self, kind: str = "CUMULATIVE") -> None:
        self.version: int | None = 1
        self.batches: list[object] = []
        self.request_states = {name: self.state(kind) for name in "ab"}
        TokenVersions(self, self, self.serving)

    def serving(self) -> int:
        if self.version is None:
            raise WeightsLost("no weights")
        return self.version

    def state(self, kind: str) -> Fake:
        state = Fake(tokens=[], new=0, output_kind=Fake(name=kind))
        state._new_completion_output = lambda: Fake(
            token_ids=state.tokens[len(state.tokens) - state.new :] if kind == "DELTA" else list(state.tokens)
        )
        return state

    def schedule(self) -> object:
        self.batches.append(Fake())
        return self.batches[-1]

    def update_from_output(self, batch: object, sampled: dict[str, int]) -> dict[int, Fake]:
        outputs = [Fake(request_id=name, new_token_ids=[7] * count) for name, count in sampled.items()]
        return {0: Fake(outputs=outputs)}

    def process_outputs(self, outputs: list[Fake]) -> dict[str, Fake]:
        made = {}
        for output in outputs:
            state = self.request_states[output.request_id]
            state.tokens += output.new_token_ids
            state.new = len(output.new_token_ids)
            made[output.request_id] = state._new_completion_output()
        return made

    def step(self, **sampled: int) -> dict[str, Fake]:
        return self.finish(self.schedule(), **sampled)

    def finish(self, batch: object, **sampled: int) -> dict[str, Fake]:
        return self.process_outputs(self.update_from_output(batch, sampled)[0].outputs)


def test_each_token_has_the_version_that_sampled_it():
    engine = Engine()
    engine.step(a=1, b=1)
    engine.version = 2
    engine.step(a=1)
    made = engine.step(a=2, b=1)
    assert made["a"].weight_versions == (1, 2, 2, 2)
    assert made["b"].weight_versions == (1, 2)


def test_a_batch_scheduled_ahead_keeps_the_version_of_its_scheduling():
    engine = Engine()
    ahead = engine.schedule()
    engine.version = 2
    assert engine.finish(ahead, a=1)["a"].weight_versions == (1,)
    assert engine.step(a=1)["a"].weight_versions == (1, 2)


def test_a_streamed_piece_has_the_versions_of_its_own_tokens():
    engine = Engine("DELTA")
    assert engine.step(a=2)["a"].weight_versions == (1, 1)
    engine.version = 2
    assert engine.step(a=1)["a"].weight_versions == (2,)


def test_a_request_that_is_gone_leaves_nothing_behind():
    engine = Engine()
    engine.step(a=1, b=1)
    del engine.request_states["b"]  # aborted
    engine.step(a=1)
    engine.request_states["b"] = engine.state("CUMULATIVE")
    engine.version = 3
    assert engine.step(b=1)["b"].weight_versions == (3,)


def test_without_weights_nothing_is_scheduled():  # [W7]
    engine = Engine()
    engine.version = None
    with pytest.raises(WeightsLost):
        engine.schedule()
    assert engine.batches == []


# -------------------------------------------------------------------------------------------- stopping, slots, sleep


def stopped(**core) -> str:
    """Why an engine with this core cannot stop; empty if it does."""
    defaults = {
        "batch_queue": None,
        "model_executor": Fake(is_sleeping=False),
        "reset_prefix_cache": lambda reset_running_requests, reset_connector: True,
        "reset_encoder_cache": lambda: None,
    }
    store = object.__new__(VllmStore)
    store.core = Fake(**{**defaults, **core})
    try:
        store.stop()
    except SyncRefused as error:
        return str(error)
    return ""


def test_an_engine_stops_only_if_no_old_kv_entry_can_be_read_again():  # [W9]
    asked = []
    assert stopped(reset_prefix_cache=lambda **how: asked.append(how) or True) == ""
    assert asked == [{"reset_running_requests": True, "reset_connector": True}]
    assert "could not be reset" in stopped(reset_prefix_cache=lambda **how: False)
    assert stopped(batch_queue=[]) == ""
    assert "sleeps" in stopped(model_executor=Fake(is_sleeping=True))


class AheadCore:
    """An engine core that schedules ahead, in the order of vLLM's `step_with_batch_queue`; batches are numbers."""

    def __init__(self, requests: int) -> None:
        self.requests = requests  # batches that are to be scheduled yet
        self.batch_queue: deque[int] = deque()
        self.scheduler = Fake(has_requests=lambda: self.requests > 0)
        self.model_executor = Fake(is_sleeping=False)
        self.step_fn = self.step
        self.in_flight_at_reset: list[int] = []

    def step(self) -> int | None:
        if self.scheduler.has_requests():
            self.batch_queue.appendleft(self.requests)
            self.requests -= 1
            if len(self.batch_queue) < 2:
                return None
        return self.batch_queue.pop()

    def reset_prefix_cache(self, **_: bool) -> bool:
        self.in_flight_at_reset.append(len(self.batch_queue))
        return True

    def reset_encoder_cache(self) -> None: ...


def test_an_engine_that_schedules_ahead_stops_between_two_steps_and_loses_no_output():
    """As on a GPU by default: a batch is always in flight, so refusing an update meanwhile would refuse it forever."""
    core = AheadCore(4)
    store = VllmStore(core, torch.nn.Module())
    outputs = [core.step_fn() for _ in range(2)]
    store.stop()
    store.stop()  # another update, before the engine steps again
    assert core.in_flight_at_reset == [0, 0]
    while core.scheduler.has_requests() or core.batch_queue:
        outputs.append(core.step_fn())
    assert [batch for batch in outputs if batch is not None] == [4, 3, 2, 1]


def test_engines_in_other_processes_or_on_several_ranks_are_refused():
    class SyncMPClient: ...

    def llm(core):
        return Fake(llm_engine=Fake(engine_core=core))

    with pytest.raises(SyncRefused, match="in another process .SyncMPClient.: set VLLM_ENABLE_V1_MULTIPROCESSING=0"):
        core_of(llm(SyncMPClient()))
    two = Fake(scheduler=None, vllm_config=Fake(parallel_config=Fake(world_size=2)))
    with pytest.raises(SyncRefused, match="the engine has 2 ranks"):
        core_of(llm(Fake(engine_core=two)))


def linear(weight: torch.Tensor, method: str = "Method", **parameters: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.quant_method = type(method, (), {})()
    for name, tensor in {"weight": weight, **parameters}.items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    return module


PARTS = [LinearPart("a.q_proj", (0, 4), None), LinearPart("a.k_proj", (4, 6), None)]


def test_parts_of_a_merged_bf16_linear_are_its_rows():
    module = linear(torch.arange(12.0).bfloat16().view(6, 2), bias=torch.arange(6.0).bfloat16())
    found = list(linear_slots("a.qkv_proj", module, PARTS))
    assert {name: live.flatten().tolist() for name, live, _ in found} == {
        "a.q_proj.weight": [0, 1, 2, 3, 4, 5, 6, 7],
        "a.q_proj.bias": [0, 1, 2, 3],
        "a.k_proj.weight": [8, 9, 10, 11],
        "a.k_proj.bias": [4, 5],
    }
    assert {precision for *_, precision in found} == {"bf16"}
    assert found[2][1].data_ptr() == module.weight[4:].data_ptr()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (
            linear(torch.zeros(3, 8, dtype=torch.int32), "Marlin"),
            r"Marlin holds its weight as \[3, 8\] int32, expected 6",
        ),
        (linear(torch.zeros(0), "UnquantizedLinearMethod"), "it is packed and cannot be written in place"),
        (linear(torch.zeros(6, 2, dtype=torch.float8_e4m3fn)), "float8_e4m3fn weights without a declared scale rule"),
        (linear(torch.zeros(6, 2).bfloat16(), weight_scale=torch.ones(1)), "has weight_scale: nobody can tell"),
    ],
)
def test_weights_that_are_not_the_checkpoints_are_refused_by_name(module, message):  # [W1, W3]
    with pytest.raises(SyncRefused, match=f"a.qkv_proj: .*{message}"):
        list(linear_slots("a.qkv_proj", module, PARTS))


@pytest.mark.engine  # imports vLLM
def test_whoever_puts_the_executor_to_sleep_passes_the_guard():  # [W7]
    """With vLLM's own executor, its collective calls answered by a worker that discards its weights at level 2."""
    from vllm.v1.executor.abstract import Executor

    weight, table = torch.ones(4, 4, dtype=torch.bfloat16), torch.arange(4.0)

    class OneWorker(Executor):
        def __init__(self) -> None:
            self.is_sleeping, self.sleeping_tags = False, set()

        def _init_executor(self) -> None: ...
        def check_health(self) -> None: ...

        def collective_rpc(self, method, kwargs=None, **rest):
            if method == "sleep" and kwargs["level"] == 2:
                weight.fill_(torch.nan)
                table.fill_(torch.nan)

    executor = OneWorker()
    store = Fake(slots={"w": Slot("w", weight, "bf16")}, aliases={}, stop=lambda: None, refresh=lambda: None)
    receiver = Receiver(store)
    guard_sleep(executor, receiver, {"cos_sin_cache": table})
    executor.sleep(level=1)
    assert executor.is_sleeping
    executor.wake_up()
    receiver.require_serving()
    executor.sleep(level=2)
    executor.wake_up(tags=["kv_cache"])
    assert executor.is_sleeping
    executor.wake_up(tags=["weights"])
    assert not executor.is_sleeping
    assert table.tolist() == [0, 1, 2, 3]
    with pytest.raises(WeightsLost, match="send a complete update before generating"):
        receiver.require_serving()


def test_the_rest_is_what_no_update_writes():
    """A view of a slot's storage is written with it; a table beside it is not."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(8, 4, dtype=torch.bfloat16))
    model.register_buffer("cos_sin_cache", torch.arange(4.0), persistent=False)
    store = object.__new__(VllmStore)
    store.model, store.slots = model, {"w": Slot("w", model.weight.data[:6], "bf16")}
    assert list(store.rest()) == ["cos_sin_cache"]
    assert store.rest()["cos_sin_cache"].data_ptr() == model.cos_sin_cache.data_ptr()

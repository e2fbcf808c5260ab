"""A death among a run's processes, on real Ray actors: it is raised in the main thread, whatever that waits for."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

ray = pytest.importorskip("ray")

from jetgraph_verl import watch  # noqa: E402
from jetgraph_verl.watch import ProcessDied, watched  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LIMIT = 60.0
"""Seconds for what takes two: the machine may be busy.  Without a watch every test here would wait for its timeout."""


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, logging_level="ERROR", object_store_memory=100_000_000)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def last_resort(monkeypatch):
    """The test process must not end itself."""
    ended = threading.Event()
    monkeypatch.setattr(watch.os, "_exit", lambda _: ended.set())
    return ended


@pytest.fixture
def actors():
    @ray.remote(num_cpus=0)
    class Actor:
        def pid(self) -> int:
            return os.getpid()

        def work(self, seconds: float) -> None:
            time.sleep(seconds)

        def check(self) -> None:
            raise RuntimeError("EngineCore died: see the log above")

    made = [Actor.remote() for _ in range(2)]
    yield made
    for actor in made:
        ray.kill(actor)


def pings(actors) -> dict:
    return {f"worker {index}": actor.__ray_ready__.remote for index, actor in enumerate(actors)}


def kill_soon(pid: int) -> None:
    threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()


def asleep(actors) -> None:
    for _ in range(1000):
        time.sleep(1)  # as VeRL polls for trajectories


def waiting_for_another(actors) -> None:
    ray.get(actors[0].work.remote(1000))


def deaf(actors) -> None:
    while True:  # a loop that takes every failure for a passing one
        try:
            ray.get(actors[1].pid.remote())
        except ray.exceptions.RayError:
            time.sleep(0.1)


@pytest.mark.parametrize("body", [asleep, waiting_for_another, deaf])
def test_kill_9_is_raised_where_the_main_thread_waits(actors, body, capsys):
    kill_soon(ray.get(actors[1].pid.remote()))
    start = time.monotonic()
    with pytest.raises(ProcessDied, match=r"worker 1 died: .*the same command goes on"), watched(pings(actors)):
        body(actors)
    assert time.monotonic() - start < LIMIT
    told = capsys.readouterr().out
    assert "jetgraph: RUN ENDED: worker 1 died: its worker process has died" in told
    assert "common causes" not in told[told.index("RUN ENDED") :]


def test_an_error_that_the_death_caused_is_not_what_is_told(actors):
    """As VeRL's "no materializable trajectories" after the death of its only rollout server."""
    pid = ray.get(actors[1].pid.remote())

    def notices_first() -> None:
        with watched(pings(actors)):
            os.kill(pid, signal.SIGKILL)
            raise RuntimeError("no materializable trajectories")

    with pytest.raises(ProcessDied, match="worker 1 died") as died:
        notices_first()
    assert isinstance(died.value.__cause__ or died.value.__context__, RuntimeError)


def test_a_process_that_lives_and_says_that_its_engine_is_dead_counts_as_dead(actors):
    with (
        pytest.raises(ProcessDied, match=r"server died: RuntimeError: EngineCore died: see the log above\. What"),
        watched({"server": actors[0].check.remote}),
    ):
        asleep(actors)


def test_a_busy_process_is_not_a_dead_one_and_an_error_of_ones_own_stays_itself(actors):
    busy = actors[0].work.remote(4.0)

    def fails() -> None:
        with watched(pings(actors)):
            ray.get(busy)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fails()


def test_afterwards_nothing_is_watched_any_more(actors):
    before = signal.getsignal(signal.SIGUSR1)
    with watched(pings(actors)):
        assert signal.getsignal(signal.SIGUSR1) is not before
    assert signal.getsignal(signal.SIGUSR1) is before
    assert not [thread for thread in threading.enumerate() if thread.name == "jetgraph-watch"]
    os.kill(ray.get(actors[1].pid.remote()), signal.SIGKILL)
    time.sleep(3)


def test_if_clearing_up_hangs_the_process_ends_by_itself(actors, last_resort, monkeypatch):
    monkeypatch.setattr(watch, "LAST_RESORT", 1.0)
    kill_soon(ray.get(actors[1].pid.remote()))
    with pytest.raises(ProcessDied), watched(pings(actors)):
        asleep(actors)
    assert last_resort.wait(LIMIT)  # as if tq.close() waited for the dead

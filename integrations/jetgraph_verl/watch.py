"""A run whose processes are watched: one that dies ends the run within seconds, by name, whatever was waiting for it.

VeRL notices a death only where it asks the dead process for something.  A rollout server that dies is a failed prompt,
which may be padded and trained on; an agent loop that dies leaves its prompts "running", and the trainer polls on.
Here every process has one call pending, which Ray answers with an error the moment that the process is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError

PERIOD = 1.0
"""Seconds between two looks, and between an answer and the next call to the same process."""

LAST_RESORT = 30.0
"""Seconds after which the driver's process ends by itself, if what clears up after the error hangs too."""

Ping = Callable[[], ray.ObjectRef]


class ProcessDied(RuntimeError):
    """A process that the run needs is gone; the message has its name and Ray's reason."""


@contextlib.contextmanager
def watched(pings: Mapping[str, Ping]) -> Iterator[None]:
    """While the body runs in the main thread, a death among these processes is raised there.

    Args:
        pings: a call to each process by the name that people know it by.  It may wait behind the process's own work as
            long as that takes.

    Raises:
        ProcessDied: also out of a `ray.get` or a sleep that would have gone on waiting.
    """
    over, found = threading.Event(), list[ProcessDied]()

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        if not over.is_set():
            raise KeyboardInterrupt  # the one exception that a `ray.get` which is waiting lets through

    def watch() -> None:
        died = _first_death(pings, over)
        if died is None:
            return
        found.append(died)
        print(f"jetgraph: RUN ENDED: {died}", flush=True)
        last_resort = threading.Timer(LAST_RESORT, os._exit, (1,))
        last_resort.daemon = True  # a process that ends by itself does not wait for it
        last_resort.start()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]

    before = signal.signal(signal.SIGUSR1, interrupt)
    thread = threading.Thread(target=watch, name="jetgraph-watch", daemon=True)
    thread.start()
    try:
        yield
    except KeyboardInterrupt:
        if found:
            raise found[0] from None
        raise
    except Exception as error:  # what the death broke may be noticed before the death, and tells less
        with contextlib.suppress(KeyboardInterrupt):
            thread.join(2 * PERIOD)
        if found:
            raise found[0] from error
        raise
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    if found:  # at the very end
        raise found[0]


def _first_death(pings: Mapping[str, Ping], over: threading.Event) -> ProcessDied | None:
    """Call and call again until a call fails, or ``over``."""
    pending: dict[ray.ObjectRef, str] = {}
    due = dict.fromkeys(pings, 0.0)
    while not over.is_set():
        now = time.monotonic()
        for name in [name for name, when in due.items() if when <= now]:
            del due[name]
            pending[pings[name]()] = name
        if not pending:
            over.wait(PERIOD)
            continue
        answered, _ = ray.wait(list(pending), num_returns=len(pending), timeout=PERIOD)
        for reference in answered:
            name = pending.pop(reference)
            try:
                ray.get(reference)
            except ActorUnavailableError:
                pass  # a broken connection; Ray says whether the process is dead when it knows
            except Exception as error:
                return ProcessDied(
                    f"{name} died: {_one_line(error)}. What the last checkpoint holds stands; the same command goes on "
                    "from there"
                )
            due[name] = now + PERIOD
    return None


def _one_line(error: Any, length: int = 400) -> str:
    """Ray's errors are pages: what a call raised, or why a process is dead without what else it could have been."""
    cause = getattr(error, "cause", None) or error
    text = " ".join(str(cause).split())
    if reason := re.search(r"The actor is dead because (.*?)(?: Some common causes|$)", text):
        text = reason[1].rstrip(".")
    if cause is not error:
        text = f"{type(cause).__name__}: {text}".rstrip(".")
    return text if len(text) <= length else f"…{text[-length:]}"

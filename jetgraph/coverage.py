"""What every linear of a model really ran as: the report that proves that nothing ran silently in BF16.

Counted where work is done: compiled regions count each graph they execute, `Linear` counts the calls that reach it
outside a region.  Take the report after a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from jetgraph.backend import Backend
from jetgraph.graph import Role
from jetgraph.linear import Linear
from jetgraph.policy import Policy


class CoverageError(RuntimeError):
    """Some linear did not run what the policy declares for it."""


@dataclass(frozen=True)
class LinearCoverage:
    """One linear: what the policy declares, and where its forward ran."""

    fqn: str
    declared: str
    reason: str
    calls_in_region: int = 0
    calls_eager: int = 0
    roles: tuple[str, ...] = ()
    """GEMMs that run on FP8 codes in its region's newest graphs."""
    problem: str = ""

    @property
    def ran(self) -> str:
        if self.problem:
            return self.problem
        where = [("region", self.calls_in_region), ("eager", self.calls_eager)]
        return ", ".join(f"{name} x{count}" for name, count in where if count) or "torch's own nn.Linear"


@dataclass(frozen=True)
class Coverage:
    rows: tuple[LinearCoverage, ...]
    others: tuple[str, ...] = ()
    """What else is not as compiled."""

    @property
    def problems(self) -> tuple[LinearCoverage, ...]:
        return tuple(row for row in self.rows if row.problem)

    def require(self) -> Coverage:
        """This report, if every linear ran as declared.

        Raises:
            CoverageError: some did not; names the first ones and says why.
        """
        if self.others:
            raise CoverageError("; ".join(self.others))
        if self.problems:
            named = "; ".join(f"{row.fqn}: {row.problem}" for row in self.problems[:5])
            more = f" (and {len(self.problems) - 5} more)" if len(self.problems) > 5 else ""
            raise CoverageError(f"{len(self.problems)} of {len(self.rows)} linears are not covered: {named}{more}")
        return self

    def __str__(self) -> str:
        width = max((len(row.fqn) for row in self.rows), default=0)
        lines = [f"{row.fqn:<{width}}  {row.declared:<16}  {row.ran}" for row in self.rows]
        covered = len(self.rows) - len(self.problems)
        return "\n".join([*lines, f"{covered} of {len(self.rows)} linears ran as declared"])


def coverage(model: torch.nn.Module, policy: Policy, regions: Mapping[str, Backend], *, reference: bool) -> Coverage:
    """The report for ``model``; ``regions`` are its compiled regions by FQN; ``reference``: its provider."""
    return Coverage(
        tuple(
            _row(name, module, policy, regions, reference)
            for name, module in model.named_modules(remove_duplicate=False)
            if isinstance(module, torch.nn.Linear)
        )
    )


def _row(
    name: str, module: torch.nn.Linear, policy: Policy, regions: Mapping[str, Backend], reference: bool
) -> LinearCoverage:
    demanded = policy.linear(name)
    if not isinstance(module, Linear):
        problem = f"BF16, added after compile ({demanded.reason} demands FP8)" if demanded.quantized else ""
        if reference and not problem:
            problem = "torch's own GEMM, added after compile (provider 'reference' runs none)"
        return LinearCoverage(name, "bf16", demanded.reason, problem=problem)
    region = next((r for r in regions if r == "" or name.startswith(f"{r}.")), None)
    calls, roles = 0, set()
    if region is not None:
        backend = regions[region]
        ran = backend.executions[region]
        calls = ran["forward"] + ran["inference"]
        relative = name.removeprefix(f"{region}.") if region else name
        roles = {gemm.role for variant in backend.compiled for gemm in variant.lowered if gemm.fqn == relative}
    precision = module.precision
    problem = ""
    if precision.without_reason() != demanded.without_reason():
        problem = (
            f"{precision.weight.short()} ({precision.reason}); expected {demanded.weight.short()} ({demanded.reason})"
        )
    elif not calls and not module.num_eager_calls:
        problem = "not seen to run (not called yet, or traced by another compiler)"
    elif calls and precision.quantized and Role.FPROP not in roles:
        problem = "its FP8 GEMM is missing from its region"
    return LinearCoverage(
        name,
        precision.weight.short(),
        precision.reason,
        calls,
        module.num_eager_calls,
        tuple(role.value for role in Role if role in roles),
        problem,
    )

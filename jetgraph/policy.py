"""Policies: which linears are FP8, how each operand is quantised, and what the rollout must do.

A policy is two ordered lists of rules, one for training and one for the rollout; the first rule whose pattern matches a
linear's FQN decides.  A pattern is an exact dotted path, ``re:`` followed by a regular expression that must match the
whole path, or ``*``.  Never a substring: ``mlp.gate`` must not catch ``mlp.gate_proj``.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from dataclasses import dataclass
from enum import Enum

import jetgraph.policies
from jetgraph.precision import BF16, Format, Granularity, Precision, Scale, ScaleRule


class WgradSource(str, Enum):
    """Where WGRAD's activation operand, grouped along the tokens, comes from."""

    BOTH = "both"
    """both orientations are quantised from the BF16 activation at once: one quantisation, more bytes saved"""
    REQUANTIZE = "requantize"
    """the saved 1x128 codes are dequantised and quantised again along the tokens: fewer bytes, a double quantisation"""


@dataclass(frozen=True)
class LinearPrecision:
    """How the operands of one linear's three GEMMs are represented, and the rule that decided it.

    ``activation`` and ``weight`` enter FPROP; ``gradient`` (1 x group) and ``weight`` enter DGRAD; ``wgrad``
    (group x 1, along the tokens) is both operands of WGRAD.  For an unquantised linear all four are BF16.
    """

    activation: Precision = BF16
    weight: Precision = BF16
    gradient: Precision = BF16
    wgrad: Precision = BF16
    reason: str = ""

    @property
    def quantized(self) -> bool:
        return self.weight.format is Format.E4M3

    @property
    def group(self) -> int:
        scale = self.activation.scale
        assert scale is not None
        assert scale.granularity.cols is not None
        return scale.granularity.cols


@dataclass(frozen=True)
class Rule:
    """``pattern`` → precision; ``None`` keeps matching linears in BF16."""

    pattern: str
    fp8: FP8Recipe | None

    def matches(self, fqn: str) -> bool:
        if self.pattern == "*":
            return True
        if self.pattern.startswith("re:"):
            return re.fullmatch(self.pattern[3:], fqn) is not None
        return self.pattern == fqn


@dataclass(frozen=True)
class FP8Recipe:
    """Block-scaled e4m3: groups of 1 x ``group`` for activations and gradients, ``group`` x ``group`` for weights."""

    group: int = 128
    rule: ScaleRule = ScaleRule()

    def precision(self, reason: str) -> LinearPrecision:
        def fp8(granularity: Granularity) -> Precision:
            return Precision(Format.E4M3, Scale(granularity, self.rule))

        along_features = fp8(Granularity.per_group(self.group))
        along_tokens = fp8(Granularity.per_token_group(self.group))
        weight = fp8(Granularity.per_block(self.group, self.group))
        return LinearPrecision(along_features, weight, along_features, along_tokens, reason)


@dataclass(frozen=True)
class Policy:
    """One precision flow (or, for a negative control, two that differ)."""

    name: str
    description: str
    train: tuple[Rule, ...]
    rollout: tuple[Rule, ...]
    wgrad_source: WgradSource = WgradSource.BOTH

    def linear(self, fqn: str, *, rollout: bool = False) -> LinearPrecision:
        """What this policy demands of the linear at ``fqn``; BF16 if no rule matches."""
        for rule in self.rollout if rollout else self.train:
            if rule.matches(fqn):
                reason = f"{self.name}: {rule.pattern}"
                return rule.fp8.precision(reason) if rule.fp8 else LinearPrecision(reason=reason)
        return LinearPrecision(reason=f"{self.name}: no rule matches")

    @property
    def same_on_both_sides(self) -> bool:
        return self.train == self.rollout


BLOCK_LINEARS = r"re:.*\.layers\.\d+\..*"
"""Every linear inside a decoder block; lm_head, embeddings and norms stay BF16, as in every peer."""


def policies() -> dict[str, Policy]:
    """All policies by name: one per module of `jetgraph.policies`, its `POLICY`."""
    found = {}
    for module in pkgutil.iter_modules(jetgraph.policies.__path__):
        policy = importlib.import_module(f"jetgraph.policies.{module.name}").POLICY
        found[policy.name] = policy
    return found


def get_policy(policy: str | Policy) -> Policy:
    """A policy by name (or itself).

    Raises:
        ValueError: no policy has that name; the message lists those that exist.
    """
    if isinstance(policy, Policy):
        return policy
    known = policies()
    if policy not in known:
        raise ValueError(f"policy {policy!r} does not exist; choose one of {', '.join(sorted(known))}")
    return known[policy]

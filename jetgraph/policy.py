"""Policies: which linears are FP8, how each operand is quantised, and what the rollout must do.

A policy is two ordered lists of rules, one for training and one for the rollout; the first rule whose pattern matches a
linear's FQN decides.  A pattern is an exact dotted path, ``re:`` followed by a regular expression that must match the
whole path, or ``*``.  Never a substring: ``mlp.gate`` must not catch ``mlp.gate_proj``.  A rule that decides nothing in
a model is an error (`check_matches`), never ignored.  docs/policies.md has the JSON form.
"""

from __future__ import annotations

import difflib
import importlib
import json
import pkgutil
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import jetgraph.policies
from jetgraph import bounded_json, typed_json
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

    ``activation`` and ``weight`` enter FPROP; ``gradient`` and ``weight`` enter DGRAD; ``wgrad`` (grouped along the
    tokens, or per tensor) is both operands of WGRAD, and ``wgrad_source`` where its activation comes from.  For an
    unquantised linear all four are BF16.

    >>> str(LinearPrecision(reason="bf16: *"))
    'bf16|bf16|bf16|bf16|both|bf16: *'
    >>> LinearPrecision.parse("bf16|bf16|bf16|bf16|both|bf16: *") == LinearPrecision(reason="bf16: *")
    True
    """

    activation: Precision = BF16
    weight: Precision = BF16
    gradient: Precision = BF16
    wgrad: Precision = BF16
    reason: str = ""
    wgrad_source: WgradSource = WgradSource.BOTH

    @property
    def quantized(self) -> bool:
        return self.weight.format is Format.E4M3

    def without_reason(self) -> LinearPrecision:
        """The representation alone, for comparing."""
        return replace(self, reason="")

    @property
    def group(self) -> int:
        """Codes along the contraction axis that share one scale; 0 is the whole axis."""
        scale = self.activation.scale
        assert scale is not None
        return scale.granularity.cols or 0

    def __str__(self) -> str:
        operands = (self.activation, self.weight, self.gradient, self.wgrad)
        return "|".join((*map(str, operands), self.wgrad_source.value, self.reason))

    @classmethod
    def parse(cls, text: str) -> LinearPrecision:
        """What `str` printed, and nothing else.  The reason comes last: it may hold the ``|`` of a pattern.

        Raises:
            ValueError: the text is not the normal form of any linear's precision.
        """
        parts = text.split("|", 5)
        if len(parts) == 6:
            *operands, source, reason = parts
            activation, weight, gradient, wgrad = map(Precision.parse, operands)
            parsed = cls(activation, weight, gradient, wgrad, reason, WgradSource(source))
            if str(parsed) == text:
                return parsed
        raise ValueError(
            f"linear precision {text!r}: expected activation|weight|gradient|wgrad|wgrad source|reason, as printed"
        )


class PolicyError(ValueError):
    """A policy does not fit the model, or the engine, that it is meant for: names the rule and the linears."""


@dataclass(frozen=True)
class FP8Recipe:
    """e4m3 operands with dynamic FP32 scales, all by one ``rule``.

    ``group`` g: 1 x g for activations and gradients, g x g for weights, g x 1 (along the tokens) for WGRAD's operands.
    None: one scale for each whole tensor, as torchao and Transformer Engine know it; that scale couples the tokens of a
    call, so no rollout of it is contained in training (JG019).
    """

    group: int | None = 128
    rule: ScaleRule = ScaleRule()

    def __post_init__(self) -> None:
        if self.group is not None and self.group < 1:
            raise ValueError(f"group {self.group}: expected a positive number of codes, or None for the whole tensor")

    def precision(self, reason: str) -> LinearPrecision:
        def fp8(granularity: Granularity) -> Precision:
            return Precision(Format.E4M3, Scale(granularity, self.rule))

        if self.group is None:
            whole = fp8(Granularity.per_tensor())
            return LinearPrecision(whole, whole, whole, whole, reason)
        along_features = fp8(Granularity.per_group(self.group))
        along_tokens = fp8(Granularity.per_token_group(self.group))
        weight = fp8(Granularity.per_block(self.group, self.group))
        return LinearPrecision(along_features, weight, along_features, along_tokens, reason)


@dataclass(frozen=True)
class Rule:
    """``pattern`` → recipe; None keeps matching linears in BF16.

    An ``optional`` rule may decide nothing: some models have no ``lm_head``.

    Raises:
        ValueError: the pattern is neither ``*``, nor a dotted path, nor ``re:`` and a regular expression.
    """

    pattern: str
    fp8: FP8Recipe | None
    optional: bool = False

    def __post_init__(self) -> None:
        if self.pattern.startswith("re:"):
            try:
                re.compile(self.pattern[3:])
            except re.error as error:
                raise ValueError(f"pattern {self.pattern!r} is no regular expression: {error}") from error
        elif self.pattern != "*" and re.fullmatch(r"[\w-]+(\.[\w-]+)*", self.pattern) is None:
            raise ValueError(f"pattern {self.pattern!r}: expected a dotted path, or re: and a regular expression, or *")

    def matches(self, fqn: str) -> bool:
        if self.pattern == "*":
            return True
        if self.pattern.startswith("re:"):
            return re.fullmatch(self.pattern[3:], fqn) is not None
        return self.pattern == fqn


@dataclass(frozen=True)
class Policy:
    """One precision flow (or, for a negative control, two that differ).

    ``rollout`` left out is ``train``: what a policy is for.

    Raises:
        ValueError: no name, no rules, or a per-tensor recipe with `WgradSource.REQUANTIZE` (its codes serve both ways).
    """

    name: str
    description: str
    train: tuple[Rule, ...]
    rollout: tuple[Rule, ...] = ()
    wgrad_source: WgradSource = WgradSource.BOTH

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.train:
            raise ValueError("a policy needs a name and at least one rule for training")
        if not self.rollout:
            object.__setattr__(self, "rollout", self.train)
        per_tensor = any(rule.fp8 and rule.fp8.group is None for rule in (*self.train, *self.rollout))
        if per_tensor and self.wgrad_source is WgradSource.REQUANTIZE:
            raise ValueError("wgrad_source 'requantize' needs groups: per-tensor codes serve WGRAD as they are")

    def rules(self, *, rollout: bool = False) -> tuple[Rule, ...]:
        return self.rollout if rollout else self.train

    def rule(self, fqn: str, *, rollout: bool = False) -> Rule | None:
        """The first rule that matches the linear at ``fqn``: the one that decides."""
        return next((rule for rule in self.rules(rollout=rollout) if rule.matches(fqn)), None)

    def linear(self, fqn: str, *, rollout: bool = False) -> LinearPrecision:
        """What this policy demands of the linear at ``fqn``; BF16 if no rule matches."""
        rule = self.rule(fqn, rollout=rollout)
        if rule is None:
            return LinearPrecision(reason=f"{self.name}: no rule matches")
        reason = f"{self.name}: {rule.pattern}"
        if rule.fp8 is None:
            return LinearPrecision(reason=reason)
        return replace(rule.fp8.precision(reason), wgrad_source=self.wgrad_source)

    def override(self, pattern: str, fp8: FP8Recipe | None, *, name: str = "") -> Policy:
        """This policy with one more rule, put first in training *and* rollout: one layer cannot change on one side.

        A rule that has the same pattern already is replaced.  The new policy is called ``name``, or after both.

        >>> from jetgraph.policy import get_policy
        >>> kept = get_policy("jet").override("model.layers.0.mlp.down_proj", None)
        >>> kept.name, kept.linear("model.layers.0.mlp.down_proj", rollout=True).quantized
        ('jet+model.layers.0.mlp.down_proj', False)
        """
        first = Rule(pattern, fp8)
        train, rollout = ((first, *(r for r in rules if r.pattern != pattern)) for rules in (self.train, self.rollout))
        return replace(self, name=name or f"{self.name}+{pattern}", train=train, rollout=rollout)

    @property
    def same_on_both_sides(self) -> bool:
        return self.train == self.rollout

    @property
    def file_stem(self) -> str:
        """The name without what file names cannot hold; a derived policy's name may contain a pattern."""
        return re.sub(r"[^\w.+-]+", "_", self.name)

    def to_plain(self) -> dict[str, Any]:
        """The policy as JSON values; ``rollout`` only where it differs from ``train``."""
        plain = typed_json.to_plain(self)
        if self.same_on_both_sides:
            del plain["rollout"]
        return plain

    def to_json(self) -> str:
        return json.dumps(self.to_plain(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_plain(cls, data: Any) -> Policy:
        """The policy that `to_plain` gave.

        Raises:
            ValueError: an unknown or missing key or a bad value; says where, such as ``train[1].fp8.rule.qmax``.
        """
        return typed_json.from_plain(cls, data)

    @classmethod
    def from_json(cls, text: str) -> Policy:
        return cls.from_plain(bounded_json.parse(text.encode()))


BLOCK_LINEARS = r"re:.*\.layers\.\d+\..*"
"""Every linear inside a decoder block; lm_head, embeddings and norms stay BF16, as in every peer."""


def policies() -> dict[str, Policy]:
    """The built-in policies by name: one per module of `jetgraph.policies`, its `POLICY`."""
    found = {}
    for module in pkgutil.iter_modules(jetgraph.policies.__path__):
        policy = importlib.import_module(f"jetgraph.policies.{module.name}").POLICY
        found[policy.name] = policy
    return found


def get_policy(policy: str | Policy) -> Policy:
    """A policy by name, from a file (a path that ends in ``.json``), or itself.

    Raises:
        ValueError: no policy has that name (the message lists those that exist), or the file holds none, or one that
            goes by the name of a built-in policy and is another.
    """
    if isinstance(policy, Policy):
        return policy
    known = policies()
    if policy.endswith(".json"):
        return _read(Path(policy), known)
    if policy not in known:
        raise ValueError(
            f"policy {policy!r} does not exist; choose one of {', '.join(sorted(known))}, or the path of a .json file"
        )
    return known[policy]


def _read(path: Path, known: dict[str, Policy]) -> Policy:
    data = bounded_json.read_bytes(path)
    try:
        policy = Policy.from_plain(bounded_json.parse(data))
    except ValueError as error:
        raise ValueError(f"policy {path}: {error}") from error
    if policy.name in known and policy != known[policy.name]:
        raise ValueError(f"policy {path}: name {policy.name!r} belongs to a built-in policy that differs; rename yours")
    return policy


def check_matches(policy: Policy, names: Iterable[str]) -> None:
    """Every rule must decide something: ``names`` are the FQNs of all linears of the model.

    Raises:
        PolicyError: a rule that is not optional matches none of them, or only such as an earlier rule has decided.  The
            message names each such rule, and the linears nearest to what it asks for or the rules that came first.
    """
    linears = list(names)
    sides = {"train": policy.train} if policy.same_on_both_sides else {"train": policy.train, "rollout": policy.rollout}
    faults = [
        f"{side}[{i}] {rule.pattern!r} {fault}"
        for side, rules in sides.items()
        for i, rule in enumerate(rules)
        if not rule.optional and (fault := _why_idle(rules, i, linears))
    ]
    if faults:
        raise PolicyError(f"policy {policy.name!r}: rule " + "; rule ".join(faults))


def _why_idle(rules: Sequence[Rule], index: int, names: Sequence[str]) -> str:
    """Why a rule decides no linear; empty if it decides one."""
    matched = [name for name in names if rules[index].matches(name)]
    if not matched:
        near = ", ".join(nearest(rules[index].pattern, names)) or "none, it has no linears"
        return f"matches no linear of the model; nearest: {near}"
    earlier = {next((i for i, rule in enumerate(rules[:index]) if rule.matches(name)), None) for name in matched}
    if None in earlier:
        return ""
    first = ", ".join(repr(rules[i].pattern) for i in sorted(i for i in earlier if i is not None))
    return f"decides nothing, because {first} comes before it and decides all that it matches; put it first"


def nearest(pattern: str, names: Sequence[str], count: int = 3) -> list[str]:
    """The names that look most like what a pattern asks for; the first ones where none does."""
    text = pattern.removeprefix("re:").replace("\\", "")
    return difflib.get_close_matches(text, names, count, cutoff=0.5) or list(names[:count])

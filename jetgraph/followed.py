"""Training that follows an engine's own arithmetic, for a rollout that runs without our plugin.

    jetgraph.compile(model, "jet", engine="vllm-stock")

Usually the engine follows training: the plugin brings training's operators along.  Stock vLLM has its own, and where
they are known (attested on an H200: docs/findings.md) training can compute the same numbers up to the order of sums:

    scales            amax counts as at least 1e-10, for every FP8 operand                                F4
    RMSNorm           one rounding, r(w · (x · rsqrt(mean(x²) + eps))), where Hugging Face rounds x̂ first  F1, F2
    rotary embedding  one rounding, r(x₁·c − x₂·s), where Hugging Face rounds each product                F3
    frequencies       1/θ^(2i/d) evaluated on the device that trains, as vLLM does on its own             F10

silu·up, residual adds, embedding, head and log-softmax are Hugging Face's formulas in both.  Which of vLLM's settings
compute all this is said by `jetgraph_vllm.stock_settings`; that they do is verified like any other engine's graph.

The model's own code runs: norms get their input in FP32 and their result is rounded, cos and sin come in FP32 (the
numbers of their BF16 values), and attention rounds what they turned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from jetgraph.errors import CompileError
from jetgraph.policy import FP8Recipe, Policy, PolicyError, Rule
from jetgraph.precision import Division, ScaleRule


@dataclass(frozen=True)
class Followed:
    """What an engine's own kernels make of FP8: the group that they know, and how they scale it.

    ``integration`` is the engine's name in `jetgraph.engines`.
    """

    name: str
    integration: str
    group: int
    rule: ScaleRule

    def policy(self, policy: Policy) -> Policy:
        """``policy`` with every FP8 recipe as this engine computes it.

        Raises:
            PolicyError: a recipe that no setting of the engine computes.
        """
        train = tuple(self._rule(policy, rule) for rule in policy.train)
        rollout = () if policy.same_on_both_sides else tuple(self._rule(policy, rule) for rule in policy.rollout)
        if (train, rollout or train) == (policy.train, policy.rollout):
            return policy
        described = f"{policy.description}; scales as {self.name} computes them"
        return replace(policy, name=f"{policy.name}@{self.name}", description=described, train=train, rollout=rollout)

    def _rule(self, policy: Policy, rule: Rule) -> Rule:
        if rule.fp8 is None:
            return rule
        why = ""
        if rule.fp8.group != self.group:
            why = f"groups of {rule.fp8.group or 'the whole tensor'}; its kernels know {self.group}"
        elif rule.fp8.rule.power_of_two:
            why = "scales that are powers of two; with them it quantises every weight again at load (JG009)"
        elif rule.fp8.rule.qmax != self.rule.qmax:
            why = f"qmax {rule.fp8.rule.qmax:g}; its kernels have {self.rule.qmax:g}"
        if why:
            raise PolicyError(
                f"policy {policy.name!r}, rule {rule.pattern!r}: {self.name} cannot be followed with {why}"
            )
        return replace(rule, fp8=FP8Recipe(self.group, self.rule))


ENGINES = {"vllm-stock": Followed("vllm-stock", "vllm", 128, ScaleRule(448.0, 1e-10, Division.DIVIDE))}
"""By the name that `jetgraph.compile` and `jetgraph.export` take."""


def get_followed(engine: str) -> Followed:
    """
    Raises:
        ValueError: nothing is known of that engine's own arithmetic; lists those that can be followed.
    """
    if engine not in ENGINES:
        known = ", ".join(sorted(ENGINES))
        raise ValueError(
            f"engine {engine!r} cannot be followed; choose one of {known}, or leave it out: with our plugin the engine "
            "follows training"
        )
    return ENGINES[engine]


def check_followable(model: nn.Module) -> None:
    """Whether the formulas above are those of every norm, activation and rotary embedding in ``model``.

    Raises:
        CompileError: names the modules that are others, and why.
    """
    found = list(_unknown(model))
    if found:
        lines = "".join(f"\n  {fqn}: {reason}" for fqn, reason in found[:8])
        raise CompileError(f"{type(model).__name__} cannot follow an engine's own kernels:{lines}")


def _unknown(model: nn.Module) -> Iterator[tuple[str, str]]:
    activation = getattr(getattr(model, "config", None), "hidden_act", "silu")
    if activation not in ("silu", "swish"):
        yield "config.hidden_act", f"{activation!r}; of activations only silu is known"
    if not any(map(_is_norm, model.modules())) or not any(map(_is_rotary, model.modules())):
        yield (
            "model",
            "its norms or rotary embedding are no modules, as in an exported program; compile the model itself",
        )
    for fqn, module in model.named_modules():
        if _is_norm(module) and not _is_plain_norm(module):
            yield fqn, f"{type(module).__name__}; expected w · x · rsqrt(mean(x²) + eps), as Llama and Qwen have it"
        if _is_rotary(module):
            kind = getattr(module, "rope_type", None)
            if kind != "default":
                yield fqn, f"rope_type {kind!r}; of rotary embeddings only the default is known"


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def _is_rotary(module: nn.Module) -> bool:
    return isinstance(getattr(module, "inv_freq", None), Tensor)


def _is_plain_norm(module: nn.Module) -> bool:
    """By its numbers: an RMSNorm in FP32 without the weight's offset, bias or another order of products."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    if not isinstance(weight, Tensor) or eps is None or len(list(module.parameters())) != 1:
        return False
    if weight.is_meta:
        return True  # no numbers yet; what a family's class computes is seen when one with numbers is compiled
    draw = torch.Generator().manual_seed(0)
    x = torch.randn((3, weight.shape[0]), generator=draw).to(weight.device)
    want = weight.float() * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))
    with torch.no_grad():
        return torch.equal(module(x).float(), want)


def follow(model: nn.Module, device: torch.device | None = None) -> None:
    """Make ``model``, which `check_followable` accepts, compute as above; the same module, parameters and names.

    ``device``: where it will run; by default where its frequencies lie.
    """
    check_followable(model)
    for module in model.modules():
        if _is_norm(module):
            module.register_forward_pre_hook(_in_f32)
            module.register_forward_hook(_rounded)
        elif _is_rotary(module):
            _evaluate_frequencies(module, device or module.inv_freq.device)  # type: ignore[arg-type]
            module.register_forward_hook(_widened)
        elif type(module).__name__.endswith("Attention"):
            module.rounds_rotary = True  # type: ignore[assignment]  # read by jetgraph.lowering.attention


def _evaluate_frequencies(rotary: nn.Module, device: torch.device) -> None:
    """``inv_freq`` again, evaluated on ``device``: Hugging Face's loader makes it on the CPU, whose pow differs."""
    lies_on = rotary.inv_freq.device
    if "meta" not in (device.type, lies_on.type):
        with device:  # transformers from 5.17 on moves there what it evaluates on the default device
            evaluated, _ = rotary.compute_default_rope_parameters(rotary.config, device)  # type: ignore[operator]
        rotary.inv_freq = evaluated.to(lies_on)


def _in_f32(norm: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    x, *rest = args
    return (x.float(), *rest)


def _rounded(norm: nn.Module, args: tuple, out: Tensor) -> Tensor:
    return out.to(torch.bfloat16)


def _widened(rotary: nn.Module, args: tuple, out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    cos, sin = out
    return cos.float(), sin.float()

"""How much of the model does one optimizer step really change?  Counted on weights as the forward reads them.

    before = snapshot(model, policy="jet")
    optimizer.step()
    logger.log(before.changes(model).scalars(), step)

At a learning rate of 1e-6 BF16 masters swallow most updates, and FP8 codes show fewer still; codes and scales are what
a rollout samples with.  Everything is compared as bytes, on the device; nothing is hashed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from jetgraph.export import export_linear, rollout_linears
from jetgraph.model_linears import linears_of_model
from jetgraph.policy import LinearPrecision, Policy, get_policy
from jetgraph.sync.manifest import SCALE_SUFFIX
from jetgraph.sync.masters import in_bf16


@dataclass(frozen=True)
class Changes:
    """Counts over the whole model; ``codes`` and ``scales`` are of the linears that the policy quantises."""

    num_weights: int = 0
    num_weights_changed: int = 0
    num_codes: int = 0
    num_codes_changed: int = 0
    num_scales: int = 0
    num_scales_changed: int = 0

    def __add__(self, other: Changes) -> Changes:
        return Changes(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def scalars(self, prefix: str = "jetgraph/") -> dict[str, float]:
        """``{prefix}weights_changed``, ``codes_changed``, ``scales_changed``: fractions, of kinds that exist."""
        found = {}
        for kind in ("weights", "codes", "scales"):
            if total := getattr(self, f"num_{kind}"):
                found[f"{prefix}{kind}_changed"] = getattr(self, f"num_{kind}_changed") / total
        return found


@dataclass(frozen=True)
class Snapshot:
    """A BF16 copy of every parameter, sharded as the parameter is: 2 bytes each, on its device."""

    weights: dict[str, Tensor]
    linears: dict[str, LinearPrecision]

    def changes(self, model: torch.nn.Module) -> Changes:
        """What differs in ``model`` now.

        Codes are made again from both sides, one weight at a time: two quantisations each, and under FSDP2 two
        all-gathers, so every rank must call this; each gets the counts of the whole model.

        Raises:
            ValueError: the model has other parameters than at the snapshot, or a weight is not finite.
        """
        names = [name for name, _ in model.named_parameters()]
        if names != list(self.weights):
            odd = sorted(set(names) ^ set(self.weights))
            raise ValueError(
                f"the model has {len(names)} parameters, the snapshot {len(self.weights)} (first difference: "
                f"{odd[0] if odd else 'their order'}): expected the model that was snapshotted"
            )
        total = Changes()
        for name, parameter in model.named_parameters():
            total += self._changes_of(name, in_bf16(name, self.weights[name]), in_bf16(name, parameter))
        return total

    def _changes_of(self, name: str, old: Tensor, new: Tensor) -> Changes:
        weights = Changes(new.numel(), _num_differing(old, new))
        module, _, leaf = name.rpartition(".")
        linear = self.linears.get(module) if leaf == "weight" else None
        if linear is None or not linear.quantized:
            return weights
        if not weights.num_weights_changed:
            after = before = export_linear(name, new, linear)  # equal weights have equal codes
        else:
            before, after = (export_linear(name, w, linear) for w in (old, new))
        codes = scales = (0, 0)
        for sent, tensor in after.items():
            counted = (tensor.numel(), _num_differing(before[sent], tensor))
            if sent.endswith(SCALE_SUFFIX):
                scales = counted
            else:
                codes = counted
        return weights + Changes(0, 0, *codes, *scales)


def snapshot(model: torch.nn.Module, policy: str | Policy | None = None) -> Snapshot:
    """Copy the weights before a step; ``policy`` says which linears have codes (a compiled model has its own).

    Without a policy only weights are counted.

    Raises:
        PolicyError: the policy does not fit the model.
    """
    compiled = getattr(model, "jetgraph", None)
    chosen = policy if policy is not None or compiled is None else compiled.policy
    linears = {} if chosen is None else rollout_linears(get_policy(chosen), linears_of_model(model))
    weights = {name: p.detach().to(torch.bfloat16, copy=True) for name, p in model.named_parameters()}
    return Snapshot(weights, linears)


def _num_differing(old: Tensor, new: Tensor) -> int:
    """As bytes, so that −0 is not 0 and a NaN equals itself."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[new.element_size()]
    return int((old.view(integer) != new.view(integer)).sum())

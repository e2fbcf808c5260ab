"""BF16 masters that keep small updates: any torch optimizer, run in FP32 and rounded by a chosen rule.

    optimizer = RoundedMasters(torch.optim.AdamW(model.parameters(), lr=1e-6), "stochastic", seed=0)

A BF16 weight of 0.02 has neighbours 1.2e-4 away, so an update of 1e-6 rounds to nothing in 98 of 100 weights.  Here the
inner optimizer updates an FP32 copy, made for a few parameters at a time and dropped again, and the result is rounded:

* ``nearest``: to the nearest BF16; loses small updates, as plain BF16 training does;
* ``stochastic``: up or down at random, right on average; no memory;
* ``kahan``: to the nearest, and what that lost is added back before the next update (BF16, 2 bytes a parameter); the
  sum has 17 bits, so updates below 2^-18 of a weight still vanish in the end;
* ``split``: to the nearest, and the lower half of the FP32 master beside it (int16, 2 bytes): loses nothing.

torch has none of these and torchao has the second only inside its own AdamW variants, with the global generator; so
this is ours.  FP32 masters, which lose nothing, need no such class: `jetgraph.sync.masters` casts them once to BF16.
docs/mismatch.md compares memory and what each loses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from jetgraph.masters import rounding

Mode = Literal["nearest", "stochastic", "kahan", "split"]
COMPENSATION = "compensation"
_COMPENSATION_DTYPE = {"kahan": torch.bfloat16, "split": torch.int16}
_SETTINGS = ("rounding", "rounding_seed", "rounding_step")


class RoundedMasters(torch.optim.Optimizer):
    """Wraps a torch optimizer that has not stepped yet; use it in its place, with schedulers, clipping, checkpoints.

    ``param_groups`` hold the model's own parameters and the inner optimizer's settings; ``state`` the inner state, FP32
    for BF16 parameters, and with ``kahan`` and ``split`` the entry "compensation".  FP32 parameters are stepped as they
    are.  DTensor parameters (FSDP2) are stepped by their local shards, so the inner optimizer must be elementwise, as
    SGD, Adam and AdamW are; their state in `state_dict` is DTensors again.

    Stochastic rounding draws from a generator of its own, seeded by ``seed`` and the step's number: a resumed run
    repeats the bits, and replicas (DDP) stay equal if their seed is.  Other world sizes draw other numbers.

    Args:
        optimizer: already made over the model's parameters.
        mode: see the module.
        seed: of the stochastic mode; the same on every rank.
        chunk: elements that have FP32 copies at one time (8 bytes each: weight and gradient), unless one tensor is
            larger.

    Raises:
        ValueError: the optimizer has stepped, or calls its closure several times (LBFGS); a parameter is FP16; the mode
            is unknown.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, mode: Mode, *, seed: int = 0, chunk: int = 1 << 26) -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode is {mode!r}: expected one of {', '.join(get_args(Mode))}")
        if optimizer.state:
            raise ValueError(
                "the optimizer has state already, in its own parameters' format: wrap a new one, then load_state_dict"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates the model between its own updates: expected one update a step, as AdamW")
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.dtype not in (torch.bfloat16, torch.float32, torch.float64):
                raise ValueError(f"a parameter is {parameter.dtype}: expected bfloat16 masters, or float32 beside them")
        self.mode, self.seed, self.chunk = mode, seed, chunk
        self._inner = optimizer
        self._stand_ins: dict[Tensor, Tensor] = {}
        settings = {"rounding": mode, "rounding_seed": seed, "rounding_step": 0}
        super().__init__([group | settings for group in optimizer.param_groups], optimizer.defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Called by torch for the groups given at the start; a later one would miss in the inner optimizer."""
        super().add_param_group(param_group)
        groups = self._inner.param_groups
        if len(self.param_groups) > len(groups):
            raise ValueError("add the group to the optimizer before it is wrapped")
        groups[len(self.param_groups) - 1]["params"] = [self._stand_in(p) for p in self.param_groups[-1]["params"]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One update of every parameter that has a gradient; a closure is evaluated once, before.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._hand_over_settings()
        number = self.param_groups[0]["rounding_step"]
        generators: dict[torch.device, torch.Generator] = {}
        with self._hidden_gradients() as gradients:
            for parameters in self._chunks(list(gradients)):
                self._step_some(parameters, gradients, generators, number)
        for mine, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            mine.update({k: v for k, v in theirs.items() if k != "params"})
            mine["rounding_step"] = number + 1
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, in torch's format, with "compensation"; mode, seed and step are in the groups."""
        packed = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        packed["state"] = {
            index: {name: _as_shard_of(parameters[index], value) for name, value in entries.items()}
            for index, entries in packed["state"].items()
        }
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also of the same optimizer unwrapped: the run goes on with rounding, from step 0 of its random numbers.

        Raises:
            ValueError: it was saved in another mode, or as torch raises where groups differ.
        """
        saved = {group.get("rounding", self.mode) for group in state_dict["param_groups"]}
        if saved != {self.mode}:
            raise ValueError(
                f"saved with mode {', '.join(sorted(saved))}, loaded into {self.mode!r}: make the optimizer with the "
                "mode of the checkpoint, or start its state anew"
            )
        state = {i: {k: _local(v) for k, v in entries.items()} for i, entries in state_dict["state"].items()}
        plain = [{k: v for k, v in group.items() if k not in _SETTINGS} for group in state_dict["param_groups"]]
        self._inner.load_state_dict({"state": state, "param_groups": plain})
        for mine, theirs, given in zip(
            self.param_groups, self._inner.param_groups, state_dict["param_groups"], strict=True
        ):
            mine.update({k: v for k, v in theirs.items() if k != "params"})
            mine["rounding_seed"] = given.get("rounding_seed", self.seed)
            mine["rounding_step"] = given.get("rounding_step", 0)
        self.state.clear()
        for parameter in (p for group in self.param_groups for p in group["params"]):
            entries = self._inner.state.get(self._stand_in(parameter))
            if entries:
                if COMPENSATION in entries:  # torch cast it to the dtype of the stand-in
                    entries[COMPENSATION] = entries[COMPENSATION].to(_COMPENSATION_DTYPE[self.mode])
                self.state[parameter] = entries

    def _stand_in(self, parameter: Tensor) -> Tensor:
        """What the inner optimizer knows in place of a parameter: FP32, local, without memory between steps."""
        if parameter.dtype != torch.bfloat16:
            return parameter
        if parameter not in self._stand_ins:
            empty = torch.empty(0, dtype=torch.float32, device=_local(parameter).device)
            self._stand_ins[parameter] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        return self._stand_ins[parameter]

    def _hand_over_settings(self) -> None:
        """Schedulers write learning rates into this optimizer's groups."""
        for mine, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            theirs.update({k: v for k, v in mine.items() if k != "params" and k not in _SETTINGS})

    @contextmanager
    def _hidden_gradients(self) -> Iterator[dict[Tensor, Tensor]]:
        """Parameters with their gradients, which the inner optimizer does not see: what it does not see it skips."""
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        gradients = {p: p.grad for p in parameters}
        if any(g.layout != torch.strided for g in map(_local, gradients.values())):
            raise RuntimeError("a gradient is sparse: expected dense gradients, which masters are rounded after")
        try:
            for parameter in parameters:
                parameter.grad = None
            yield gradients
        finally:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient

    def _chunks(self, parameters: list[Tensor]) -> Iterator[list[Tensor]]:
        chunk: list[Tensor] = []
        held = 0
        for parameter in parameters:
            size = _local(parameter).numel()
            if chunk and held + size > self.chunk:
                yield chunk
                chunk, held = [], 0
            chunk.append(parameter)
            held += size
        if chunk:
            yield chunk

    def _step_some(
        self,
        parameters: list[Tensor],
        gradients: dict[Tensor, Tensor],
        generators: dict[torch.device, torch.Generator],
        number: int,
    ) -> None:
        try:
            for parameter in parameters:
                stand_in = self._stand_in(parameter)
                if stand_in is parameter:
                    parameter.grad = gradients[parameter]
                    continue
                stand_in.data = self._wide(parameter)
                stand_in.grad = _local(gradients[parameter]).float()
            self._inner.step()
            for parameter in parameters:
                stand_in = self._stand_in(parameter)
                self.state[parameter] = entries = self._inner.state[stand_in]
                if stand_in is not parameter:
                    self._round(_local(parameter.detach()), stand_in.detach(), entries, generators, number)
        finally:
            for parameter in parameters:
                stand_in = self._stand_in(parameter)
                stand_in.grad = None
                if stand_in is not parameter:
                    stand_in.data = stand_in.data.new_empty(0)

    def _wide(self, parameter: Tensor) -> Tensor:
        """The FP32 master that BF16 parameter and compensation stand for, in memory of its own."""
        master, kept = _local(parameter.detach()), self.state.get(parameter, {}).get(COMPENSATION)
        if kept is None:
            return master.float()
        return rounding.joined(master, kept) if self.mode == "split" else master.float() + kept

    def _round(
        self,
        master: Tensor,
        value: Tensor,
        entries: dict[str, Any],
        generators: dict[torch.device, torch.Generator],
        number: int,
    ) -> None:
        if self.mode == "nearest":
            master.copy_(value)
        elif self.mode in _COMPENSATION_DTYPE:
            apart = rounding.split if self.mode == "split" else rounding.compensated
            rounded, entries[COMPENSATION] = apart(value)
            master.copy_(rounded)
        else:
            if value.device not in generators:
                generators[value.device] = torch.Generator(value.device)
                generators[value.device].manual_seed(_seed(self.param_groups[0]["rounding_seed"], number))
            master.copy_(rounding.stochastic(value, generators[value.device]))


def _seed(seed: int, step: int) -> int:
    """Of one step; a large odd factor keeps the steps of neighbouring seeds apart."""
    return (seed * 0x9E3779B97F4A7C15 + step) % 2**63


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_shard_of(parameter: Tensor, value: Any) -> Any:
    """State of a sharded parameter as a DTensor of the same placement, for checkpoints that reshard."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != parameter.to_local().shape or value.dim() == 0:
        return value
    return DTensor.from_local(
        value, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape,
        stride=parameter.stride(),
    )  # fmt: skip

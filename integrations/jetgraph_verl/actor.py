"""VeRL's FSDP2 engine with one change: the model it builds is compiled by jetgraph before it is sharded.

Actor and reference policy are built by the same class, so both run the policy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

import jetgraph
from jetgraph.lowering import registry
from jetgraph.masters import RoundedMasters
from jetgraph.policy import Policy
from jetgraph.replay import replay_step
from jetgraph.sync import Update, publish
from jetgraph.trainer import capture_step, token_logprobs
from jetgraph_verl import cpu
from jetgraph_verl.options import Options


class JetgraphEngine(FSDPEngineWithLMHead):
    """``options`` is set by `install`, once in a worker's process."""

    options: Options

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()
        restore_rotary_buffers(module)
        fused = False if self.options.codegen == "fx" else None
        return jetgraph.compile(
            module, self.options.policy, codegen=self.options.codegen, fused=fused, device=where_it_runs()
        )

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        module = super()._build_fsdp_module(module)
        # FSDP2 casts parameters and inputs to BF16 itself; VeRL's autocast around it would choose roundings of its own
        self._autocast_dtype = torch.float32
        return module

    def _build_optimizer(self, module: torch.nn.Module) -> Any:
        optimizer = super()._build_optimizer(module)
        if self.options.rounding == "nearest":
            return optimizer
        return RoundedMasters(optimizer, self.options.rounding, seed=self.engine_config.seed)

    def prepare_model_outputs(self, output: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Temperature and log-softmax in FP32, as the rollout engine computes them; VeRL would divide BF16 logits."""
        output.logits = output.logits.float()
        return super().prepare_model_outputs(output, *args, **kwargs)

    def get_per_tensor_param(self, **_: Any) -> tuple[Weights, None]:
        """The masters, to be quantised by training's own operator while they are sent."""
        return Weights(self.module, self.options.policy), None

    def capture(self, path: Path) -> dict[str, Any]:
        """Record one training forward of the live, sharded model and write its graph to ``path`` (rank 0).

        Every rank must call this.  Returns the replay gate's outcome.
        """
        was_training = self.module.training
        self.module.train()
        try:
            step = capture_step(self.module.jetgraph, backward=False, grad_mode=True)  # type: ignore[arg-type]
            graph = replay_step(self.module, step)
        finally:
            self.module.train(was_training)
            self.module.reshard()  # type: ignore[operator]
        if self.rank == 0:
            graph.save(path)
        return graph.meta["replay"]


class Weights:
    """What the trainer hands to its rollout: the masters, which become an update once their version is known."""

    def __init__(self, module: torch.nn.Module, policy: Policy) -> None:
        self.module = module
        self.policy = policy

    @property
    def num_bytes(self) -> int:
        """No update is larger: BF16 is the widest format that is sent."""
        return 2 * sum(parameter.numel() for parameter in self.module.parameters())

    def at(self, version: int) -> Update:
        return publish(self.module, version, self.policy)


def where_it_runs() -> torch.device:
    """This worker's device, to which FSDP2 moves a model that VeRL built, and we compiled, on the CPU."""
    return torch.device("cpu") if cpu.is_asked_for() else registry.this_device()


def restore_rotary_buffers(module: torch.nn.Module) -> None:
    """Rotary frequencies in FP32 again: VeRL's ``module.to(dtype)`` rounds them to BF16, which no engine does."""
    for part in module.modules():
        # one of each per layer type in some families: sliding_attention_inv_freq, full_attention_original_inv_freq
        rounded = {name: b for name, b in part.named_buffers(recurse=False) if name.endswith("inv_freq")}
        if rounded and hasattr(part, "config"):
            fresh = type(part)(part.config)
            for name, buffer in rounded.items():
                setattr(part, name, getattr(fresh, name).to(buffer.device))


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """VeRL's function of this name with the one formula that the graph has: FP32 log-softmax, then the label's entry.

    logits [T, V], labels [T] → [T] FP32.
    """
    return token_logprobs(logits.unsqueeze(0), labels.unsqueeze(0))[0]


def install(options: Options) -> None:
    """In this process VeRL's FSDP2 engine for language models is `JetgraphEngine`, under ``options``."""
    JetgraphEngine.options = options
    engines = EngineRegistry._engines["language_model"]["fsdp2"]
    for key in list(engines):
        engines[key] = JetgraphEngine
    engines["cpu"] = JetgraphEngine
    transformer_impl.logprobs_from_logits = logprobs_from_logits
    if cpu.is_asked_for():
        cpu.unpinned_offload()

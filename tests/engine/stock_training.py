"""The training that the stock vLLM captures are held against: the same random model, under several policies.

`tests/data/stock_vllm/train_*.json.gz` are graphs of live steps of exactly these models; a slow test makes them again.
The checkpoint that vLLM loaded on the H200 was exported from this model, so digests of codes and scales compare.
Where a change of the lifter changes them on purpose: ``python -m tests.engine.stock_training`` writes them anew.
"""

from __future__ import annotations

import gzip
import types
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

import jetgraph
from jetgraph.graph import PrecisionGraph
from jetgraph.policy import BLOCK_LINEARS, FP8Recipe, Policy, Rule
from jetgraph.precision import ScaleRule
from jetgraph.replay import replay_step
from jetgraph.trainer import capture_step
from tests.core.small_models import random_model

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def fp8_policy(name: str, rule: ScaleRule) -> Policy:
    return Policy(
        name,
        "jet by another scale rule",
        (Rule("lm_head", None, optional=True), Rule(BLOCK_LINEARS, FP8Recipe(rule=rule))),
    )


POLICIES: dict[str, str | Policy] = {
    "jet": "jet",
    "jet_ue8m0": "jet_ue8m0",
    "jet_floor": fp8_policy("jet_floor", ScaleRule(amax_floor=1e-10)),
    "jet_ue8m0_floor": fp8_policy("jet_ue8m0_floor", ScaleRule(amax_floor=4.48e-8, power_of_two=True)),
    "vllm_arithmetic": fp8_policy("vllm_arithmetic", ScaleRule(amax_floor=1e-10)),
}
"""By the name of the stored graph.  vLLM's activation floor is 1e-10, and 448 · 1e-10 for power-of-two scales."""


def model_for(name: str) -> PreTrainedModel:
    """BF16; rotary frequencies FP32, as `from_pretrained` has them; ``vllm_arithmetic`` rounds as vLLM's CUDA ops."""
    model = random_model("qwen3", layers=2, seed=0, sizes=SIZES)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    if name == "vllm_arithmetic":
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":
                module.forward = types.MethodType(_rms_norm_of_one_rounding, module)
    return model


def train(name: str) -> PrecisionGraph:
    """The graph of a live forward step, replayed."""
    model = model_for(name)
    with rotary_of_one_rounding() if name == "vllm_arithmetic" else _as_it_is():
        jetgraph.compile(model, policy=POLICIES[name])
        step = capture_step(model.jetgraph, backward=False)
        return replay_step(model, step)


def _rms_norm_of_one_rounding(self: torch.nn.Module, x: Tensor) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
    return (self.weight.float() * normed).to(x.dtype)


class _as_it_is:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


class rotary_of_one_rounding:
    """Within it, transformers' Qwen3 turns q and k in FP32 and rounds once."""

    def __enter__(self) -> None:
        from transformers.models.qwen3 import modeling_qwen3

        self.module, self.original = modeling_qwen3, modeling_qwen3.apply_rotary_pos_emb
        self.module.apply_rotary_pos_emb = _apply_rotary

    def __exit__(self, *_: object) -> None:
        self.module.apply_rotary_pos_emb = self.original


def _apply_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim).float(), sin.unsqueeze(unsqueeze_dim).float()
    turn: Callable[[Tensor], Tensor] = lambda x: (x.float() * cos + _half_turned(x.float()) * sin).to(x.dtype)  # noqa: E731
    return turn(q), turn(k)


def _half_turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def main() -> None:
    folder = Path(__file__).resolve().parents[1] / "data" / "stock_vllm"
    for name in POLICIES:
        text = train(name).to_json()
        (folder / f"train_{name}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()

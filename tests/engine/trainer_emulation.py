"""The trainer's eager forward, built from Hugging Face's own model and the `torch.ops.jetgraph` operators.

Independent of the engine: transformers' norm, rotary, SiLU and residuals, one whole sequence per call, no cache.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from jetgraph.lowering import reference, torch_ops
from jetgraph.policy import LinearPrecision, get_policy


class QuantisedLinear(nn.Module):
    """Dynamic activation codes times weight codes, both by the declared precision."""

    def __init__(self, linear: nn.Linear, precision: LinearPrecision) -> None:
        super().__init__()
        weight = torch_ops.scale_arguments(precision.weight.scale)
        self.block = precision.weight.scale.granularity
        self.activation = torch_ops.scale_arguments(precision.activation.scale)
        self.codes, self.scale = torch.ops.jetgraph.quantize(linear.weight, *weight)
        reference.pin_weight(self.codes)

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = torch.ops.jetgraph.quantize(x.flatten(0, -2), *self.activation)
        block = self.block
        out = torch.ops.jetgraph.fp8_gemm(codes, scale, self.codes, self.scale, None, block.rows, block.cols)
        return out.view(*x.shape[:-1], -1)


class RowTileLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.jetgraph.row_tile_gemm(x, self.weight)


def reference_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_):
    return torch.ops.jetgraph.attention(query, key, value, scaling)[0], None


class Trainer:
    """Logprobs of a sequence by one teacher-forced forward."""

    def __init__(self, folder: Path, policy: str) -> None:
        ALL_ATTENTION_FUNCTIONS.register("jetgraph_reference", reference_attention)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).eval()
        self.model.config._attn_implementation = "jetgraph_reference"
        linears = [(name, m) for name, m in self.model.named_modules() if isinstance(m, nn.Linear)]
        for name, linear in linears:
            precision = get_policy(policy).linear(name, rollout=True)
            replacement = QuantisedLinear(linear, precision) if precision.quantized else RowTileLinear(linear)
            self.model.set_submodule(name, replacement)
        self._known: dict[tuple[int, ...], list[float]] = {}

    @torch.no_grad()
    def logprobs(self, tokens: list[int]) -> list[float]:
        """Of tokens[1:], given all before each."""
        key = tuple(tokens)
        if key not in self._known:
            logits = self.model(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
            chosen = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])
            self._known[key] = chosen[:, 0].tolist()
        return self._known[key]

"""Decoder blocks of one size, compiled by us and by peers: what `block`, `memory` and `scaling` measure.

Every arm is a fresh Qwen3 model with the same weights whose blocks are called by hand: hidden states in, hidden states
out, position embeddings beside them, plain causal attention.  An arm that cannot be made says why; it is never left out
silently.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import jetgraph
from benchmarks.gpu_time import milliseconds
from jetgraph.lowering.masks import Mask

QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128,
}  # fmt: skip
TINY = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


class NotAvailable(RuntimeError):
    """An arm's package is missing, or does not run here."""


@dataclass
class Arm:
    """A model and its blocks, compiled; ``hold`` shares quantised weights between calls."""

    name: str
    model: PreTrainedModel
    hold: Callable[[], AbstractContextManager] = nullcontext
    mask: Mask | None = None
    """What a block gets as its attention mask: causal either way."""

    def __post_init__(self) -> None:
        self.blocks = list(self.model.model.layers)
        self.embeddings: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, C] through all blocks."""
        if x.shape[:2] not in self.embeddings:
            positions = torch.arange(x.shape[1], device=x.device)[None]
            self.embeddings[x.shape[:2]] = self.model.model.rotary_emb(x, positions)  # type: ignore[index]
        for block in self.blocks:
            x = block(x, attention_mask=self.mask, position_embeddings=self.embeddings[x.shape[:2]])  # type: ignore[index]
            x = x[0] if isinstance(x, tuple) else x
        return x

    def step(self, x: Tensor, dy: Tensor) -> None:
        """Forward and backward; gradients are made and dropped."""
        out = self.forward(x.requires_grad_())
        torch.autograd.backward(out, dy)
        x.grad = None
        self.model.zero_grad(set_to_none=True)


def make_model(sizes: dict[str, int], layers: int, device: torch.device) -> PreTrainedModel:
    """BF16, the same weights at every call; a small vocabulary, because no token is ever read."""
    config = transformers.Qwen3Config(
        **sizes, num_hidden_layers=layers, vocab_size=128, tie_word_embeddings=True, attn_implementation="sdpa"
    )
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def _plain(model: PreTrainedModel, compiler: str) -> Arm:
    for block in model.model.layers:
        block.compile(backend=compiler, fullgraph=True)
    return Arm("BF16 torch.compile", model)


def _torchao(model: PreTrainedModel, compiler: str) -> Arm:
    if importlib.util.find_spec("torchao") is None:
        raise NotAvailable("torchao is not installed")
    try:
        from torchao.prototype.blockwise_fp8_training.linear import Float8BlockwiseLinearConfig
        from torchao.quantization import quantize_

        quantize_(model.model.layers, Float8BlockwiseLinearConfig())
        # Dynamo of torch 2.11 does not know the builtin below `scaled_mm` and would break the block's graph there
        torch.compiler.allow_in_graph(torch._scaled_mm_v2)
    except Exception as error:  # a peer's prototype may not fit this torch; that is its row, not our crash
        first_line = (str(error).strip() or "no message").splitlines()[0][:160]
        raise NotAvailable(f"torchao cannot be used here: {type(error).__name__}: {first_line}") from error
    for block in model.model.layers:
        block.compile(backend=compiler)
    return Arm("torchao Float8BlockwiseLinear", model)


def _ours(name: str, policy: str = "jet", *, provider: str, **options) -> Callable[[PreTrainedModel, str], Arm]:
    def make(model: PreTrainedModel, compiler: str) -> Arm:
        compiled = jetgraph.compile(model, policy, provider=provider, **options)
        mask = Mask("0", None) if provider == "reference" else None
        return Arm(name, compiled, compiled.jetgraph.hold_weights, mask)  # type: ignore[union-attr]

    return make


ARMS: dict[str, Callable[[PreTrainedModel, str], Arm]] = {
    "bf16": _plain,
    "torchao": _torchao,
    "bf16-default": _ours("BF16, default partitioner", "bf16", provider="stock", fused=False, codegen="fx"),
    "jet-unfused": _ours("jet, not fused", provider="stock", fused=False, codegen="fx"),
    "jet": _ours("jet", provider="reference", fused=True),
    "jet-sdpa": _ours("jet, torch's attention", provider="stock", fused=True),
    "jet-fx": _ours("jet, operator by operator", provider="reference", fused=True, codegen="fx"),
}
"""``jet`` is what `jetgraph.compile` gives by default: exact, its attention included.  With torch's attention a row's
bits may depend on the others."""


def make_arm(name: str, sizes: dict[str, int], layers: int, device: torch.device, compiler: str) -> Arm:
    """
    Raises:
        NotAvailable: the arm's package is missing.
    """
    print(f"{time.perf_counter():.0f} s: making {name}", file=sys.stderr, flush=True)
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # all arms' blocks share one code object, in two grad modes and sizes
    return ARMS[name](make_model(sizes, layers, device), compiler)


def numbers(batch: int, length: int, sizes: dict[str, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Hidden states and their gradient, [B, S, C]."""
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(batch, length, sizes["hidden_size"], generator=generator) for _ in range(2))
    return x.bfloat16().to(device), (dy / length).bfloat16().to(device)


def time_of(call: Callable[[], object], device: torch.device, repeats: int, settle_seconds: float = 0.0) -> float:
    """Median milliseconds of ``call``: device time on a GPU, wall time elsewhere."""
    if device.type == "cuda":
        return milliseconds(call, repeats, 2, settle_seconds)
    call()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return 1e3 * median(seconds)


def interleaved(
    calls: dict[str, Callable[[], object]], device: torch.device, turns: int, repeats: int, settle_seconds: float = 0.0
) -> dict[str, float]:
    """Median of ``turns`` medians for each call; the calls take turns, there and back."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns):
        for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
            times[name].append(time_of(calls[name], device, repeats, settle_seconds))
    return {name: median(values) for name, values in times.items()}

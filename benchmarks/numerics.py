"""Whole training steps on a GPU, provider by provider:  python -m benchmarks.numerics [--smollm2 DIR] [--json FILE]

Needs a CUDA device.  Two models, one step each: SmolLM2 (from a folder, else of its sizes with random weights) and four
layers of Qwen3-8B's sizes.  Gradients of every linear, by layer: BF16 against FP32, jet against BF16, and each provider
against the reference provider, which sums exactly.

FP8 codes keep four bits, so whatever moves a number by a little moves a few codes by a sixteenth, and a network carries
that on: two providers that differ in the last bits of a few sums end far apart.  How far is told by a control: the
reference provider itself, with one embedding value in 1,024 moved by one unit in its last place.  A provider passes if
it is no farther from the reference than jet is from BF16, and no farther than twice the control's noise (3 dB).

Figures are the worst over the linears.  SQNR(x, y) = 10 log₁₀(Σ y² / Σ (x - y)²) in dB; cosine of flattened tensors.
Next door: `benchmarks.finetune` trains for 200 steps.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import jetgraph
from benchmarks.gpu_time import device_name
from benchmarks.report import Row, report
from jetgraph.lowering import registry
from jetgraph.lowering.provider import ProviderError

SMOLLM2 = transformers.LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192, rms_norm_eps=1e-5,
)  # fmt: skip
QWEN3_8B = transformers.Qwen3Config(
    vocab_size=151936, hidden_size=4096, intermediate_size=12288, num_hidden_layers=4, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=False, max_position_embeddings=8192,
)  # fmt: skip
TINY = transformers.Qwen3Config(
    vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, tie_word_embeddings=False,
)  # fmt: skip
ARMS = ("deep_gemm", "dgrad=cublaslt,wgrad=cublaslt", "wgrad=cublaslt", "triton", "auto")
"""cuBLASLt's rows depend on their number, so it never serves FPROP; where DGRAD's sizes do not suit it, WGRAD alone."""
NUDGED = 1024
"""One value in so many of the embeddings is moved in the control."""
CONTROL_MARGIN = 3.0
"""dB: a provider's noise may have twice the power of the control's."""


def make(config: transformers.PreTrainedConfig, folder: str | None, device: str) -> PreTrainedModel:
    """BF16 on ``device``, the same weights at every call."""
    gc.collect()
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).train()
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


@torch.no_grad()
def nudge(model: PreTrainedModel) -> PreTrainedModel:
    """Move every `NUDGED`-th value of the embeddings to the next BF16 number away from zero."""
    bits = model.get_input_embeddings().weight.view(torch.int16).view(-1)
    bits[::NUDGED] += 1
    return model


def step(model: PreTrainedModel, ids: Tensor) -> dict[str, Tensor]:
    """Gradients of the mean cross entropy of the next token, of every linear in the blocks."""
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None and n.endswith("proj.weight")}


def sqnr(x: Tensor, y: Tensor) -> float:
    noise = (x - y).double().square().sum().item()
    return 10 * math.log10(y.double().square().sum().item() / noise) if noise else math.inf


def cosine(x: Tensor, y: Tensor) -> float:
    return torch.nn.functional.cosine_similarity(x.flatten().double(), y.flatten().double(), 0).item()


def worst(got: dict[str, Tensor], want: dict[str, Tensor]) -> tuple[float, float]:
    """(cosine, SQNR) of the linear that is farthest from ``want``."""
    return min(cosine(got[n], want[n]) for n in want), min(sqnr(got[n], want[n]) for n in want)


def compiled_step(model: PreTrainedModel, ids: Tensor, kernels: str) -> dict[str, Tensor]:
    """
    Raises:
        ProviderError: the kernels cannot run one of the model's GEMMs.
    """
    gradients = step(jetgraph.compile(model, "jet", kernels=kernels), ids)
    model.jetgraph.coverage().require()
    return gradients


def by_layer(got: dict[str, Tensor], want: dict[str, Tensor]) -> Iterator[tuple[str, float, float]]:
    """(layer, worst cosine, worst SQNR) in order."""
    layers: dict[str, list[str]] = {}
    for name in want:
        layers.setdefault(name.split(".self_attn")[0].split(".mlp")[0], []).append(name)
    for layer, names in layers.items():
        yield layer, *worst({n: got[n] for n in names}, {n: want[n] for n in names})


def figures(label: str, config, folder: str | None, device: str, batch: int, length: int) -> list[Row]:
    ids = torch.randint(0, config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)
    exact = step(make(config, folder, device).float(), ids)
    plain = step(make(config, folder, device), ids)
    reference = compiled_step(make(config, folder, device), ids, "reference")
    rows = []
    for what, got, want in (("BF16 against FP32", plain, exact), ("jet against BF16", reference, plain)):
        for layer, cos, noise in by_layer(got, want):
            rows.append(Row.fact(f"{label}, {layer}, {what}, cosine", cos))
            rows.append(Row.fact(f"{label}, {layer}, {what}, SQNR", noise, "dB"))
    cos, control = worst(compiled_step(nudge(make(config, folder, device)), ids, "reference"), reference)
    rows.append(Row.fact(f"{label}, control against reference, cosine", cos))
    rows.append(Row.fact(f"{label}, control against reference, SQNR", control, "dB"))
    least = max(worst(reference, plain)[1], control - CONTROL_MARGIN)
    for kernels in ARMS:
        try:
            got = compiled_step(make(config, folder, device), ids, kernels)
        except ProviderError as refused:
            print(f"{label}, {kernels}: refused, {refused}", flush=True)
            continue
        cos, noise = worst(got, reference)
        rows.append(Row.fact(f"{label}, {kernels} against reference, cosine", cos))
        rows.append(Row.above(f"{label}, {kernels} against reference, SQNR", noise, "dB", least))
        print(f"{label}, {kernels}: cosine {cos:.6f}, SQNR {noise:.1f} dB (least {least:.1f})", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", help="folder of the real weights; else its sizes with random weights")
    parser.add_argument("--only", choices=("smollm2", "qwen3-8b", "tiny"), help="tiny: the program's own test")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and options.only != "tiny":
        parser.error("these models need a CUDA device, and this machine has none; --only tiny runs anywhere")
    for name, line in registry.findings():
        print(f"{name}: {line}", flush=True)
    rows = []
    if options.only in (None, "smollm2"):
        label = "SmolLM2" if options.smollm2 else "SmolLM2's sizes, random"
        rows += figures(label, SMOLLM2, options.smollm2, device, 4, 128)
    if options.only in (None, "qwen3-8b"):
        rows += figures("4 layers of Qwen3-8B", QWEN3_8B, None, device, 2, 256)
    if options.only == "tiny":
        rows += figures("tiny", TINY, None, device, 2, 17)
    return report(rows, options.json, device_name() if device == "cuda" else "cpu")


if __name__ == "__main__":
    sys.exit(main())

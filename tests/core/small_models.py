"""Small random Hugging Face models with odd sizes, and one real step of them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "hidden_size": 320,
    "intermediate_size": 448,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


SMOLLM2_SIZES = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
"""SmolLM2-135M's own: 4.5 groups of 128, K and V of 192 rows."""

NARROW = SIZES | {"num_attention_heads": 5, "num_key_value_heads": 1}
"""For families whose heads fill the hidden size."""

WIDE = {
    "hidden_size": 2880,
    "intermediate_size": 320,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
"""22.5 groups of 128 along the hidden size."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama3": ("Llama", SIZES | {"rope_parameters": LLAMA3_ROPE}),
    "smollm2": ("Llama", SMOLLM2_SIZES | {"intermediate_size": 320, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", NARROW | {"intermediate_size": 2880, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", SIZES),
    "mistral": ("Mistral", WIDE | {"sliding_window": 7}),
    "gemma2": ("Gemma2", SIZES | ALTERNATING | {"query_pre_attn_scalar": 48, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3Text", SIZES | ALTERNATING | {"query_pre_attn_scalar": 48}),
    "phi4": ("Phi3", NARROW | {"partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2", NARROW),
    "gpt_neox": ("GPTNeoX", NARROW | {"use_parallel_residual": True}),
    # cheap to add, because nothing in the compiler knows them
    "gemma": ("Gemma", SIZES),
    "granite": (
        "Granite",
        NARROW | {"attention_multiplier": 0.1, "residual_multiplier": 0.3, "embedding_multiplier": 4.0},
    ),
    "olmo3": ("Olmo3", NARROW | ALTERNATING),
    "smollm3": ("SmolLM3", NARROW | {"no_rope_layers": [1, 0]}),
    "starcoder2": ("Starcoder2", NARROW | {"sliding_window": 5}),
    "cohere": ("Cohere", NARROW),
    "glm4": ("Glm4", SIZES | {"attention_bias": True}),
    "phi": ("Phi", NARROW),
}
"""Name → configuration class (without `Config`) and options; two layers unless the test says otherwise."""


def family_config(kind: str, *, layers: int = 2, **options: Any) -> transformers.PreTrainedConfig:
    name, own = FAMILIES[kind]
    shared = {
        "num_hidden_layers": layers,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return getattr(transformers, f"{name}Config")(**shared | own | options)


def random_model(
    kind: str = "qwen3", *, layers: int = 2, seed: int = 0, tied: bool = False, sizes: dict[str, int] = SIZES
) -> PreTrainedModel:
    """A BF16 Qwen3 or Llama with every parameter far from its usual initial value; see `randomized`."""
    return randomized(family_config(kind, layers=layers, tie_word_embeddings=tied, **sizes), seed)


def random_family(kind: str, *, seed: int = 0, **options: Any) -> PreTrainedModel:
    """A BF16 model of one of the `FAMILIES`."""
    return randomized(family_config(kind, **options), seed)


def randomized(config: transformers.PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A BF16 model, so that no term hides in a 1 or a 0: norms, biases and weights are all random."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.05)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.2)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def random_ids(model: PreTrainedModel, batch: int, length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)


def one_step(
    model: PreTrainedModel, ids: Tensor, real: Tensor | None = None, **inputs: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and every gradient of Σ w · log p(next token), w non-uniform, over the ``real`` tokens [B, S]."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False, **inputs).logits
    logprobs = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    weight = torch.linspace(-1, 1, logprobs.shape[1], device=logits.device)
    if real is not None:
        weight = weight * (real[:, 1:] & real[:, :-1])
    (logprobs * weight).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

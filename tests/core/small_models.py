"""Small random Hugging Face models with odd sizes, and one real step of them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3Config

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


def random_model(
    kind: str = "qwen3", *, layers: int = 2, seed: int = 0, tied: bool = False, sizes: dict[str, int] = SIZES
) -> PreTrainedModel:
    """A BF16 model whose every parameter is far from its usual initial value, so that no term hides in a 1 or a 0."""
    torch.manual_seed(seed)
    options = {
        "num_hidden_layers": layers,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
    }
    config = {"qwen3": Qwen3Config, "llama": LlamaConfig}[kind](**sizes, **options)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.05)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def random_ids(model: PreTrainedModel, batch: int, length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, model.config.vocab_size, (batch, length), generator=generator)


def one_step(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and every gradient of Σ w · log p(next token), w non-uniform."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=ids, use_cache=False).logits
    logprobs = logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    (logprobs * torch.linspace(-1, 1, logprobs.shape[1])).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

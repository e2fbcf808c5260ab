"""The training side without a process group: rotary buffers, log-probabilities, and what `install` replaces."""

from __future__ import annotations

import copy

import pytest
import torch

from jetgraph.trainer import token_logprobs
from tests.core.small_models import random_family

pytestmark = pytest.mark.slow  # importing VeRL's engines takes some ten seconds


@pytest.fixture(autouse=True)
def verl(verl_on_cpu):
    pass


def frequencies(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if "inv_freq" in name}


@pytest.mark.parametrize("kind", ["llama", "llama3", "qwen3", "phi4", "gemma3"])
def test_rotary_frequencies_are_fp32_again(kind):
    from jetgraph_verl.actor import restore_rotary_buffers

    model = random_family(kind)
    fresh = frequencies(type(model)(model.config))
    model.to(torch.bfloat16)
    damaged = frequencies(model)
    assert fresh
    assert any(not torch.equal(damaged[name].float(), fresh[name]) for name in fresh)
    restore_rotary_buffers(model)
    restored = frequencies(model)
    assert restored.keys() == fresh.keys()
    for name in fresh:
        assert restored[name].dtype == torch.float32, name
        assert torch.equal(restored[name], fresh[name]), name
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())


def test_logprobs_are_the_graphs_formula_and_near_float64():
    from jetgraph_verl.actor import logprobs_from_logits

    generator = torch.Generator().manual_seed(0)
    logits = (30 + 4 * torch.randn(64, 2048, generator=generator)).to(torch.bfloat16)
    labels = torch.randint(0, 2048, (64,), generator=generator)
    exact = logits.double().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    found = logprobs_from_logits(logits.float(), labels)
    assert found.dtype == torch.float32
    assert torch.equal(found, token_logprobs(logits[None], labels[None])[0])
    error = (found.double() - exact).abs().max()
    in_bf16 = (logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0].double() - exact).abs().max()
    # FP32: some units in the last place of a logprob near 16 (1e-6 each); BF16: half of one is 1/32
    assert error < 1e-5
    assert in_bf16 > 1e-2


def test_logprobs_have_the_gradient_of_log_softmax_and_leave_the_logits_alone():
    """VeRL passes ``inplace_backward=True``: the logits may not be overwritten, entropy reads them too."""
    from jetgraph_verl.actor import logprobs_from_logits

    logits = torch.randn(3, 7, requires_grad=True)
    before, labels = logits.detach().clone(), torch.tensor([0, 3, 6])
    logprobs_from_logits(logits, labels, inplace_backward=True).sum().backward()
    onehot = torch.nn.functional.one_hot(labels, 7).double()
    torch.testing.assert_close(logits.grad.double(), onehot - before.double().softmax(-1), rtol=0, atol=1e-6)
    assert torch.equal(logits.detach(), before)


def test_install_replaces_the_language_models_fsdp2_engine_and_nothing_else(monkeypatch):
    from jetgraph_verl import actor
    from jetgraph_verl.options import Options
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl

    from jetgraph.policy import get_policy

    before = copy.deepcopy(EngineRegistry._engines)
    monkeypatch.setattr(EngineRegistry, "_engines", copy.deepcopy(before))
    monkeypatch.setattr(transformer_impl, "logprobs_from_logits", transformer_impl.logprobs_from_logits)
    monkeypatch.setattr(transformer_impl, "CPUOffloadPolicy", transformer_impl.CPUOffloadPolicy)
    monkeypatch.setattr(actor.JetgraphEngine, "options", None, raising=False)
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    monkeypatch.setenv("VERL_ENGINE_DEVICE", "cpu")

    options = Options(get_policy("jet").to_plain(), "start", "nowhere")
    actor.install(options)
    assert EngineRegistry.get_engine_cls("language_model", "fsdp2") is actor.JetgraphEngine
    assert actor.JetgraphEngine.options is options
    assert transformer_impl.logprobs_from_logits is actor.logprobs_from_logits
    assert transformer_impl.CPUOffloadPolicy(pin_memory=True).pin_memory is False
    after = EngineRegistry._engines
    assert set(after["language_model"]["fsdp2"].values()) == {actor.JetgraphEngine}
    for kind, found in before.items():
        for name, keys in found.items():
            if (kind, name) != ("language_model", "fsdp2"):
                assert after[kind][name] == keys, (kind, name)

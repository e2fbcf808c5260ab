"""A step that runs on the GPU is captured there: its graph means what the CPU's means, however its sequences lie."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import jetgraph
from jetgraph.replay import replay_step
from jetgraph.trainer import capture_step
from tests.core.small_models import random_ids, random_model

PACKED = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 0, 1, 2, 3, 4, 5, 6]])
LEFT = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 11])
BATCHES = {
    "one": ((1, 53), {}),
    "two": ((2, 29), {}),
    "packed": ((1, 17), {"position_ids": PACKED}),
    "padded left": ((2, 11), {"attention_mask": LEFT}),
}


@pytest.mark.parametrize("policy", ["jet", "bf16"])
def test_the_gpu_captures_the_terms_that_the_cpu_captures(policy):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    models = {device: jetgraph.compile(random_model("qwen3").to(device), policy) for device in ("cpu", "cuda")}

    def terms(device: str, shape: tuple[int, int], options: dict) -> list[tuple]:
        model = models[device]
        given = {name: value.to(device) for name, value in options.items()}
        graph = capture_step(model.jetgraph, random_ids(model, *shape).to(device), **given).graph
        assert graph.meta["unknown"] == []
        # a fused operator stands in one module, and what it computes comes from several
        return sorted((n.op, str(n.attrs), str(n.type), n.phase.value) for n in graph.nodes)

    for name, (shape, options) in BATCHES.items():
        assert terms("cuda", shape, options) == terms("cpu", shape, options), name


@pytest.mark.parametrize(("backend", "name", "arrangements"), [
    pytest.param(SDPBackend.CUDNN_ATTENTION, "cudnn", tuple(BATCHES), id="cudnn"),
    pytest.param(SDPBackend.FLASH_ATTENTION, "flash", ("one", "two"), id="flash"),  # it takes no mask
    pytest.param(SDPBackend.EFFICIENT_ATTENTION, "efficient", ("padded left", "packed"), id="efficient"),  # nor groups
])  # fmt: skip
def test_a_stock_step_replays_its_own_attention(backend, name, arrangements):
    """Which of its kernels torch takes is its own affair; the graph names it, and the replay runs it."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with sdpa_kernel(backend):
        model = jetgraph.compile(random_model("llama").to("cuda"), "bf16", provider="stock")
        for arrangement in arrangements:
            shape, options = BATCHES[arrangement]
            given = {key: value.to("cuda") for key, value in options.items()}
            step = capture_step(model.jetgraph, random_ids(model, *shape).to("cuda"), **given)
            assert step.graph.meta["unknown"] == [], arrangement
            kernels = {n.kernel for n in step.graph.nodes if n.op == "attention"}
            assert kernels == {f"aten::_scaled_dot_product_{name}_attention"}, arrangement
            cases = replay_step(model, step).meta["replay"]["cases"]
            # gradients may be added in another order each time (cuDNN, flash): they are computed, not compared
            assert [case.split(": ")[1] for case in cases[:2]] == ["equal", "equal"], (arrangement, cases)

"""What the plugin decides for a GPU, decided without one: compilation, merged GEMMs, surroundings of self-tests."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

from tests.engine.test_declaration import changed

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow  # imports vLLM


def configured(quantization, **compilation):
    """What `adopt` reads of a `VllmConfig`, with vLLM's defaults before they are filled in."""
    defaults = {"mode": None, "backend": "", "cudagraph_mode": None}
    return SimpleNamespace(quant_config=quantization, compilation_config=SimpleNamespace(**defaults | compilation))


@pytest.fixture
def adopt(monkeypatch):
    from jetgraph_vllm import exact_compilation

    monkeypatch.setenv("VLLM_USE_AOT_COMPILE", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "x")  # so that it is restored
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    return exact_compilation.adopt


@pytest.fixture
def quantizations():
    from jetgraph_vllm.quantization import JetgraphConfig

    return {ops: JetgraphConfig.from_config(changed(ops=ops)) for ops in ("exact", "stock")}


def test_an_exact_model_is_compiled_by_our_backend_in_full_graphs(adopt, quantizations):
    from vllm.config import CompilationMode, CUDAGraphMode

    for given in ({}, {"mode": CompilationMode.VLLM_COMPILE, "cudagraph_mode": CUDAGraphMode.FULL_AND_PIECEWISE}):
        config = configured(quantizations["exact"], **given)
        adopt(config)
        found = config.compilation_config
        assert (found.mode, found.backend) == (CompilationMode.DYNAMO_TRACE_ONCE, "jetgraph_vllm.capture.backend")
        assert found.cudagraph_mode is CUDAGraphMode.FULL
    assert (os.environ["VLLM_USE_AOT_COMPILE"], os.environ["VLLM_USE_V2_MODEL_RUNNER"]) == ("0", "0")


def test_what_the_user_chose_stays(adopt, quantizations):
    from vllm.config import CompilationMode, CUDAGraphMode

    chosen = [
        {"mode": CompilationMode.NONE},
        {"mode": CompilationMode.VLLM_COMPILE, "backend": "eager"},
        {"mode": CompilationMode.DYNAMO_TRACE_ONCE, "backend": "somebody.elses"},
    ]
    for given in chosen:
        config = configured(quantizations["exact"], **given)
        before = vars(config.compilation_config).copy()
        adopt(config)
        assert vars(config.compilation_config) == before
    config = configured(quantizations["exact"], cudagraph_mode=CUDAGraphMode.NONE)
    adopt(config)
    assert config.compilation_config.cudagraph_mode is CUDAGraphMode.NONE


def test_a_model_that_declares_no_exact_operators_stays_vllms(adopt, quantizations):
    for quantization in (quantizations["stock"], None, object()):
        config = configured(quantization)
        adopt(config)
        assert vars(config.compilation_config) == {"mode": None, "backend": "", "cudagraph_mode": None}
    assert os.environ["VLLM_USE_AOT_COMPILE"] == "1"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ


@pytest.mark.parametrize(("sizes", "merges"), [([256, 128, 128], True), ([192, 64, 64], False)])
def test_one_gemm_for_all_parts_gives_their_bits(quantizations, sizes, merges):
    from jetgraph_vllm.linear import Fp8BlockLinearMethod
    from jetgraph_vllm.parts import merged

    method = Fp8BlockLinearMethod(quantizations["exact"].declaration, "model.qkv_proj", ("q", "k", "v"))
    layer = torch.nn.Module()
    method.create_weights(layer, 256, sizes, 256, sum(sizes), torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    layer.weight.data = torch.randn(layer.weight.shape, generator=generator).to(torch.float8_e4m3fn)
    layer.weight_scale_inv.data = torch.rand(layer.weight_scale_inv.shape, generator=generator)
    x, bias = (
        torch.randn(5, 256, generator=generator).bfloat16(),
        torch.randn(sum(sizes), generator=generator).bfloat16(),
    )
    apart = method.apply(layer, x, bias)
    whole = merged(method.parts, method.block_rows)
    assert (whole is not None) == merges
    if whole is not None:
        method.products = (whole,)
        assert torch.equal(method.apply(layer, x, bias), apart)


def test_a_self_test_sees_torchs_own_defaults():
    from jetgraph_vllm.defaults import plain_defaults

    with torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            with plain_defaults():
                made = torch.zeros(1)
            after = torch.zeros(1)
        finally:
            torch.set_default_dtype(torch.float32)
    assert (made.device.type, made.dtype) == ("cpu", torch.float32)
    assert (after.device.type, after.dtype) == ("meta", torch.bfloat16)

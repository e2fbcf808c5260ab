"""What the plugin decides for a GPU, decided without one: compilation, merged GEMMs, surroundings of self-tests."""

from __future__ import annotations

import functools
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
    return functools.partial(exact_compilation.adopt, graphs=True)


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


def test_where_there_are_no_cuda_graphs_nobody_asks_for_them(adopt, quantizations):
    """On a CPU vLLM's default is Inductor as well; its numbers are not the trainer's."""
    config = configured(quantizations["exact"])
    adopt(config, graphs=False)
    assert (int(config.compilation_config.mode), config.compilation_config.backend) == (
        2,
        "jetgraph_vllm.capture.backend",
    )
    assert config.compilation_config.cudagraph_mode is None


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


@pytest.mark.parametrize(
    ("chosen", "products"),
    [
        ({256: "wide", 128: "narrow", 512: "wide"}, {(0, 256): "wide", (256, 384): "narrow", (384, 512): "narrow"}),
        ({256: "one", 128: "one", 512: "other"}, {(0, 256): "one", (256, 384): "one", (384, 512): "one"}),
        ({256: "one", 128: "one", 512: "one"}, {(0, 512): "one"}),
    ],
)
def test_every_product_of_a_merged_linear_names_its_own_provider(quantizations, monkeypatch, chosen, products):
    """By the number of output rows; one GEMM does all only if one provider runs the parts and the whole."""
    from jetgraph_vllm import linear

    class Registry:
        @staticmethod
        def choose(request, device):
            return SimpleNamespace(name=chosen.get(getattr(request, "num_out", None)))

    method = linear.Fp8BlockLinearMethod(quantizations["exact"].declaration, "model.qkv_proj", ("q", "k", "v"))
    layer = torch.nn.Module()
    method.create_weights(layer, 256, [256, 128, 128], 256, 512, torch.bfloat16)
    monkeypatch.setattr(linear, "registry", Registry)
    method.providers = method._choose(layer)
    assert {part.rows: name for part, name in method.providers.items()} == products
    method.products, called = tuple(method.providers), []

    def fp8_gemm(codes, scale, weight, weight_scale, bias, block_rows, group, provider):
        called.append(provider)
        return torch.zeros(codes.shape[0], weight.shape[0])

    operators = SimpleNamespace(quantize=torch.ops.jetgraph.quantize, fp8_gemm=fp8_gemm)
    monkeypatch.setattr(torch.ops, "jetgraph", operators)
    out = method.apply(layer, torch.zeros(5, 256, dtype=torch.bfloat16))
    assert out.shape == (5, 512)
    assert called == list(products.values())


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

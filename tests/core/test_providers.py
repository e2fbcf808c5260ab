"""Providers: refused early and in one sentence, never wrong silently, chosen without looking at the number of rows.

GPU results are tested in tests/gpu; here the rules of choice, the probes' refusals with faked tools and devices, the
kernels' indexing in Triton's interpreter, and cuBLASLt's shapes on the meta device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

import jetgraph
from jetgraph.lowering import cublaslt, deep_gemm, provider, reference, registry
from jetgraph.lowering.kernels import Kernels
from jetgraph.lowering.provider import Finding, Gemm, ProviderError, Quantizer
from tests.core.small_models import one_step, random_ids, random_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
JET = (448.0, 1e-12, "div", False)


@pytest.fixture
def hopper(monkeypatch):
    """A machine that says it has an H200; nothing must be launched on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.fixture
def toolchain(monkeypatch, tmp_path):
    """An empty PATH, and a function that puts an nvcc of some version on it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(deep_gemm, "DEFAULT_CUDA_HOME", tmp_path / "no-cuda")
    monkeypatch.setattr(deep_gemm, "module_name", lambda: "deep_gemm")

    def nvcc(answer: str) -> None:
        (tmp_path / "nvcc").write_text(f"#!/bin/sh\necho '{answer}'\n")
        (tmp_path / "nvcc").chmod(0o755)

    return nvcc


@pytest.fixture
def probes(monkeypatch):
    """Replace what the probes found; by default everything is usable and rows are independent."""
    found = {name: Finding(name, True, "fine", row_invariant=True) for name in registry.PROVIDERS}
    monkeypatch.setattr(registry, "probe", lambda name, device: found[name])
    registry._first.cache_clear()
    yield found
    registry._first.cache_clear()


# ------------------------------------------------------------------------------------------------- refusals, early


def test_without_cuda_one_sentence_each(monkeypatch):  # [C3]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("deep_gemm", "cublaslt", "triton"):
        finding = registry.PROVIDERS[name].probe(CUDA)
        assert not finding.ok
        assert finding.reason == "this machine has no CUDA device"
        assert "\n" not in str(finding)


@pytest.mark.parametrize(("name", "capability"), [("deep_gemm", (10, 0)), ("cublaslt", (8, 9)), ("triton", (8, 0))])
def test_wrong_architecture_names_the_capability(monkeypatch, hopper, name, capability):  # [K10, C3]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    finding = registry.PROVIDERS[name].probe(CUDA)
    assert not finding.ok
    assert f"this device has {capability[0]}.{capability[1]}" in finding.reason


def test_without_deep_gemm(monkeypatch, hopper):  # [C3]
    monkeypatch.setattr(deep_gemm, "module_name", lambda: None)
    assert deep_gemm.DeepGemm().probe(CUDA).reason == "DeepGEMM is not installed, neither on its own nor inside vLLM"


def test_without_nvcc(hopper, toolchain):  # [C1]
    finding = deep_gemm.DeepGemm().probe(CUDA)
    assert not finding.ok
    assert re.search(r"there is none at \S+no-cuda/bin/nvcc; install a CUDA toolkit of at least 12.3", finding.reason)


def test_with_an_old_nvcc(hopper, toolchain):  # [C1]
    toolchain("Cuda compilation tools, release 12.1, V12.1.105")
    assert "nvcc 12.1" in deep_gemm.DeepGemm().probe(CUDA).reason
    assert "too old for DeepGEMM" in deep_gemm.DeepGemm().probe(CUDA).reason
    toolchain("Cuda compilation tools, release 12.3, V12.3.52")
    assert deep_gemm.nvcc_version() == (12, 3)  # just new enough
    toolchain("no version at all")
    with pytest.raises(deep_gemm.ToolchainError, match=r"nvcc 0\.0"):
        deep_gemm.nvcc_version()


def test_an_nvcc_that_crashes_is_a_refusal(hopper, toolchain, tmp_path):  # [C1]
    (tmp_path / "nvcc").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "nvcc").chmod(0o755)
    assert "--version failed with CalledProcessError" in deep_gemm.DeepGemm().probe(CUDA).reason


@pytest.mark.parametrize("error", [RuntimeError("no ninja\nsecond line"), AttributeError("get_device"), OSError("so")])
def test_a_deep_gemm_that_does_not_load_is_a_refusal(monkeypatch, hopper, toolchain, error):  # [C1, C3]
    def load(name):
        raise error

    toolchain("Cuda compilation tools, release 12.9, V12.9.1")
    monkeypatch.setattr(deep_gemm.importlib, "import_module", load)
    finding = deep_gemm.DeepGemm().probe(CUDA)
    assert not finding.ok
    first_line = str(error).splitlines()[0]
    assert finding.reason == f"import deep_gemm failed with {type(error).__name__}: {first_line}"


def test_a_triton_that_another_package_brought(monkeypatch):
    """torch's nightly builds bring it in one of another name: no traceback, even where nothing would run it."""
    installed = {"pytorch-triton": "3.9.0+git"}

    def version(name):
        if name not in installed:
            raise PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(provider, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert provider.triton_version() == "3.9.0+git"
    installed.clear()
    for name in ("triton", "triton_fused", "triton_exact"):
        assert str(registry.PROVIDERS[name].probe(CPU)).endswith("this one is cpu; triton of unknown version")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("triton", "triton_fused", "triton_exact"):
        assert registry.PROVIDERS[name].probe(CPU).reason == "triton is not installed; install jetgraph[gpu]"


@pytest.mark.parametrize("kernel", ["right", "wrong", "broken"])
def test_codes_are_transposed_by_a_kernel_that_was_seen_to_do_so(monkeypatch, kernel):
    def transpose_codes(codes):
        if kernel == "broken":
            raise RuntimeError("Failed to find C compiler")
        return (codes if kernel == "right" else codes.roll(1, 0)).t().contiguous()

    triton_transpose = pytest.importorskip("jetgraph.lowering.triton_transpose", reason="needs triton")
    monkeypatch.setattr(triton_transpose, "transpose_codes", transpose_codes)
    cublaslt.transposes.cache_clear()
    assert cublaslt.transposes(CPU) is (kernel == "right")
    cublaslt.transposes.cache_clear()


# -------------------------------------------------------------------------------------------------------- the choice


def test_the_number_of_rows_is_no_part_of_the_question():  # [K12]
    assert {f.name for f in dataclasses.fields(Gemm)} == {"num_out", "depth", "b_rows", "group", "bias", "is_dgrad"}


@pytest.mark.parametrize(
    ("gemm", "expected"),
    [
        (Gemm(4096, 4096), "deep_gemm"),
        (Gemm(576, 640), "deep_gemm"),  # N a multiple of 64
        (Gemm(560, 640), "triton"),  # N is not
        (Gemm(576, 576), "triton"),  # K not a multiple of 128
        (Gemm(4096, 4096, bias=True), "triton"),  # DeepGEMM rounds before a bias could come
        (Gemm(2880, 0, b_rows=1), "cublaslt"),
        (Gemm(2888, 0, b_rows=1), "triton"),  # N not a multiple of 16
        (Gemm(4096, 4096, group=64), "triton"),
        (Gemm(4096, 4096, group=48), "reference"),
        (Gemm(4096, 4096, 0, 0), "triton"),
    ],
    ids=str,
)
def test_chosen_by_role_and_shape(probes, gemm, expected):
    assert registry.choose(gemm, CUDA).name == expected


def test_rows_that_depend_on_each_other_never_serve_a_forward_pass(probes):  # [N15]
    for name in ("deep_gemm", "cublaslt", "triton"):
        probes[name] = dataclasses.replace(probes[name], row_invariant=False)
    assert registry.choose(Gemm(4096, 4096), CUDA).name == "reference"
    assert registry.choose(Gemm(4096, 0, 1), CUDA).name == "cublaslt"
    assert registry.choose(Gemm(4096, 4096, is_dgrad=True), CUDA).name == "deep_gemm"  # no rollout has a DGRAD
    with pytest.raises(ProviderError, match="may depend on how many rows there are"):
        registry.choose(Gemm(4096, 4096), CUDA, "cublaslt")


def test_what_is_refused_is_not_chosen(probes):  # [C1]
    probes["deep_gemm"] = Finding("deep_gemm", False, "nvcc 12.1 is too old")
    assert registry.choose(Gemm(4096, 4096), CUDA).name == "triton"
    assert registry.refusal("deep_gemm", Gemm(4096, 4096), CUDA) == "nvcc 12.1 is too old"


def test_where_nobody_can_everybody_says_why(probes):
    for name in probes:
        probes[name] = Finding(name, False, f"{name} is broken")
    message = r"^no provider runs FPROP GEMM N=4096 .* on cuda:0: deep_gemm: deep_gemm is broken; triton: .* is broken$"
    with pytest.raises(ProviderError, match=message):
        registry.choose(Gemm(4096, 4096), CUDA)


def test_quantisers(probes):
    assert registry.choose(Quantizer(1, 128, JET), CUDA).name == "triton"
    assert registry.choose(Quantizer(0, 0, JET), CUDA).name == "reference"
    assert registry.choose(Quantizer(1, 128, (448.0, 0.0, "div", False)), CUDA).name == "reference"
    assert "quantiser" in str(registry.PROVIDERS["deep_gemm"].refuses(Quantizer(1, 128, JET)))


def test_a_provider_that_was_asked_for_and_cannot_serve_is_an_error_before_anything_runs(probes):
    with pytest.raises(ProviderError) as error:
        registry.choose(Gemm(576, 576), CUDA, "deep_gemm")
    assert str(error.value) == (
        "provider 'deep_gemm' cannot run FPROP GEMM N=576 K=576, scales 1x128 · 128x128: K=576 is not a "
        "multiple of 128; these can: triton, reference"
    )
    assert registry.choose(Gemm(4096, 0, 1), CUDA, "deep_gemm").name == "deep_gemm"
    assert registry.choose(Gemm(576, 576), CUDA).name == "triton"


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("auto", ("deep_gemm", "deep_gemm", "cublaslt")),
        ("triton", ("triton", "triton", "triton")),
        ("dgrad=cublaslt", ("deep_gemm", "cublaslt", "cublaslt")),
        ("wgrad=triton, fprop=reference", ("reference", "deep_gemm", "triton")),
    ],
)
def test_a_wish_per_role(probes, text, chosen):
    probes["cublaslt"] = dataclasses.replace(probes["cublaslt"], row_invariant=False)
    kernels = Kernels.parse(text)
    assert tuple(kernels.provider(gemm, CUDA) for gemm in registry.linear_gemms(4096, 4096)) == chosen
    assert Kernels.parse(str(kernels)) == kernels


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cutlass", "provider 'cutlass': expected auto or one of deep_gemm"),
        ("fprop=cutlass", "provider 'cutlass': expected auto or one of deep_gemm"),
        ("forward=triton", "no role 'forward'; expected fprop, dgrad, wgrad"),
        ("wgrad=reference,wgrad=triton", "a role is named twice"),
    ],
)
def test_a_wish_for_what_does_not_exist(text, message):
    with pytest.raises(ProviderError, match=message):
        Kernels.parse(text)


def test_a_wish_that_cannot_be_served_names_the_linear(probes):
    gemms = [("model.layers.0.mlp.up_proj", gemm) for gemm in registry.linear_gemms(576, 576)]
    with pytest.raises(ProviderError, match="^model.layers.0.mlp.up_proj: provider 'deep_gemm' cannot run FPROP"):
        Kernels.parse("deep_gemm").check(gemms, CUDA)


def test_compile_refuses_before_it_changes_the_model():
    """This machine's CPU runs no kernel of a GPU; the model stays what it was."""
    model = random_model()
    before = [type(m) for m in model.modules()]
    with pytest.raises(ProviderError, match=r"q_proj: provider 'triton' cannot run FPROP GEMM .* this one is cpu"):
        jetgraph.compile(model, kernels="triton")
    assert [type(m) for m in model.modules()] == before
    assert not hasattr(model, "jetgraph")


@pytest.mark.slow
def test_every_gemm_of_a_compiled_graph_names_its_provider():
    model = jetgraph.compile(random_model())
    one_step(model, random_ids(model, 1, 9))
    graphs = [
        g for b in set(model.jetgraph.regions.values()) for g in (b.last_trained.forward, b.last_trained.backward)
    ]
    gemms = [n for g in graphs for n in g.graph.nodes if n.target is torch.ops.jetgraph.fp8_gemm.default]
    assert len(gemms) == 7 * 3
    assert {n.args[-1] for n in gemms} == {"reference"}


def test_asking_for_what_is_not_there(probes):
    with pytest.raises(ProviderError, match="provider 'cutlass': expected one of deep_gemm, cublaslt, triton"):
        registry.choose(Gemm(4096, 4096), CUDA, "cutlass")
    probes["deep_gemm"] = Finding("deep_gemm", False, "nvcc 12.1 is too old")
    with pytest.raises(ProviderError, match="nvcc 12.1 is too old; these can: triton, reference"):
        registry.choose(Gemm(4096, 4096), CUDA, "deep_gemm")


def test_findings_are_one_line_for_each_provider():
    rows = registry.findings(CPU)
    names = ["deep_gemm", "cublaslt", "triton", "triton_fused", "cudnn", "triton_exact", "reference"]
    assert [name for name, _ in rows] == names
    assert all("\n" not in line and line.startswith(("usable: ", "refused: ")) for _, line in rows)


# ------------------------------------------------------------------------------------------- layouts without a GPU


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "gemm"),
    [(5, Gemm(768, 1024)), (130, Gemm(640, 384)), (576, Gemm(576, 130, 1)), (8192, Gemm(24576, 4096))],
)
def test_cublaslt_lowering_type_checks_on_the_meta_device(num_rows, gemm, bias):  # [K5]
    """N in whole blocks: for a ragged one torch 2.13's meta function expects ⌊N/128⌋ scales, its CUDA code ⌈N/128⌉."""
    meta = {"device": "meta", "dtype": torch.float32}
    groups = -(-gemm.depth // 128)
    a, b = (torch.empty(n, gemm.depth, **meta).to(reference.E4M3) for n in (num_rows, gemm.num_out))
    scales = torch.empty(num_rows, groups, **meta), torch.empty(-(-gemm.num_out // gemm.b_rows), groups, **meta)
    shift = torch.empty(gemm.num_out, device="meta", dtype=torch.bfloat16) if bias else None
    out = cublaslt.CublasLt().fp8_gemm(a, scales[0], b, scales[1], shift, gemm.b_rows, 128)
    assert (out.shape, out.dtype) == ((num_rows, gemm.num_out), torch.bfloat16)


def test_block_scales_are_padded_to_multiples_of_four():  # [K5]
    scale = torch.arange(1.0, 31.0).view(6, 5)
    for pad_rows in (False, True):
        padded = cublaslt.block_scales(scale, pad_rows)
        assert padded.shape == (8, 8 if pad_rows else 6)
        assert padded.stride() == (1, 8)
        assert torch.equal(padded.t()[:6, :5], scale)
        assert padded.sum() == scale.sum()


def test_whole_groups_of_tokens():  # [P9]
    codes = torch.ones(3, 130).to(reference.E4M3)
    padded = cublaslt.whole_groups(codes, more_rows=1).float()
    assert padded.shape == (4, 256)
    assert padded.sum() == codes.float().sum()


# ------------------------------------------------------------------------------------------------ kernels, no GPU


@pytest.mark.slow
def test_kernels_index_rightly_in_the_interpreter():
    pytest.importorskip("triton", reason="the kernels are written in triton")
    script = Path(__file__).with_name("triton_interpreted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", str(script)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)


def _intermediate(kernel, signature: dict[str, str], constants: dict[str, object]) -> str:
    """Triton's own intermediate code of ``kernel`` for Hopper; no GPU is needed to compile."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else signature.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=types, constexprs=values)
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32)).asm["ttir"]


def _narrow_offsets(text: str) -> list[str]:
    """Products of 32-bit tensors: what wraps past 2^31 elements."""
    return re.findall(r"^.*arith\.muli .*tensor<[\dx]+xi32>.*$", text, re.M)


RULE = {"DIVISION": 0, "POWER_OF_TWO": False, "SATURATES": True, "NATIVE": True}
BYTES = dict.fromkeys(("codes", "codes_t"), "*u8")
FLOATS = dict.fromkeys(("x_scales", "scales", "scales_t", "a_scale", "b_scale"), "*fp32")
TYPES = BYTES | FLOATS | {"x": "*bf16", "qmax": "fp32", "amax_floor": "fp32"}
CODES = {"a": "*fp8e4nv", "b": "*fp8e4nv", "bias": "*bf16", "out": "*bf16"}


@pytest.mark.slow
def test_offsets_are_sixty_four_bit():  # [K9]
    """Rows x strides is a product of 64-bit numbers in every kernel; and the check sees one that is not."""
    pytest.importorskip("triton", reason="the kernels are written in triton")
    import triton
    import triton.language as tl

    from jetgraph.lowering import triton_gemm, triton_quantize

    tile = {"X_COLS": 128, "ROWS": 128, "COLS": 1, "TILE_R": 128, "TILE_C": 16}
    gemm = {"HAS_BIAS": True, "B_ROWS": 1, "GROUP": 128, "EVEN": False, "WIDEN": False}
    kernels = [
        (triton_quantize.quantize_kernel, TYPES, tile | RULE),
        (triton_gemm.fp8_gemm_kernel, TYPES | CODES, gemm | {"BLOCK_M": 64, "BLOCK_N": 128, "SWIZZLE": 8}),
    ]
    for kernel, signature, constants in kernels:
        text = _intermediate(kernel, signature, constants)
        assert "tt.addptr" in text
        assert _narrow_offsets(text) == []

    @triton.jit
    def narrow(x, stride, WIDTH: tl.constexpr):
        rows = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        tl.store(x + rows * stride, 0.0)

    assert _narrow_offsets(_intermediate(narrow, {"x": "*fp32"}, {"WIDTH": 128}))


@pytest.mark.parametrize(
    ("outcome", "ok", "reason"),
    [
        (("", "all bits"), True, "all bits"),
        (("a bit is wrong", "all bits"), False, "a bit is wrong"),
        (ValueError("at 17:4:\n    code"), False, "failed with ValueError: at 17:4:"),
        (RuntimeError(), False, "failed with RuntimeError: no message"),
    ],
)
def test_a_finding_of_triton_kernels(monkeypatch, outcome, ok, reason):
    def test(device):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    pytest.importorskip("triton", reason="the probe asks for triton first")
    monkeypatch.setattr(provider, "missing_hopper", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    found = provider.triton_finding("mine", torch.device("cuda", 0), test)
    assert (found.provider, found.ok, found.reason, found.row_invariant) == ("mine", ok, reason, ok)

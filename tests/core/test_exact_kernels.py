"""The provider of exact kernels without a GPU: what it refuses, what its self-test sees, what the kernels compile to.

The kernels' bits on a GPU are in tests/gpu/test_exact_ops.py, their indexing in triton_exact_interpreted.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import jetgraph.lowering.torch_ops  # noqa: F401  (defines torch.ops.jetgraph)
from jetgraph.lowering import cuda_ops, reference, registry, triton_exact_provider
from jetgraph.lowering.provider import Exact, Finding, Gemm, ProviderError
from jetgraph.lowering.triton_exact_provider import TritonExact

BF16 = torch.bfloat16
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


# ------------------------------------------------------------------------------------------------------- choosing


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Exact("row_tile_gemm", BF16), None),
        (Exact("attention", BF16, 64, 3), None),
        (Exact("attention", BF16, 80, 1), None),
        (Exact("row_tile_gemm", torch.float32), "torch.float32; expected torch.bfloat16"),
        (Exact("attention", BF16, 12, 1), "a head size of 12; expected a multiple of 8 up to 256"),
        (Exact("attention", BF16, 320, 1), "a head size of 320"),
        (Exact("attention", BF16, 64, 71), "71 heads on one of keys"),
        (Gemm(4096, 4096), "row-invariant BF16 operators alone"),
    ],
    ids=str,
)
def test_what_is_refused(request_, reason):
    found = TritonExact().refuses(request_)
    assert found is None if reason is None else reason in (found or "")


def test_the_definition_runs_where_the_kernels_do_not(monkeypatch):
    found = {name: Finding(name, True, "fine", row_invariant=True) for name in registry.PROVIDERS}
    monkeypatch.setattr(registry, "probe", lambda name, device: found[name])
    registry._first.cache_clear()
    head = Exact("row_tile_gemm", BF16)
    assert registry.choose(head, CUDA).name == "triton_exact"
    assert registry.choose(Exact("attention", torch.float32, 64), CUDA).name == "reference"
    assert registry.choose(head, CPU).name == "reference"
    with pytest.raises(ProviderError, match="it runs row-invariant BF16 operators alone"):
        registry.choose(Gemm(4096, 4096), CUDA, "triton_exact")
    registry._first.cache_clear()
    found["triton_exact"] = Finding("triton_exact", False, "rows differ")
    assert registry.choose(head, CUDA).name == "reference"
    registry._first.cache_clear()


def test_cudnn_serves_plain_gradients_alone(monkeypatch):
    found = {name: Finding(name, True, "") for name in registry.PROVIDERS}
    monkeypatch.setattr(registry, "probe", lambda name, device: found[name])
    registry._first.cache_clear()
    plain = Exact("attention_backward", torch.bfloat16, 128, 4, is_plain=True)
    assert registry.choose(plain, CUDA).name == "cudnn"
    for other in ({"is_plain": False}, {"head_size": 80}, {"kernel": "attention"}):
        assert registry.choose(dataclasses.replace(plain, **other), CUDA).name == "triton_exact"
    found["cudnn"] = Finding("cudnn", False, "wrong gradient")
    registry._first.cache_clear()
    assert registry.choose(plain, CUDA).name == "triton_exact"
    registry._first.cache_clear()


@pytest.mark.parametrize(
    ("case", "is_plain"),
    [({}, True), ({"window": 3}, False), ({"softcap": 1.0}, False), ({"first": True}, False), ({"keys": 9}, False),
     ({"keys": 1, "queries": 1}, False), ({"deterministic": True}, False)],
)  # fmt: skip
def test_what_a_plain_gradient_is(monkeypatch, case, is_plain):
    asked = []

    def choose(request, device):
        asked.append(request)
        return registry.PROVIDERS["reference"]

    monkeypatch.setattr(registry, "choose", choose)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: case.get("deterministic", False))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    keys, queries = case.get("keys", 5), case.get("queries", 5)
    q, k = torch.randn(1, 4, queries, 64).bfloat16(), torch.randn(1, 2, keys, 64).bfloat16()
    first = torch.zeros(1, queries, dtype=torch.int64) if "first" in case else None
    options = 0.125, case.get("window", 0), case.get("softcap", 0.0), first
    out, lse = reference.attention(q, k, k, *options)
    cuda_ops.attention_backward(out, q, k, k, out, lse, *options)
    assert asked == [Exact("attention_backward", torch.bfloat16, 64, 2, is_plain)]


def test_without_cuda_one_sentence(monkeypatch):  # [C3]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = TritonExact().probe(CUDA)
    assert not finding.ok
    assert finding.reason in ("this machine has no CUDA device", "triton is not installed; install jetgraph[gpu]")


# --------------------------------------------------------------------------------- the self-test and what it can see


class Definitions(TritonExact):
    """The self-test asks the definitions, with one fault at most."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        object.__setattr__(self, "fault", fault)

    def row_tile_gemm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = reference.row_tile_gemm(x, weight, bias)
        if self.fault == "a last column" or (self.fault == "few rows" and len(x) == 3):
            out[-1, -1] += 1
        return out

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float, *options) -> tuple[Tensor, Tensor]:
        if self.fault == "a key of the future":
            q, v = torch.cat((q[:, :, :1], q), 2)[:, :, :-1], torch.roll(v, 1, 2)
        if self.fault == "window" and options and options[0]:
            options = (options[0] + 1, *options[1:])
        out, lse = reference.attention(q, k, v, scale, *options)
        if self.fault == "chunk" and q.shape[2] < k.shape[2]:
            out[0, -1, -1, -1] += 2.0**-7
        return out, lse

    def attention_backward(self, grad, q, k, v, out, lse, *options) -> tuple[Tensor, ...]:
        dq, dk, dv = reference.attention_backward(grad, q, k, v, *options)
        return (dq, dk * 1.02, dv) if self.fault == "scale of a gradient" else (dq, dk, dv)

    def paged_attention(
        self,
        q: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        table: Tensor,
        lens: Tensor,
        starts: Tensor,
        *options,
        out: Tensor | None = None,
    ) -> Tensor:
        parts = []
        for row, length in enumerate(lens.tolist()):
            count = length - 1 if self.fault == "length" and length > 1 else length
            k, v = (c[table[row].long()].flatten(0, 1)[:count].transpose(0, 1)[None] for c in (key_cache, value_cache))
            queries = q[starts[row] : starts[row + 1]][-count:]
            part = reference.attention(queries.transpose(0, 1)[None], k, v, *options)[0][0]
            parts.append(torch.cat((part, part[:1]))[: starts[row + 1] - starts[row]])
        return torch.cat(parts) if out is None else out.copy_(torch.cat(parts))


FAULTS = {
    "a last column": "exact sums are wrong",
    "few rows": "rows of 3 differ from the same rows of 257",
    "a key of the future": "further from float64",
    "window": "further from float64",
    "chunk": "the last 1 queries differ alone and in the whole",
    "scale of a gradient": "the gradient of k is further from float64",
    "length": "chunks of 257: differs from dense",
}


@pytest.fixture
def few_cases(monkeypatch):
    """The self-test itself, at sizes for a CPU."""
    monkeypatch.setattr(triton_exact_provider, "COUNTS", (1, 3, 129))
    yield
    assert triton_exact_provider.LONGEST == 257


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_the_self_test_sees_one_fault(few_cases, fault):
    found = Definitions(fault)._wrong(CPU)
    assert FAULTS[fault] in found if fault else found == ""


# ------------------------------------------------------------------------------------------------ kernels, no GPU


@pytest.mark.slow
def test_kernels_in_the_interpreter():
    pytest.importorskip("triton", reason="the kernels are written in triton")
    script = Path(__file__).with_name("triton_exact_interpreted.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", str(script)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout)


POINTERS = dict.fromkeys(("x", "weight", "bias", "out", "q", "k", "v", "grad", "dq", "dk", "dv"), "*bf16")
POINTERS |= dict.fromkeys(("lse", "rows"), "*fp32") | dict.fromkeys(("first", "last"), "*i64")
POINTERS |= dict.fromkeys(("table", "seq_lens", "starts"), "*i32") | dict.fromkeys(("scale", "softcap"), "fp32")
HEADS = {"G": 4, "D": 64, "BLOCK_D": 64, "WINDOWED": False, "SOFTCAP": False, "NATIVE": True}


def compiled(kernel, constants: dict, tile: tuple[int, int, int, int]) -> dict[str, str]:
    """``kernel`` as compiled for Hopper; no GPU is needed."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    constants = constants | {"BLOCK_M": tile[0], "BLOCK_N": tile[1]}
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else POINTERS.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if types[name].startswith("*") or name in ("depth", "num_out", "x_row", "weight_row")
    }
    source = ASTSource(fn=kernel, signature=types, constexprs=values, attrs=aligned)
    options = {"num_warps": tile[2], "num_stages": tile[3], "enable_fp_fusion": False}
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options).asm


@pytest.mark.slow
def test_what_the_kernels_compile_to():  # [K9]
    """64-bit offsets, copies of 16 bytes, Hopper's MMA, one instruction for the exponential, nothing contracted.

    And sums along a row in one layout, whose order they take, in all three kernels of attention.
    """
    pytest.importorskip("triton", reason="the kernels are written in triton")
    from jetgraph.lowering import triton_attention, triton_attention_backward, triton_attention_kernels
    from jetgraph.lowering import triton_bf16_gemm as gemm

    block_m, block_n, block_k, *launch = gemm.GEMM_TILE
    few_m, few_n, few_k, *few_launch = gemm.FEW_ROWS_TILE
    assert few_k == block_k  # steps of another length would be other sums
    flags = {"HAS_BIAS": True, "EVEN": True, "NATIVE": True, "BLOCK_K": block_k, "SWIZZLE": gemm.SWIZZLE}
    tile = triton_attention.ATTENTION_TILE
    kernels = {
        "gemm": (gemm.bf16_gemm_kernel, flags, (block_m, block_n, *launch)),
        "gemm of few rows": (gemm.bf16_gemm_kernel, flags, (few_m, few_n, *few_launch)),
        "dense": (triton_attention_kernels.attention_kernel, HEADS | {"FIRST": False}, tile),
        "packed": (triton_attention_kernels.attention_kernel, HEADS | {"FIRST": True, "WINDOWED": True}, tile),
        "paged": (triton_attention_kernels.paged_attention_kernel, HEADS | {"PAGE": 16}, tile),
        "dq": (
            triton_attention_backward.query_gradient_kernel,
            HEADS | {"FIRST": True},
            triton_attention_backward.QUERY_TILE,
        ),
        "dk": (
            triton_attention_backward.key_gradient_kernel,
            HEADS | {"FIRST": True},
            triton_attention_backward.KEY_TILE,
        ),
    }
    layouts = {}
    for name, (kernel, constants, shape) in kernels.items():
        asm = compiled(kernel, constants, shape)
        assert not re.findall(r"^.*arith\.muli .*tensor<[\dx]+xi32>.*$", asm["ttir"], re.M), name
        ptx = asm["ptx"]
        assert re.search(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.f32\.bf16\.bf16", ptx), name
        assert re.search(r"cp\.async\.cg\.shared\.global .*, 0x10", ptx), name
        assert not re.search(r"\b(mul|add|sub)\.f32", ptx), name  # without .rn ptxas may contract them
        assert set(re.findall(r"\bex2\.\S+", ptx)) == (set() if name.startswith("gemm") else {"ex2.approx.ftz.f32"}), (
            name
        )
        mma = re.findall(r"^#mma = (.*)$", asm["ttgir"], re.M)
        sums = re.findall(r"\(tensor<\d+x64xf32, (#\w+)>\) -> tensor<\d+xf32", asm["ttgir"])
        layouts[name] = (*mma, *sorted(set(sums)))
    assert layouts["dense"] == layouts["packed"] == layouts["paged"]
    assert layouts["dense"][1:] == ("#mma",)

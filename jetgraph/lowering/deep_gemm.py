"""The `deep_gemm` provider: DeepGEMM's FP8 kernels, from the package `deep_gemm` or from the copy that vLLM carries.

DeepGEMM compiles a kernel with nvcc when a shape is first seen, so nvcc is probed before it is chosen: found late, it
is a crash in the middle of loading.  FPROP and DGRAD run recipe (1, 128, 128), WGRAD (1, 1, 128) into FP32.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from jetgraph.lowering.cublaslt import dense, shifted, whole_groups
from jetgraph.lowering.provider import (
    FPROP,
    WGRAD,
    Finding,
    Gemm,
    Quantizer,
    failed,
    missing_hopper,
    refuses_blocks,
    self_test,
)
from jetgraph.lowering.scale_layout import lies_in_columns

MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")
LEAST_NVCC = (12, 3)
DEFAULT_CUDA_HOME = Path("/usr/local/cuda")
GROUP, N_MULTIPLE = 128, 64
LEAST_WGRAD_ROWS = 64
"""For 32 rows or fewer DeepGEMM 2.5 picks a tile that its own WGRAD kernel does not compile with."""


@dataclass(frozen=True)
class DeepGemm:
    name: str = "deep_gemm"
    kernels: frozenset[str] = frozenset({"fp8_gemm"})

    def probe(self, device: torch.device) -> Finding:
        missing = missing_hopper(device, exact=True)
        if missing:
            return Finding(self.name, False, missing)
        module = module_name()
        if module is None:
            return Finding(self.name, False, "DeepGEMM is not installed, neither on its own nor inside vLLM")
        try:
            nvcc = nvcc_version()
        except ToolchainError as error:
            return Finding(self.name, False, str(error))
        try:
            library = importlib.import_module(module)
        except Exception as error:  # it looks for a driver, headers and tools when it is imported
            return Finding(self.name, False, f"import {module} {failed(error)}")
        versions = (("DeepGEMM", getattr(library, "__version__", f"of {module}")), ("nvcc", "{}.{}".format(*nvcc)))
        return self_test(self.name, self.fp8_gemm, (FPROP, WGRAD), device, versions)

    def refuses(self, request: Gemm | Quantizer) -> str | None:
        if not isinstance(request, Gemm):
            return "it has no quantiser of ours"
        if request.bias and request.b_rows != 1:
            return "it writes BF16 only, and a bias would come after the rounding"
        return refuses_blocks(request, N_MULTIPLE)

    def fp8_gemm(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, b_rows: int, group: int
    ) -> Tensor:
        """`jetgraph::fp8_gemm` for the shapes that `refuses` lets through."""
        num_rows, num_out = a.shape[0], b.shape[0]
        if not (num_rows and num_out and a.shape[1]):
            return shifted(a.new_zeros((num_rows, num_out), dtype=torch.float32), bias)
        library = _library()
        a_scale = a_scale.expand(num_rows, -1)
        if b_rows != 1:
            left, right = a.contiguous(), dense(b)
            left_scale = _in_columns(a_scale, library)
            out = a.new_empty((num_rows, num_out), dtype=torch.bfloat16)
            right_scale = b_scale.contiguous()
            library.fp8_gemm_nt((left, left_scale), (right, right_scale), out, disable_ue8m0_cast=True)
            return out
        missing = max(0, LEAST_WGRAD_ROWS - num_rows)
        left, right = whole_groups(a, missing), whole_groups(b)
        left_scale = _in_columns(F.pad(a_scale, (0, 0, 0, missing)) if missing else a_scale, library)
        right_scale = _in_columns(b_scale, library)
        out = a.new_zeros((num_rows + missing, num_out), dtype=torch.float32)
        operands = (left, left_scale), (right, right_scale)
        library.fp8_gemm_nt(*operands, out, c=out, recipe=(1, 1, GROUP), disable_ue8m0_cast=True)
        return shifted(out[:num_rows], bias)


def _in_columns(scale: Tensor, library: ModuleType) -> Tensor:
    """Scales as DeepGEMM's kernels read them: as they lie, if our quantisers made them."""
    return scale if lies_in_columns(scale) else library.get_mn_major_tma_aligned_tensor(scale.contiguous())


class ToolchainError(Exception):
    """nvcc is missing or too old for DeepGEMM; the message says what to do."""


def module_name() -> str | None:
    """The first of `MODULES` that can be found, without importing it."""
    for name in MODULES:
        try:
            if importlib.util.find_spec(name) is not None:
                return name
        except ImportError:  # the parent package is not there
            continue
    return None


@cache
def _library() -> ModuleType:
    name = module_name()
    if name is None:
        raise ImportError("DeepGEMM is not installed")
    return importlib.import_module(name)


def nvcc_version() -> tuple[int, int]:
    """(major, minor) of the nvcc that DeepGEMM would run.

    Raises:
        ToolchainError: there is none, it does not answer, or it is older than `LEAST_NVCC`.
    """
    advice = f"install a CUDA toolkit of at least {LEAST_NVCC[0]}.{LEAST_NVCC[1]} or set CUDA_HOME to one"
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc") or str(DEFAULT_CUDA_HOME / "bin" / "nvcc")
    if not Path(nvcc).is_file():
        raise ToolchainError(f"DeepGEMM compiles its kernels with nvcc, and there is none at {nvcc}; {advice}")
    try:
        answer = subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"{nvcc} --version failed with {type(error).__name__}; {advice}") from error
    match = re.search(r"release (\d+)\.(\d+)", answer)
    found = (int(match[1]), int(match[2])) if match else (0, 0)
    if found < LEAST_NVCC:
        raise ToolchainError(f"nvcc {found[0]}.{found[1]} at {nvcc} is too old for DeepGEMM; {advice}")
    return found

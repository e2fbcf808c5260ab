"""Which provider runs which kernel: probed once per device, chosen by role and shape, never by the number of rows.

    choose(Gemm(4096, 4096), device)       the first provider of `ORDER` whose probe passed and that serves the shape
    choose(gemm, device, "deep_gemm")      that one; an error if it cannot
    findings()                             what `jetgraph doctor` prints

A GEMM of the forward pass goes only to a provider whose rows were found independent of each other.  The choice is a
function of the device, the installed packages and the shape: a trainer and a rollout on equal machines choose alike.
In a compiled graph each GEMM names the provider that was chosen for it (`jetgraph.lowering.kernels`); called without a
name, FPROP and DGRAD look the same to `jetgraph::fp8_gemm`, and both follow FPROP's rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from jetgraph.lowering import fused_reference, probe_cache, reference
from jetgraph.lowering.cublaslt import CublasLt
from jetgraph.lowering.cudnn_attention import CudnnAttention
from jetgraph.lowering.deep_gemm import DeepGemm
from jetgraph.lowering.provider import (
    FPROP,
    WGRAD,
    Exact,
    Finding,
    Fused,
    Gemm,
    Provider,
    ProviderError,
    Quantizer,
    Request,
    self_test,
)
from jetgraph.lowering.triton_exact_provider import EXACT, TritonExact
from jetgraph.lowering.triton_fused_provider import FUSED, TritonFused
from jetgraph.lowering.triton_provider import TritonKernels


@dataclass(frozen=True)
class Reference:
    """Plain torch on any device: the definition, slow, and exact in any order."""

    name: str = "reference"
    kernels: frozenset[str] = (
        frozenset({"quantize", "quantize_transposed", "quantize_tokens", "requantize_tokens", "fp8_gemm"})
        | FUSED
        | EXACT
    )

    def probe(self, device: torch.device) -> Finding:
        return self_test(self.name, self.fp8_gemm, (FPROP, WGRAD), device, (("torch", torch.__version__),), True)

    def refuses(self, request: Request) -> str | None:
        return None

    def quantize(self, x: Tensor, *arguments) -> tuple[Tensor, Tensor]:
        return reference.quantize(x, *arguments)

    def quantize_transposed(self, x: Tensor, *arguments) -> tuple[Tensor, Tensor]:
        return reference.quantize_transposed(x, *arguments)

    def quantize_tokens(self, x: Tensor, group: int, *rule) -> tuple[Tensor, Tensor]:
        return reference.quantize_tokens(x, group, *rule)

    def requantize_tokens(self, codes: Tensor, scale: Tensor, cols: int, group: int, *rule) -> tuple[Tensor, Tensor]:
        return reference.quantize_tokens(reference.dequantize(codes, scale, 1, cols), group, *rule)

    def fp8_gemm(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None, b_rows: int, group: int
    ) -> Tensor:
        out = reference.fp8_gemm(a, a_scale, b, b_scale, b_rows, group)
        return (out if bias is None else out + bias.float()).to(torch.bfloat16)

    def fused(self, kernel: str, *arguments) -> Tensor | tuple[Tensor, ...]:
        """The definition of the fused operator ``kernel``."""
        return getattr(fused_reference, kernel)(*arguments)

    def row_tile_gemm(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return reference.row_tile_gemm(x, weight, bias)

    def attention(self, *arguments) -> tuple[Tensor, Tensor]:
        return reference.attention(*arguments)

    def attention_backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options):
        return reference.attention_backward(grad, q, k, v, *options)


_ALL = DeepGemm(), CublasLt(), TritonKernels(), TritonFused(), CudnnAttention(), TritonExact(), Reference()
PROVIDERS: dict[str, Provider] = {p.name: p for p in _ALL}
ORDER = {
    "FPROP": ("deep_gemm", "triton", "reference"),
    "DGRAD": ("deep_gemm", "cublaslt", "triton", "reference"),
    "WGRAD": ("cublaslt", "deep_gemm", "triton", "reference"),
    "quantiser": ("triton", "reference"),
    "fused": ("triton_fused", "reference"),
    "exact": ("cudnn", "triton_exact", "reference"),
}
"""Fastest first, as measured on an H200 (docs/kernels.md)."""
_ROLES = {Quantizer: "quantiser", Fused: "fused", Exact: "exact"}


def this_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@cache
def probe(name: str, device: torch.device) -> Finding:
    """What provider ``name`` found on ``device``; runs its self-test the first time, a slow one once a machine."""
    return probe_cache.probe(PROVIDERS[name], device)


def findings(device: torch.device | None = None) -> list[tuple[str, str]]:
    """(provider, one line) for each provider, tested now: usable or refused, why, versions, value of the self-test."""
    device = device or this_device()
    return [(name, str(probe_cache.probe(p, device, fresh=True))) for name, p in PROVIDERS.items()]


def refusal(name: str, request: Request, device: torch.device) -> str | None:
    """Why provider ``name`` does not run ``request`` on ``device``, in one sentence; None if it does."""
    finding = probe(name, device)
    if not finding.ok:
        return finding.reason
    if isinstance(request, Gemm) and request.role == "FPROP" and not finding.row_invariant:
        return "a row of its result may depend on how many rows there are, and in a forward pass it must not"
    return PROVIDERS[name].refuses(request)


@cache
def _first(request: Request, device: torch.device, wanted: str | None) -> Provider:
    if device.type != "cuda" and wanted is None:
        return PROVIDERS["reference"]
    names = ORDER[request.role if isinstance(request, Gemm) else _ROLES[type(request)]]
    if isinstance(request, Gemm) and wanted is not None:
        reason = refusal(wanted, request, device)
        if reason is not None:
            raise ProviderError(_cannot(wanted, request, reason, names, device))
        return PROVIDERS[wanted]
    refusals = {}
    for name in names:
        reason = refusal(name, request, device)
        if reason is None:
            return PROVIDERS[name]
        refusals[name] = reason
    raise ProviderError(f"no provider runs {request} on {device}: {'; '.join(map(': '.join, refusals.items()))}")


def _cannot(name: str, request: Request, reason: str, names: Iterable[str], device: torch.device) -> str:
    others = [other for other in names if other != name and refusal(other, request, device) is None]
    return f"provider {name!r} cannot run {request}: {reason}; these can: {', '.join(others)}"


def choose(request: Request, device: torch.device, wanted: str | None = None) -> Provider:
    """The provider that runs ``request`` on ``device``: ``wanted``, else the fastest that can.

    Raises:
        ProviderError: ``wanted`` does not exist or cannot.
    """
    if wanted is not None and wanted not in PROVIDERS:
        raise ProviderError(f"provider {wanted!r}: expected one of {', '.join(PROVIDERS)}")
    return _first(request, device, wanted)


def linear_gemms(out_features: int, in_features: int, bias: bool = False, group: int = 128) -> tuple[Gemm, Gemm, Gemm]:
    """FPROP, DGRAD and WGRAD of a linear layer, to ask `refusal` or `choose` about."""
    return (
        Gemm(out_features, in_features, group, group, bias),
        Gemm(in_features, out_features, group, group, is_dgrad=True),
        Gemm(in_features, 0, 1, group),
    )

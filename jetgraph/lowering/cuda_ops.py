"""The CUDA implementations of the operators of `torch_ops`: quantisers, GEMMs, attention, row means.

Importing this module registers them beside the reference implementations of `torch_ops`; the registry chooses the
provider when a tensor on a GPU arrives.  Quantisers of all providers give the same bytes, GEMMs agree within
docs/kernels.md.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import jetgraph.lowering.torch_ops  # noqa: F401  (defines the operators)
from jetgraph.lowering import reference, registry
from jetgraph.lowering.operators import on_cuda
from jetgraph.lowering.provider import Exact, Gemm, Quantizer


def quantize(x: Tensor, rows: int, cols: int, *rule) -> tuple[Tensor, Tensor]:
    return registry.choose(Quantizer(rows, cols, rule), x.device).quantize(x, rows, cols, *rule)


def quantize_transposed(x: Tensor, rows: int, cols: int, *rule) -> tuple[Tensor, Tensor]:
    return registry.choose(Quantizer(rows, cols, rule), x.device).quantize_transposed(x, rows, cols, *rule)


def quantize_tokens(x: Tensor, group: int, *rule) -> tuple[Tensor, Tensor]:
    return registry.choose(Quantizer(group, 1, rule), x.device).quantize_tokens(x, group, *rule)


def requantize_tokens(codes: Tensor, scale: Tensor, cols: int, group: int, *rule) -> tuple[Tensor, Tensor]:
    expected = (codes.shape[0], reference.num_blocks(codes.shape[1], cols))
    if scale.shape != expected or scale.dtype is not torch.float32:
        raise ValueError(
            f"scales are {scale.dtype} {list(scale.shape)}; expected torch.float32 {list(expected)} for codes "
            f"{list(codes.shape)} in groups of {cols or 'a whole row'}"
        )
    provider = registry.choose(Quantizer(group, 1, rule), codes.device)
    return provider.requantize_tokens(codes, scale, cols, group, *rule)


def fp8_gemm(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    bias: Tensor | None,
    b_rows: int,
    group: int,
    provider: str = "",
) -> Tensor:
    reference.check_operands(a, a_scale, b, b_scale, b_rows, group)
    if provider:  # a compiled graph says who; it was asked whether it can before anything ran
        chosen = registry.PROVIDERS[provider]
    else:
        depth = 0 if b_rows == 1 else a.shape[1]  # WGRAD's depth is the number of tokens, which decides nothing
        chosen = registry.choose(Gemm(b.shape[0], depth, b_rows, group, bias is not None), a.device)
    return chosen.fp8_gemm(a, a_scale, b, b_scale, bias, b_rows, group)


def row_mean(x: Tensor) -> Tensor:
    from jetgraph.lowering import triton_rows  # imports triton

    return triton_rows.row_mean(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], 1)


def row_tile_gemm(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    chosen = _exact(Exact("row_tile_gemm", x.dtype), x.device, len(dtypes) == 1)
    return chosen.row_tile_gemm(x, weight, bias)


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int = 0, softcap: float = 0.0, first: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    return _attention("attention", q, k, v, scale).attention(q, k, v, scale, window, softcap, first)


def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    is_plain = window == 0 and softcap == 0 and first is None and q.numel() > 0
    is_plain = is_plain and 1 < q.shape[2] == k.shape[2] and not torch.are_deterministic_algorithms_enabled()
    provider = _attention("attention_backward", q, k, v, scale, is_plain)
    return provider.attention_backward(grad, q, k, v, out, lse, scale, window, softcap, first)


def _attention(kernel: str, q: Tensor, k: Tensor, v: Tensor, scale: float, is_plain: bool = False) -> Any:
    """Never chosen by the number of queries or keys: a row's kernel is that of the model's heads."""
    request = Exact(kernel, q.dtype, q.shape[3], q.shape[1] // k.shape[1], is_plain)
    return _exact(request, q.device, q.dtype is k.dtype is v.dtype and scale > 0)


def _exact(request: Exact, device: torch.device, usual: bool) -> Any:
    return registry.choose(request, device) if usual else registry.PROVIDERS["reference"]


for _kernel in (
    quantize, quantize_transposed, quantize_tokens, requantize_tokens, fp8_gemm, row_mean, row_tile_gemm, attention,
    attention_backward,
):  # fmt: skip
    on_cuda(_kernel)

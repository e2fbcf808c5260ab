"""The `cudnn` provider: cuDNN's gradient of plain causal attention, from the output and log-sum-exp of any forward.

A rollout computes no gradients, so this one need not have the bits of ours; on a Hopper it is about twice as fast.  It
adds the parts of dQ in the order in which blocks finish, so two calls may differ in the last bits: under
`torch.use_deterministic_algorithms(True)` the `triton_exact` provider runs instead, as it does for every mask but the
plain one.

Private torch API used (same in 2.11–2.13): `aten._scaled_dot_product_cudnn_attention_backward`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jetgraph.lowering import reference
from jetgraph.lowering.provider import Exact, Finding, Request, tested_finding
from jetgraph.lowering.triton_exact_provider import attention_inputs, numbers, wrong_gradient

SIZES = (64, 128)
"""Head sizes that the self-test has seen."""


@dataclass(frozen=True)
class CudnnAttention:
    name: str = "cudnn"
    kernels: frozenset[str] = frozenset({"attention_backward"})

    def probe(self, device: torch.device) -> Finding:
        def test(device: torch.device) -> tuple[str, str]:
            wrong = next((w for size in SIZES if (w := self._wrong(size, device))), "")
            return wrong, "the gradient of plain causal attention is float64's within the roundings of BF16"

        versions = (("cuDNN", str(torch.backends.cudnn.version())),)
        return replace(tested_finding(self.name, device, versions, test), row_invariant=False)

    def refuses(self, request: Request) -> str | None:
        if not isinstance(request, Exact) or request.kernel != "attention_backward":
            return "it runs the gradient of attention alone"
        if not request.is_plain:
            return "it runs plain causal attention, and adds in an order of its own"
        if request.dtype is not torch.bfloat16 or request.head_size not in SIZES:
            return f"{request.dtype}, heads of {request.head_size}; expected torch.bfloat16, heads of {SIZES}"
        return None

    def attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, *_plain
    ) -> tuple[Tensor, ...]:
        """`jetgraph::attention_backward` of plain causal attention."""
        num_queries, num_keys = q.shape[2], k.shape[2]
        no_seed = torch.empty((), dtype=torch.int64, device=q.device)  # of a dropout of 0
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad.transpose(1, 2), q, k, v, out.transpose(1, 2), lse[..., None], no_seed, no_seed,
            None, None, None, num_queries, num_keys, 0.0, True, scale=scale,
        )  # fmt: skip
        return tuple(g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads)

    def _wrong(self, size: int, device: torch.device) -> str:
        """What is wrong with heads of ``size``, in one sentence; "" if nothing is."""
        q, k, v = attention_inputs(size, device)
        out, lse = reference.attention(q, k, v, size**-0.5)
        grad = numbers(tuple(out.shape), device)
        exact = reference.attention_backward(*(t.double() for t in (grad, q, k, v)), size**-0.5)
        wrong = wrong_gradient(self.attention_backward(grad, q, k, v, out, lse, size**-0.5), exact)
        return f"heads of {size}: {wrong}" if wrong else ""

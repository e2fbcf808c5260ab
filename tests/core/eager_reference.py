"""An independent eager reference of the jet precision flow: own quantiser, own GEMM, own attention, plain autograd.

Nothing here calls jetgraph.  The GEMM works on *integers*: an e4m3 number is an integer multiple of 2^-9, so a group's
dot product is an exact int64; the attention is written per head in float64, under the dense boolean mask that
transformers itself makes for SDPA.  What must agree bit for bit is what the two are defined by: exact group dots, FP32
scales applied in group order, one rounding to BF16.  A bias is added before that rounding; its gradient is torch's sum.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

GROUP = 128
E4M3_STEP = 512.0  # e4m3's smallest positive number is 2^-9


def quantize_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [R, C] → codes as float32 [R, C], scales [R, ⌈C/128⌉]: groups of 1 x 128."""
    codes, scales = [], []
    for start in range(0, x.shape[1], GROUP):
        group = x[:, start : start + GROUP].float()
        scale = group.abs().max(dim=1, keepdim=True).values.clamp(min=1e-12) / 448.0
        codes.append(torch.clamp(group / scale, -448.0, 448.0).to(torch.float8_e4m3fn).float())
        scales.append(scale)
    return torch.cat(codes, 1), torch.cat(scales, 1)


def quantize_blocks(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [N, K] → codes as float32, and every element's scale [N, K]: blocks of 128 x 128."""
    codes, full = torch.empty_like(w, dtype=torch.float32), torch.empty_like(w, dtype=torch.float32)
    for r in range(0, w.shape[0], GROUP):
        for c in range(0, w.shape[1], GROUP):
            block = w[r : r + GROUP, c : c + GROUP].float()
            scale = block.abs().max().clamp(min=1e-12) / 448.0
            codes[r : r + GROUP, c : c + GROUP] = (
                torch.clamp(block / scale, -448.0, 448.0).to(torch.float8_e4m3fn).float()
            )
            full[r : r + GROUP, c : c + GROUP] = scale
    return codes, full


def integer_gemm(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [M, K] · b [N, K]ᵀ + bias [N] in BF16; scales [M, G] and [N, G] per group of 128 along K."""
    left, right = (a * E4M3_STEP).to(torch.int64), (b * E4M3_STEP).to(torch.int64)
    acc = torch.zeros(a.shape[0], b.shape[0])
    for g in range(a_scale.shape[1]):
        part = slice(g * GROUP, (g + 1) * GROUP)
        exact = left[:, part] @ right[:, part].T  # int64: no rounding at all
        dot = (exact.double() / E4M3_STEP**2).float()
        acc = acc + dot * (a_scale[:, g, None] * b_scale[None, :, g])
    return (acc if bias is None else acc + bias.float()).to(torch.bfloat16)


class ReferenceLinear(torch.autograd.Function):
    """FPROP, DGRAD and WGRAD of one FP8 linear; straight-through quantisation."""

    @staticmethod
    def forward(ctx, x, weight, bias, requantize):
        flat = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(flat, weight)
        ctx.shape, ctx.requantize, ctx.biased = x.shape, requantize, bias is not None
        codes, scale = quantize_blocks(weight)
        out = integer_gemm(*quantize_groups(flat), codes, scale[:, ::GROUP], bias)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        codes, scale = quantize_blocks(weight)
        dx = integer_gemm(*quantize_groups(grad), codes.T, scale.T[:, ::GROUP])
        if ctx.requantize:
            saved, scales = quantize_groups(x)
            x = saved * scales.repeat_interleave(GROUP, 1)[:, : saved.shape[1]]
        dw = integer_gemm(*quantize_groups(grad.T), *quantize_groups(x.T))
        return dx.view(ctx.shape), dw, grad.sum(0) if ctx.biased else None, None


def _fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


class ReferenceAttention(torch.autograd.Function):
    """Attention head by head in float64 under a dense mask, rounded once; gradients by the textbook formulas.

    ``visible`` [B, 1, n, L] is True where a query sees a key; a query that sees none gives zeros.  ``scale`` and
    ``softcap`` count as the FP32 numbers nearest to them.
    """

    @staticmethod
    def forward(ctx, q, k, v, visible, scale, softcap):
        scale, softcap = _fp32(scale), None if softcap is None else _fp32(softcap)
        ctx.save_for_backward(q, k, v, visible)
        ctx.scale, ctx.softcap = scale, softcap
        out = torch.empty_like(q)
        for b, h, weights, _slope, _k, value in ReferenceAttention.heads(q, k, v, visible, scale, softcap):
            out[b, h] = (weights @ value).to(q.dtype)
        return out.transpose(1, 2)

    @staticmethod
    def heads(q, k, v, visible, scale, softcap):
        per_group = q.shape[1] // k.shape[1]
        for b in range(q.shape[0]):
            seen = visible[b, 0]
            for h in range(q.shape[1]):
                key, value = k[b, h // per_group].double(), v[b, h // per_group].double()
                scores, slope = (q[b, h].double() @ key.T) * scale, 1.0
                if softcap is not None:
                    tanh = torch.tanh(scores / softcap)
                    scores, slope = softcap * tanh, 1.0 - tanh**2
                highest = torch.where(seen, scores, -torch.inf).max(1, keepdim=True).values
                weights = torch.where(seen, torch.exp(scores - highest), 0.0)
                total = weights.sum(1, keepdim=True)
                yield b, h, weights / torch.where(total == 0, 1.0, total), slope, key, value

    @staticmethod
    def backward(ctx, grad):
        q, k, v, visible = ctx.saved_tensors
        per_group = q.shape[1] // k.shape[1]
        dq = torch.empty_like(q)
        dk, dv = torch.zeros(k.shape, dtype=torch.float64), torch.zeros(v.shape, dtype=torch.float64)
        heads = ReferenceAttention.heads(q, k, v, visible, ctx.scale, ctx.softcap)
        for b, h, weights, slope, key, value in heads:
            d_out = grad[b, :, h].double()
            d_weights = d_out @ value.T
            d_scores = weights * (d_weights - (d_weights * weights).sum(1, keepdim=True)) * slope * ctx.scale
            dq[b, h] = (d_scores @ key).to(q.dtype)
            dk[b, h // per_group] += d_scores.T @ q[b, h].double()
            dv[b, h // per_group] += weights.T @ d_out
        return dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None


class ReferenceHead(torch.autograd.Function):
    """A BF16 linear in FP32, sixteen rows at a time, rounded once."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        rows = x.reshape(-1, x.shape[-1])
        out = torch.empty(rows.shape[0], weight.shape[0], dtype=x.dtype)
        for start in range(0, rows.shape[0], 16):
            tile = torch.zeros(16, rows.shape[1])
            part = rows[start : start + 16]
            tile[: len(part)] = part.float()
            product = (tile @ weight.float().T)[: len(part)]
            out[start : start + 16] = (product if bias is None else product + bias.float()).to(x.dtype)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        rows = flat.float()
        dx = (rows @ weight.float()).to(x.dtype).view(x.shape)
        dw = (rows.T @ x.flatten(0, -2).float()).to(x.dtype)
        return dx, dw, flat.sum(0) if ctx.biased else None


def make_reference(model, *, requantize: bool = False, quantize: bool = True):
    """Patch ``model`` to run the reference: FP8 linears in the blocks, BF16 head, float64 attention, dense masks."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def dense_mask(*args, allow_is_causal_skip=True, **options):
        return sdpa_mask(*args, allow_is_causal_skip=False, **options)

    def attend(module, q, k, v, mask, scaling=None, dropout=0.0, softcap=None, sliding_window=None, **_):
        assert mask.dtype is torch.bool  # the window is in it
        assert not dropout
        return ReferenceAttention.apply(q, k, v, mask, scaling, softcap), None

    ALL_ATTENTION_FUNCTIONS.register("independent", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("independent", dense_mask)
    model.config._attn_implementation = "independent"
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            if ".layers." in name and quantize:
                module.forward = functools.partial(_fp8, module, requantize)
            else:
                module.forward = functools.partial(_head, module)
    return model


def _fp8(module, requantize, x):
    return ReferenceLinear.apply(x, module.weight, module.bias, requantize)


def _head(module, x):
    return ReferenceHead.apply(x, module.weight, module.bias)

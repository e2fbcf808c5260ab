"""The closed vocabulary of the precision graph.

Every primitive is a total, deterministic function of its inputs and attributes.  Arithmetic is FP32 on real numbers;
a narrower result is a separate `round` node and a quantised one a separate `quantize` node, so a missing cast is an
ordinary difference of terms.  Widening keeps the number and is no node at all.  What captured programs call — fused
operators included — is *expanded* into these by the lifters; nothing here is recognised by a pattern.

Notation in the formulas: x, y are [T, C] (token axis T, C flat features) unless said otherwise, W is [N, K].
`row_local` says that row t of the result depends on row t of the inputs alone (attention: and on the rows before it in
the same sequence); it is what makes prefill, decode and chunked prefill the same function (docs/spec.md §3).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OpSpec:
    """One primitive.  ``arity`` None is any number of inputs; ``accumulates`` names the format sums are carried in."""

    name: str
    arity: int | None
    attrs: tuple[str, ...]
    formula: str
    row_local: bool = True
    accumulates: str = ""
    leaf: bool = False


def _specs() -> dict[str, OpSpec]:
    rows = [
        # ------------------------------------------------------------------------------------------------- leaves
        OpSpec("input", 0, ("name",), "a per-token input of the program: token ids, positions, targets", leaf=True),
        OpSpec(
            "parameter", 0, ("name",), "a master parameter or buffer by FQN; tied names are one parameter", leaf=True
        ),
        OpSpec("operand", 0, ("name",), "stored FP8 codes and scales that no parameter accounts for", leaf=True),
        OpSpec(
            "poison",
            0,
            ("name",),
            "uninitialised memory: differs from everything, itself included elsewhere",
            leaf=True,
        ),
        OpSpec(
            "unknown", None, ("name",), "an operator outside this vocabulary, by its name: verdict UNKNOWN", leaf=True
        ),
        OpSpec("const", 0, ("value",), "one FP32 number", leaf=True),
        # -------------------------------------------------------------------------------------- pointwise, in FP32
        OpSpec("round", 1, ("format",), "x rounded to nearest even in a narrower format"),
        OpSpec("add", 2, (), "x + y (commutes bit for bit: inputs are sorted by digest)"),
        OpSpec("sub", 2, (), "x - y"),
        OpSpec("mul", 2, (), "x * y (commutes)"),
        OpSpec("div", 2, (), "x / y"),
        OpSpec("neg", 1, (), "-x"),
        OpSpec("sq", 1, (), "x * x"),
        OpSpec("pow", 1, ("exponent",), "x ** exponent"),
        OpSpec("rsqrt", 1, (), "1 / sqrt(x)"),
        OpSpec("cos", 1, (), "cos(x)"),
        OpSpec("sin", 1, (), "sin(x)"),
        OpSpec("silu", 1, (), "x * sigmoid(x)"),
        OpSpec("silu_backward", 2, (), "dy * sigmoid(x) * (1 + x * (1 - sigmoid(x))) for (dy, x)"),
        OpSpec("gelu", 1, ("approximate",), "x * Φ(x); tanh: x/2 * (1 + tanh(√(2/π) * (x + 0.044715 x³)))"),
        OpSpec("gelu_backward", 2, ("approximate",), "dy * gelu'(x) for (dy, x)"),
        OpSpec("tanh", 1, (), "tanh(x)"),
        OpSpec("int_to_float", 1, (), "an integer below 2^24 as FP32"),
        # ------------------------------------------------------------------------------------------- arrangement
        OpSpec(
            "slice",
            1,
            ("outer", "size", "inner", "start", "stop"),
            "features seen as [outer, size, inner], cut on size",
        ),
        OpSpec("cat", None, ("outer", "sizes", "inner"), "features seen as [outer, sizes[i], inner], joined on sizes"),
        OpSpec(
            "broadcast", 1, ("sizes", "present"), "features repeated along the factors of ``sizes`` not ``present``"
        ),
        OpSpec("permute", 1, ("sizes", "order"), "features seen as ``sizes``, axes reordered"),
        OpSpec("pick", 1, ("index",), "one result of an operator that has several"),
        # -------------------------------------------------------------------------------------------- reductions
        OpSpec("mean", 1, ("size",), "mean over the last ``size`` features of each group", accumulates="f32"),
        OpSpec(
            "sum", 1, ("sizes", "reduced"), "sum over the feature factors ``reduced`` of ``sizes``", accumulates="f32"
        ),
        OpSpec(
            "layer_norm",
            3,
            ("eps",),
            "(x - mean x) / sqrt(var x + eps) * w + b over all features, for (x, w[C], b[C])",
            accumulates="f32",
        ),
        OpSpec(
            "layer_norm_backward",
            3,
            ("eps",),
            "(dx, dw, db) of layer_norm for (dy, x, w); mean and 1/sqrt are first rounded to the format of x",
            row_local=False,
            accumulates="f32",
        ),
        OpSpec(
            "sum_tokens",
            1,
            ("sizes", "reduced"),
            "sum over all tokens and the feature factors ``reduced``",
            row_local=False,
            accumulates="f32",
        ),
        # ------------------------------------------------------------------------------------------------- FP8
        OpSpec("quantize", 1, (), "codes and scales of x by the Scale in this node's own precision (ScaleRule)"),
        # ------------------------------------------------------------------------------------------------- GEMM
        OpSpec(
            "gemm",
            2,
            ("contraction",),
            "nt: x[T,K] W[N,K]ᵀ (FPROP)   nn: dy[T,N] W[N,K] (DGRAD)   tn: dy[T,N]ᵀ x[T,K] (WGRAD)",
            accumulates="f32",
        ),
        OpSpec(
            "row_parallel_gemm",
            2,
            ("contraction", "parts", "wire"),
            "nt gemm with K cut in ``parts`` equal runs: a rank's sum is rounded to ``wire``, ranks are added in FP32",
            accumulates="f32",
        ),
        # ------------------------------------------------------------------------------------------------- experts
        OpSpec(
            "route",
            None,
            ("top_k", "score", "renormalise", "scale", "tie_break", "selection", "capacity"),
            "(logits[, bias]) -> [T, E]: scores of the top_k experts by score + bias, others 0; / their sum; * scale",
        ),
        OpSpec(
            "combine",
            None,
            ("order", "format"),
            "(w[T, E], y_0, …, y_E-1) -> Σ w_e y_e over w_e ≠ 0 in ``order``, products and sums rounded to ``format``",
            accumulates="f32",
        ),
        # ------------------------------------------------------------------------------------ attention, embedding
        OpSpec(
            "attention",
            3,
            ("heads", "kv_heads", "head_dim", "scale", "mask", "window", "softcap"),
            "softmax(q kᵀ · scale + mask) v per head, FP32 result",
            accumulates="f32",
        ),
        OpSpec(
            "attention_backward",
            4,
            ("heads", "kv_heads", "head_dim", "scale", "mask", "window", "softcap"),
            "(dq, dk, dv) of attention for (dout, q, k, v)",
            row_local=False,
            accumulates="f32",
        ),
        OpSpec("embed", 2, (), "rows of W[V, C] at token ids"),
        OpSpec(
            "embed_backward",
            2,
            ("rows", "padding"),
            "dW[V, C]: dy summed into rows ids, padding id left out",
            row_local=False,
        ),
        # ------------------------------------------------------------------------------------------- observables
        OpSpec("log_softmax", 1, (), "x - log Σ exp x over all features", accumulates="f32"),
        OpSpec("log_softmax_backward", 2, (), "dy - exp(y) Σ dy for (dy, y = log_softmax)", accumulates="f32"),
        OpSpec("gather", 2, (), "x[t, ids[t]]"),
        OpSpec("gather_backward", 2, ("size",), "zeros [T, size] with dy[t] at ids[t], for (dy, ids)"),
    ]
    return {row.name: row for row in rows}


OPS = _specs()
COMMUTATIVE = frozenset({"add", "mul"})

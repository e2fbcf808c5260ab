"""o_proj's partial sums of two ranks meet in FP32: contained modulo reduction order; valid when training cuts K too."""

from tests.verify.mutations import Context, apply
from tests.verify.toy_transformer import build

MODULO = ("reduction order",)


def over_two_ranks(c: Context) -> int | None:
    if c.node.op != "gemm" or not c.node.fqn.endswith("o_proj"):
        return None
    attrs = {"contraction": "nt", "parts": 2, "wire": "f32"}
    return c.b.intern("row_parallel_gemm", c.inputs, attrs, c.node.type.shape, c.node.type.precision, c.node.kernel)


def refuted():
    return build("train"), apply(build("infer"), over_two_ranks)


def twin():
    return apply(build("train"), over_two_ranks), apply(build("infer"), over_two_ranks)

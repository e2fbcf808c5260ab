"""The engine's GEMM is not known to be row-invariant: still one precision flow, but not bitwise."""

from tests.verify.toy_transformer import KERNELS, build, with_meta


def refuted():
    return build("train"), with_meta(build("infer"), kernels={**KERNELS, "ref.gemm": {"row_invariant": False}})


def twin():
    return build("train"), with_meta(build("infer"), kernels={**KERNELS, "unused": {"row_invariant": False}})

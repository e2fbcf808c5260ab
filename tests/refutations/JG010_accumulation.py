"""The engine's GEMM hands out bf16; valid when the trainer's is the same GEMM."""

from tests.verify.mutations import apply, gemm_in_bf16
from tests.verify.toy_transformer import build


def refuted():
    return build("train"), apply(build("infer"), gemm_in_bf16)


def twin():
    return apply(build("train"), gemm_in_bf16), apply(build("infer"), gemm_in_bf16)

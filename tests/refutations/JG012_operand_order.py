"""gate and up are swapped; valid when both sides apply silu to up."""

from tests.verify.mutations import apply, gate_and_up_swapped
from tests.verify.toy_transformer import build


def refuted():
    return build("train"), apply(build("infer"), gate_and_up_swapped)


def twin():
    return apply(build("train"), gate_and_up_swapped), apply(build("infer"), gate_and_up_swapped)

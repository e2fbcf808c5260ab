"""The engine quantises at load what was quantised already; valid when the trainer's operand is made so too."""

from tests.verify.mutations import apply, weights_quantised_twice
from tests.verify.toy_transformer import build


def refuted():
    return build("train"), apply(build("infer"), weights_quantised_twice)


def twin():
    return apply(build("train"), weights_quantised_twice), apply(build("infer"), weights_quantised_twice)

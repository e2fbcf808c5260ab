"""The engine squares the residual before rounding it; valid when both do."""

from tests.verify.mutations import apply, residual_not_rounded
from tests.verify.toy_transformer import build


def refuted():
    return build("train"), apply(build("infer"), residual_not_rounded)


def twin():
    return apply(build("train"), residual_not_rounded), apply(build("infer"), residual_not_rounded)

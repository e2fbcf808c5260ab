"""eps is 1e-6 in the engine's config and 1e-5 in the trainer's, which replay cannot see; valid when both are 1e-6."""

from tests.verify.mutations import apply, eps
from tests.verify.toy_transformer import build


def refuted():
    return build("train"), apply(build("infer"), eps)


def twin():
    return apply(build("train"), eps), apply(build("infer"), eps)

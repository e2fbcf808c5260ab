"""The engine's graph was lowered by Inductor; valid when it ran as the graph shows."""

from tests.verify.toy_transformer import build, with_meta


def refuted():
    return build("train"), with_meta(build("infer"), compiler="inductor")


def twin():
    return build("train"), with_meta(build("infer"), compiler="fx")

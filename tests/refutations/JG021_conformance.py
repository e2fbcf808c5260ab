"""Both sides are silently bf16 and the policy demands FP8: they contain each other; valid when the policy says bf16."""

from tests.verify.toy_transformer import build, with_meta

SCOPE = build("train").meta["scope"]


def refuted():
    return tuple(with_meta(g, scope=SCOPE) for g in twin())


def twin():
    return build("train", activation=None, weight=None), build("infer", activation=None, weight=None)

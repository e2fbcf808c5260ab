"""The naive setting: bf16 training, FP8 rollout; valid when both are bf16 and the policy says so."""

from tests.verify.toy_transformer import build


def refuted():
    return build("train", activation=None, weight=None), build("infer")


def twin():
    return build("train", activation=None, weight=None), build("infer", activation=None, weight=None)


EXTRA = {"JG021"}
"""the two scopes differ as well"""

"""The engine rounds scales up to a power of two; valid when the trainer does too."""

from dataclasses import replace

from tests.verify.mutations import MUTATIONS, apply
from tests.verify.toy_transformer import ACTIVATION, build

POWER_OF_TWO = replace(ACTIVATION, rule=replace(ACTIVATION.rule, power_of_two=True))


def refuted():
    return build("train"), apply(build("infer"), MUTATIONS["activation power of two"].edit)


def twin():
    return build("train", activation=POWER_OF_TWO), build("infer", activation=POWER_OF_TWO)

"""The engine's amax floor is 1e-10, ordinary data never reach it; valid when it is the trainer's too."""

from dataclasses import replace

from tests.verify.mutations import MUTATIONS, apply
from tests.verify.toy_transformer import ACTIVATION, build

HIGHER_FLOOR = replace(ACTIVATION, rule=replace(ACTIVATION.rule, amax_floor=1e-10))


def refuted():
    return build("train"), apply(build("infer"), MUTATIONS["activation amax floor"].edit)


def twin():
    return build("train", activation=HIGHER_FLOOR), build("infer", activation=HIGHER_FLOOR)

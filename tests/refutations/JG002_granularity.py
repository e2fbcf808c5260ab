"""The engine groups activations 1x64, the trainer 1x128; valid when both use 1x64.  A finer grid is not contained."""

from dataclasses import replace

from jetgraph.precision import Granularity
from tests.verify.mutations import MUTATIONS, apply
from tests.verify.toy_transformer import ACTIVATION, build

FINER = replace(ACTIVATION, granularity=Granularity.per_group(64))


def refuted():
    return build("train"), apply(build("infer"), MUTATIONS["activation 1x64"].edit)


def twin():
    return build("train", activation=FINER), build("infer", activation=FINER)

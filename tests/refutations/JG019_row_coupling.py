"""Per-tensor dynamic activation scales on both sides agree as terms, and still couple tokens; static ones do not."""

from dataclasses import replace

from jetgraph.precision import Granularity
from tests.verify.toy_transformer import ACTIVATION, build

DYNAMIC = replace(ACTIVATION, granularity=Granularity.per_tensor())
STATIC = replace(DYNAMIC, dynamic=False)


def refuted():
    return build("train", activation=DYNAMIC), build("infer", activation=DYNAMIC)


def twin():
    return build("train", activation=STATIC), build("infer", activation=STATIC)

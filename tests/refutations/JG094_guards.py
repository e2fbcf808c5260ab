"""Training was captured for up to 4096 tokens and the engine serves 8192; valid when the engine serves 4096."""

from tests.verify.toy_transformer import build, with_meta

TRAIN = ["2 <= T <= 4096", "positions are consecutive"]


def refuted():
    infer = with_meta(build("infer"), guards=["2 <= T", "T <= 8192", "positions are consecutive"])
    return with_meta(build("train"), guards=TRAIN), infer


def twin():
    infer = with_meta(build("infer"), guards=["16 <= T <= 4096", "T % 16 == 0", "positions are consecutive"])
    return with_meta(build("train"), guards=TRAIN), infer

"""The engine's graph does not observe V of layer 1; valid when it does (and may leave the logprob out)."""

from tests.verify.toy_transformer import build


def refuted():
    infer = build("infer")
    return build("train"), infer.restrict({k: i for k, i in infer.outputs.items() if k != "v.1"})


def twin():
    infer = build("infer")
    return build("train"), infer.restrict({k: i for k, i in infer.outputs.items() if k != "logprob"})

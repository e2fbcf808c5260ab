"""The engine's graph does not observe V of layer 1; valid when it does (training may observe more: hidden states)."""

import dataclasses

from tests.verify.toy_transformer import build


def refuted():
    infer = build("infer")
    return build("train"), infer.restrict({k: i for k, i in infer.outputs.items() if k != "v.1"})


def twin():
    train = build("train")
    more = {**train.outputs, "hidden": train.outputs["logits"]}
    return dataclasses.replace(train, outputs=more), build("infer")

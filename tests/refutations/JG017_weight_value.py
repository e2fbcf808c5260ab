"""Codes were quantised again at load: one digest differs, the graph does not; valid when the digests agree."""

from tests.verify.toy_transformer import build, sha, with_meta

NAME = "model.layers.1.mlp.up_proj.weight"


def refuted():
    infer = build("infer")
    operands = {**infer.meta["operands"]}
    operands[NAME] = {**operands[NAME], "digest": sha("one bit of one code")}
    return build("train"), with_meta(infer, operands=operands)


def twin():
    return build("train"), build("infer")

"""A norm reads the weight of the next layer's; valid when the model does so on both sides (a shared weight)."""

from tests.verify.mutations import apply, norm_weight_of_next_layer
from tests.verify.toy_transformer import build, with_meta

IDLE = ["model.layers.0.input_layernorm.weight"]


def shared(side):
    return with_meta(apply(build(side), norm_weight_of_next_layer, layer=0), dead=IDLE)


def refuted():
    return build("train"), apply(build("infer"), norm_weight_of_next_layer, layer=0)


def twin():
    return shared("train"), shared("infer")

"""The engine's logprobs are of logits at temperature 0.7; valid when the trainer scales them too."""

from tests.verify.mutations import Context, apply
from tests.verify.toy_transformer import build


def temperature(c: Context) -> int | None:
    if c.node.op != "log_softmax":
        return None
    return c.with_inputs([c.b.pointwise("div", [c.inputs[0], c.b.const(0.7)])])


def refuted():
    return build("train"), apply(build("infer"), temperature)


def twin():
    return apply(build("train"), temperature), apply(build("infer"), temperature)

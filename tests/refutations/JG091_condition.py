"""The class of the mask is unproven on both sides; valid when it is causal."""

from tests.verify.mutations import Context, apply
from tests.verify.toy_transformer import build


def unproven(c: Context) -> int | None:
    if c.node.op != "attention":
        return None
    attrs = {**dict(c.node.attrs), "mask": "unknown"}
    return c.b.intern("attention", c.inputs, attrs, c.node.type.shape, c.node.type.precision, c.node.kernel)


def refuted():
    return apply(build("train"), unproven), apply(build("infer"), unproven)


def twin():
    return build("train"), build("infer")

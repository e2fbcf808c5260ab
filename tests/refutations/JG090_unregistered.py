"""The engine calls an op outside the vocabulary; valid once the op is expanded."""

from tests.verify.mutations import Context, apply
from tests.verify.toy_transformer import build


def unknown(c: Context) -> int | None:
    if c.node.op != "silu":
        return None
    return c.b.intern("unknown", c.inputs, {"name": "my::silu"}, c.node.type.shape, c.node.type.precision)


def refuted():
    return build("train"), apply(build("infer"), unknown)


def twin():
    return build("train"), build("infer")

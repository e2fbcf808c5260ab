"""The engine does not renormalise the scores of the chosen experts; valid when training does not either."""

from tests.verify.mutations import Context, apply
from tests.verify.toy_transformer import build


def not_renormalised(c: Context) -> int | None:
    if c.node.op != "route":
        return None
    attrs = {**dict(c.node.attrs), "renormalise": False}
    return c.b.intern("route", c.inputs, attrs, c.node.type.shape, c.node.type.precision)


def refuted():
    return build("train", experts=3), apply(build("infer", experts=3), not_renormalised)


def twin():
    return apply(build("train", experts=3), not_renormalised), apply(build("infer", experts=3), not_renormalised)

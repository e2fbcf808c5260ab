"""The final norm's result is rounded to f8e4m3 by the engine; valid when both sides do so."""

from jetgraph.precision import Format
from tests.verify.mutations import Context, apply
from tests.verify.toy_transformer import build


def narrower(c: Context) -> int | None:
    if c.node.op != "round" or c.node.fqn != "model.norm" or not c.reads("mul"):
        return None
    return c.b.round(c.inputs[0], Format.E4M3) if any(c.chain(i, ("mul", "parameter")) for i in c.node.inputs) else None


def refuted():
    return build("train"), apply(build("infer"), narrower)


def twin():
    return apply(build("train"), narrower), apply(build("infer"), narrower)

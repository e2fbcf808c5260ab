"""Small graphs with the shape of real ones: embedding, decoder layers of one FP8 linear with a norm, head, loss."""

from __future__ import annotations

import shutil

from jetgraph.graph import Node, Phase, PrecisionGraph, Role, ValueType
from jetgraph.precision import BF16, F32, I64, Format, Granularity, Precision, Scale
from jetgraph.viz import Difference

ROWS = Precision(Format.E4M3, Scale(Granularity.per_group(128)))
BLOCKS = Precision(Format.E4M3, Scale(Granularity.per_block(128, 128)))
TOKENS = Precision(Format.E4M3, Scale(Granularity.per_token_group(128)))
HOSTILE = "m</script><b>&amp;|{}$x\"'\u2028ünïcode\u2192.layers"
BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


class Builder:
    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def __call__(
        self, op, *inputs, precision=F32, shape=("T", 256), fqn="", role=Role.NONE, back=False, **attrs
    ) -> int:
        reason, kernel = attrs.pop("reason", ""), attrs.pop("kernel", "")
        phase = Phase.BACKWARD if back else Phase.FORWARD
        kind = ValueType(tuple(shape), precision)
        self.nodes.append(
            Node(
                op,
                inputs,
                tuple(sorted(attrs.items())),
                kind,
                fqn,
                role,
                phase,
                kernel,
                f"model.py:{len(self.nodes)}",
                reason,
            )
        )
        return len(self.nodes) - 1

    def parameter(self, name: str, shape=(256, 256)) -> int:
        return self("parameter", precision=BF16, shape=shape, name=name)


def tiny(
    layers: int = 3,
    fp8: bool = True,
    odd: int | None = None,
    backward: bool = True,
    prefix: str = "model.layers",
    weights: str = "",
) -> PrecisionGraph:
    """``odd`` is a layer whose norm has another eps; ``weights`` the parameters' prefix if not the modules'."""
    b = Builder()
    table = b.parameter("model.embed.weight", (1000, 256))
    ids = b("input", precision=I64, shape=("T", 1), name="input_ids")
    x = b("embed", table, ids, precision=BF16, fqn="model.embed")
    saved, outputs = [], {}
    for n in range(layers):
        fqn = f"{prefix}.{n}"
        weight = b.parameter(f"{weights or prefix}.{n}.proj.weight")
        eps = b("const", shape=(1,), value=1e-6 if n == odd else 1e-5)
        square = b("sq", x, fqn=f"{fqn}.norm")
        mean = b("add", b("mean", square, shape=("T", 1), fqn=f"{fqn}.norm", size=256), eps, fqn=f"{fqn}.norm")
        normed = b("round", b("mul", x, mean, fqn=f"{fqn}.norm"), precision=BF16, fqn=f"{fqn}.norm", format="bf16")
        a, w = normed, weight
        if fp8:
            a = b("quantize", normed, precision=ROWS, fqn=f"{fqn}.proj", reason="jet: *", kernel="jetgraph::quantize")
            w = b("quantize", weight, precision=BLOCKS, shape=(256, 256), fqn=f"{fqn}.proj", reason="jet: *")
        y = b("gemm", a, w, fqn=f"{fqn}.proj", role=Role.FPROP, contraction="nt", reason="jet: *", kernel="k::mm")
        y = b("round", y, precision=BF16, fqn=f"{fqn}.proj", format="bf16")
        outputs[f"k.{n}"] = y
        saved.append((weight if not fp8 else w, fqn))
        x = b("round", b("add", x, y, fqn=fqn), precision=BF16, fqn=fqn, format="bf16")
    head = b("gemm", x, table, shape=("T", 1000), fqn="lm_head", role=Role.FPROP, contraction="nt", kernel="k::mm")
    logits = b("round", head, precision=BF16, shape=("T", 1000), fqn="lm_head", format="bf16")
    outputs["logits"] = logits
    if backward:
        g = b("input", precision=BF16, name="d_logits")
        for w, fqn in reversed(saved):
            d = b("quantize", g, precision=ROWS, fqn=f"{fqn}.proj", back=True) if fp8 else g
            g = b("gemm", d, w, fqn=f"{fqn}.proj", role=Role.DGRAD, back=True, contraction="nn", kernel="k::mm")
            g = b("round", g, precision=BF16, fqn=f"{fqn}.proj", back=True, format="bf16")
        table_grad = b("embed_backward", g, ids, shape=(1000, 256), back=True, rows=1000, padding=-1)
        outputs["grad.model.embed.weight"] = table_grad
    return PrecisionGraph(
        "tiny", tuple(b.nodes), outputs, {"policy": "jet" if fp8 else "bf16", "unknown": ["aten::odd"]}
    )


def differing():
    train, infer = tiny(), tiny(fp8=False, backward=False)
    gemms = [[i for i, n in enumerate(g.nodes) if n.op == "gemm" and n.role == "FPROP"][:3] for g in (train, infer)]
    return train, infer, [Difference(t, i, "JG001", "expected f8; got bf16") for t, i in zip(*gemms, strict=True)]


def in_order(*names):
    b = Builder()
    x = b("input", precision=BF16, name="x")
    for name in names:
        weight = b.parameter(f"m.layers.0.{name}.weight")
        x = b("gemm", x, weight, fqn=f"m.layers.0.{name}", role=Role.FPROP, contraction="nt")
        x = b("round", x, precision=BF16, fqn=f"m.layers.0.{name}", format="bf16")
    return PrecisionGraph("chain", tuple(b.nodes), {"y": x})

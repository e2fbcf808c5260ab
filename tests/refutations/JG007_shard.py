"""gate_proj's 512 rows over 8 ranks are half blocks; valid over 4, where every rank holds whole blocks of 128."""

from jetgraph.graph import PrecisionGraph
from tests.verify.toy_transformer import build, with_meta

NAME = "model.layers.0.mlp.gate_proj.weight"


def engine(parts: int) -> PrecisionGraph:
    return with_meta(build("infer"), shards={NAME: [0, parts]})


def refuted():
    return build("train"), engine(8)


def twin():
    return build("train"), engine(4)

"""A partial rollout goes on after an update over KV of the old weights; valid when the cache was dropped."""

from jetgraph.graph import PrecisionGraph
from tests.verify.toy_transformer import build, with_meta

MODULO = ("version vector",)


def engine(**wrote: str) -> PrecisionGraph:
    return with_meta(build("infer"), state={"version": "step 8", "entries": wrote})


def refuted():
    return build("train"), engine(**{"request 3, positions 0-127": "step 7", "request 3, positions 128-200": "step 8"})


def twin():
    return build("train"), engine(**{"request 3, positions 0-200": "step 8"})

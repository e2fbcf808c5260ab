"""The engine's cache holds FP8 K and V; valid when the trainer attends over the same FP8 values."""

from tests.verify.mutations import apply, kv_cache_fp8
from tests.verify.toy_transformer import build, rewrite


def cached(side):
    """Attention and the observables K and V all read the quantised values, as an FP8 cache does."""
    graph = apply(build(side), kv_cache_fp8)
    attention = [n for n in graph.nodes if n.op == "attention"]
    outputs = dict(graph.outputs)
    for i, node in enumerate(attention):
        outputs |= {f"k.{i}": node.inputs[1], f"v.{i}": node.inputs[2]}
    return rewrite(graph, lambda *_: None, outputs)


def refuted():
    return build("train"), cached("infer")


def twin():
    return cached("train"), cached("infer")

"""q 256 | k 64 | v 64 rows share one block grid: v starts inside a block; valid when each part has its own grid."""

from jetgraph.graph import PrecisionGraph
from tests.verify.toy_transformer import build, sha, with_meta

NAMES = [f"model.layers.1.self_attn.{p}_proj.weight" for p in "qkv"]
MERGED = "model.layers.1.self_attn.qkv_proj.weight"


def engine(origins: tuple[int, ...], first: tuple[int, ...] = (0, 256, 320)) -> PrecisionGraph:
    segments = {name: [MERGED, row, origin] for name, row, origin in zip(NAMES, first, origins, strict=True)}
    return with_meta(build("infer", kv_heads=1), segments=segments)


def refuted():
    """The codes that such a load stores are others too: the grid is the root, the digest its echo."""
    infer = engine((0, 0, 0))
    v = NAMES[2]
    operands = {**infer.meta["operands"], v: {**infer.meta["operands"][v], "digest": sha("amax of k and v")}}
    return build("train", kv_heads=1), with_meta(infer, operands=operands)


def twin():
    return build("train", kv_heads=1), engine((0, 256, 320))

"""What a lowered region keeps between forward and backward, and which backward operators need it.

requires: a partitioned region
ensures:  the graph is unchanged; every saved tensor that is not a parameter is listed with its consumers
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from jetgraph.fx_record import module_fqn, record_value, relative_fqn, target_name
from jetgraph.passes.edit import VIEWS
from jetgraph.record import TensorSpec

BYTES = {"float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "float32": 4, "int64": 8, "float64": 8, "bool": 1}


@dataclass(frozen=True)
class SavedTensor:
    """A tensor kept for backward: its shape (symbols for sizes), dtype, who made it and who reads it."""

    region: str
    name: str
    dtype: str
    shape: tuple[int | str, ...]
    made_by: str
    consumers: tuple[str, ...]

    @property
    def quantized(self) -> bool:
        return self.dtype == "float8_e4m3fn"

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes for one token if exactly one axis is symbolic (the token axis), else None."""
        symbolic = [s for s in self.shape if isinstance(s, str)]
        if len(symbolic) != 1:
            return None
        fixed = math.prod(s for s in self.shape if isinstance(s, int))
        per_group = 128 if "//128" in str(symbolic[0]).replace(" ", "") else 1
        return fixed * BYTES[self.dtype] / per_group


def saved_tensors(forward: GraphModule, backward: GraphModule, region: str) -> list[SavedTensor]:
    """What ``forward`` hands to ``backward``, activations only: parameters are kept by the model anyway."""
    readers = {n.name: n for n in backward.graph.nodes if n.op == "placeholder"}
    saved = []
    for node in forward.graph.nodes:
        spec = record_value(node.meta.get("val"))
        if node.name not in readers or node.op == "placeholder" or not isinstance(spec, TensorSpec):
            continue
        consumers = dict.fromkeys(
            f"{target_name(user.target)} of {relative_fqn(module_fqn(user)) or region}"
            for user in _users(readers[node.name])
        )
        saved.append(
            SavedTensor(
                region, node.name, spec.dtype, spec.shape, relative_fqn(module_fqn(node)) or region, tuple(consumers)
            )
        )
    return saved


def _users(node: Node) -> list[Node]:
    """The operators that read a saved tensor, looking through views."""
    found = []
    for user in node.users:
        found += _users(user) if user.target in VIEWS else [user]
    return found

"""Parameters as a forward reads them: whole, in the dtype it computes with, wherever FSDP2 keeps their shards.

An FSDP2 parameter is a `DTensor` of masters between steps; inside a forward it is a plain tensor, gathered and cast
once to ``MixedPrecisionPolicy.param_dtype``.  The second is what a graph's leaf is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jetgraph.graph import PrecisionGraph
from jetgraph.precision import Format

DTYPES = {Format.BF16: torch.bfloat16, Format.F32: torch.float32}


def is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def whole(tensor: Tensor) -> Tensor:
    """The whole of a parameter, detached.  For a sharded one a collective: every rank must ask, in the same order."""
    value = tensor.detach()
    return value.full_tensor() if is_sharded(value) else value  # type: ignore[operator]


def leaves_of(graph: PrecisionGraph, model: torch.nn.Module) -> dict[str, Tensor]:
    """Every buffer and parameter of ``model`` by name; sharded parameters that ``graph`` reads as its leaves have them.

    A sharded parameter that the graph does not read is left out.
    """
    leaves = dict(model.named_buffers())
    dtypes = leaf_dtypes(graph)
    for name, parameter in model.named_parameters():
        if not is_sharded(parameter):
            leaves[name] = parameter
        else:
            value = whole(parameter)  # on every rank, whatever its graph reads
            if name in dtypes:
                leaves[name] = value.to(dtypes[name])
    return leaves


def leaf_dtypes(graph: PrecisionGraph) -> Mapping[str, torch.dtype]:
    """The dtype in which the graph reads each parameter."""
    return {str(n.attr("name")): DTYPES[n.type.precision.format] for n in graph.nodes if n.op == "parameter"}

"""Fuse what is computed with its quantisation, so that one read gives every set of codes that the GEMMs need.

    norms        [residual add →] RMSNorm → quantise
    activations  silu(gate) · up → quantise, and its gradients
    inverse_rms  1/√(mean + eps) of the norms that are left
    rotary       [heads' RMSNorm →] rotary embedding
    copies       what is left: codes along features and along tokens of one tensor

Every fusion is checked when it is applied (`legality`): both forms are run on numbers and must agree in every bit, else
the graph stays as it was and the refusal is in the report.  At the end `passes.recompute` lets backward compute again
what is elementwise in what it keeps anyway.
"""

from __future__ import annotations

from torch.fx import GraphModule

from jetgraph.passes.fuse.activations import fuse_activation_gradients, fuse_activations
from jetgraph.passes.fuse.copies import fuse_copies
from jetgraph.passes.fuse.inverse_rms import fuse_inverse_rms
from jetgraph.passes.fuse.legality import Fusion
from jetgraph.passes.fuse.norms import fuse_norms
from jetgraph.passes.fuse.rotary import fuse_rotary
from jetgraph.passes.recompute import recompute

__all__ = [
    "Fusion", "fuse", "fuse_activation_gradients", "fuse_activations", "fuse_copies", "fuse_inverse_rms", "fuse_norms",
    "fuse_rotary",
]  # fmt: skip


def fuse(module: GraphModule) -> list[Fusion]:
    """All fusions, in place, of a graph whose linears `quantize_linears` has lowered.  Returns what was tried."""
    passes = fuse_norms, fuse_inverse_rms, fuse_rotary, fuse_activations, fuse_activation_gradients, fuse_copies
    tried = [fusion for each in passes for fusion in each(module)]
    module.graph.eliminate_dead_code()
    recompute(module)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return tried

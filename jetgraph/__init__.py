"""jetgraph: the precision of an LLM as an object.

A graph that can be run, whose every edge says how its tensor is represented: training is compiled from it, what the
rollout engine really runs is read back as one, and the second is proved to be contained in the first.

The names below load what they need when they are first used, so `import jetgraph.verify` works without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetgraph.compiler import compile
    from jetgraph.graph import PrecisionGraph
    from jetgraph.policy import Policy, get_policy

__version__ = "0.1.0"
__all__ = ["Policy", "PrecisionGraph", "compile", "get_policy"]

_HOMES = {
    "compile": "jetgraph.compiler",
    "PrecisionGraph": "jetgraph.graph",
    "Policy": "jetgraph.policy",
    "get_policy": "jetgraph.policy",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jetgraph' has no attribute {name!r}")
    import importlib

    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value

"""The rollout graph that a training graph implies: what the engine is *expected* to run.

It configures the engine and says what to look for.  It is never what is verified: a graph cut out of training's is
contained by construction, and proving that proves nothing.
"""

from __future__ import annotations

import dataclasses

from jetgraph.graph import PrecisionGraph

OBSERVABLES = ("logits", "logprob")


def expected_rollout(train: PrecisionGraph) -> PrecisionGraph:
    """The observables of a rollout (logits, logprob, K and V of every layer) and what they need of ``train``."""
    wanted = {
        name: index for name, index in train.outputs.items() if name in OBSERVABLES or name.startswith(("k.", "v."))
    }
    if not wanted:
        raise ValueError(f"graph {train.name!r} has none of the observables logits, logprob, k.0, v.0 …")
    expected = train.restrict(wanted)
    return dataclasses.replace(expected, name="expected rollout", meta={**train.meta, "side": "expected"})

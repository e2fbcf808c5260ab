"""What a loaded engine really holds, layer by layer, against what a policy says: no compiler, no graph, no run.

An engine integration reads its live tensors and methods into `Row`s (`rows`); `compare` holds them against the
annotation of a policy, both as sets of facts; `report` prints either.  Equal sets mean that every linear has the
formats and scale rules of the policy, nothing else is quantised, and the other layers compute as training does.  That
the *graph* is contained is a stronger statement, and `jetgraph verify`'s.
"""

from __future__ import annotations

from jetgraph.audit.compare import Difference, annotation, compare
from jetgraph.audit.report import Audit
from jetgraph.audit.rows import UNKNOWN, Fact, Quantiser, Role, Row

__all__ = ["UNKNOWN", "Audit", "Difference", "Fact", "Quantiser", "Role", "Row", "annotation", "compare"]

"""Does an operator compute what the graph says that it computes?  Measured on the machine where it runs.

A precision graph says what every operator means; that a kernel *has* this meaning is an axiom of the theorem
(docs/spec.md §5).  Here the axiom meets the kernel:

* pointwise and quantising operators: bit for bit against their plain definition;
* operators that sum: bit for bit on inputs whose every partial sum is exact, within a derived bound of a float64 oracle
  on random ones;
* the trainer's kernel against the engine's, bit for bit.

`rows` are the crafted inputs, `definitions` the plain meanings, `report` what was found; `trainer` attests this
library's own kernels, an engine integration its engine's (entry point ``jetgraph.engines``).
"""

from __future__ import annotations

from jetgraph.attest.report import Attestation, Check, Outcome

__all__ = ["Attestation", "Check", "Outcome"]

"""Folds equal faults over layers, so that sixty wrong norms are two lines and an exception stands apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jetgraph.verify.fault import Fault, layer_of, without_layer


@dataclass(frozen=True)
class Folded:
    """Faults that say the same of other layers; ``first`` speaks for all of them."""

    first: Fault
    count: int
    layers: tuple[int, ...]
    """() for faults outside the layers"""

    @property
    def fqn(self) -> str:
        return self.text(self.first.fqn)

    @property
    def remedy(self) -> str:
        return self.text(self.first.remedy)

    def text(self, text: str) -> str:
        """Words of the first fault as they hold for all layers of the fold."""
        return without_layer(text, self.layers[0]) if len(self.layers) > 1 else text

    @property
    def where(self) -> str:
        """``layers 0–29``, ``layers 0–2, 5``, ``layer 7`` or nothing."""
        if not self.layers:
            return ""
        return f"layer{'s' if len(self.layers) > 1 else ''} {spans(self.layers)}"


def fold(faults: Sequence[Fault]) -> tuple[Folded, ...]:
    """Group faults of equal rule, op, path and words but for the layer; the order of first appearance is kept."""
    groups: dict[tuple, list[Fault]] = {}
    for fault in faults:
        layer = layer_of(fault.fqn)
        texts = (fault.fqn, fault.expected, fault.got)
        key = (fault.rule, fault.op, layer is None, *(without_layer(t, layer) for t in texts))
        groups.setdefault(key, []).append(fault)
    return tuple(_folded(group) for group in groups.values())


def _folded(group: list[Fault]) -> Folded:
    layers = tuple(sorted({n for f in group if (n := layer_of(f.fqn)) is not None}))
    first = min(group, key=lambda f: -1 if (n := layer_of(f.fqn)) is None else n)
    return Folded(first, len(group), layers)


def spans(numbers: Sequence[int]) -> str:
    """
    >>> spans([0, 1, 2, 5])
    '0–2, 5'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], n]
        else:
            runs.append([n])
    return ", ".join("–".join(map(str, run)) for run in runs)

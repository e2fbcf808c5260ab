"""What the two sides share of the weights, in one sentence: the same codes, the same BF16 bits, or something else.

"FP8 end to end" is often two quantisers: the trainer's, and one that the engine runs over exported BF16 weights.  This
counts, weight by weight, and every report says the numbers whatever the verdict is.
"""

from __future__ import annotations

from dataclasses import dataclass

from jetgraph.graph import PrecisionGraph


@dataclass(frozen=True)
class Weights:
    """Names of the engine's weights.  ``differing`` have other bits than training's next forward uses."""

    shared_codes: tuple[str, ...] = ()
    """quantised: the codes and scales that the engine stores are the trainer's operand, by digest"""
    differing_codes: tuple[str, ...] = ()
    """quantised: the engine stores other codes or scales; quantised again, with another rule, or an older version"""
    unknown_codes: tuple[str, ...] = ()
    """quantised in the engine's graph, and no digest of stored codes on one of the sides"""
    shared: tuple[str, ...] = ()
    """not quantised, equal bits"""
    differing: tuple[str, ...] = ()

    def text(self) -> str:
        """``weights: 210 of 210 quantised weights are the codes that training uses, none quantised again; …``"""
        total = len(self.shared_codes) + len(self.differing_codes) + len(self.unknown_codes)
        parts = []
        if total:
            shared = len(self.shared_codes)
            again = "none" if shared == total else f"{total - shared} ({(total - shared) / total:.1%})"
            parts.append(f"{shared} of {total} quantised weights are shared as the very codes that training uses")
            parts.append(f"{again} re-quantised or of unknown origin")
        else:
            parts.append("no quantised weights in the engine")
        plain = len(self.shared) + len(self.differing)
        parts.append(f"{len(self.shared)} of {plain} other parameters are shared bit for bit")
        return "weights: " + "; ".join(parts)

    def to_dict(self) -> dict[str, object]:
        """For the JSON report: what is shared as numbers, what is not by name."""
        return {
            "shared_codes": len(self.shared_codes),
            "re_quantised": list(self.differing_codes),
            "unknown": list(self.unknown_codes),
            "shared": len(self.shared),
            "differing": list(self.differing),
        }


def compare(train: PrecisionGraph, infer: PrecisionGraph) -> Weights:
    """The weights of the engine beside training's, by the digests in both graphs."""
    used, stored = (graph.meta.get("operands", {}) for graph in (train, infer))
    theirs, ours = (graph.meta.get("parameters", {}) for graph in (train, infer))
    nodes = infer.nodes
    quantised = {
        str(nodes[node.inputs[0]].attr("name"))
        for node in nodes
        if node.op == "quantize" and nodes[node.inputs[0]].op == "parameter"
    }
    codes = sorted(quantised | set(stored))
    known = [name for name in codes if name in stored and name in used]
    plain = sorted(set(theirs) & set(ours) - quantised - set(stored))
    return Weights(
        tuple(name for name in known if stored[name] == used[name]),
        tuple(name for name in known if stored[name] != used[name]),
        tuple(name for name in codes if name not in stored or name not in used),
        tuple(name for name in plain if theirs[name] == ours[name]),
        tuple(name for name in plain if theirs[name] != ours[name]),
    )

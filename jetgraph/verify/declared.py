"""What graphs declare beside their nodes: merged weights, shards, guards, sibling graphs, versions of the KV cache.

| meta | form | rule |
|---|---|---|
| ``segments`` | {parameter: [merged weight, its first row there, the row where its block grid starts]} | JG006 |
| ``shards`` | {parameter: [axis, parts]}: equal cuts of its rows (axis 0) or columns (1), one a rank | JG007 |
| ``guards`` | texts of `guards`; the engine's must imply the trainer's | JG094 |
| ``family`` | {when it serves: semantic digest}: every graph the engine compiled for this model | JG094 |
| ``capture`` | {"logprobs_mode": …}: of which distribution the engine's logprobs are; training's are raw | JG020 |
| ``state`` | {"version": …, "entries": {which KV entries: the version that wrote them}} | JG018 |

All are integer or equality facts.  The checker does not read them: they can only take a verdict away, because what it
certifies is said of this graph, of token counts within the guards that it lists, of weights whose digests agree and of
KV entries of one version (docs/spec.md §6).  A declaration in another form is JG091.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from jetgraph.graph import Node
from jetgraph.verify.fault import Fault, at
from jetgraph.verify.forward import Forward
from jetgraph.verify.guards import uncovered

RAW_LOGPROBS = "raw_logprobs"
Detector = Callable[[Forward, Forward], Iterator[Fault]]


def declared(train: Forward, infer: Forward) -> list[Fault]:
    """Every fault of what both graphs declare about the engine; JG091 where a declaration cannot be read."""
    faults: list[Fault] = []
    for key, detector in _DETECTORS.items():
        try:
            faults += detector(train, infer)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError):
            e = f"meta {key!r} in the form of jetgraph/verify/declared.py"
            faults.append(Fault("JG091", "meta", key, e, repr(infer.graph.meta.get(key))[:60]))
    return faults


def _meta(forward: Forward, key: str) -> dict[str, Any]:
    return dict(forward.graph.meta.get(key) or {})


def _weights(forward: Forward) -> dict[str, tuple[int, Node, Node]]:
    """parameter → (index of a GEMM that reads it quantised, its activation node, its quantised weight node)."""
    found: dict[str, tuple[int, Node, Node]] = {}
    for index in forward.live:
        node = forward.nodes[index]
        if node.op == "gemm" and (weight := forward.nodes[node.inputs[1]]).op == "quantize":
            leaf = forward.nodes[weight.inputs[0]]
            if leaf.op == "parameter":
                found.setdefault(str(leaf.attr("name")), (index, forward.nodes[node.inputs[0]], weight))
    return found


def _block(node: Node, axis: int) -> int:
    """Rows or columns that share a scale; 1 where nothing is shared along the axis or there is no scale."""
    scale = node.type.precision.scale
    if scale is None:
        return 1
    size = (scale.granularity.rows, scale.granularity.cols)[axis]
    return int(node.type.shape[axis]) if size is None else size


def _segments(train: Forward, infer: Forward) -> Iterator[Fault]:
    """JG006: in its grid, the first row of a part of a merged weight must start a block."""
    theirs, ours = (_meta(f, "segments") for f in (train, infer))
    for name, (index, _, weight) in _weights(infer).items():
        if name not in ours or ours[name] == theirs.get(name):
            continue
        merged, first, origin = ours[name]
        block = _block(weight, 0)
        inside = (int(first) - int(origin)) % block
        if inside:
            e = f"a block that starts at row {first} of {merged}, its first"
            g = f"rows {first - inside}–{first - inside + block - 1} of {merged} in one block"
            yield at("JG006", e, g, infer=(infer.graph, index), fqn=name)


def _shards(train: Forward, infer: Forward) -> Iterator[Fault]:
    """JG007: what one rank holds must be a whole number of blocks, of the weight and along K of the activation."""
    theirs, ours = (_meta(f, "shards") for f in (train, infer))
    for name, (index, activation, weight) in _weights(infer).items():
        if name not in ours or ours[name] == theirs.get(name):
            continue
        axis, parts = ours[name]
        size = int(weight.type.shape[axis])
        blocks = [_block(weight, axis), *([_block(activation, 1)] if axis == 1 else [])]
        if any(size % (parts * block) for block in blocks):
            what = ("rows", "columns")[axis]
            e = f"{what} a rank in whole blocks of {max(blocks)}"
            g = f"{size} {what} over {parts} ranks, {size / parts:g} each"
            yield at("JG007", e, g, infer=(infer.graph, index), fqn=name)


def _versions(train: Forward, infer: Forward) -> Iterator[Fault]:
    """JG018: KV entries that another weight version or adapter wrote, in this request's past or a shared prefix."""
    state = _meta(infer, "state")
    if state:
        version = state["version"]
        for which, wrote in state["entries"].items():
            if wrote != version:
                yield Fault("JG018", "kv entries", which, f"version {version}", f"version {wrote}")


def _guards(train: Forward, infer: Forward) -> Iterator[Fault]:
    """JG094: the trainer's graph must hold wherever the engine's serves."""
    theirs, ours = (list(f.graph.meta.get("guards") or ()) for f in (train, infer))
    for guard in uncovered(theirs, ours):
        got = "; ".join(ours) or "no guard"
        yield Fault(
            "JG094", "guard", infer.graph.name, f"{guard}, as the trainer's graph assumes", f"{got} in the engine"
        )


def _family(train: Forward, infer: Forward) -> Iterator[Fault]:
    """JG094: each graph that the engine compiled for this model must be this one, or be verified itself."""
    family = _meta(infer, "family")
    own = infer.graph.semantic_digest if family else ""
    for serves, digest in family.items():
        if digest != own:
            yield Fault("JG094", "graph", serves, f"the verified graph {own[:12]}", f"another graph {str(digest)[:12]}")


def _logprobs(train: Forward, infer: Forward) -> Iterator[Fault]:
    """JG020: what is done to logits before their logprobs depends on each request, so no capture shows all of it."""
    mode = _meta(infer, "capture").get("logprobs_mode", RAW_LOGPROBS)
    if mode != RAW_LOGPROBS:
        e = f"logprobs of the raw logits, {RAW_LOGPROBS!r}, as training's graph computes them"
        g = f"{mode!r}, of what temperature, top-k and top-p make of them"
        yield Fault("JG020", "logprobs_mode", "logprob", e, g)


_DETECTORS: dict[str, Detector] = {
    "segments": _segments,
    "shards": _shards,
    "state": _versions,
    "capture": _logprobs,
    "guards": _guards,
    "family": _family,
}

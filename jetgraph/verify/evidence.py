"""What the comparison of terms rests on: digests of weights, observables, row-locality, replay, compiler, kernels.

Each function looks at one kind of evidence and returns its faults; `evidence` is all that can change the verdict,
`bitwise` only ever takes away the word "bitwise".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jetgraph.graph import Node, PrecisionGraph
from jetgraph.ops import OPS
from jetgraph.verify.fault import Fault, at, on
from jetgraph.verify.forward import Forward

TRUSTED_COMPILERS = ("fx", "eager", "inductor-exact")


def evidence(train: Forward, infer: Forward) -> list[Fault]:
    faults: list[Fault] = []
    for side, forward in (("train", train), ("infer", infer)):
        faults += _capture(side, forward.graph)
        faults += _unknown(side, forward)
        faults += _dead(side, forward)
    return [*faults, *_observables(infer), *_row_coupling(infer), *_weights(train, infer)]


def _capture(side: str, graph: PrecisionGraph) -> Iterator[Fault]:
    compiler = graph.meta.get("compiler")
    if compiler not in TRUSTED_COMPILERS:
        yield Fault("JG092", side, graph.name, " or ".join(TRUSTED_COMPILERS), f"compiler {compiler!r}")
    replay = graph.meta.get("replay") or {}
    if replay.get("passed") is not True or not replay.get("cases"):
        got = "replay failed" if replay.get("cases") else "no replay"
        yield Fault("JG093", side, graph.name, "a replay that passed", got)


def _unknown(side: str, forward: Forward) -> Iterator[Fault]:
    for index in forward.live:
        node = forward.nodes[index]
        if node.op == "unknown":
            yield on(side, forward.graph, index, "JG090", "an op of the vocabulary", str(node.attr("name")))
        if node.op not in ("attention", "route"):
            continue
        for name in (n for n, value in node.attrs if value == "unknown"):
            yield on(side, forward.graph, index, "JG091", f"{name} of the {side}'s {node.op}", f"{name} unknown")


def _dead(side: str, forward: Forward) -> Iterator[Fault]:
    """The engine must read a parameter in its forward part; for the trainer any use counts."""
    meta = forward.graph.meta
    nodes = forward.nodes
    indices = forward.live if side == "infer" else range(len(nodes))
    used = {str(nodes[i].attr("name")) for i in indices if nodes[i].op == "parameter"}
    for name in sorted(set(meta.get("parameters", {})) - used - set(meta.get("dead", ()))):
        yield Fault("JG095", "parameter", name, f"a use in the {side} graph, or its name among the dead", "no use")


def _observables(infer: Forward) -> Iterator[Fault]:
    """`logits`, `logprob`, and per attention the K and V that it reads; the empty graph proves nothing."""
    found = infer.observables
    attention = sorted(infer.nodes[i].inputs[1:] for i in infer.live if infer.nodes[i].op == "attention")
    required = ["logits", "logprob", *(f"{kv}.{i}" for i in range(max(1, len(attention))) for kv in "kv")]
    missing = [name for name in required if name not in found]
    for name in missing:
        yield Fault("JG095", "observable", name, "an output of the engine's graph", "no such output")
    if not attention:
        yield Fault("JG095", "attention", "", "at least one attention", "none")
    if not missing and attention:
        written = sorted((found[f"k.{i}"], found[f"v.{i}"]) for i in range(len(attention)))
        if written != attention:
            e = "the K and V that the attentions read, among outputs k.* and v.*"
            yield Fault("JG095", "observable", "k.* v.*", e, "other values")


def _row_coupling(infer: Forward) -> Iterator[Fault]:
    for index in infer.live:
        node = infer.nodes[index]
        shape = node.type.shape
        if node.op in UNCONDITIONAL and len(shape) == 2 and shape[0] == "T" and shape[1] != "T":
            continue
        reason = coupling(node, [infer.nodes[i] for i in node.inputs])
        if reason:
            yield at("JG019", reason[0], reason[1], infer=(infer.graph, index))


UNCONDITIONAL = frozenset(op for op, spec in OPS.items() if spec.row_local) - {
    "gemm", "row_parallel_gemm", "attention", "route", "quantize",
}  # fmt: skip
"""Ops that couple no tokens if their result has one row a token; for the others `coupling` looks closer."""


def coupling(node: Node, inputs: list[Node]) -> tuple[str, str] | None:
    """(what would be row-local, what this is) if a token's result depends on other tokens of the batch, else None.

    The rest of the answer is `OpSpec.row_local`: attention reads the tokens before it only if its mask says so.
    """
    shape = node.type.shape
    if not OPS[node.op].row_local:
        return "an op that is row-local", f"{node.op} couples tokens"
    if "T" in shape[1:] or ("T" not in shape and any("T" in i.type.shape for i in inputs)):
        return "a result with one row a token", f"shape {list(shape)}"
    if node.op == "gemm" and (node.attr("contraction") == "tn" or "T" in inputs[1].type.shape):
        return "a contraction over features", f"{node.attr('contraction')} over tokens"
    if node.op == "attention" and node.attr("mask") not in ("causal", "unknown"):
        return "mask 'causal'", f"mask {node.attr('mask')!r}"
    if node.op == "route" and node.attr("capacity") is not None:
        return "experts without a capacity limit", f"capacity {node.attr('capacity')}: other tokens may fill an expert"
    scale = node.type.precision.scale
    if node.op == "quantize" and "T" in shape and scale and scale.dynamic and scale.granularity.rows != 1:
        return "a scale for each token (1 x n blocks)", f"blocks of {scale.granularity} share a scale across tokens"
    return None


def _weights(train: Forward, infer: Forward) -> Iterator[Fault]:
    """JG017: what the engine stores is what the trainer's next forward uses; JG091 where a digest is missing."""
    stored: dict[str, Any] = infer.graph.meta.get("operands", {})
    used: dict[str, Any] = train.graph.meta.get("operands", {})
    for fqn in sorted(stored):
        if fqn not in used:
            yield Fault("JG091", "operand", fqn, "the digest of the trainer's operand", "none")
        elif used[fqn] != stored[fqn]:
            yield Fault("JG017", "operand", fqn, _stored(used[fqn]), _stored(stored[fqn]))
    parameters = [f.graph.meta.get("parameters", {}) for f in (train, infer)]
    for fqn in sorted(set(parameters[0]) & set(parameters[1])):
        e, g = parameters[0][fqn], parameters[1][fqn]
        if e != g:
            yield Fault("JG017", "parameter", fqn, _value(e), _value(g))
    for index in infer.live:
        node = infer.nodes[index]
        if node.op == "parameter":
            yield from _undigested(infer, index, str(node.attr("name")), parameters, stored)


def _undigested(
    infer: Forward, index: int, name: str, parameters: list[dict[str, Any]], stored: dict[str, Any]
) -> Iterator[Fault]:
    """A quantised weight is known by its codes; any other parameter by its own digest, on both sides."""
    users = [infer.nodes[u] for u in infer.users.get(index, ())]
    for user in users:
        if user.op == "quantize" and stored.get(name, {}).get("precision") != str(user.type.precision):
            got = stored[name]["precision"] if name in stored else "none"
            e = f"the digest of stored codes {user.type.precision}"
            yield Fault("JG091", "operand", name, e, got)
    plain = [u for u in users if u.op != "quantize"] or (not users)
    if plain and not (name in parameters[0] and name in parameters[1]):
        yield Fault("JG091", "parameter", name, "a digest on both sides", "none on one")


def _stored(entry: dict[str, str]) -> str:
    return f"{entry.get('precision', '?')} codes {entry.get('digest', '?')[:12]}"


def _value(entry: dict[str, Any]) -> str:
    return f"{entry.get('format', '?')} {entry.get('shape', '?')} {entry.get('digest', '?')[:12]}"


def bitwise(train: Forward, infer: Forward, phi: tuple[int | None, ...]) -> list[Fault]:
    """JG015 for each engine node that is not known to give the trainer's bits on every batch.

    No kernel name means plain elementwise arithmetic; an op that sums cannot be that, so there it means "not known".
    """
    faults: list[Fault] = []
    tables = [f.graph.meta.get("kernels", {}) for f in (train, infer)]
    places = [
        f"{f.graph.meta.get('device')}, torch {f.graph.meta.get('versions', {}).get('torch')}" for f in (train, infer)
    ]
    if places[0] != places[1]:
        faults.append(Fault("JG015", "machine", "", places[0], places[1]))
    for index in infer.live:
        node, image = infer.nodes[index], phi[index]
        if OPS[node.op].leaf or image is None or train.nodes[image].op != node.op:  # another op: split sums, JG016
            continue
        other = train.nodes[image]
        e, g = other.kernel, node.kernel
        if e != g:
            e, g = f"kernel {e or 'elementwise'}", f"kernel {g or 'elementwise'}"
        elif not g and OPS[node.op].accumulates:
            e, g = "a named kernel", "none: the order of its sums is not known"
        elif g and not all(table.get(g, {}).get("row_invariant") is True for table in tables):
            e, g = "a row-invariant kernel", f"{g}, not known to be row-invariant"
        else:
            continue
        faults.append(at("JG015", e, g, train=(train.graph, image), infer=(infer.graph, index)))
    return faults


PRECISION_RULES = {"JG001", "JG002", "JG003", "JG004", "JG005", "JG008", "JG009", "JG010", "JG014", "JG017", "JG022"}
WEIGHT_RULES = PRECISION_RULES - {"JG008", "JG010"} | {"JG006", "JG007", "JG011", "JG012", "JG013"}


def explain_away(
    faults: list[Fault], found: tuple[Fault, ...], train: Forward, infer: Forward
) -> tuple[list[Fault], list[Fault]]:
    """Faults that stand, and echoes: what a root fault of the finder already says about the same node or parameter."""
    nodes = {f.infer for f in found if f.infer is not None and f.rule in PRECISION_RULES}
    nodes |= {u for i in nodes for u in infer.users.get(i, ()) if infer.nodes[u].op == "gemm"}
    names: set[str] = set()
    for fault in found:
        for forward, index in ((train, fault.train), (infer, fault.infer)):
            if index is not None and fault.rule in WEIGHT_RULES:
                names |= _parameters(forward, index)

    read = {str(n.attr("name")) for i in train.live if (n := train.nodes[i]).op == "parameter"}
    gemms = {n.fqn for i in train.live if (n := train.nodes[i]).op == "gemm"}
    read |= {"k.* v.*"}

    differing = {f.fqn for f in found if f.op == "gemm" and f.rule in PRECISION_RULES}

    def echo(fault: Fault) -> bool:
        if fault.rule == "JG021" and fault.infer is None and fault.fqn in differing:  # two policies: that is why
            return True
        if fault.rule in ("JG019", "JG021") and fault.infer is not None:
            return fault.infer in nodes
        if fault.rule == "JG021" and fault.op == "gemm":  # the engine lacks what the trainer computes: a term differs
            return bool(found) and fault.train is None and fault.fqn in gemms
        if fault.rule == "JG095":
            return bool(found) and (fault.fqn in read or fault.op == "attention")
        return fault.rule in ("JG017", "JG091") and fault.fqn in names

    standing: list[Fault] = []
    echoes: list[Fault] = []
    for fault in faults:
        (echoes if echo(fault) else standing).append(fault)
    return standing, echoes


def _parameters(forward: Forward, index: int) -> set[str]:
    """The parameters that a node reads directly or through one-input ops."""
    names: set[str] = set()
    for producer in (index, *forward.nodes[index].inputs):
        node = forward.nodes[producer]
        while len(node.inputs) == 1:
            node = forward.nodes[node.inputs[0]]
        if node.op == "parameter":
            names.add(str(node.attr("name")))
    return names

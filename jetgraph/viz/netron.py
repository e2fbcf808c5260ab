"""The graph as an ONNX file, for Netron: every op a node of the domain ``jetgraph``, every section a function.

ONNX because Netron has no form of its own and this is the one that carries element types (bfloat16, float8e4m3fn) on
every value, symbolic shapes, and functions: equal layers call one function, so the file opens as a column of a hundred
boxes at most and a layer opens on demand.  Weights are nodes too (Netron writes initialisers into their reader, without
an edge); a value's name begins with its λ, which "Show Names" writes on every edge.  The file holds no numbers and
cannot be run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetgraph.graph import Node
from jetgraph.viz.condense import leaf
from jetgraph.viz.layers import consumers, relative
from jetgraph.viz.png import INSTALL, PictureError
from jetgraph.viz.study import Section, Side, Study

if TYPE_CHECKING:
    import onnx

DOMAIN, IR_VERSION = "jetgraph", 10
MAX_READERS = 2
"""A value that more sections read is drawn beside each of them."""
ELEMENT_TYPES = {
    "bf16": "BFLOAT16",
    "f32": "FLOAT",
    "f64": "DOUBLE",
    "i64": "INT64",
    "f8e4m3": "FLOAT8E4M3FN",
    "e8m0": "FLOAT8E8M0",
}


def write_netron(path: str | Path, study: Study) -> tuple[Path, ...]:
    """Write ``path``, and for a second graph ``*.NAME.onnx`` beside it; all paths.

    Raises:
        PictureError: the package onnx is not installed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path if k == 0 else path.with_suffix(f".{side.name}.onnx") for k, side in enumerate(study.sides)]
    for file, side in zip(files, study.sides, strict=True):
        file.write_bytes(model(study, side).SerializeToString(deterministic=True))
    return tuple(files)


def model(study: Study, side: Side) -> onnx.ModelProto:
    """The graph of one side, folded into functions by the sections of the study; flat if the sections wait for each
    other (ONNX lists nodes in an order in which they can run)."""
    try:
        import onnx
    except ImportError as error:
        raise PictureError(f"the form for Netron needs the package onnx, which is not installed: {INSTALL}") from error
    users = consumers(side.graph)
    parts = [part for section in study.sections for part in _parts(section, side, users)]
    calls = _ordered([call for part in parts for call in part.calls])
    if calls is None:
        every = range(len(side.graph.nodes))
        body, parts = onnx.GraphProto(name=side.graph.name, node=[_node(side, i) for i in every]), []
        body.value_info.extend(_value(_name(side, i), side.graph.nodes[i]) for i in every)
    else:
        body = _column(side, calls, [i for part in parts for i in part.loose])
    meta = {k: str(side.graph.meta[k]) for k in ("model", "policy", "provider", "device") if side.graph.meta.get(k)}
    return onnx.ModelProto(
        ir_version=IR_VERSION,
        producer_name="jetgraph",
        graph=body,
        opset_import=_opsets(),
        metadata_props=[onnx.StringStringEntryProto(key=k, value=v) for k, v in meta.items()],
        functions=[_function(side, part) for part in parts if part.calls],
        doc_string="A precision graph for looking at: it holds no weights and cannot be run.",
    )


# ----------------------------------------------------------------------------------------------------------- folding


@dataclass(frozen=True)
class Call:
    """One place's use of its part's function; inputs and outputs are node numbers."""

    title: str
    name: str
    backward: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One phase of a section: a function, written from the section's first place, and a call for each place."""

    title: str
    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    calls: tuple[Call, ...]
    loose: tuple[int, ...]
    """leaves of all its places that only other parts read: they stand beside the calls, or parts would wait for each
    other"""


def _parts(section: Section, side: Side, users: Sequence[Sequence[int]]) -> Iterator[Part]:
    """The forward and the backward part of a section, by ordinals that mean the same in each of its places."""
    if section.first not in side.blocks:
        return
    first = side.blocks[section.first]
    ordinal = {i: k for k, i in enumerate(first.numbering)}
    for backward in (False, True):
        own = sorted(
            (k for k, i in enumerate(first.nodes) if (i not in side.forward) is backward), key=first.nodes.__getitem__
        )
        members = {first.nodes[k] for k in own}
        apart = [
            k for k in own if not side.graph.nodes[first.nodes[k]].inputs and members.isdisjoint(users[first.nodes[k]])
        ]
        loose = tuple(side.blocks[place].numbering[k] for place in section.places for k in apart)
        own = [k for k in own if k not in apart]
        if not own:
            yield Part("", (), (), (), (), loose)
            continue
        read = [ordinal[i] for k in own for i in side.graph.nodes[first.nodes[k]].inputs if i in ordinal]
        inputs = [k for k in dict.fromkeys(read) if k not in set(own)]
        leaving: set[int] = set()
        for place in section.places:
            leaving |= _leaving(side, users, side.blocks[place].numbering, own)
        title = f"{section.title}, backward" if backward else section.title
        calls = []
        for place in section.places:
            numbering = side.blocks[place].numbering
            name = f"layer {place}" if isinstance(place, int) else str(place)
            ends = (tuple(numbering[k] for k in ks) for ks in (inputs, sorted(leaving)))
            calls.append(Call(title, f"{name}, backward" if backward else name, backward, *ends))
        nodes = tuple(first.nodes[k] for k in own)
        yield Part(title, nodes, calls[0].inputs, calls[0].outputs, tuple(calls), loose)


def _leaving(side: Side, users: Sequence[Sequence[int]], numbering: Sequence[int], own: Sequence[int]) -> set[int]:
    """Ordinals of nodes that something outside the part reads, or that are outputs of the graph."""
    inside = {numbering[k] for k in own}
    outputs = set(side.graph.outputs.values())
    return {k for k in own if numbering[k] in outputs or any(u not in inside for u in users[numbering[k]])}


def _ordered(calls: Sequence[Call]) -> list[Call] | None:
    """The calls in an order in which each comes after those it reads from; None if there is none."""
    maker = {i: k for k, call in enumerate(calls) for i in call.outputs}
    sources = {k: {maker[i] for i in call.inputs if i in maker} for k, call in enumerate(calls)}
    try:
        return [calls[k] for k in TopologicalSorter(sources).static_order()]
    except CycleError:
        return None


# ------------------------------------------------------------------------------------------------------------ as ONNX


def _column(side: Side, calls: Sequence[Call], loose: Sequence[int]) -> onnx.GraphProto:
    """The calls one below the other: only what flows from a section to the next is an edge.  What many read (rotary
    tables) or backward reads again comes from a small node beside its reader, ``from layer 3``, with the value's
    number: edges across the whole column would make it as wide as it is long."""
    import onnx

    nodes = side.graph.nodes
    maker = {i: call for call in calls for i in call.outputs}
    readers = Counter(i for call in calls for i in call.inputs)
    outputs: dict[Call, dict[str, int]] = defaultdict(dict)
    for name, index in side.graph.outputs.items():
        if index in maker:
            outputs[maker[index]][name] = index
    body = onnx.GraphProto(name=side.graph.name, node=[_node(side, i) for i in loose])
    types = {_name(side, i): i for i in loose}
    for call in calls:
        names = {i: _name(side, i) for i in call.inputs}
        apart: dict[Call, list[int]] = defaultdict(list)
        for i in call.inputs:
            source = maker.get(i)
            if source is not None and (readers[i] > MAX_READERS or source.backward != call.backward):
                apart[source].append(i)
        for source, values in apart.items():
            names |= {i: f"{_name(side, i)} for {call.name}" for i in values}
            body.node.append(_plain(f"from {source.name}", f"{call.name} reads", [], [names[i] for i in values]))
        body.node.append(_plain(call.title, call.name, list(names.values()), [_name(side, i) for i in call.outputs]))
        if outputs[call]:
            found = outputs[call]
            ends = [f"{nodes[i].type.precision.short()} {name}" for name, i in found.items()]
            body.node.append(_plain("outputs", ", ".join(found), [_name(side, i) for i in found.values()], ends))
            types |= dict(zip(ends, found.values(), strict=True))
        types |= {names[i]: i for i in call.inputs} | {_name(side, i): i for i in call.outputs}
    body.value_info.extend(_value(name, nodes[i]) for name, i in types.items())
    return body


def _plain(op_type: str, name: str, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.NodeProto:
    import onnx

    return onnx.NodeProto(op_type=op_type, domain=DOMAIN, name=name, input=inputs, output=outputs)


def _function(side: Side, part: Part) -> onnx.FunctionProto:
    import onnx

    several = len(part.calls) > 1
    nodes = side.graph.nodes
    constants = dict.fromkeys(i for n in part.nodes for i in nodes[n].inputs if nodes[i].op == "const")
    shown = [*part.inputs, *constants, *part.nodes]
    return onnx.FunctionProto(
        name=part.title,
        domain=DOMAIN,
        input=[_name(side, i) for i in part.inputs],
        output=[_name(side, i) for i in part.outputs],
        node=[_node(side, i, several) for i in (*constants, *part.nodes)],
        value_info=[_value(_name(side, i), nodes[i]) for i in shown],
        opset_import=_opsets(),
        doc_string=f"{part.calls[0].name} of {len(part.calls)} that are equal" if several else "",
    )


def _opsets() -> list[onnx.OperatorSetIdProto]:
    import onnx

    return [onnx.OperatorSetIdProto(domain=DOMAIN, version=1)]


def _name(side: Side, index: int) -> str:
    """A value's name, which Netron can write on its edges: λ, then what makes it unique."""
    return f"{side.graph.nodes[index].type.precision.short()} %{index}"


def _node(side: Side, index: int, several: bool = False) -> onnx.NodeProto:
    """An op with everything that is known of it as attributes; in a function of several layers ``*`` is the layer."""
    import onnx

    node = side.graph.nodes[index]
    made = onnx.NodeProto(
        op_type=node.op,
        domain=DOMAIN,
        name=f"{node.op} {leaf(side.paths[index])}" if side.paths[index] else node.op,
        input=[_name(side, i) for i in node.inputs],
        output=[_name(side, index)],
    )
    made.attribute.extend(onnx.helper.make_attribute(k, v) for k, v in _facts(node, several).items() if v != "")
    return made


def _facts(node: Node, several: bool) -> dict[str, Any]:
    scale = node.type.precision.scale
    fqn = relative(node.fqn) if several else node.fqn
    attrs = {k: _attribute(relative(v) if several and k == "name" and isinstance(v, str) else v) for k, v in node.attrs}
    return {
        **attrs,
        "dtype": node.type.precision.format.value,
        "granularity": str(scale.granularity) if scale else "",
        "scale_rule": str(scale) if scale else "",
        "module": fqn,
        "role": node.role.value,
        "phase": node.phase.value,
        "kernel": node.kernel,
        "policy_rule": node.reason,
        "source": node.source,
    }


def _attribute(value: Any) -> Any:
    """A value as ONNX can hold it: an empty list has no type there."""
    if isinstance(value, float | str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    return list(value) if isinstance(value, tuple) and value else str(value)


def _value(name: str, node: Node) -> onnx.ValueInfoProto:
    import onnx

    kind = getattr(onnx.TensorProto, ELEMENT_TYPES[node.type.precision.format.value])
    return onnx.helper.make_tensor_value_info(name, kind, list(node.type.shape))

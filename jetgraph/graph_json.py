"""The written form for tools: JSON in which nothing is said twice, read under limits.

    {"jetgraph": 2, "name": "train", "outputs": {"logits": 7025}, "meta": {…},
     "terms": [["round", {"format": "bf16"}, ["T", 576], "bf16"], …],               op, attributes, shape, precision
     "modules": ["", "model.layers.0.mlp", …],
     "origins": [["FPROP", "forward", "jetgraph::fp8_gemm", "modeling_llama.py:262", "jet: re:.*"], …],
     "nodes": [[0, 1, 0, 41, 37], …]}                                   rows of terms, modules, origins, then the inputs

A model repeats its layers, so a graph of a million nodes has a few hundred terms and origins; parsing, digests and
comparison all work once a row instead of once a node.  `origins` are role, phase, kernel, source and reason.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jetgraph.node import Attr, Attrs, GraphError, Node, Phase, Role, ValueType
from jetgraph.precision import Precision

VERSION = 2
LISTS = ("saved", "unknown", "dead")
"""Fields of meta that are lists of text where they are there."""
MAX_TEXT = 4096
"""Characters of a name, kernel, source or reason; every one of them is printed somewhere."""

Parts = tuple[str, tuple[Node, ...], dict[str, int], dict[str, Any]]


def write(name: str, nodes: Sequence[Node], outputs: Mapping[str, int], meta: Mapping[str, Any]) -> str:
    terms: dict[str, int] = {}
    modules: dict[str, int] = {}
    origins: dict[tuple, int] = {}
    rows = []
    for node in nodes:
        term = _dump([node.op, dict(node.attrs), node.type.shape, str(node.type.precision)])
        origin = (node.role.value, node.phase.value, node.kernel, node.source, node.reason)
        columns = terms.setdefault(term, len(terms)), modules.setdefault(node.fqn, len(modules))
        rows.append([*columns, origins.setdefault(origin, len(origins)), *node.inputs])
    head = _dump({"jetgraph": VERSION, "name": name, "outputs": dict(outputs)})[:-1]
    head += f', "meta": {json.dumps(meta, ensure_ascii=False, sort_keys=True)}'
    tables = {"terms": terms, "modules": map(_dump, modules), "origins": map(_dump, origins), "nodes": map(str, rows)}
    return ",\n".join([head, *(f'"{key}": [\n' + ",\n".join(table) + "\n]" for key, table in tables.items())]) + "}\n"


def read(data: Any) -> Parts:
    """(name, nodes, outputs, meta) of a parsed file; nodes of equal rows share attributes and types.

    Raises:
        GraphError: a field is missing, of another type than the format's, or names what does not exist.
    """
    if type(data) is not dict or "jetgraph" not in data:
        raise GraphError("not a jetgraph graph file: the file is no object with a field 'jetgraph'")
    if data["jetgraph"] != VERSION or type(data["jetgraph"]) is not int:
        raise GraphError(f"graph file has version {str(data['jetgraph'])[:20]}, this jetgraph reads version {VERSION}: "
                         "capture the graph again")  # fmt: skip
    try:
        name, outputs, meta = data["name"], data["outputs"], data["meta"]
        if type(outputs) is not dict or type(meta) is not dict or any(type(i) is not int for i in outputs.values()):
            raise GraphError("outputs must be an object of node numbers, and meta an object")
        for text in (name, *outputs):
            _text(text)
        _meta(meta)
        precisions: dict[str, Precision] = {}
        terms = [_term(precisions, *row) for row in data["terms"]]
        modules = [_text(text) for text in data["modules"]]
        origins = [_origin(*row) for row in data["origins"]]
        nodes = []
        for term, module, origin, *inputs in data["nodes"]:
            if term < 0 or module < 0 or origin < 0:
                raise GraphError("a node names a row below 0")
            op, attrs, type_ = terms[term]
            nodes.append(Node(op, tuple(inputs), attrs, type_, modules[module], *origins[origin]))
    except GraphError as error:
        raise GraphError(f"not a jetgraph graph file: {error}") from None
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise GraphError(f"not a jetgraph graph file: {type(error).__name__}: {str(error)[:120]}") from error
    return name, tuple(nodes), outputs, meta


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _term(
    precisions: dict[str, Precision], op: Any, attrs: Any, shape: Any, precision: Any
) -> tuple[str, Attrs, ValueType]:
    if any(size != "T" and (type(size) is not int or not 0 <= size < 2**63) for size in shape):
        raise GraphError(f"shape {str(shape)[:80]} of {str(op)[:20]}: a size is a whole number or 'T'")
    if precision not in precisions:
        precisions[precision] = Precision.parse(_text(precision))
    parsed = precisions[precision]
    if str(parsed) != precision:
        raise GraphError(f"precision {precision!r} is written {str(parsed)!r}")
    items = tuple(sorted((_text(key), _attr(value)) for key, value in attrs.items()))
    return _text(op), items, ValueType(tuple(shape), parsed)


def _attr(value: Any) -> Attr:
    if type(value) is list and all(type(i) is int and abs(i) < 2**63 for i in value):
        return tuple(value)
    if type(value) is float and math.isfinite(value):
        return value
    if value is None or type(value) is bool or (type(value) is int and abs(value) < 2**63):
        return value
    return _text(value)


def _origin(role: Any, phase: Any, kernel: Any, source: Any, reason: Any) -> tuple[Role, Phase, str, str, str]:
    return Role(role), Phase(phase), _text(kernel), _text(source), _text(reason)


def _meta(meta: dict[str, Any]) -> None:
    """What a run says of itself is shown too, so its text must print; verification checks the fields that it reads."""
    stack: list[Any] = [meta]
    while stack:
        value = stack.pop()
        if type(value) is dict:
            stack += [*value, *value.values()]
        elif type(value) is list:
            stack += value
        elif type(value) is str:
            _text(value)
    for key in LISTS:
        if type(meta.get(key, [])) is not list or not all(type(text) is str for text in meta.get(key, [])):
            raise GraphError(f"meta {key!r} must be a list of text, got {str(meta[key])[:40]!r}")


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT or not value.isprintable():
        raise GraphError(f"expected printable text of at most {MAX_TEXT} characters, got {str(value)[:40]!r}")
    return value

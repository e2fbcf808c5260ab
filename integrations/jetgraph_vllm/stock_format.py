"""The file that `jetgraph_vllm.stock_capture` wrote, as one functional program.  Torch-free.

    capture = StockCapture.load("tests/data/stock_vllm/default.json.gz")
    capture.ops         # the whole body, every write in functional form, list[jetgraph.record.Op]
    capture.settings    # the configuration under which it was recorded

In mode 3 the engine runs pieces one after another; here they are one program again: each piece's operators under
``piece.name``, its inputs replaced by what the cut graph passes to it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jetgraph.graph import PrecisionGraph
from jetgraph.record import Op, Ref, _decode_op
from jetgraph_vllm.storages import functional


class StockCaptureError(ValueError):
    """The file is not a stock capture, or misses what lifting needs."""


@dataclass(frozen=True)
class StockInput:
    """A placeholder of `StockCapture.ops`: parameter, buffer, input, size or object (a layer's name)."""

    name: str
    kind: str
    fqn: str
    shape: tuple[int, ...] | None
    dtype: str


@dataclass(frozen=True)
class StockCapture:
    label: str
    ops: list[Op]
    inputs: list[StockInput]
    heads: list[dict[str, Any]]
    sampler: list[Op]
    tensors: dict[str, dict[str, Any]]
    linears: dict[str, dict[str, Any]]
    attention: dict[str, dict[str, Any]]
    rotary: dict[str, dict[str, Any]]
    settings: dict[str, Any]
    config: dict[str, Any]
    compiler: str
    """``fx``: the recorded graph is what runs; ``inductor``: kernels were generated from it (JG092)."""
    replays: dict[str, dict[str, Any]]
    """Outcomes of `jetgraph_vllm.stock_replay` by the semantic digest of the graph that was replayed."""

    @classmethod
    def load(cls, path: str | Path) -> StockCapture:
        """Read a capture, gzipped or not.

        Raises:
            StockCaptureError: another format, or a part that could not be recorded.
        """
        raw = Path(path).read_bytes()
        text = gzip.decompress(raw) if str(path).endswith(".gz") else raw
        return cls.parse(json.loads(text))

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> StockCapture:
        if data.get("format") != 1:
            raise StockCaptureError(f"format {data.get('format')!r}: expected 1, a file of jetgraph_vllm.stock_capture")
        if data.get("failed"):
            why = "; ".join(traceback.strip().splitlines()[-1] for traceback in data["failed"].values())
            raise StockCaptureError(f"{data['label']}: {', '.join(data['failed'])} could not be recorded ({why})")
        if data.get("body"):
            ops, described = _ops(data["body"]["ops"]), data["body"]["inputs"]
        else:
            pieces = data["pieces"]
            ops, described = _joined(pieces), pieces["inputs"]
        ops = functional(ops, data["schemas"])
        names = [op.name for op in ops if op.kind == "placeholder"]
        if len(names) != len(described):
            raise StockCaptureError(f"{data['label']}: {len(names)} inputs, {len(described)} described")
        root = _root(described)
        return cls(
            data["label"],
            [_live_fqn(op, root) for op in ops],
            [_input(name, d) for name, d in zip(names, described, strict=True)],
            data["heads"],
            _ops(data["sampler"]),
            data["tensors"],
            data["linears"],
            {layer["layer_name"]: layer for layer in data["attention"]},
            data["rotary"],
            data["settings"],
            data["config"],
            "fx" if data.get("body") else "inductor",
            {outcome["graph"]: outcome for outcome in data.get("replay") or ()},
        )

    def replay_of(self, graph: PrecisionGraph) -> dict[str, Any]:
        """``meta["replay"]`` of a graph lifted from this capture: nothing, unless that very graph was replayed."""
        return self.replays.get(graph.semantic_digest, {"passed": None, "cases": []})

    def head(self) -> tuple[list[Op], list[StockInput]]:
        """The lm_head graph for any number of rows."""
        chosen = next((h for h in self.heads if h["num_rows"] is None), None)
        if chosen is None:
            raise StockCaptureError(f"{self.label}: no head graph for several rows")
        ops = _ops(chosen["ops"])
        names = [op.name for op in ops if op.kind == "placeholder"]
        return ops, [_input(name, d) for name, d in zip(names, chosen["inputs"], strict=True)]


def _ops(items: Sequence[Any]) -> list[Op]:
    return [_decode_op(item) for item in items]


def _input(name: str, described: Mapping[str, Any]) -> StockInput:
    shape = described["shape"]
    return StockInput(name, described["kind"], described["fqn"], shape and tuple(shape), described["dtype"])


def _root(described: Sequence[Mapping[str, Any]]) -> str:
    """What a live parameter name has before its name inside the compiled module: ``model``."""
    for item in described:
        if item["kind"] == "parameter" and item["fqn"].endswith("embed_tokens.weight"):
            return item["fqn"].removesuffix("embed_tokens.weight").rstrip(".")
    return ""


def _live_fqn(op: Op, root: str) -> Op:
    if not op.fqn.startswith("L['self']"):
        return op
    inside = op.fqn.removeprefix("L['self']").lstrip(".")
    return replace(op, fqn=".".join(part for part in (root, inside) if part))


# ------------------------------------------------------------------------------------------------- joining the pieces


def _joined(pieces: Mapping[str, Any]) -> list[Op]:
    """The cut graph with every piece in place: the compiled form where there is one, as cut where it runs as it is."""
    names: dict[str, Any] = {}
    results: dict[str, tuple[Any, ...]] = {}
    out: list[Op] = []
    for op in _ops(pieces["stitch"]):
        if op.target in pieces["raw"]:
            body = _inlined(op, _piece(pieces, op.target), names)
            out += body[:-1]
            results[op.name] = _as_tuple(body[-1].args[0])
        elif op.target == "getitem" and isinstance(op.args[0], Ref) and op.args[0].name in results:
            names[op.name] = results[op.args[0].name][op.args[1]]
        else:
            names |= {piece: value[0] for piece, value in results.items() if len(value) == 1 and piece not in names}
            out.append(replace(op, args=_renamed(op.args, names), kwargs=_renamed(op.kwargs, names)))
    return out


def _piece(pieces: Mapping[str, Any], name: str) -> list[Op]:
    """The graph that runs: Inductor's last form of a compiled piece, the cut graph of a piece with attention."""
    versions = pieces["post_grad"].get(name)
    if versions:
        return _ops(versions[0])
    raw = _ops(pieces["raw"][name])
    if any(op.target.startswith("unified_attention") for op in raw):
        return raw
    raise StockCaptureError(f"piece {name} was compiled, but its compiled form was not recorded")


def _inlined(call: Op, body: list[Op], names: Mapping[str, Any]) -> list[Op]:
    """A piece's operators under ``call.name.`` with the caller's arguments in place of its inputs."""
    given = iter(_renamed(call.args, names))
    inner: dict[str, Any] = {}
    out: list[Op] = []
    for op in body:
        if op.kind == "placeholder":
            inner[op.name] = next(given)
            continue
        inner_name = f"{call.name}.{op.name}"
        out.append(replace(op, name=inner_name, args=_renamed(op.args, inner), kwargs=_renamed(op.kwargs, inner)))
        inner[op.name] = Ref(inner_name)
    return out


def _renamed(argument: Any, names: Mapping[str, Any]) -> Any:
    if isinstance(argument, Ref):
        return names.get(argument.name, argument)
    if isinstance(argument, tuple):
        return tuple(_renamed(a, names) for a in argument)
    if isinstance(argument, dict):
        return {k: _renamed(v, names) for k, v in argument.items()}
    return argument


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)

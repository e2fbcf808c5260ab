"""What a live engine computed, without its tensors: a digest for each token at the border of every linear.

A digest is of one token's row, so chunks and single decoding steps line up with training's whole sequence, and the
answer says at which position, and whether that position was prefilled or decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jetgraph.digest import row_digests
from jetgraph.diverge.boundaries import Boundary, boundaries
from jetgraph.diverge.roots import Side, not_as_it_ran
from jetgraph.graph import PrecisionGraph
from jetgraph.interpret import PENDING, Run
from jetgraph.verify import Fault

LOGPROB = "logprob"


class RecordingError(ValueError):
    """A recording is not one of this form, or not one of this model."""


@dataclass(frozen=True)
class Recording:
    """One request in a live engine, alone.

    ``digests`` has for every border by name (see `Boundary`) one digest a row; the rows are the tokens that the engine
    ran in order: the prompt and every sampled token but the last.  ``steps`` are the rows of each step of the engine.
    ``logprobs`` are of the tokens after each row: the prompt's, then the sampled ones.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    steps: tuple[int, ...]
    digests: Mapping[str, Sequence[str]]

    def __post_init__(self) -> None:
        rows = self.num_rows
        if sum(self.steps) != rows or len(self.logprobs) != rows:
            raise RecordingError(f"{sum(self.steps)} rows and {len(self.logprobs)} logprobs recorded, expected {rows}")
        for name, found in self.digests.items():
            if len(found) != rows:
                raise RecordingError(f"{name}: {len(found)} rows recorded, expected {rows}")

    @property
    def num_rows(self) -> int:
        return len(self.prompt) + len(self.tokens) - 1

    @classmethod
    def from_plain(cls, data: Mapping[str, Any]) -> Recording:
        lists = {key: tuple(data[key]) for key in ("prompt", "tokens", "logprobs", "steps")}
        return cls(digests=dict(data["digests"]), **lists)

    def how(self, row: int) -> str:
        """In what step the engine ran this row: a chunk of a prompt, or one token."""
        end = 0
        for size in self.steps:
            end += size
            if row < end:
                return "in a step of its own" if size == 1 else f"in a step of {size} tokens"
        raise IndexError(row)


@dataclass(frozen=True)
class RecordingReport:
    """The first border at which the live engine holds other bits than training, if there is one.

    ``after`` is the last border before it that agrees, "" if there is none; ``between`` are training's nodes that lie
    between the two, ``row`` the first position that differs, and ``how`` the step that computed it.
    """

    train: PrecisionGraph
    first: str
    after: str
    row: int
    num_different: int
    num_rows: int
    num_borders: int
    how: str
    between: tuple[int, ...]
    explained_by: tuple[Fault, ...]
    not_recorded: tuple[str, ...]
    unknown: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        return 1 if self.first else 3 if self.unknown else 0


@torch.no_grad()
def compare_recording(train: Side, recording: Recording, faults: Sequence[Fault] = ()) -> RecordingReport:
    """Run training's graph on the recorded tokens and hold every border against the engine's.

    ``train.leaves`` need no inputs, they are those of the recording.  ``faults`` are the entries of a verification
    report of the two graphs, from which those about the place are chosen.

    Raises:
        RecordingError: the engine recorded none of training's borders.
        InterpretError: a node of training's graph cannot be run.
    """
    graph = train.graph
    borders = boundaries(graph)
    seen = [b for b in borders if b.name in recording.digests]
    if not seen:
        names = ", ".join(sorted(recording.digests)[:3]) or "nothing"
        raise RecordingError(f"the engine recorded {names} …, training's borders are {borders[0].name} …")
    ids = torch.tensor([*recording.prompt, *recording.tokens])
    ids = ids.to(train.device)
    positions = torch.arange(len(ids) - 1, device=train.device)
    inputs = {"input_ids": ids[:-1], "positions": positions, "targets": ids[1:]}
    wanted = [b.node for b in seen] + [graph.outputs[LOGPROB]]
    with train.device:
        differing = _differing(Run(graph, {**train.leaves, **inputs}, wanted), seen, recording)
    first = next((b for b in [*seen, Boundary(LOGPROB, wanted[-1])] if differing.get(b.name)), None)
    equal = [b for b in seen if not differing[b.name] and (first is None or b.node <= first.node)]
    between = _between(graph, [b.node for b in equal], first.node) if first else ()
    rows = differing[first.name] if first else [0]
    return RecordingReport(
        graph,
        first.name if first else "",
        equal[-1].name if equal else "",
        rows[0],
        len(rows) if first else 0,
        recording.num_rows,
        len(seen),
        recording.how(rows[0]) if first else "",
        between,
        _about(graph, between, faults),
        tuple(b.name for b in borders if b.name not in recording.digests),
        tuple(not_as_it_ran("train", train)),
    )


def _differing(run: Run, borders: Sequence[Boundary], recording: Recording) -> dict[str, list[int]]:
    """Rows that differ by border, and under `LOGPROB` those whose logprob does."""
    at: dict[int, list[str]] = {}
    for border in borders:
        at.setdefault(border.node, []).append(border.name)
    found: dict[str, list[int]] = {}
    for index in run:
        value = run.values[index]
        value = value.rounded() if isinstance(value, PENDING) else value
        for name in at.get(index, ()):
            pairs = zip(row_digests(value), recording.digests[name], strict=True)
            found[name] = [row for row, (ours, theirs) in enumerate(pairs) if ours != theirs]
        if index == run.graph.outputs[LOGPROB]:
            pairs = zip(value.flatten().tolist(), recording.logprobs, strict=True)
            found[LOGPROB] = [row for row, (ours, theirs) in enumerate(pairs) if ours != theirs]
    return found


def _about(graph: PrecisionGraph, between: Sequence[int], faults: Sequence[Fault]) -> tuple[Fault, ...]:
    """Entries at one of these nodes of training's graph, or about a parameter among them."""
    places = set(between)
    names = {str(graph.nodes[i].attr("name")) for i in between if graph.nodes[i].op == "parameter"}
    return tuple(f for f in faults if f.train in places or (f.train is None and f.fqn in names))


def _between(graph: PrecisionGraph, equal: Sequence[int], first: int) -> tuple[int, ...]:
    """What ``first`` was computed from, except what the equal borders were."""
    known = set(graph.ancestors(equal))
    return tuple(i for i in graph.ancestors([first]) if i not in known)

"""Both graphs run beside each other on one prompt; every aligned pair of values is compared as it comes.

The alignment is verification's own map from the rollout's nodes to training's: a proof if the verdict is CONTAINED,
otherwise the finder's assumption.  The rollout is walked in topological order, so the first pair that differs is a
*root*: whatever it was computed from is equal.  Then training's value takes its place and the walk goes on, so that a
second root is seen for itself and not as an echo of the first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jetgraph.diverge.values import Difference, difference
from jetgraph.graph import Node, PrecisionGraph
from jetgraph.interpret import InterpretError, Quantized, Run, attention
from jetgraph.ops import OPS
from jetgraph.verify import Fault, Result, Verdict
from jetgraph.verify.classify import stripped
from jetgraph.verify.finder import find
from jetgraph.verify.forward import Forward
from jetgraph.verify.reduction import sequential


@dataclass(frozen=True)
class Side:
    """A graph and the values of its leaves: inputs, parameters, buffers; see `jetgraph.interpret.interpret`."""

    graph: PrecisionGraph
    leaves: Mapping[str, Tensor | Quantized]

    @property
    def device(self) -> torch.device:
        """Where the leaves lie, and so where the graph is run."""
        return next((x.device for x in self.leaves.values() if isinstance(x, Tensor)), torch.device("cpu"))


@dataclass(frozen=True)
class Root:
    """A value that differs although everything it was computed from is equal.

    ``infer`` and ``train`` are its nodes in the two graphs; ``consumer`` is the node of the rollout that reads it (the
    one that an entry names, else the first), so (infer, consumer) is the edge; None where it is an output.
    ``explained_by`` are the entries of the verification report that are about this place.
    """

    infer: int
    train: int
    consumer: int | None
    difference: Difference
    explained_by: tuple[Fault, ...]


@dataclass(frozen=True)
class Comparison:
    """``unknown`` says in words why equality here would not mean equality there; with a root it is only a caveat."""

    train: PrecisionGraph
    infer: PrecisionGraph
    verdict: Verdict
    roots: tuple[Root, ...]
    num_compared: int
    unknown: tuple[str, ...] = field(default=())

    @property
    def exit_status(self) -> int:
        """0 no edge differs, 1 one does, 3 none was seen, but not everything could be run as it really runs."""
        return 1 if self.roots else 3 if self.unknown else 0


@torch.no_grad()
def compare_graphs(train: Side, infer: Side, result: Result, *, every: bool = False) -> Comparison:
    """The first root, or ``every`` one.  ``result`` is `jetgraph.verify.verify` of the two graphs.

    Raises:
        InterpretError: a node before the first root cannot be run, or a leaf has no value.
    """
    walk = _Walk(train, infer, result)
    found: list[Root] = []
    unknown = [*not_as_it_ran("train", train), *not_as_it_ran("infer", infer)]
    try:
        with train.device:
            for root in walk.roots():
                found.append(root)
                if not every:
                    break
            else:
                unknown += walk.outputs_unseen()
    except InterpretError as error:
        if not found:
            raise
        unknown.append(f"behind the last root nothing could be run: {error}")
    return Comparison(train.graph, infer.graph, result.verdict, tuple(found), walk.num_compared, tuple(unknown))


def not_as_it_ran(side: str, given: Side) -> Iterator[str]:
    """Why running this graph here may not give the bits of the run that it was captured from."""
    captured = given.graph.meta.get("device") or "cpu"
    if captured != given.device.type:
        yield f"{side}: captured on {captured} and run on {given.device.type}, whose sums may be added in another order"
    replay = given.graph.meta.get("replay") or {}
    if replay.get("passed") is not True:
        yield f"{side}: its replay {'failed' if replay.get('cases') else 'was never done'}, so running it proves little"
    stand_in = "training's result was taken in its place" if side == "infer" else "another kernel ran in its place"
    for kernel in replay.get("injected", ()):
        yield f"{side}: {kernel} cannot be run here; {stand_in}"


class _Walk:
    def __init__(self, train: Side, infer: Side, result: Result) -> None:
        self.train, self.infer = train, infer
        self.forward = Forward(infer.graph)
        self.phi = find(sequential(Forward(train.graph)), sequential(self.forward)).phi
        self.entries = _Entries(result, self.forward)
        self.images = _Images(train, [image for i in self.forward.live if (image := self.phi[i]) is not None])
        self.num_compared = 0
        self.unseen: set[int] = set()
        """nodes whose value was not compared: their consumers answer for them"""
        self.tainted: set[int] = set()
        """nodes that differ and whose value training's could not replace"""

    def roots(self) -> Iterator[Root]:
        graph = self.infer.graph
        injected = set((graph.meta.get("replay") or {}).get("injected", ()))
        attentions = [i for i in self.forward.live if graph.nodes[i].op == "attention"]

        def attend(node: Node, index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            image = self.phi[attentions[index]]
            if node.kernel in injected and image is not None:
                return self.images.value(image)
            return attention(node, q, k, v)

        run = Run(graph, self.infer.leaves, self.forward.observables.values(), attend=attend)
        for index in run:
            image = self.phi[index]
            if image is None:
                self.unseen.add(index)
                continue
            expected = self.images.value(image)
            root = self._compare(run, index, image, expected)
            self.images.done_with(image)
            if root is not None:
                yield root

    def outputs_unseen(self) -> Iterator[str]:
        """After a whole walk: outputs that no value of training's was held against, so nothing is known of them."""
        names = [name for name, index in self.forward.observables.items() if index in self.unseen]
        if names:
            yield f"infer: {', '.join(names[:5])} could not be compared, training has no value of that place and shape"

    def _compare(self, run: Run, index: int, image: int, expected: Any) -> Root | None:
        value = run.values[index]
        if not self._comparable(index, image, value, expected):
            self.unseen.add(index)
            return None
        self.num_compared += 1
        found = difference(expected, value, self._precisions(index, image))
        if found is None:
            return None
        origins = self._origins(index)
        if not _replace(run, index, expected):
            self.tainted.add(index)
        if not origins.isdisjoint(self.tainted):
            return None
        entries = self.entries.about(index, image, origins, self.unseen)
        readers = self.forward.users.get(index, [])
        named = {fault.infer for fault in entries}
        consumer = next((r for r in readers if r in named), readers[0] if readers else None)
        return Root(index, image, consumer, found, entries)

    def _precisions(self, index: int, image: int) -> tuple[Any, Any]:
        return self.train.graph.nodes[image].type.precision, self.infer.graph.nodes[index].type.precision

    def _comparable(self, index: int, image: int, value: Any, expected: Any) -> bool:
        """Not a GEMM that its kernel rounds later, not a master that an engine lacks, and of one shape.

        Where the finder assumed that a reader of this node should read another value of training's, the reader is at
        fault and not this node: its core is another op.
        """
        graph = self.infer.graph
        if not all(isinstance(x, (Tensor, Quantized)) for x in (value, expected)):
            return False
        if OPS[graph.nodes[index].op].leaf and isinstance(value, Quantized):
            return False
        if _num_elements(value) != _num_elements(expected):
            return False
        cores = (
            self.train.graph.nodes[stripped(self.train.graph, image)].op,
            graph.nodes[stripped(graph, index)].op,
        )
        return cores[0] == cores[1] or any(self.phi[i] == image for i in graph.nodes[index].inputs)

    def _origins(self, index: int) -> set[int]:
        """What the node reads, seen through nodes that were not compared."""
        found: set[int] = set()
        stack = list(self.infer.graph.nodes[index].inputs)
        while stack:
            i = stack.pop()
            if i not in found:
                found.add(i)
                stack += self.infer.graph.nodes[i].inputs if i in self.unseen else ()
        return found


def _replace(run: Run, index: int, expected: Any) -> bool:
    """Whether training's value could take the place of the rollout's, in its format if need be."""
    value = run.values[index]
    if isinstance(expected, Quantized):
        fits = isinstance(value, Quantized) and [x.shape for x in value] == [x.shape for x in expected]
        run.values[index] = expected if fits else value
        return fits
    run.values[index] = expected if isinstance(value, Quantized) else expected.reshape(value.shape)
    return True


def _num_elements(x: Tensor | Quantized) -> int:
    return (x.codes if isinstance(x, Quantized) else x).numel()


class _Images:
    """Values of training's nodes, computed in order up to the one that is asked for and kept for as long as needed."""

    def __init__(self, train: Side, images: Sequence[int]) -> None:
        self.left = Counter(images)
        self.run = Run(train.graph, train.leaves, self.left)
        self.steps = iter(self.run)
        self.kept: dict[int, Any] = {}

    def value(self, image: int) -> Any:
        while image not in self.kept:
            index = next(self.steps)
            if index in self.left:
                self.kept[index] = self.run.values[index]
        return self.kept[image]

    def done_with(self, image: int) -> None:
        self.left[image] -= 1
        if not self.left[image]:
            del self.kept[image]


class _Entries:
    """The entries of a verification report by the place that they are about."""

    def __init__(self, result: Result, infer: Forward) -> None:
        self.faults = result.faults
        self.infer = infer

    def about(self, index: int, image: int, origins: set[int], unseen: set[int]) -> tuple[Fault, ...]:
        """The nearest entries: at the node itself, at a node behind it that was not compared, by name, at a reader."""
        readers = set(self.infer.users.get(index, ()))
        hidden = origins & unseen
        names = {_parameter(self.infer.graph, i) for i in (index, *origins)} - {""}
        for places in (
            [f for f in self.faults if f.infer == index or (f.infer is None and f.train == image)],
            [f for f in self.faults if f.infer in hidden],
            [f for f in self.faults if f.infer is None and f.fqn in names],
            [f for f in self.faults if f.infer in readers],
        ):
            if places:
                return tuple(places)
        return ()


def _parameter(graph: PrecisionGraph, index: int) -> str:
    """The parameter that a leaf is, or that a quantised leaf was."""
    node = graph.nodes[index]
    while node.op == "quantize":
        node = graph.nodes[node.inputs[0]]
    return str(node.attr("name")) if node.op == "parameter" else ""

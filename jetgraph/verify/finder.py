"""Finds every root fault of the engine's forward graph against the trainer's, or the map φ that proves containment.

The engine's nodes are walked in order and looked up among the trainer's terms.  A miss whose inputs all have images is
a root fault: it is named, the trainer's counterpart is *assumed* as its image, and the walk goes on, so one wrong
layer does not taint all above it.  Four rules keep the report at root causes (measured in docs: facts of lifting):

- leaves are never faults, their consumer is: one eps constant shared by 61 norms is 61 faults;
- before a counterpart is looked for, the inputs are tried rounded, unrounded, quantised and unquantised;
- an input that was repaired keeps both images, so its later consumers match in silence;
- a GEMM's counterpart is found by its activation and the module that ran, never by its weight's name.

The finder is clever and not trusted: `checker` validates the φ it returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from jetgraph.graph import Node
from jetgraph.ops import COMMUTATIVE
from jetgraph.verify import classify
from jetgraph.verify.classify import REPRESENTATION
from jetgraph.verify.fault import Fault, at, words
from jetgraph.verify.forward import Forward
from jetgraph.verify.terms import CARRIES_PRECISION, Terms

ROUTING_OPS = frozenset({"route", "combine"})
ROUTING_RULES = frozenset({"JG001", "JG002", "JG003", "JG004", "JG005", "JG009", "JG010", "JG011", "JG014"})


@dataclass(frozen=True)
class Finding:
    """``phi[i]`` is the trainer's node of the engine's node i: a proof if ``complete``, an alignment otherwise."""

    phi: tuple[int | None, ...]
    faults: tuple[Fault, ...]
    complete: bool


def find(train: Forward, infer: Forward) -> Finding:
    """Compare two forward graphs in normal form.  ``complete`` iff the engine's terms are among the trainer's."""
    return _Finder(train, infer).run()


class _Finder:
    def __init__(self, train: Forward, infer: Forward) -> None:
        self.train, self.infer = train, infer
        self.terms = Terms(train)
        self.faults: list[Fault] = []
        self.complete = True
        self.images: dict[int, tuple[int, ...]] = {}
        """engine node → trainer nodes it stands for, the best first; () if the trainer has none"""
        self.opaque: set[int] = set()
        """engine nodes without an image whose reason is reported already (or unknown): their consumers are silent"""
        self.extra: set[int] = set()
        """engine `quantize` nodes that the trainer lacks; reported by whoever consumes them"""
        self.told: set[int] = set()
        """engine values already named in a fault"""
        self.claimed: set[int] = set()

    def run(self) -> Finding:
        for index in self.infer.live:
            node = self.infer.nodes[index]
            if node.op == "unknown":
                self.images[index] = ()
                self.opaque.add(index)
                self.complete = False
            elif not node.inputs:
                found = None if node.op in ("operand", "poison") else self.terms.find(node, ())
                self.images[index] = () if found is None else (found,)
            else:
                self.visit(index, node)
        for name, index in self.infer.observables.items():
            self.observe(name, index)
        phi = [(self.images.get(i) or (None,))[0] for i in range(len(self.infer.nodes))]
        return Finding(tuple(phi), tuple(self.faults), self.complete and not self.faults)

    # --------------------------------------------------------------------------------------------------- one node

    def visit(self, index: int, node: Node) -> None:
        images = [self.images[a] for a in node.inputs]
        if all(images):
            found = self.terms.find(node, [image[0] for image in images])
            if found is not None:
                self.adopt(index, found)
                if node.op in CARRIES_PRECISION:
                    self.check_carried_precision(index, found)
                return
        self.complete = False
        if not self.explained(index, node, images) and not self.repaired(index, node, images):
            self.assume(index, node)

    def adopt(self, index: int, *found: int) -> None:
        self.images[index] = found
        self.claimed.update(found)
        if self.extra and not self.extra.isdisjoint(self.infer.nodes[index].inputs):
            self.report_extra_quantize(index, found[0])

    def explained(self, index: int, node: Node, images: list[tuple[int, ...]]) -> bool:
        """A miss that follows from what is reported already, or that its consumer will report."""
        if all(images):
            for choice in product(*images) if any(len(i) > 1 for i in images) and len(images) <= 4 else ():
                found = self.terms.find(node, choice)
                if found is not None:
                    self.adopt(index, found)
                    return True
        elif len(images) == 1 and (node.op in REPRESENTATION or node.op in CARRIES_PRECISION):
            self.images[index] = ()  # an unknown leaf in another form: still the consumer's fault
            if node.inputs[0] in self.opaque:
                self.opaque.add(index)
            return True
        if node.op == "round" and all(images) and len(images[0]) > 1:
            image = self.train.nodes[images[0][0]]
            if image.type.precision == node.type.precision:
                self.images[index] = images[0]
                return True
        return False

    # ------------------------------------------------------------------------------ rounds and quantisations apart

    def repaired(self, index: int, node: Node, images: list[tuple[int, ...]]) -> bool:
        """Whether the node is found once inputs are rounded, unrounded, quantised or not: fewest changes win."""
        if not all(images) or node.op in REPRESENTATION:
            return False
        options = [list(self.representations(image)) for image in images]
        if len(options) > 3:
            kept = [[o for o in port if not o[1]] for port in options]
            choices = [[*kept[:p], options[p], *kept[p + 1 :]] for p in range(len(options))]
            tries = [choice for ports in choices for choice in product(*ports)]
        else:
            tries = list(product(*options))
        for choice in sorted(tries, key=lambda c: sum(bool(change) for _, change in c)):
            found = self.terms.find(node, [value for value, _ in choice])
            if found is not None:
                self.report_representation(index, found, choice)
                self.adopt(index, found)
                return True
        return False

    def representations(self, images: Sequence[int]) -> Iterator[tuple[int, str]]:
        """(trainer's value, what the engine would have to change to get it)"""
        for image in images:
            yield image, ""
        for image in images:
            node = self.train.nodes[image]
            rounded = self.terms.rounded(image)
            if rounded is not None:
                yield rounded, "round"
            for quantized in self.terms.quantized(image):
                yield quantized, "quantize"
            if node.op in REPRESENTATION:
                yield node.inputs[0], node.op

    def report_representation(self, index: int, found: int, choice: Sequence[tuple[int, str]]) -> None:
        node = self.infer.nodes[index]
        quantized = [a for a, (_, change) in zip(node.inputs, choice, strict=True) if change == "quantize"]
        for producer, (value, change) in zip(node.inputs, choice, strict=True):
            if change == "round":
                self.report_round(producer, value)
            if change and not (change == "quantize" and node.op == "gemm"):
                self.add_image(producer, value)
        if quantized:
            self.report_quantized_on_one_side(index, found, quantized)

    def report_round(self, producer: int, value: int) -> None:
        expected, got = self.train.nodes[value], self.infer.nodes[producer]
        core = self.infer.nodes[classify.stripped(self.infer.graph, producer)]
        self.told.add(producer)
        self.report(
            at(
                "JG004" if expected.op == "round" or got.op == "round" else "JG001",
                words(self.train.graph, value, expected.fqn),
                words(self.infer.graph, producer, got.fqn),
                train=(self.train.graph, value),
                infer=(self.infer.graph, producer),
                op=core.op,
            )
        )

    def report_extra_quantize(self, index: int, found: int) -> None:
        node = self.infer.nodes[index]
        extra = [a for a in node.inputs if a in self.extra and (node.op == "gemm" or a not in self.told)]
        if extra:
            self.report_quantized_on_one_side(index, found, extra)

    def report_quantized_on_one_side(self, index: int, found: int, producers: Sequence[int]) -> None:
        node = self.infer.nodes[index]
        rule = {"attention": "JG008", "quantize": "JG009"}.get(node.op, "JG014")
        self.told.update(producers)
        expected = [self.train.nodes[i].type.precision.short() for i in self.train.nodes[found].inputs]
        got = [self.infer.nodes[i].type.precision.short() for i in node.inputs]
        if node.op == "attention":
            expected, got = expected[1:], got[1:]
        self.report_at(rule, index, found, " · ".join(expected), " · ".join(got))

    def represent(self, index: int, node: Node) -> None:
        """A `round` or `quantize` that the trainer does not apply to this value."""
        (producer,) = node.inputs
        value = self.images[producer][0]
        graph = self.infer.graph
        if node.op == "quantize" and classify.is_double(graph, index):
            self.images[index] = self.images[producer]
            self.report_at("JG009", index, value, words(self.train.graph, value), words(graph, index))
            return
        others = [q for image in self.images[producer] for q in self.terms.users(node.op, image)]
        users = [self.infer.nodes[u].op for u in self.infer.users.get(index, ())]
        feeds_quantize = node.op == "quantize" and users and all(u in REPRESENTATION for u in users)
        if others and not feeds_quantize:
            self.adopt_different(index, self.best(index, others))
            return
        place = [q for q in self.terms.at_fqn(node.op, node.fqn) if self.train.nodes[q].type == node.type]
        place = [q for q in place if self.terms.made_from(q, value)] or (place if node.op == "quantize" else [])
        if place and not feeds_quantize and not self.passes_through(index, value):
            self.adopt_different(index, self.best(index, place))
            return
        self.images[index] = self.images[producer]
        if node.op == "quantize":
            self.extra.add(index)
        else:
            self.report_round(index, value)

    # -------------------------------------------------------------------------------------- assuming a counterpart

    def assume(self, index: int, node: Node) -> None:
        """Adopt the trainer's most likely counterpart and report how it differs."""
        if node.op in REPRESENTATION:
            self.represent(index, node)
            return
        candidates, related = self.candidates(index, node)
        best = self.best(index, candidates) if candidates else None
        if best is None or not (related or self.equal_ports(index, best)):
            through = self.pass_through(index, node)
            if through is not None:
                self.images[index] = self.images[through]
                self.report_at("JG011", index, self.images[through][0], f"no {node.op}", words(self.infer.graph, index))
                return
        if best is not None:
            self.adopt_different(index, best)
            return
        self.images[index] = next((self.images[a] for a in node.inputs if self.same_shape(a, index)), ())
        if not self.images[index]:
            self.opaque.add(index)
        if not self.excused(node):
            value = self.images[index][0] if self.images[index] else None
            self.report_at("JG011", index, value, f"no {node.op}", words(self.infer.graph, index))

    def candidates(self, index: int, node: Node) -> tuple[list[int], bool]:
        """The trainer's nodes of the same op that share an input or the place; and whether any shares an input."""
        ports = node.inputs[:1] if node.op == "gemm" else node.inputs
        found: list[int] = []
        for producer in ports:
            for image in self.images[producer]:
                users = self.terms.users(node.op, image)
                found += users if len(users) <= 64 else ()
        related = bool(found)
        found += self.terms.at_fqn(node.op, node.fqn)
        if not found:
            found = [q for q in self.terms.in_layer(node.op, node.fqn) if self.train.nodes[q].type == node.type]
        return list(dict.fromkeys(found)), related

    def best(self, index: int, candidates: Sequence[int]) -> int:
        node = self.infer.nodes[index]

        def score(candidate: int) -> tuple[int, bool, int]:
            other = self.train.nodes[candidate]
            points = self.equal_ports(index, candidate) + 2 * (other.attrs == node.attrs) + 2 * (other.fqn == node.fqn)
            return points + (other.type == node.type), candidate not in self.claimed, -candidate

        return max(candidates, key=score)

    def equal_ports(self, index: int, candidate: int) -> int:
        """Inputs that agree; a GEMM's weight does not count, it never says which module ran."""
        node, other = self.infer.nodes[index], self.train.nodes[candidate]
        pairs = list(self.ports(node, other))
        return sum(e in self.images[a] for e, a in (pairs[:1] if node.op == "gemm" else pairs))

    def ports(self, node: Node, other: Node) -> Iterator[tuple[int, int]]:
        """(trainer's input, engine's input) by port; for commutative ops equal inputs are paired first."""
        expected, got = list(other.inputs), list(node.inputs)
        if node.op in COMMUTATIVE:
            for producer in list(got):
                match = next((e for e in expected if e in self.images[producer]), None)
                if match is not None:
                    expected.remove(match)
                    got.remove(producer)
                    yield match, producer
        yield from zip(expected, got, strict=False)

    def passes_through(self, index: int, value: int) -> bool:
        """Whether what reads this engine node is applied by the trainer to ``value`` directly."""
        users = {self.infer.nodes[u].op for u in self.infer.users.get(index, ())}
        if any(self.terms.users(op, value) for op in users):
            return True
        return any(i == index and self.train.observables.get(k) == value for k, i in self.infer.observables.items())

    def pass_through(self, index: int, node: Node) -> int | None:
        """The input that the trainer uses where the engine uses this node: the node is one too many."""
        for producer in node.inputs:
            images = self.images[producer]
            if images and self.same_shape(producer, index) and self.passes_through(index, images[0]):
                return producer
        return None

    def same_shape(self, producer: int, index: int) -> bool:
        return self.infer.nodes[producer].type.shape == self.infer.nodes[index].type.shape

    def excused(self, node: Node) -> bool:
        """No counterpart because something is unknown: on the engine's side below, or on the trainer's side here."""
        if any(a in self.opaque for a in node.inputs):
            return True
        return any(self.terms.users("unknown", image) for a in node.inputs for image in self.images[a])

    # ---------------------------------------------------------------------------------------------- what differs

    def adopt_different(self, index: int, found: int) -> None:
        node, other = self.infer.nodes[index], self.train.nodes[found]
        differing = [(e, a) for e, a in self.ports(node, other) if e not in self.images[a]]
        attributes = classify.attribute_differences(other, node)
        if len(node.inputs) != len(other.inputs):
            attributes.append(("JG011", f"{len(other.inputs)} inputs", f"{len(node.inputs)} inputs"))
        got = [(self.images[a] or (-1,))[0] for a in node.inputs]
        if len(differing) > 1 and sorted(got) == sorted(other.inputs):
            names = [
                ", ".join(words(s.graph, i) for i in n.inputs) for s, n in ((self.train, other), (self.infer, node))
            ]
            self.report_at("JG012", index, found, f"operands in order {names[0]}", f"{names[1]}")
        else:
            for expected, producer in differing:
                self.report_operand(index, found, expected, producer)
        for rule, e, g in attributes:
            self.report_at(rule, index, found, e, g)
        if not differing and not attributes:
            for rule, e, g in classify.type_differences(other, node):
                self.report_at(rule, index, found, e, g)
        self.adopt(index, *self.narrowed(node, found), found)

    def narrowed(self, node: Node, found: int) -> list[int]:
        """The trainer's round of ``found``, if the engine's node has that format already: no second fault for it."""
        rounded = self.terms.rounded(found)
        if rounded is None or node.op == "quantize" or self.train.nodes[rounded].type != node.type:
            return []
        return [rounded]

    def report_operand(self, index: int, found: int, expected: int, producer: int) -> None:
        if producer in self.opaque or self.train.nodes[expected].op == "unknown":
            return
        if producer not in self.told and self.reports_other_weight(expected, producer):
            self.told.add(producer)
            return
        rule, related = self.operand_rule(index, expected, producer)
        self.told.add(producer)
        e, g = words(self.train.graph, expected), words(self.infer.graph, producer)
        self.report_at(rule, index, found, e, g)
        if related:
            self.add_image(producer, expected)

    def reports_other_weight(self, expected: int, producer: int) -> bool:
        """Whether the two are the GEMMs of one module on two parameters: the module was loaded with another's weight.

        Such a GEMM is a term of training's too, another module's, so only what reads it misses.
        """
        train, infer = self.train.graph, self.infer.graph
        theirs, ours = classify.stripped(train, expected), classify.stripped(infer, producer)
        t, i = train.nodes[theirs], infer.nodes[ours]
        if (t.op, i.op) != ("gemm", "gemm") or not t.fqn or t.fqn != i.fqn:
            return False
        rule = classify.leaf_rule(classify.origin(train, t.inputs[1]), classify.origin(infer, i.inputs[1]))
        if rule != "JG013":
            return False
        self.report_at(rule, ours, theirs, words(train, t.inputs[1]), words(infer, i.inputs[1]))
        return True

    def operand_rule(self, index: int, expected: int, producer: int) -> tuple[str, bool]:
        """The rule, and whether the two operands are the same value but for a missing or extra op."""
        train, infer = self.train.graph, self.infer.graph
        rule = classify.leaf_rule(classify.origin(train, expected), classify.origin(infer, producer))
        if rule is not None:
            return rule, False
        if not self.images[producer]:
            return "JG011", False
        value = self.images[producer][0]
        quantized = (train.nodes[expected].type.precision, infer.nodes[producer].type.precision)
        if classify.stripped(train, expected) == classify.stripped(train, value):
            differences = classify.precision_differences(*quantized, "")
            if all(p.scale for p in quantized) and differences:
                return differences[0][0], False
            if any(p.scale for p in quantized):
                return ("JG008" if infer.nodes[index].op == "attention" else "JG014"), True
            return "JG004", True
        if self.terms.made_from(expected, value) or self.terms.made_from(value, expected):
            return "JG011", True
        return "JG012", False

    def check_carried_precision(self, index: int, found: int) -> None:
        """slice, cat … take their input's precision: a difference that starts here is a fault here."""
        node, other = self.infer.nodes[index], self.train.nodes[found]
        if node.type == other.type:
            return
        self.complete = False
        below = zip(node.inputs, other.inputs, strict=True)
        if all(self.infer.nodes[a].type == self.train.nodes[e].type for a, e in below):
            for rule, e, g in classify.type_differences(other, node):
                self.report_at(rule, index, found, e, g)

    # ----------------------------------------------------------------------------------------------- observables

    def observe(self, name: str, index: int) -> None:
        """Each observable must be the trainer's observable of the same name."""
        wanted = self.train.observables.get(name)
        infer = (self.infer.graph, index)
        if wanted is None:
            got = words(self.infer.graph, index)
            self.faults.append(at("JG020", f"no observable {name} in training", got, infer=infer, fqn=name))
            return
        images = self.images[index]
        if wanted in images:
            if images[0] != wanted:
                self.complete = False
            self.observe_extra_quantize(name, index, wanted)
            return
        self.complete = False
        if index in self.opaque or index in self.told or self.train.nodes[wanted].op == "unknown":
            return
        change = next((c for v, c in self.representations(images) if v == wanted and c), None)
        if change == "round":
            self.report_round(index, wanted)
            return
        e, g = words(self.train.graph, wanted), words(self.infer.graph, index)
        kv = name.startswith(("k.", "v."))
        rule = ("JG008" if kv else "JG014") if change == "quantize" else "JG020"
        if self.infer.nodes[index].op == "poison":
            rule = "JG011"
        self.faults.append(at(rule, e, g, train=(self.train.graph, wanted), infer=infer, fqn=name))

    def observe_extra_quantize(self, name: str, index: int, wanted: int) -> None:
        if index in self.extra and index not in self.told:
            rule = "JG008" if name.startswith(("k.", "v.")) else "JG014"
            e, g = words(self.train.graph, wanted), words(self.infer.graph, index)
            train, infer = (self.train.graph, wanted), (self.infer.graph, index)
            self.faults.append(at(rule, e, g, train=train, infer=infer, fqn=name))

    # ------------------------------------------------------------------------------------------------- recording

    def add_image(self, producer: int, value: int) -> None:
        """Let later consumers match too.  Not for weights: each module that reads a wrong one is its own fault."""
        if "T" in self.infer.nodes[producer].type.shape and value not in self.images[producer]:
            self.images[producer] = (value, *self.images[producer])

    def report_at(self, rule: str, index: int, found: int | None, expected: str, got: str) -> None:
        train = None if found is None else (self.train.graph, found)
        self.report(at(rule, expected, got, train=train, infer=(self.infer.graph, index)))

    def report(self, fault: Fault) -> None:
        """At a router every difference of operation or precision is one of routing; beyond the logits, of the chain."""
        if fault.infer in self.routing and fault.rule in ROUTING_RULES:
            fault = fault.as_rule("JG022")
        if fault.infer in self.beyond_logits and fault.rule in ("JG001", "JG004", "JG011", "JG012"):
            fault = fault.as_rule("JG020")
        self.faults.append(fault)

    @cached_property
    def routing(self) -> set[int]:
        """Engine nodes that only choose experts: `route`, `combine`, and the router up to its GEMM's operands."""
        nodes = self.infer.nodes
        found = {i for i in self.infer.live if nodes[i].op in ROUTING_OPS}
        stack = [a for i in found if nodes[i].op == "route" for a in nodes[i].inputs]
        while stack:
            index = stack.pop()
            if nodes[index].op in REPRESENTATION or nodes[index].op == "gemm":
                found.add(index)
                inner = [a for a in nodes[index].inputs if nodes[a].op in REPRESENTATION or nodes[index].op != "gemm"]
                stack += [a for a in inner if found.issuperset(self.infer.users[a])]
        return found

    @cached_property
    def beyond_logits(self) -> set[int]:
        core = {k: i for k, i in self.infer.observables.items() if k == "logits" or k.startswith(("k.", "v."))}
        if "logits" not in core:
            return set()
        return set(self.infer.live) - self.infer.ancestors(core.values())

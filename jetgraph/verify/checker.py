"""Validates a certificate against the two graph files.  Given the files, this module is all that has to be trusted.

    python -m jetgraph.verify.checker CERT TRAIN INFER      exit 0 accepted, 1 refused, 2 usage or unreadable

Standard library only, nothing of jetgraph: copy the file anywhere and run it.  It finds nothing; it follows the map φ
that the certificate states and refuses at the first thing that does not hold.  What it accepts is docs/spec.md §6 for
what the files say; that they are true to the programs is the lifters' and the replay gate's.
"""

import hashlib
import json
import pathlib
import sys
from collections import namedtuple

ARITY = {"embed": 2, "round": 1, "add": 2, "sub": 2, "mul": 2, "div": 2, "neg": 1, "sq": 1, "pow": 1, "rsqrt": 1}
ARITY |= {"cos": 1, "sin": 1, "silu": 1, "int_to_float": 1, "slice": 1, "cat": None, "broadcast": 1, "permute": 1}
ARITY |= {"pick": 1, "mean": 1, "sum": 1, "quantize": 1, "gemm": 2, "attention": 3, "log_softmax": 1, "gather": 2}
ARITY |= {"row_parallel_gemm": 2, "route": None, "combine": None, "layer_norm": 3, "gelu": 1, "tanh": 1}
"""The row-local ops and their number of inputs, some under the conditions of `row_coupling`."""
LEAVES, COMMUTATIVE, GEMMS = {"input", "parameter", "const"}, {"add", "mul"}, {"gemm", "row_parallel_gemm"}
SUMS = {"mean", "sum", "layer_norm", "attention", "log_softmax", "combine", *GEMMS}
META = ("rules", "versions", "guards", "replay")
KEYS = {"jetgraph_certificate", "verdict", "bitwise", "sigma", "phi", "graphs", "axioms", "kernels", "weights"}
KEYS |= {*META, "capture", "digest"}
MAX_BYTES, MAX_VALUES = 2**29, 40_000_000  # a file with more is not parsed: memory stays bounded


class Refused(Exception):
    """The certificate does not hold; the message is the reason."""


Term = namedtuple("Term", "op attrs shape precision label")  # a row of the table of terms, and the sha256 of the row
Origin = namedtuple("Origin", "role phase kernel source reason")


def canonical(value):
    """The one written form of a certificate: any other byte is another certificate."""
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


def sha(value):
    return hashlib.sha256(value if isinstance(value, bytes) else canonical(value)).hexdigest()


def need(condition, reason, *places):
    if not condition:
        raise Refused(reason.format(*places) if places else reason)


def parse(data):
    need(len(data) <= MAX_BYTES and sum(map(data.count, (b",", b"[", b"{"))) <= MAX_VALUES, "a file is too large")
    return json.loads(data)


def in_order(op, attrs, shape, precision, _):
    """The row of a GEMM over ranks as if its products were added in one place: an FP32 wire rounds nothing between."""
    split = op == "row_parallel_gemm" and attrs["wire"] == "f32"
    return ["gemm", {"contraction": attrs["contraction"]}, shape, precision] if split else [op, attrs, shape, precision]


class Graph:
    """A graph file, read: per node its term, module, origin and inputs, in topological order, every index valid."""

    def __init__(self, data, side, file):
        need(type(data) is dict and data.get("jetgraph") == 2, f"the {side} graph is no jetgraph graph of version 2")
        self.side, self.file, self.name = side, file, data["name"]
        self.outputs, self.meta, nodes = data["outputs"], data["meta"], data["nodes"]
        terms = [Term._make([*row, bytes.fromhex(sha(row))]) for row in data["terms"]]
        origins = [Origin(*row) for row in data["origins"]]
        self.terms, self.modules = [terms[n[0]] for n in nodes], [data["modules"][n[1]] for n in nodes]
        self.origins, self.inputs = [origins[n[2]] for n in nodes], [n[3:] for n in nodes]
        for index, inputs in enumerate(self.inputs):
            below = not inputs or 0 <= min(inputs) <= max(inputs) < index
            need(below, "{} node %{} reads a node that does not come before it", side, index)
        for name, index in self.outputs.items():
            need(type(index) is int and 0 <= index < len(nodes), f"{side} output {name} names no node")
        self.forward = [origin.phase == "forward" for origin in self.origins]
        self.observables = {k: i for k, i in self.outputs.items() if not k.startswith("grad.") and self.forward[i]}
        needed = set(self.observables.values())
        for index in reversed(range(len(nodes))):
            needed.update(self.inputs[index] if index in needed else ())
        self.live = sorted(needed)

    def digests(self):
        """What is computed; and the same with the kernels, versions and device that ran."""
        terms = []
        for term, inputs in zip(self.terms, self.inputs, strict=True):
            ports = sorted([terms[i] for i in inputs]) if term.op in COMMUTATIVE else [terms[i] for i in inputs]
            terms.append(hashlib.sha256(term.label + b"".join(ports)).digest())
        semantic = sha(json.dumps(sorted([k, terms[i].hex()] for k, i in self.outputs.items())).encode())
        kernels = sorted({terms[i].hex() + o.kernel for i, o in enumerate(self.origins) if o.kernel})
        ran = [semantic, kernels, self.meta.get("versions"), self.meta.get("device")]
        return {"semantic": semantic, "execution": sha(json.dumps(ran, sort_keys=True).encode())}


def facts(train, infer):
    """The certificate's fields that the graphs determine.  ``axioms``: ops taken as total deterministic functions."""
    both = (train, infer)
    stated: dict = {key: {g.side: g.meta.get(key) for g in both} for key in META}
    stated["weights"] = sha([[g.meta.get("parameters"), g.meta.get("operands")] for g in both])
    stated["capture"] = sha([g.meta.get("capture") for g in both])
    stated["axioms"] = sorted({infer.terms[i].op for i in infer.live} - LEAVES)
    stated["kernels"] = {g.side: sorted({g.origins[i].kernel for i in g.live} - {""}) for g in both}
    return stated | {"graphs": {g.side: {"name": g.name, "file": g.file, **g.digests()} for g in both}}


def check(certificate, train, infer):
    """The certificate if it holds for the bytes of two graph files; raises `Refused` if not, ValueError if no JSON."""
    cert = parse(certificate)
    try:
        known = type(cert) is dict and set(cert) == KEYS and canonical(cert) == certificate
        need(known, "the certificate does not have the fields of version 2 in their canonical form")
        need(sha({k: v for k, v in cert.items() if k != "digest"}) == cert["digest"], "the certificate was changed")
        for side, data in (("train", train), ("infer", infer)):
            need(sha(data) == cert["graphs"][side]["file"], f"the {side} graph file is not the one that was certified")
        read = Graph(parse(train), "train", sha(train)), Graph(parse(infer), "infer", sha(infer))
        return holds(cert, *read, facts(*read))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise Refused(f"malformed certificate or graph: {type(error).__name__} {str(error)[:80]}") from error


def holds(cert, train, infer, stated):
    for key, value in stated.items():
        need(cert[key] == value, f"the certificate's {key} are not those of the graphs")
    claim = [cert["jetgraph_certificate"], cert["verdict"].partition(" modulo ")[0], cert["sigma"]]
    need(claim == [2, "CONTAINED", {"T": "T"}], "the claim must be CONTAINED under T = T, in version 2")
    _homomorphism(train, infer, cert["phi"])
    reordered = any(infer.terms[i].label != train.terms[cert["phi"][i]].label for i in infer.live)
    need(not reordered or "reduction order" in cert["verdict"], "the verdict hides another reduction order")
    _observables(train, infer, cert["phi"])
    _weights(train, infer)
    for graph in (train, infer):
        _conformance(graph)
    need(train.meta["scope"] == infer.meta["scope"], "the policies of the two sides demand different precisions")
    for index in infer.live:
        coupling = row_coupling(infer.terms[index], [infer.terms[i] for i in infer.inputs[index]])
        need(not coupling, "infer node %{} couples tokens: {}", index, coupling)
    bits = not reordered and same_bits(train, infer, cert["phi"])
    need(bits or cert["bitwise"] is False, "the certificate says bitwise, the kernels do not")
    return cert


def _homomorphism(train, infer, phi):
    need(len(phi) == len(infer.terms), "φ does not have one entry for each infer node")
    need(len(phi) - phi.count(None) == len(infer.live), "φ maps a node that no observable needs, or not all others")
    for index in infer.live:
        image, term, inputs = phi[index], infer.terms[index], infer.inputs[index]
        there = type(image) is int and 0 <= image < len(train.terms) and train.forward[image]
        need(there, "φ has no image in the forward part for infer node %{}", index)
        other, arity = train.terms[image], 0 if term.op in LEAVES else ARITY.get(term.op, -1)
        need(arity in (None, len(inputs)), "infer node %{}: {} is not a known op with these inputs", index, term.op)
        same = term.label == other.label or sha(in_order(*term)) == sha(in_order(*other))  # JSON: 0.0 is not -0.0
        need(same, "infer node %{} is {}, train node %{} {}", index, term[:4], image, other[:4])
        ports, wanted = [phi[i] for i in inputs], train.inputs[image]
        same = ports == wanted or (term.op in COMMUTATIVE and sorted(ports) == sorted(wanted))
        need(same, "infer node %{} and train node %{} read different inputs", index, image)


def _observables(train, infer, phi):
    found, wanted = infer.observables, train.observables
    need(len(found) == len(infer.outputs), "an infer output belongs to a backward pass")
    strange = [name for name, index in found.items() if wanted.get(name) != phi[index]]
    need(not strange, f"observable {''.join(strange[:1])} is not the trainer's")
    attention = sorted(infer.inputs[i][1:] for i in infer.live if infer.terms[i].op == "attention")
    need({"logits", "logprob"} <= set(found) and attention, "no logits, logprob or attention: that proves nothing")
    pairs = sorted([found.get(f"k.{i}", -1), found.get(f"v.{i}", -1)] for i in range(len(attention)))
    need(pairs == attention, "the observed K and V are not those that the attentions read")


def _weights(train, infer):
    theirs, ours, used, stored = (g.meta[key] for key in ("parameters", "operands") for g in (train, infer))
    for name in stored:
        need(used.get(name) == stored[name], f"the engine's stored codes of {name} are not the trainer's operand")
    for name in set(theirs) & set(ours):
        need(theirs[name] == ours[name], f"parameter {name} has another value in the engine")
    names = {i: infer.terms[i].attrs["name"] for i in infer.live if infer.terms[i].op == "parameter"}
    for index in infer.live:
        for name, user in [(names[i], infer.terms[index]) for i in infer.inputs[index] if i in names]:
            if user.op != "quantize":
                need(name in theirs and name in ours, f"no digest of parameter {name} on both sides")
            elif stored.get(name, {}).get("precision") != user.precision:
                raise Refused(f"no digest of the stored codes of {name} in {user.precision}")
    for graph, reached in ((train, range(len(train.terms))), (infer, infer.live)):
        read = {graph.terms[i].attrs["name"] for i in reached if graph.terms[i].op == "parameter"}
        idle = sorted(set(graph.meta["parameters"]) - read - set(graph.meta.get("dead", [])))
        need(not idle, f"{graph.side} parameter {idle[:1]} is neither used nor declared dead")


def _conformance(graph):
    """The policy's precision at every linear; and that the capture may be believed: replay, compiler, known ops."""
    replay, side = graph.meta.get("replay") or {}, graph.side
    need(replay.get("passed") is True and replay.get("cases"), f"the {side} graph did not pass the replay gate")
    need(graph.meta.get("compiler") in ("fx", "eager", "inductor-exact"), f"the {side} graph's compiler may drop casts")
    scope, seen = graph.meta["scope"], set()
    need(all(graph.terms[i].op != "unknown" for i in graph.live), f"the {side} graph has an unknown op")
    for index in (i for i in graph.live if graph.terms[i].op in GEMMS):
        fqn, operands = graph.modules[index], [graph.terms[i] for i in graph.inputs[index]]
        if fqn in scope and graph.origins[index].role == "FPROP":
            seen.add(fqn)
            demand = [scope[fqn]["activation"], scope[fqn]["weight"]]
            need([o.precision for o in operands] == demand, f"{side} {fqn} has not the policy's precision")
        else:
            need(all(o.op != "quantize" for o in operands), f"{side} {fqn} is quantised outside the policy")
    need(scope and seen == set(scope), f"{side} has no scope, or no gemm for {sorted(set(scope) - seen)[:1]}")


def row_coupling(term, inputs):
    """Why a token's result may depend on other tokens of the batch; "" if it does not."""
    if "T" in term.shape[1:] or ("T" not in term.shape and any("T" in i.shape for i in inputs)):
        return "its result does not have one row a token"
    if term.op in GEMMS and (term.attrs["contraction"] == "tn" or "T" in inputs[1].shape):
        return "its contraction runs over tokens"
    if term.attrs.get("mask", "causal") != "causal" or term.attrs.get("capacity") is not None:
        return "its mask is not causal, or experts have a capacity"
    if term.op == "quantize" and "T" in term.shape:
        block, _, mode = term.precision.partition("[")[2].split(" ")[:3]
        return "" if mode == "static" or block.startswith("1x") else f"blocks of {block} span tokens"
    return ""


def same_bits(train, infer, phi):
    """Equal kernels, device and torch, a row's bits the same in every batch; no name means elementwise arithmetic."""
    places = {(g.meta.get("device"), g.meta.get("versions", {}).get("torch")) for g in (train, infer)}
    tables = [g.meta.get("kernels", {}) for g in (train, infer)]
    ran = {(infer.terms[i].op, infer.origins[i].kernel, train.origins[phi[i]].kernel) for i in infer.live}
    if len(places) > 1 or any(kernel != other or (kernel == "" and op in SUMS) for op, kernel, other in ran):
        return False
    return all(table.get(k, {}).get("row_invariant") is True for _, k, _ in ran if k for table in tables)


def main(arguments):
    if len(arguments) != 3:
        print("usage: python -m jetgraph.verify.checker CERT TRAIN INFER", file=sys.stderr)
        return 2
    try:
        cert = check(*(pathlib.Path(path).read_bytes() for path in arguments))
    except (OSError, ValueError, RecursionError) as error:
        print(f"unreadable: {error}", file=sys.stderr)
        return 2
    except Refused as reason:
        print(f"refused: {reason}")
        return 1
    print(f"accepted: {cert['verdict']}{', bitwise' if cert['bitwise'] else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

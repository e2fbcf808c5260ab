"""Validates a certificate against the two graph files.  Given the files, this module is all that has to be trusted.

    python -m jetgraph.verify.checker CERT TRAIN INFER      exit 0 accepted, 1 refused, 2 usage or unreadable

Standard library only, nothing of jetgraph: copy the file anywhere and run it.  It finds nothing; it follows the map φ
that the certificate states and refuses at the first thing that does not hold.  What it accepts is docs/spec.md §6, for
what the files say: that they are true to the programs is the lifters' and the replay gate's.
"""

import hashlib
import json
import pathlib
import sys

LEAVES = {"input", "parameter", "const"}
ARITY = {"embed": 2, "round": 1, "add": 2, "sub": 2, "mul": 2, "div": 2, "neg": 1, "sq": 1, "pow": 1, "rsqrt": 1}
ARITY |= {"cos": 1, "sin": 1, "silu": 1, "int_to_float": 1, "slice": 1, "cat": None, "broadcast": 1, "permute": 1}
ARITY |= {"pick": 1, "mean": 1, "sum": 1, "quantize": 1, "gemm": 2, "attention": 3, "log_softmax": 1, "gather": 2}
"""The row-local ops and their number of inputs; gemm, attention and quantize under the conditions of `row_local`."""
SUMS, COMMUTATIVE = {"mean", "sum", "gemm", "attention", "log_softmax"}, {"add", "mul"}
META = ("rules", "versions", "guards", "replay")
KEYS = "jetgraph_certificate verdict bitwise graphs sigma phi rules axioms kernels versions guards replay weights"
KEYS = {*KEYS.split(), "capture", "digest"}


class Refused(Exception):
    """The certificate does not hold; the message is the reason."""


class Unreadable(Refused):
    """The certificate's file is no JSON."""


def canonical(value):
    """The one written form of a certificate: any other byte is another certificate."""
    return (json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


def sha(value):
    return hashlib.sha256(value if isinstance(value, bytes) else canonical(value)).hexdigest()


def need(condition, reason):
    """The only way a certificate is refused for what it says."""
    if not condition:
        raise Refused(reason)


class Graph:
    def __init__(self, data: dict, side: str):
        """A graph file, read: nodes as plain dicts in topological order, every index valid."""
        need(type(data) is dict and data.get("jetgraph") == 1, f"the {side} graph is no jetgraph graph of version 1")
        self.side, self.name, self.nodes, self.outputs = side, data["name"], data["nodes"], data["outputs"]
        self.meta = data["meta"]
        for index, node in enumerate(self.nodes):
            below = all(type(i) is int and 0 <= i < index for i in node["in"])
            need(below, f"{side} node %{index} reads a node that does not come before it")
        for name, index in self.outputs.items():
            need(type(index) is int and 0 <= index < len(self.nodes), f"{side} output {name} names no node")

    def forward(self, index):
        return self.nodes[index].get("phase", "forward") == "forward"

    def observables(self):
        return {k: i for k, i in self.outputs.items() if not k.startswith("grad.") and self.forward(i)}

    def live(self):
        """Nodes that the observables need, in order."""
        live = set(self.observables().values())
        for index in range(len(self.nodes) - 1, -1, -1):
            if index in live:
                live.update(self.nodes[index]["in"])
        return sorted(live)

    def digests(self):
        """What is computed; and the same with the kernels, versions and device that ran."""
        terms = []
        for node in self.nodes:
            key = [node["op"], sorted(map(list, node["attrs"].items())), [str(s) for s in node["shape"]]]
            key += [node["precision"], [terms[i] for i in node["in"]]]
            terms.append(sha(json.dumps(key).encode()))
        semantic = sha(json.dumps(sorted([k, terms[i]] for k, i in self.outputs.items())).encode())
        kernels = sorted({(terms[i], n["kernel"]) for i, n in enumerate(self.nodes) if n.get("kernel")})
        ran = [semantic, kernels, self.meta.get("versions"), self.meta.get("device")]
        return {"semantic": semantic, "execution": sha(json.dumps(ran, sort_keys=True).encode())}


def facts(train, infer) -> tuple[dict, dict]:
    """The certificate's fields that the graphs determine.  ``axioms``: ops taken as total deterministic functions."""
    stated: dict = {key: {g.side: g.meta.get(key) for g in (train, infer)} for key in META}
    stated["weights"] = sha([[g.meta.get("parameters"), g.meta.get("operands")] for g in (train, infer)])
    stated["capture"] = sha([g.meta.get("capture") for g in (train, infer)])
    stated["axioms"] = sorted({infer.nodes[i]["op"] for i in infer.live()} - LEAVES)
    used = {g.side: {g.nodes[i].get("kernel", "") for i in g.live()} - {""} for g in (train, infer)}
    stated["kernels"] = {side: sorted(kernels) for side, kernels in used.items()}
    return stated, {g.side: {"name": g.name, **g.digests()} for g in (train, infer)}


def check(certificate, train, infer):
    """The certificate if it holds for the bytes of the two graph files; raises `Refused` with the reason if not."""
    try:
        cert = json.loads(certificate)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"the certificate is not JSON: {str(error)[:80]}") from error
    try:
        version = type(cert) is dict and set(cert) == KEYS and cert["jetgraph_certificate"]
        need(version == 1, "the certificate does not have the fields of version 1")
        need(canonical(cert) == certificate, "the certificate is not in its canonical form")
        same = sha({k: v for k, v in cert.items() if k != "digest"}) == cert["digest"]
        need(same, "the certificate was changed: its digest does not match its content")
        for side, data in (("train", train), ("infer", infer)):
            need(sha(data) == cert["graphs"][side]["file"], f"the {side} graph file is not the one that was certified")
        return _check(cert, Graph(json.loads(train), "train"), Graph(json.loads(infer), "infer"))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        raise Refused(f"malformed certificate or graph: {type(error).__name__} {str(error)[:80]}") from error


def _check(cert, train, infer):
    live, phi = infer.live(), cert["phi"]
    stated, named = facts(train, infer)
    for key, value in stated.items():
        need(cert[key] == value, f"the certificate's {key} are not those of the graphs")
    for side in named:
        same = cert["graphs"][side] == named[side] | {"file": cert["graphs"][side]["file"]}
        need(same, f"the certificate's digests of the {side} graph are wrong")
    need([cert["verdict"], cert["sigma"]] == ["CONTAINED", {"T": "T"}], "the claim must be CONTAINED under T = T")
    _homomorphism(train, infer, live, phi)
    _observables(train, infer, live, phi)
    _weights(train, infer, live)
    for graph in (train, infer):
        _conformance(graph)
    need(train.meta["scope"] == infer.meta["scope"], "the policies of the two sides demand different precisions")
    coupled = [f"infer node %{i} couples tokens: {reason}" for i in live if (reason := row_coupling(infer, i))]
    need(not coupled, "; ".join(coupled[:1]))
    bits = all(same_bits(train, infer, i, phi[i]) for i in live if infer.nodes[i]["op"] not in LEAVES)
    need(cert["bitwise"] is bits, f"the certificate says bitwise {cert['bitwise']}, the kernels say {bits}")
    return cert


def _homomorphism(train, infer, live, phi):
    need(len(phi) == len(infer.nodes), "φ does not have one entry for each infer node")
    need(len(phi) - phi.count(None) == len(live), "φ maps a node that no observable needs, or not all others")
    for index in live:
        node, image = infer.nodes[index], phi[index]
        need(type(image) is int and 0 <= image < len(train.nodes), f"φ has no image for infer node %{index}")
        other, op = train.nodes[image], node["op"]
        arity = 0 if op in LEAVES else ARITY.get(op, -1)
        need(arity in (None, len(node["in"])), f"infer node %{index}: {op} is not a known op with these inputs")
        values = [(n["op"], n["shape"], n["precision"], repr(sorted(n["attrs"].items()))) for n in (node, other)]
        for key, mine, theirs in zip(("op", "shape", "precision", "attrs"), *values, strict=True):  # repr: 0.0 == -0.0
            need(mine == theirs, f"infer node %{index} and train node %{image} differ in {key}")
        order = sorted if op in COMMUTATIVE else list
        ports, wanted = order(phi[i] for i in node["in"]), order(other["in"])
        need(ports == wanted, f"infer node %{index} and train node %{image} read different inputs")
        need(train.forward(image), f"train node %{image} is not in the forward part")


def _observables(train, infer, live, phi):
    found, wanted = infer.observables(), train.observables()
    need(len(found) == len(infer.outputs), "an infer output belongs to a backward pass")
    strange = [name for name, index in found.items() if wanted.get(name) != phi[index]]
    need(not strange, f"observable {''.join(strange[:1])} is not the trainer's")
    attention = sorted(infer.nodes[i]["in"][1:] for i in live if infer.nodes[i]["op"] == "attention")
    need({"logits", "logprob"} <= set(found) and attention, "no logits, logprob or attention: that proves nothing")
    pairs = sorted([found.get(f"k.{i}", -1), found.get(f"v.{i}", -1)] for i in range(len(attention)))
    need(pairs == attention, "the observed K and V are not those that the attentions read")


def _weights(train, infer, live):
    theirs, ours, used, stored = (g.meta[key] for key in ("parameters", "operands") for g in (train, infer))
    for name in stored:
        need(used.get(name) == stored[name], f"the engine's stored codes of {name} are not the trainer's operand")
    for name in set(theirs) & set(ours):
        need(theirs[name] == ours[name], f"parameter {name} has another value in the engine")
    for index in live:
        for node in (infer.nodes[i] for i in infer.nodes[index]["in"]):
            name, user = node["attrs"].get("name"), infer.nodes[index]
            if node["op"] == "parameter" and user["op"] == "quantize":
                known = stored.get(name, {}).get("precision")
                need(known == user["precision"], f"no digest of the stored codes of {name} in {user['precision']}")
            elif node["op"] == "parameter":
                need(name in theirs and name in ours, f"no digest of parameter {name} on both sides")
    for graph, reached in ((train, range(len(train.nodes))), (infer, live)):
        read = {graph.nodes[i]["attrs"]["name"] for i in reached if graph.nodes[i]["op"] == "parameter"}
        idle = sorted(set(graph.meta["parameters"]) - read - set(graph.meta.get("dead", [])))
        need(not idle, f"{graph.side} parameter {idle[:1]} is neither used nor declared dead")


def _conformance(graph):
    """The policy's precision at every linear; and that the capture may be believed: replay, compiler, known ops."""
    replay = graph.meta.get("replay") or {}
    need(replay.get("passed") is True and replay.get("cases"), f"the {graph.side} graph did not pass the replay gate")
    need(graph.meta.get("compiler") in ("fx", "eager"), f"the {graph.side} graph's compiler may drop casts")
    scope, seen = graph.meta["scope"], set()
    for node in (graph.nodes[i] for i in graph.live()):
        need(node["op"] != "unknown", f"the {graph.side} graph has an unknown op")
        fqn, operands = node.get("fqn", ""), [graph.nodes[i] for i in node["in"]]
        if node["op"] == "gemm" and fqn in scope and node.get("role") == "FPROP":
            seen.add(fqn)
            demand = [scope[fqn]["activation"], scope[fqn]["weight"]]
            need([o["precision"] for o in operands] == demand, f"{graph.side} {fqn} has not the policy's precision")
        elif node["op"] == "gemm":
            need(all(o["op"] != "quantize" for o in operands), f"{graph.side} {fqn} is quantised outside the policy")
    need(scope and seen == set(scope), f"{graph.side} has no scope, or no gemm for {sorted(set(scope) - seen)[:1]}")


def row_coupling(graph, index):
    """Why a token's result may depend on other tokens of the batch; "" if it does not."""
    node = graph.nodes[index]
    shape, inputs = node["shape"], [graph.nodes[i] for i in node["in"]]
    if "T" in shape[1:] or ("T" not in shape and any("T" in i["shape"] for i in inputs)):
        return "its result does not have one row a token"
    if node["op"] == "gemm" and (node["attrs"]["contraction"] == "tn" or "T" in inputs[1]["shape"]):
        return "its contraction runs over tokens"
    if node["op"] == "attention" and node["attrs"]["mask"] != "causal":
        return "its mask is not causal"
    if node["op"] == "quantize" and "T" in shape:
        block, _, mode = node["precision"].partition("[")[2].split(" ")[:3]
        return "" if mode == "static" or block.startswith("1x") else f"blocks of {block} span tokens"
    return ""


def same_bits(train, infer, index, image):
    """Equal kernels, device and torch, a row's bits the same in every batch; no name means elementwise arithmetic."""
    places = {(g.meta.get("device"), g.meta.get("versions", {}).get("torch")) for g in (train, infer)}
    kernel, other = infer.nodes[index].get("kernel", ""), train.nodes[image].get("kernel", "")
    if len(places) > 1 or kernel == "" or other != kernel:
        return len(places) == 1 and other == kernel and infer.nodes[index]["op"] not in SUMS
    return all(g.meta.get("kernels", {}).get(kernel, {}).get("row_invariant") is True for g in (train, infer))


def main(arguments):
    if len(arguments) != 3:
        print("usage: python -m jetgraph.verify.checker CERT TRAIN INFER", file=sys.stderr)
        return 2
    try:
        cert = check(*(pathlib.Path(path).read_bytes() for path in arguments))
    except (OSError, Unreadable) as error:
        print(f"unreadable: {error}", file=sys.stderr)
        return 2
    except Refused as reason:
        print(f"refused: {reason}")
        return 1
    print(f"accepted: CONTAINED{', bitwise' if cert['bitwise'] else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

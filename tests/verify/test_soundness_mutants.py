"""No change of the checker goes unnoticed: each of its mutants is told from it by some claim, or argued to be equal.

A claim is a certificate with its two graph files and what the checker says of it.  The claims are those of
`test_verify_checker` (one certificate that holds, every forgery) and the ones below, which mutants asked for.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jetgraph.ops import COMMUTATIVE, OPS
from jetgraph.verify import checker, verify
from tests.refutations import JG016_reduction_order
from tests.verify.mutation_testing import Mutant, mutants
from tests.verify.test_verify_checker import FORGERIES, both, first, forge, node
from tests.verify.toy_transformer import build

Claim = tuple[bytes, bytes, bytes]
HOLDS = "holds"
Outcome = str
"""`HOLDS`, or a pattern of the reason for refusing"""


def claims_of(train, infer) -> Claim:
    certificate = verify(train, infer).certificate
    assert certificate is not None
    return certificate.to_bytes(), train.to_json().encode(), infer.to_json().encode()


NORM = "model.norm.weight"
MODULO = "CONTAINED modulo reduction order"
UP = "model.layers.0.mlp.up_proj"


def split(c: dict, t: dict, i: dict, wire: str = "f32") -> None:
    attrs = {"contraction": "nt", "parts": 2, "wire": wire}
    i["nodes"][first(i, "gemm", lambda n: n["fqn"].endswith("o_proj"))].update(op="row_parallel_gemm", attrs=attrs)
    c["bitwise"] = False


def activation(graph: dict, block: str, mode: str = "dyn") -> None:
    """Every activation's block, in the graph and in its policy."""
    for n in graph["nodes"]:
        if n["op"] == "quantize" and "T" in n["shape"]:
            n["precision"] = n["precision"].replace("[1x128", f"[{block}").replace(" dyn ", f" {mode} ")
    for demand in graph["meta"]["scope"].values():
        demand["activation"] = demand["activation"].replace("[1x128", f"[{block}").replace(" dyn ", f" {mode} ")


def without_attention(graph: dict) -> None:
    node(graph, "attention").update(op="cat")
    for name in ("k.0", "v.0"):
        del graph["outputs"][name]


def no_residual(graph: dict) -> None:
    """o_proj's result twice, where training adds the residual to it."""
    inputs = graph["nodes"][first(graph, "add", lambda n: n["fqn"].endswith("post_attention_layernorm"))]["in"]
    (result,) = (i for i in inputs if graph["nodes"][i]["op"] != "embed")
    inputs[:] = [result, result]


def head_of_itself(graph: dict) -> None:
    """Logits as products of tokens with tokens, of the shape of logits."""
    head = graph["nodes"][first(graph, "gemm", lambda n: n["fqn"] == "lm_head")]
    head["in"][1] = head["in"][0]


def keep(c: dict) -> None:
    """Only the files' digests are made right again, not what the certificate states of them."""
    c["_keep_facts"] = True


def half_quantised(graph: dict) -> None:
    """up_proj leaves the policy and reads its activation unquantised, its weight quantised."""
    del graph["meta"]["scope"][UP]
    inputs = graph["nodes"][first(graph, "gemm", lambda n: n["fqn"] == UP)]["in"]
    inputs[0] = graph["nodes"][inputs[0]]["in"][0]


def unused_bias(graph: dict) -> None:
    graph["meta"]["parameters"]["bias"] = {}
    graph["meta"]["dead"] = ["bias"]


def not_bitwise(c: dict, graph: dict, **meta: object) -> None:
    graph["meta"].update(meta)
    c["bitwise"] = False


MORE: dict[str, tuple[Callable[[dict, dict, dict], object], Outcome]] = {
    "operands of add exchanged": (lambda c, t, i: node(i, "add")["in"].reverse(), HOLDS),
    "a dead parameter": (both(unused_bias), HOLDS),
    "a weaker claim": (lambda c, t, i: c.update(bitwise=False), HOLDS),
    "split sums unsaid": (split, "hides another reduction order"),
    "split sums said": (lambda c, t, i: (split(c, t, i), c.update(verdict=MODULO)), HOLDS),
    "split sums bitwise": (lambda c, t, i: (split(c, t, i), c.update(verdict=MODULO, bitwise=True)), "bitwise"),
    "split sums in bf16": (lambda c, t, i: (split(c, t, i, "bf16"), c.update(verdict=MODULO)), "train node"),
    "static per tensor": (both(lambda g: activation(g, "*x*", "static")), HOLDS),
    "groups of tokens": (both(lambda g: activation(g, "128x1")), "span tokens"),
    "per tensor": (both(lambda g: activation(g, "*x*")), "span tokens"),
    "contraction over tokens": (both(lambda g: node(g, "gemm")["attrs"].update(contraction="tn")), "over tokens"),
    "tokens as a feature": (both(lambda g: node(g, "silu").update(shape=["T", "T"])), "one row a token"),
    "tokens summed up": (both(lambda g: node(g, "mean").update(shape=[1])), "one row a token"),
    "another policy": (lambda c, t, i: t["meta"]["scope"][UP].update(note="x"), "policies of the two sides"),
    "no scope": (both(lambda g: g["meta"]["scope"].clear()), "outside the policy"),
    "half quantised outside": (both(half_quantised), "outside the policy"),
    "not FPROP": (both(lambda g: node(g, "gemm").update(role="DGRAD")), "outside the policy"),
    "other device": (lambda c, t, i: i["meta"].update(device="cuda"), "bitwise"),
    "other device, said": (lambda c, t, i: not_bitwise(c, i, device="cuda"), HOLDS),
    "other torch": (lambda c, t, i: i["meta"].update(versions={"torch": "1"}), "bitwise"),
    "unknown kernel": (lambda c, t, i: i["meta"].update(kernels={}), "bitwise"),
    "trainer's kernel unknown": (lambda c, t, i: t["meta"].update(kernels={}), "bitwise"),
    "kernel on one side": (lambda c, t, i: node(i, "silu").update(kernel="fused"), "bitwise"),
    "kernel with one name": (both(lambda g: node(g, "silu").update(kernel="ref.sum")), HOLDS),
    "replay without cases": (lambda c, t, i: i["meta"]["replay"].update(cases=[]), "replay"),
    "compiler fx": (both(lambda g: g["meta"].update(compiler="fx")), HOLDS),
    "compiler inductor-exact": (both(lambda g: g["meta"].update(compiler="inductor-exact")), HOLDS),
    "compiler of nobody": (lambda c, t, i: t["meta"].pop("compiler"), "compiler"),
    "codes for nobody's operand": (lambda c, t, i: t["meta"]["operands"].clear(), "stored codes"),
    "codes in another precision": (
        both(lambda g: next(iter(g["meta"]["operands"].values())).update(precision="bf16")), "stored codes of"),
    "trainer's value unknown": (lambda c, t, i: t["meta"]["parameters"].pop(NORM), "no digest of parameter"),
    "a gradient as output": (
        lambda c, t, i: i["outputs"].update({"grad.x": i["outputs"]["logits"]}), "backward pass"),
    "a backward output": (lambda c, t, i: node(i, "gather").update(phase="backward"), "not all others"),
    "an output to nowhere": (lambda c, t, i: (keep(c), i["outputs"].update(logits=10**6)), "names no node"),
    "an output one beyond": (lambda c, t, i: (keep(c), i["outputs"].update(logits=len(i["nodes"]))), "names no node"),
    "an output below zero": (lambda c, t, i: (keep(c), i["outputs"].update(logits=-1)), "names no node"),
    "an output to half a node": (lambda c, t, i: (keep(c), i["outputs"].update(logits=1.0)), "names no node"),
    "reads itself": (lambda c, t, i: (keep(c), i["nodes"][7].update({"in": [7]})), "come before"),
    "reads the last node": (lambda c, t, i: (keep(c), i["nodes"][0].update({"in": [-1]})), "come before"),
    "no logprob": (lambda c, t, i: i["outputs"].pop("logprob"), "not all others"),
    "K for V": (lambda c, t, i: (i["outputs"].update({"v.0": i["outputs"]["k.0"]}),
                                 t["outputs"].update({"v.0": t["outputs"]["k.0"]})), "observed K and V"),
    "phi of a truth value": (lambda c, t, i: c["phi"].__setitem__(c["phi"].index(1), True), "no image"),
    "no scope at all": (both(lambda g: g["meta"].pop("scope")), "malformed"),
    "an unknown op of training's own": (
        lambda c, t, i: (t["nodes"].append(t["nodes"][0] | {"op": "unknown"}),
                         t["outputs"].update(extra=len(t["nodes"]) - 1)), "unknown op"),
    "a capacity": (both(lambda g: node(g, "silu")["attrs"].update(capacity=4)), "capacity"),
    "phi one beyond": (lambda c, t, i: c["phi"].__setitem__(0, len(t["nodes"])), "no image"),
    "reads one below zero": (lambda c, t, i: (keep(c), i["nodes"][7].update({"in": [-1, 2]})), "come before"),
    "the first node as output": (
        lambda c, t, i: (i["outputs"].update(leaf=0), t["outputs"].update(leaf=c["phi"][0])), HOLDS),
    "a result added to itself": (lambda c, t, i: no_residual(i), "different inputs"),
    "reads one beyond": (lambda c, t, i: (keep(c), i["nodes"][7].update({"in": [2, 10**6]})), "come before"),
    "versions in another order": (both(lambda g: g["meta"].update(versions={"torch": "2", "numpy": "1"})), HOLDS),
    "neither K nor V": (lambda c, t, i: (i["outputs"].pop("k.0"), i["outputs"].pop("v.0")), "observed K and V"),
    "kernel of another op": (lambda c, t, i: node(i, "silu").update(kernel="ref.sum"), "bitwise"),
    "no attention": (both(without_attention), "no logits, logprob or attention"),
    "tokens against tokens": (both(head_of_itself), "over tokens"),
    "phi below zero": (lambda c, t, i: c["phi"].__setitem__(0, -1), "no image"),
    "version of tomorrow": (lambda c, t, i: c.update(jetgraph_certificate=3), "claim"),
    "graph of tomorrow": (lambda c, t, i: (keep(c), i.update(jetgraph=3)), "version 2"),
    "another kernel in the list": (
        lambda c, t, i: c.update(kernels={"train": [], "infer": []}, _keep_facts=True), "kernels are not those"),
    "fewer axioms": (lambda c, t, i: c.update(axioms=c["axioms"][1:], _keep_facts=True), "axioms are not those"),
    "other weights": (lambda c, t, i: c.update(weights="0", _keep_facts=True), "weights are not those"),
    "other capture": (lambda c, t, i: c.update(capture="0", _keep_facts=True), "capture are not those"),
    "other guards": (lambda c, t, i: c.update(guards={}, _keep_facts=True), "guards are not those"),
    "other name": (lambda c, t, i: (keep(c), c["graphs"]["infer"].update(name="x")), "graphs are not"),
}  # fmt: skip


def claims() -> Iterator[tuple[str, Claim, Outcome]]:
    plain = claims_of(build("train", layers=1, backward=True), build("infer", layers=1))
    yield "plain", plain, HOLDS
    yield "reordered", claims_of(*JG016_reduction_order.refuted()), HOLDS
    cert, train, infer = plain
    yield "another train file", (cert, train + b" ", infer), "train graph file is not the one"
    yield "another infer file", (cert, train, infer + b" "), "infer graph file is not the one"
    idle = build("infer", layers=1)
    idle = replace(idle, nodes=(*idle.nodes, idle.nodes[0]))
    yield "a node that nobody needs", claims_of(build("train", layers=1), idle), HOLDS
    named = replace(build("train", layers=1), name="modèle")
    yield "a name beyond ASCII", claims_of(named, build("infer", layers=1)), HOLDS
    listed = json.loads(cert)
    listed["graphs"]["infer"]["file"] = checker.sha(b"[]")
    listed["digest"] = checker.sha({k: v for k, v in listed.items() if k != "digest"})
    yield "a list for a graph", (checker.canonical(listed), train, b"[]"), "no jetgraph graph"
    yield "another spelling", (json.dumps(json.loads(cert)).encode(), train, infer), "canonical"
    bf16 = claims_of(*(build(side, layers=1, activation=None, weight=None) for side in ("train", "infer")))
    yield "bf16 without a policy", forge(bf16, both(lambda g: g["meta"]["scope"].clear())), "has no scope"
    other = json.loads(cert) | {"digest": "0" * 64}
    yield "another digest", (checker.canonical(other), train, infer), "was changed"
    yield "experts", claims_of(*(build(side, layers=1, experts=2) for side in ("train", "infer"))), HOLDS
    for name, (change, reason) in (FORGERIES | MORE).items():
        with contextlib.suppress(checker.Refused):  # a graph that is not well formed is refused while forging
            yield name, forge(plain, change), reason


def says(module: ModuleType, claim: Claim) -> str:
    try:
        return HOLDS if module.check(*claim) == json.loads(claim[0]) else "other certificate"
    except module.Refused as reason:
        return str(reason)
    except ValueError as error:
        return f"unreadable {error}"


def agrees(said: str, outcome: Outcome) -> bool:
    return said == outcome if HOLDS in (said, outcome) else re.search(outcome, said) is not None


class Slow(Exception):
    pass


def killed(mutant: Mutant, suite: list[tuple[str, Callable[[ModuleType], bool]]]) -> str:
    """The name of the first claim that tells the mutant from the checker; "" if none does."""

    def alarm(*_: Any) -> None:
        raise Slow

    signal.signal(signal.SIGVTALRM, alarm)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 5)
        module = mutant.load()
        for name, holds in suite:
            if not holds(module):
                return name
        if script_says(mutant.code) != (2, "unreadable"):
            return "script"
    except (Exception, SystemExit) as error:  # a mutant may fail in any way: that is noticed
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return ""


def main_says(module: ModuleType, folder: Path, claim: Claim) -> list[tuple[int, str]]:
    """Exit status and the first words printed: accepted, refused, unreadable, wrong usage."""
    paths = [folder / name for name in ("cert", "train", "infer")]
    said = []
    for data in (claim, (claim[0], claim[1] + b" ", claim[2]), (b"\xff", *claim[1:])):
        for path, content in zip(paths, data, strict=True):
            path.write_bytes(content)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = module.main([str(p) for p in paths])
        said.append((status, (out.getvalue() + "|" + err.getvalue())[:12]))
    for arguments in ([str(paths[0])], ["absent", *map(str, paths[1:])]):
        err = io.StringIO()
        with contextlib.redirect_stderr(err):
            said.append((module.main(arguments), err.getvalue()[:12]))
    return said


def vocabulary(module: ModuleType) -> bool:
    """The ops and sums that it knows are the row-local ones of jetgraph/ops.py."""
    known = {n: o.arity for n, o in OPS.items() if o.row_local and not o.leaf and not n.endswith("_backward")}
    sums = {n for n in known if OPS[n].accumulates}
    return known == module.ARITY and sums == module.SUMS and module.COMMUTATIVE == COMMUTATIVE


def script_says(code: object) -> tuple[object, str]:
    """Exit status and first word of the file run as a script on three files that do not exist."""
    old, sys.argv = sys.argv, ["checker", "absent", "absent", "absent"]
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err):
            exec(code, {"__name__": "__main__"})  # type: ignore[arg-type]
    except SystemExit as done:
        return done.code, err.getvalue()[:10]
    finally:
        sys.argv = old
    return None, ""


def bounded(module: ModuleType) -> list[bool]:
    """At the limits of size, of bytes and of values, a file is parsed; one beyond, it is not."""
    answers = []
    for name, data, size in (("MAX_BYTES", b"[1]", 3), ("MAX_VALUES", b'[[1,2],{"a":1}]', 5)):
        for limit in (size, size - 1):
            old, value = getattr(module, name), None
            setattr(module, name, limit)
            try:
                value = module.parse(data)
            except module.Refused:
                pass
            finally:
                setattr(module, name, old)
            answers.append(value is not None)
    return [*answers, module.MAX_BYTES == checker.MAX_BYTES, module.MAX_VALUES == checker.MAX_VALUES]


EQUIVALENT: dict[tuple[str, str], str] = {
    ('return ""', "returns nothing instead of ''"): "only read as `not coupling`: None is as false as the empty text",
    ("return False", "returns nothing instead of False"): "only read as `bits or …`: None is as false as False",
    (
        "known = type(cert) is dict and set(cert) == KEYS and canonical(cert) == certificate",
        "without type(cert) is dict",
    ): "a list of the field names passes here and is refused at its first field: malformed",
    (
        "other, arity = train.terms[image], 0 if term.op in LEAVES else ARITY.get(term.op, -1)",
        "1 → 2",
    ): "no node has -1 or -2 inputs",
    (
        "same = term.label == other.label or sha(in_order(*term)) == sha(in_order(*other))  # JSON: 0.0 is not -0.0",
        "without term.label == other.label",
    ): "equal labels are equal rows, whose digests in order are equal: the first test only saves the second",
    (
        'pairs = sorted([found.get(f"k.{i}", -1), found.get(f"v.{i}", -1)] for i in range(len(attention)))',
        "1 → 2",
    ): "no node has index -1 or -2",
    ("for term, inputs in zip(self.terms, self.inputs, strict=True):", "True → False"): "both have one entry a node",
}
"""(source line, change) → why no claim can tell"""


@pytest.mark.slow
def test_every_mutant_of_the_checker_is_noticed(tmp_path: Path) -> None:
    everything = list(claims())
    suite: list[tuple[str, Callable[[ModuleType], bool]]] = [
        (name, lambda m, c=claim, o=outcome: agrees(says(m, c), o)) for name, claim, outcome in everything
    ]
    wanted = main_says(checker, tmp_path, everything[0][1]), bounded(checker)
    assert wanted[1] == [True, False, True, False, True, True]
    suite.append(("main", lambda m: main_says(m, tmp_path, everything[0][1]) == wanted[0]))
    suite.append(("vocabulary", vocabulary))
    suite.append(("bounded", lambda m: bounded(m) == wanted[1]))
    assert all(holds(checker) for _, holds in suite)
    source = Path(checker.__file__).read_text(encoding="utf-8")
    count, survivors = 0, []
    for mutant in mutants(source):
        count += 1
        if not killed(mutant, suite):
            survivors.append(mutant)
    unexplained = [m for m in survivors if (m.line, m.change) not in EQUIVALENT]
    assert not unexplained, "\n".join(f"{m.number}: {m.change}    [{m.line}]" for m in unexplained)
    assert {(m.line, m.change) for m in survivors} == set(EQUIVALENT), (
        "an argument for a mutant that no longer survives"
    )
    assert count > 400

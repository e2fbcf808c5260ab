"""The checker: accepts what holds, refuses every changed byte and every false claim, and needs nothing but Python."""

from __future__ import annotations

import copy
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetgraph.ops import COMMUTATIVE, OPS
from jetgraph.verify import Certificate, CertificateError, checker, verify
from tests.verify.toy_transformer import build


@pytest.fixture(scope="module")
def files() -> tuple[bytes, bytes, bytes]:
    train, infer = build("train", layers=1, backward=True), build("infer", layers=1)
    certificate = verify(train, infer).certificate
    assert certificate is not None
    return certificate.to_bytes(), train.to_json().encode(), infer.to_json().encode()


def test_accepts(files: tuple[bytes, bytes, bytes]) -> None:
    assert checker.check(*files)["bitwise"] is True


def test_any_changed_byte_is_refused(files: tuple[bytes, bytes, bytes]) -> None:
    rng = random.Random(0)
    for _ in range(1500):
        which = rng.randrange(3)
        data = bytearray(files[which])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        changed = [*files[:which], bytes(data), *files[which + 1 :]]
        with pytest.raises((checker.Refused, ValueError)):
            checker.check(*changed)


@pytest.mark.parametrize("which", range(3))
def test_appended_and_removed_bytes_are_refused(files: tuple[bytes, bytes, bytes], which: int) -> None:
    for data in (files[which] + b" ", files[which] + b"\n", files[which][:-1], b""):
        with pytest.raises((checker.Refused, ValueError)):
            checker.check(*files[:which], data, *files[which + 1 :])


# ------------------------------------------------------------------------- forged certificates with right digests


def forge(
    files: tuple[bytes, bytes, bytes], change: Callable[[dict, dict, dict], object]
) -> tuple[bytes, bytes, bytes]:
    """Change certificate or graphs and make every digest right again: only what is claimed can be wrong."""
    cert = json.loads(files[0])
    rows = [unfolded(json.loads(data)) for data in files[1:]]
    change(cert, *rows)
    graphs = [json.dumps(folded(graph)).encode() for graph in rows]
    if cert.pop("_keep_facts", None):
        for side, data in zip(("train", "infer"), graphs, strict=True):
            cert["graphs"][side]["file"] = checker.sha(data)
    elif set(cert) == checker.KEYS:
        sides = zip(graphs, ("train", "infer"), strict=True)
        cert |= checker.facts(*[checker.Graph(json.loads(g), side, checker.sha(g)) for g, side in sides])
    cert["digest"] = checker.sha({k: v for k, v in cert.items() if k != "digest"})
    return checker.canonical(cert), *graphs


def unfolded(graph: dict) -> dict:
    """A graph file with its tables resolved: one dict a node, for changing one node alone."""
    graph["nodes"] = [
        dict(zip(("op", "attrs", "shape", "precision"), copy.deepcopy(graph["terms"][term]), strict=True))
        | {"fqn": graph["modules"][module]}
        | dict(zip(ORIGIN, graph["origins"][origin], strict=True))
        | {"in": inputs}
        for term, module, origin, *inputs in graph["nodes"]
    ]
    return graph


def folded(graph: dict) -> dict:
    nodes = graph["nodes"]
    terms = [[n[key] for key in ("op", "attrs", "shape", "precision")] for n in nodes]
    tables = {"terms": terms, "modules": [n["fqn"] for n in nodes], "origins": [[n[k] for k in ORIGIN] for n in nodes]}
    return graph | tables | {"nodes": [[i, i, i, *n["in"]] for i, n in enumerate(nodes)]}


def first(graph: dict, op: str, where: Callable[[dict], bool] = lambda _: True) -> int:
    return next(i for i, n in enumerate(graph["nodes"]) if n["op"] == op and where(n))


def node(graph: dict, op: str) -> dict[str, Any]:
    return graph["nodes"][first(graph, op)]


ORIGIN = ("role", "phase", "kernel", "source", "reason")


def both(change: Callable[[dict], object]) -> Callable[[dict, dict, dict], object]:
    def apply(_: dict, train: dict, infer: dict) -> None:
        change(train)
        change(infer)

    return apply


def swap(inputs: list[int]) -> None:
    inputs[:] = inputs[::-1]


def wrong_image(c: dict, t: dict, i: dict) -> None:
    gate, up = ((lambda n, k=k: n["fqn"].endswith(k)) for k in ("gate_proj", "up_proj"))
    c["phi"][first(i, "gemm", gate)] = first(t, "gemm", up)


def zero(graph: dict, value: float) -> None:
    node(graph, "const")["attrs"]["value"] = value


UP = "model.layers.0.mlp.up_proj"
FORGERIES: dict[str, tuple[Callable[[dict, dict, dict], object], str]] = {
    "a field too many": (lambda c, t, i: c.update(note="trust me"), "fields"),
    "bitwise claimed": (lambda c, t, i: i["meta"]["kernels"]["ref.gemm"].update(row_invariant=False), "bitwise"),
    "kernels differ": (lambda c, t, i: node(i, "attention").update(kernel="flash"), "bitwise"),
    "a sum without a kernel": (both(lambda g: node(g, "mean").update(kernel="")), "bitwise"),
    "verdict": (lambda c, t, i: c.update(verdict="CERTAIN"), "claim"),
    "sigma": (lambda c, t, i: c.update(sigma={"T": "S"}), "claim"),
    "phi too short": (lambda c, t, i: c["phi"].pop(), "entry"),
    "phi to nowhere": (lambda c, t, i: c["phi"].__setitem__(-1, 10**6), "no image"),
    "phi with a hole": (lambda c, t, i: c["phi"].__setitem__(0, None), "no observable needs, or not all"),
    "phi to another node": (wrong_image, "read different inputs"),
    "attribute": (lambda c, t, i: node(i, "attention")["attrs"].update(scale=0.126), "'scale': 0.126.*'scale': 0.125"),
    "minus zero": (lambda c, t, i: (zero(i, -0.0), zero(t, 0.0)), "'value': -0.0.*'value': 0.0"),
    "precision": (lambda c, t, i: node(i, "gemm").update(precision="bf16"), "'bf16'.*'f32'"),
    "shape": (lambda c, t, i: node(i, "gemm").update(shape=["T", 7]), "'T', 7.*'T', 256"),
    "port order": (lambda c, t, i: swap(node(i, "sub")["in"]), "different inputs"),
    "an input too many": (both(lambda g: node(g, "silu")["in"].append(0)), "these inputs"),
    "a dropped input": (lambda c, t, i: node(i, "gemm")["in"].pop(), "not all others"),
    "a cycle": (lambda c, t, i: node(i, "gemm")["in"].__setitem__(0, 10**4), "come before"),
    "op outside the vocabulary": (both(lambda g: node(g, "silu").update(op="erf")), "known op"),
    "unknown op": (both(lambda g: node(g, "silu").update(op="unknown")), "known op"),
    "poison": (both(lambda g: node(g, "input").update(op="poison")), "known op"),
    "stored codes of nobody": (both(lambda g: node(g, "parameter").update(op="operand")), "known op"),
    "backward image": (lambda c, t, i: node(t, "silu").update(phase="backward"), "forward part"),
    "observable renamed": (lambda c, t, i: i["outputs"].update(extra=i["outputs"]["logits"]), "observable extra"),
    "observables exchanged": (lambda c, t, i: i["outputs"].update({"k.0": i["outputs"]["v.0"]}), "observable k.0"),
    "no logits": (lambda c, t, i: i["outputs"].pop("logits"), "no logits"),
    "no K": (lambda c, t, i: i["outputs"].pop("k.0"), "observed K and V"),
    "weight value": (lambda c, t, i: i["meta"]["parameters"]["model.norm.weight"].update(digest="0"), "another value"),
    "no digest": (lambda c, t, i: i["meta"]["parameters"].pop("model.norm.weight"), "no digest of parameter"),
    "operand value": (lambda c, t, i: next(iter(i["meta"]["operands"].values())).update(digest="0"), "stored codes"),
    "operand missing": (lambda c, t, i: i["meta"]["operands"].clear(), "no digest of the stored codes"),
    "idle parameter": (both(lambda g: g["meta"]["parameters"].update(bias={})), "neither used"),
    "policy not met": (both(lambda g: g["meta"]["scope"][UP].update(weight="bf16")), "policy's precision"),
    "linear missing": (both(lambda g: g["meta"]["scope"].update(x=g["meta"]["scope"][UP])), "no gemm for"),
    "quantised outside": (both(lambda g: g["meta"]["scope"].pop(UP)), "outside the policy"),
    "no replay": (lambda c, t, i: t["meta"].update(replay=None), "replay"),
    "replay failed": (lambda c, t, i: i["meta"]["replay"].update(passed=False), "replay"),
    "replay truthy": (lambda c, t, i: i["meta"]["replay"].update(passed="yes"), "replay"),
    "compiler": (lambda c, t, i: i["meta"].update(compiler="inductor"), "compiler"),
    "mask": (both(lambda g: node(g, "attention")["attrs"].update(mask="none")), "not causal"),
    "wrong rules": (lambda c, t, i: c.update(rules={}, _keep_facts=True), "rules are not those of the graphs"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_forgery_is_refused_for_its_reason(files: tuple[bytes, bytes, bytes], name: str) -> None:
    change, reason = FORGERIES[name]
    with pytest.raises(checker.Refused, match=reason):  # a graph that is not well formed is refused while forging
        checker.check(*forge(files, change))


def test_an_unchanged_forgery_is_accepted(files: tuple[bytes, bytes, bytes]) -> None:
    assert checker.check(*forge(files, lambda c, t, i: None))["verdict"] == "CONTAINED"


# ----------------------------------------------------------------------------------------------------- standing alone


def run_alone(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The checker as a lone file, isolated: no site packages, no environment, no current folder on the path."""
    shutil.copy(checker.__file__, tmp_path / "checker.py")
    blocked = ("torch", "sympy", "networkx", "jetgraph", "numpy")
    program = f"import sys, runpy\nsys.modules.update(dict.fromkeys({blocked}))\n"
    program += f"sys.argv = ['checker', *{list(arguments)}]\n"
    program += f"runpy.run_path({str(tmp_path / 'checker.py')!r}, run_name='__main__')"
    command = [sys.executable, "-I", "-S", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)


def test_runs_alone_and_exits_0_1_2(files: tuple[bytes, bytes, bytes], tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("cert", "train", "infer")]
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    accepted = run_alone(tmp_path, *map(str, paths))
    assert (accepted.returncode, accepted.stdout) == (0, "accepted: CONTAINED, bitwise\n"), accepted.stderr

    paths[2].write_bytes(files[2].replace(b'"silu"', b'"sq"', 1))
    refused = run_alone(tmp_path, *map(str, paths))
    assert refused.returncode == 1
    assert refused.stdout == "refused: the infer graph file is not the one that was certified\n"

    assert run_alone(tmp_path, *map(str, paths[:2])).returncode == 2
    assert run_alone(tmp_path, "missing", *map(str, paths[1:])).returncode == 2
    paths[0].write_bytes(b"\xff not json")
    assert run_alone(tmp_path, *map(str, paths)).returncode == 2


def test_runs_as_a_module(files: tuple[bytes, bytes, bytes], tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("cert", "train", "infer")]
    for path, data in zip(paths, files, strict=True):
        path.write_bytes(data)
    command = [sys.executable, "-m", "jetgraph.verify.checker", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_is_small_and_imports_only_the_standard_library() -> None:
    text = Path(checker.__file__).read_text()
    assert len(text.splitlines()) < 250
    imported = {line.split()[1] for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported <= set(sys.stdlib_module_names)


def test_knows_the_vocabulary() -> None:
    """The checker restates the row-local ops; a new op must be added on purpose."""
    mine = {name: spec.arity for name, spec in OPS.items() if spec.row_local and not spec.leaf}
    mine = {name: arity for name, arity in mine.items() if not name.endswith("_backward")}
    assert mine == checker.ARITY
    assert {name for name in mine if OPS[name].accumulates} == checker.SUMS
    assert COMMUTATIVE == checker.COMMUTATIVE


def test_certificate_round_trip(files: tuple[bytes, bytes, bytes], tmp_path: Path) -> None:
    path = tmp_path / "run.cert.json"
    path.write_bytes(files[0])
    certificate = Certificate.load(path)
    assert certificate.save(tmp_path / "again").read_bytes() == files[0]
    certificate.check(*files[1:])
    with pytest.raises(CertificateError, match="not the one that was certified"):
        certificate.check(files[2], files[1])


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"jetgraph_certificate": 3}', b"\xff"])
def test_loading_what_is_no_certificate(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cert"
    path.write_bytes(data)
    with pytest.raises(CertificateError):
        Certificate.load(path)


def test_certificate_carries_the_graphs_digests(files: tuple[bytes, bytes, bytes]) -> None:
    train, infer = build("train", layers=1, backward=True), build("infer", layers=1)
    graphs = json.loads(files[0])["graphs"]
    for side, graph in (("train", train), ("infer", infer)):
        assert graphs[side]["semantic"] == graph.semantic_digest
        assert graphs[side]["execution"] == graph.execution_digest

"""May a run start?  Toy graph pairs through the gate: verdicts, waivers, manifests, and files that mean harm."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
from pathlib import Path

import pytest

from jetgraph import bounded_json
from jetgraph.admission import (
    Admission,
    Enforcement,
    NotAdmitted,
    RunManifest,
    Waiver,
    WaiverError,
    admit,
    load_waivers,
)
from jetgraph.admission.manifest import ManifestError
from jetgraph.graph import GraphError
from jetgraph.verify import Certificate
from tests.verify.mutations import apply, eps, norm_weight_of_next_layer
from tests.verify.toy_transformer import KERNELS, build, with_meta

NOW = datetime.datetime(2027, 1, 31, 12, 0, tzinfo=datetime.UTC)
NORM = "model.layers.0.input_layernorm"
LINEAR = "model.layers.0.mlp.up_proj"


def another_scope(graph):
    """The policy of one side demands BF16 of one linear, which runs FP8: JG021 twice at LINEAR, in two words."""
    bf16 = {"activation": "bf16", "weight": "bf16"}
    return with_meta(graph, scope=graph.meta["scope"] | {LINEAR: bf16})


PAIRS = {
    "contained": lambda: (build("train"), build("infer")),
    # the norm of layer 0 reads layer 1's weight: one fault, JG013 at NORM; behind it, JG095: nothing reads layer 0's
    "violated": lambda: (build("train"), apply(build("infer"), norm_weight_of_next_layer, layer=0)),
    # the trainer's graph was never replayed: one fault, JG093 of the whole graph "toy-train"
    "unknown": lambda: (with_meta(build("train"), replay=None), build("infer")),
    # both norms of layer 0 have another epsilon: JG011 at two nodes
    "twice": lambda: (build("train"), apply(build("infer"), eps, layer=0)),
    "two scopes": lambda: (build("train"), another_scope(build("infer"))),
    "not bitwise": lambda: (
        build("train"),
        with_meta(build("infer"), kernels={**KERNELS, "ref.gemm": {"row_invariant": False}}),
    ),
}


@pytest.fixture
def start(tmp_path):
    """Start a run in ``tmp_path / "run"`` with a named pair, or with two graphs."""

    def start(pair, **options) -> Admission:
        train, infer = PAIRS[pair]() if isinstance(pair, str) else pair
        paths = tmp_path / "train.json", tmp_path / "infer.json"
        train.save(paths[0])
        infer.save(paths[1])
        return admit(*paths, tmp_path / "run", **{"now": NOW, **options})

    return start


EPSILON = {"rule": "JG011", "node": NORM, "op": "add", "expected": "const 1e-05", "got": "const 1e-06"}
SIGNED = {"expires": "2027-01-31", "reason": "on trial"}


def waiver(**changes) -> dict[str, str]:
    weights = [f"parameter model.layers.{layer}.input_layernorm.weight" for layer in (0, 1)]
    return {"rule": "JG013", "node": NORM, "op": "mul", "expected": weights[0], "got": weights[1], **SIGNED} | changes


BEHIND = waiver(
    rule="JG095",
    node=f"{NORM}.weight",
    op="parameter",
    expected="a use in the infer graph, or its name among the dead",
    got="no use",
)
TOLD = (
    f"JG013 at {NORM} mul (expected parameter {NORM}.weight; got parameter model.layers.1.input_layernorm.weight) "
    "until 2027-01-31: on trial"
)


def written(tmp_path, *entries) -> tuple[Waiver, ...]:
    path = tmp_path / "waivers.json"
    path.write_text(json.dumps(entries))
    return load_waivers(path)


REFUSED = {"counterexample.txt", "counterexample.json", "waivers-draft.json"}
"""What a start that is not CONTAINED leaves."""


def files(tmp_path) -> set[str]:
    return {path.name for path in (tmp_path / "run").iterdir()}


# ------------------------------------------------------------------------------------------------------------- verdicts


def test_contained_is_admitted_with_certificate_and_manifest(start, tmp_path):
    admission = start("contained", version=7)
    assert files(tmp_path) == {"certificate.json", "admission.json"}
    certificate = Certificate.load(tmp_path / "run/certificate.json")
    manifest = json.loads((tmp_path / "run/admission.json").read_text())
    assert manifest["certificate"] == certificate.digest
    assert (manifest["verdict"], manifest["bitwise"], manifest["policy"]) == ("CONTAINED", True, "jet")
    assert (manifest["version"], manifest["admitted"]) == (7, "2027-01-31T12:00:00+00:00")
    for side in ("train", "infer"):
        data = (tmp_path / f"{side}.json").read_bytes()
        assert manifest["graphs"][side]["sha256"] == hashlib.sha256(data).hexdigest()
        assert manifest["environment"][side] == {"versions": {"toy": "1"}, "device": "cpu", "kernels": sorted(KERNELS)}
    (line,) = admission.lines()
    assert line.startswith("CONTAINED")
    assert (admission.left, admission.void, admission.waived) == ((), (), ())


@pytest.mark.parametrize(
    ("pair", "verdict", "rule", "node"),
    [("violated", "VIOLATED", "JG013", NORM), ("unknown", "UNKNOWN", "JG093", "toy-train")],
)
@pytest.mark.parametrize("enforcement", ["start", "always"])
def test_anything_else_stops_with_the_counterexample(start, tmp_path, pair, verdict, rule, node, enforcement):
    with pytest.raises(NotAdmitted) as refused:
        start(pair, enforcement=enforcement)
    message = str(refused.value)
    assert message.startswith("this run may not start: 1 fault stands between training and rollout.")
    for part in (verdict, rule, node, str(tmp_path / "train.json"), str(tmp_path / "infer.json")):
        assert part in message
    assert files(tmp_path) == REFUSED
    assert (tmp_path / "run/counterexample.txt").read_text(encoding="utf-8").rstrip() in message
    every = json.loads((tmp_path / "run/counterexample.json").read_text(encoding="utf-8"))
    assert [(fault["rule"], fault["fqn"]) for fault in every["faults"]] == [(rule, node)]


def test_warn_goes_on_and_says_that_nothing_is_enforced(start, tmp_path):
    admission = start("twice", enforcement=Enforcement.WARN)
    assert [fault.rule for fault in admission.left] == ["JG011", "JG011"]
    assert admission.lines()[-1] == "NOT ENFORCED: the run goes on with faults that no waiver covers: 2"
    assert files(tmp_path) == REFUSED | {"admission.json"}
    manifest = json.loads((tmp_path / "run/admission.json").read_text())
    assert (manifest["verdict"], manifest["certificate"]) == ("VIOLATED", None)


def test_warn_says_nothing_where_nothing_is_wrong(start):
    assert not any("NOT ENFORCED" in line for line in start("contained", enforcement="warn").lines())


def test_off_has_nothing_to_admit(start, tmp_path):
    with pytest.raises(ValueError, match="captures nothing"):
        start("contained", enforcement="off")
    with pytest.raises(ValueError, match="sometimes"):
        start("contained", enforcement="sometimes")
    assert not (tmp_path / "run").exists()


def test_a_file_of_the_wrong_side_is_no_proof(start, tmp_path):
    start("contained")
    with pytest.raises(GraphError, match="captured from side 'infer'"):
        admit(tmp_path / "infer.json", tmp_path / "train.json", tmp_path / "run", now=NOW)
    # what could not be verified leaves no certificate that looks like its own
    assert files(tmp_path) == {"admission.json"}


# -------------------------------------------------------------------------------------------------------------- waivers


def test_waivers_let_through_what_they_name(start, tmp_path):
    admission = start("violated", waivers=written(tmp_path, waiver(), BEHIND))
    assert admission.lines()[1] == f"waived: {TOLD}"
    assert admission.lines()[2].startswith(f"waived: JG095 at {NORM}.weight parameter (expected a use in the infer")
    manifest = json.loads((tmp_path / "run/admission.json").read_text())
    assert manifest["waivers"][0] == TOLD
    assert (manifest["verdict"], manifest["certificate"]) == ("VIOLATED", None)


@pytest.mark.parametrize(
    "almost",
    [
        {"rule": "JG011"},
        {"node": "model.layers.1.input_layernorm"},
        {"node": NORM + "."},
        {"node": ""},
        {"op": "add"},
        {"op": ""},
        {"expected": ""},
        {"got": "parameter model.layers.2.input_layernorm.weight"},
        {"got": waiver()["got"] + " "},
    ],
)
def test_all_that_a_waiver_names_must_be_the_faults_own(start, tmp_path, almost):
    with pytest.raises(NotAdmitted, match="1 fault stands"):
        start("violated", waivers=written(tmp_path, waiver(**almost), BEHIND))


def test_one_of_two_faults_waived_leaves_the_other(start, tmp_path):
    with pytest.raises(NotAdmitted, match="1 fault stands"):
        start("twice", waivers=written(tmp_path, EPSILON | SIGNED))
    other = EPSILON | SIGNED | {"node": "model.layers.0.post_attention_layernorm"}
    assert start("twice", waivers=written(tmp_path, EPSILON | SIGNED, other)).left == ()


def test_a_fault_that_a_waived_one_explained_stands_for_itself(start, tmp_path):
    """JG095, nothing reads the weight, is not reported beside JG013, which says why; nobody has waived it."""
    with pytest.raises(NotAdmitted) as refused:
        start("violated", waivers=written(tmp_path, waiver()))
    assert f"behind the waived faults: JG095 at {NORM}.weight: expected a use" in str(refused.value)


def test_one_of_two_conformance_faults_at_one_node_waived_leaves_the_other(start, tmp_path):
    with pytest.raises(NotAdmitted, match="2 faults stand"):
        start("two scopes")
    signed = [entry | SIGNED for entry in drafted(tmp_path)]
    assert {(entry["rule"], entry["node"]) for entry in signed} == {("JG021", LINEAR)}
    for entry in signed:
        with pytest.raises(NotAdmitted, match="1 fault stands"):
            start("two scopes", waivers=written(tmp_path, entry))
    assert start("two scopes", waivers=written(tmp_path, *signed)).left == ()


def drafted(tmp_path) -> list[dict[str, str]]:
    return json.loads((tmp_path / "run/waivers-draft.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("pair", ["violated", "unknown", "twice", "two scopes"])
def test_a_refused_start_drafts_waivers_that_hold_once_they_are_signed(start, tmp_path, pair):
    with pytest.raises(NotAdmitted) as refused:
        start(pair)
    path = tmp_path / "run/waivers-draft.json"
    assert str(path) in str(refused.value)
    with pytest.raises(WaiverError, match="has no reason"):
        load_waivers(path)
    assert start(pair, waivers=written(tmp_path, *(entry | SIGNED for entry in drafted(tmp_path)))).left == ()


def test_unknown_can_be_waived_too(start, tmp_path):
    no_replay = waiver(rule="JG093", node="toy-train", op="train", expected="a replay that passed", got="no replay")
    assert start("unknown", waivers=written(tmp_path, no_replay)).left == ()


def test_the_last_day_counts_and_the_next_does_not(start, tmp_path):
    waivers = written(tmp_path, waiver(), BEHIND)
    assert start("violated", waivers=waivers, now=NOW.replace(hour=23, minute=59)).waived == waivers
    with pytest.raises(NotAdmitted) as refused:
        start("violated", waivers=waivers, now=NOW + datetime.timedelta(days=1))
    assert f"expired: {TOLD}" in str(refused.value)


def test_behind_a_waived_fault_an_expired_waiver_is_named_too(start, tmp_path):
    with pytest.raises(NotAdmitted, match=f"expired: JG095 at {NORM}.weight"):
        start("violated", waivers=written(tmp_path, waiver(), BEHIND | {"expires": "2027-01-30"}))


def test_the_example_of_the_docs_is_a_waiver(tmp_path):
    text = (Path(__file__).parents[2] / "docs/rl.md").read_text(encoding="utf-8")
    example = text[text.index("## Waivers") :].split("```json", 1)[1].split("```", 1)[0]
    (found,) = written(tmp_path, *json.loads(example))
    assert (found.rule, found.got) == ("JG011", "const 1e-06")


def test_an_expired_waiver_of_something_else_is_not_blamed(start, tmp_path):
    with pytest.raises(NotAdmitted) as refused:
        start("violated", waivers=written(tmp_path, waiver(node="elsewhere", expires="2020-01-01")))
    assert "expired: " not in str(refused.value)


def test_a_waiver_that_covers_nothing_is_not_told_as_used(start, tmp_path):
    admission = start("contained", waivers=written(tmp_path, waiver()))
    assert admission.waived == ()
    assert len(admission.lines()) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": "JG999"}, "waiver for 'JG999': no such rule"),
        ({"rule": "JG015"}, "JG015: faults of this rule do not stop a run"),  # contained, not bitwise
        ({"rule": "JG016"}, "JG016: faults of this rule do not stop a run"),  # contained modulo reduction order
        ({"node": "model.layers.*.mlp"}, "is a pattern; write one waiver for each node"),
        ({"node": "model.layers.[0-9].mlp"}, "is a pattern"),
        ({"node": "model.layers.?.mlp"}, "is a pattern"),
        ({"reason": " \n "}, "has no reason"),
        ({"expires": "31.1.2027"}, "expires '31.1.2027' is not a date YYYY-MM-DD"),
        ({"expires": "2027-W04-7"}, "is not a date YYYY-MM-DD"),
        ({"expires": "20270131"}, "is not a date YYYY-MM-DD"),
        ({"expires": "2027-02-30"}, "is not a date YYYY-MM-DD"),
        ({"expires": None}, "the fields of a waiver are text"),
        ({"node": ["a"]}, "the fields of a waiver are text"),
        (
            {"owner": "me"},
            "a waiver has the fields rule, node, op, expected, got, expires, reason; got rule, node, op, expected",
        ),
    ],
)
def test_a_waiver_that_says_too_little_or_too_much_is_refused(tmp_path, changes, message):
    with pytest.raises(WaiverError) as refused:
        written(tmp_path, waiver(**changes))
    assert message in str(refused.value)


@pytest.mark.parametrize("field", ["rule", "node", "op", "expected", "got", "expires", "reason"])
def test_every_field_is_needed(tmp_path, field):
    entry = waiver()
    del entry[field]
    with pytest.raises(WaiverError, match="a waiver has the fields"):
        written(tmp_path, entry)


def test_one_fault_is_waived_once(tmp_path):
    with pytest.raises(WaiverError, match=f"JG013 at '{NORM}' is waived twice"):
        written(tmp_path, waiver(), waiver(expires="2028-01-01"))


def test_a_reason_cannot_forge_a_line_of_the_log(start, tmp_path):
    forged = waiver(reason="trial\nCONTAINED: all is well")
    admission = start("violated", waivers=written(tmp_path, BEHIND, forged))
    assert admission.lines()[1].endswith("trial CONTAINED: all is well")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1, 2, 3]", "a waiver has the fields rule, node, op, expected, got, expires, reason; got int"),
        (b'{"rule": "JG013"}', "expected a list of waivers, got dict"),
        (b"null", "expected a list of waivers, got NoneType"),
        (b"[" * 100_000, "nested too deeply"),
        (b'[{"rule": "JG013", "rule": "JG014"}]', "the same key twice"),
        (b"[NaN]", "NaN is not a number"),
        (b"\xff\xfe", "not UTF-8"),
        (b"", "not JSON"),
    ],
)
def test_hostile_waiver_files_are_refused_in_one_short_sentence(tmp_path, content, message):
    path = tmp_path / "waivers.json"
    path.write_bytes(content)
    with pytest.raises(WaiverError) as refused:
        load_waivers(path)
    assert message in str(refused.value)
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("field", ["rule", "node", "op", "expected", "got", "expires", "reason", "another"])
def test_a_huge_field_makes_no_huge_message(tmp_path, field):
    path = tmp_path / "waivers.json"
    huge = "*" * 1_000_000
    path.write_text(json.dumps([{**waiver(expires="never"), field: huge} | ({huge: ""} if field == "another" else {})]))
    with pytest.raises(WaiverError) as refused:
        load_waivers(path)
    assert len(str(refused.value)) < 1_000


def test_a_huge_waiver_file_is_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr(bounded_json, "MAX_BYTES", 1_000)
    path = tmp_path / "waivers.json"
    path.write_text(json.dumps([waiver(node=str(i)) for i in range(100)]))
    with pytest.raises(WaiverError, match="is larger than"):
        load_waivers(path)


def test_many_waivers_take_no_time_of_their_square(start, tmp_path):
    entries = [waiver(node=str(i)) for i in range(30_000)]  # a square of it would be half an hour
    assert start("violated", waivers=written(tmp_path, *entries, waiver(), BEHIND)).left == ()


@pytest.mark.parametrize("missing", ["nowhere.json", "."])
def test_a_missing_file_and_a_folder_are_named(tmp_path, missing):
    with pytest.raises(WaiverError, match="cannot be read"):
        load_waivers(tmp_path / missing)


# ------------------------------------------------------------------------------------------------------------ manifests


def changed(side: str, **meta):
    train, infer = PAIRS["contained"]()
    return (with_meta(train, **meta), infer) if side == "train" else (train, with_meta(infer, **meta))


def test_the_same_again_voids_nothing(start):
    start("contained")
    again = start("contained", now=NOW + datetime.timedelta(days=400), version=12)
    assert again.void == ()
    assert again.manifest.version == 12


@pytest.mark.parametrize("side", ["train", "infer"])
@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({"versions": {"torch": "2.11.0"}}, {"versions": {"torch": "2.12.0"}}, "torch 2.11.0 → 2.12.0"),
        ({"versions": {"vllm": "0.24.0"}}, {"versions": {"vllm": "0.27.1"}}, "vllm 0.24.0 → 0.27.1"),
        ({"versions": {}}, {"versions": {"triton": "3.6"}}, "triton absent → 3.6"),
        ({"versions": {"triton": "3.6"}}, {"versions": {}}, "triton 3.6 → absent"),
        (
            {"kernels": {**KERNELS, "old": {"row_invariant": True}}},
            {"kernels": {**KERNELS, "new": {"row_invariant": True}}},
            "kernels −old, +new",
        ),
    ],
)
def test_what_a_later_start_changed_is_named(start, side, before, after, named):
    start(changed(side, **before))
    later = start(changed(side, **after))
    assert later.void == (f"{side}: {named}",)
    assert later.lines()[1] == f"the certificate of the earlier start is void: {side}: {named}"


@pytest.mark.parametrize("side", ["train", "infer"])
def test_another_device_is_named_and_what_follows_from_it(start, side):
    start("contained")  # both on "cpu"; two devices are not bitwise
    assert start(changed(side, device="cuda")).void == (f"{side}: device cpu → cuda", "bitwise: yes → no")


def test_another_policy_is_named(start):
    start("contained")
    pair = [with_meta(graph, policy="other") for graph in PAIRS["contained"]()]
    assert "policy jet → other" in start(pair).void


def test_another_graph_is_named_on_both_sides(start):
    start("contained")
    later = start([build("train", layers=1), build("infer", layers=1)])
    assert later.void == ("train: another precision graph", "infer: another precision graph")


def test_kernels_that_are_no_longer_row_invariant_are_named(start):
    start("contained")
    assert start("not bitwise").void == ("bitwise: yes → no",)


def test_the_same_kernels_elsewhere_are_named(start):
    """Names alone would not tell: two kernels that exchange their places are the same set of kernels."""

    def pair(first: str, second: str):  # fmt: skip
        graphs = []
        for graph in PAIRS["contained"]():
            nodes = [
                dataclasses.replace(n, kernel=first if n.fqn == NORM else second) if n.kernel == "ref.sum" else n
                for n in graph.nodes
            ]
            kernels = {**KERNELS, "a": {"row_invariant": True}, "b": {"row_invariant": True}}
            graphs.append(with_meta(dataclasses.replace(graph, nodes=tuple(nodes)), kernels=kernels))
        return graphs

    start(pair("a", "b"))
    assert start(pair("b", "a")).void == (
        "train: the same kernels at other places",
        "infer: the same kernels at other places",
    )


def test_a_refused_start_says_what_changed_and_takes_the_certificate_but_not_the_manifest(start, tmp_path):
    start("contained")
    manifest = (tmp_path / "run/admission.json").read_bytes()
    train, infer = PAIRS["violated"]()
    with pytest.raises(NotAdmitted, match="changed since the start that was admitted here: infer: toy 1 → 2"):
        start((train, with_meta(infer, versions={"toy": "2"})))
    assert files(tmp_path) == REFUSED | {"admission.json"}
    assert (tmp_path / "run/admission.json").read_bytes() == manifest


def test_the_counterexample_goes_when_the_run_is_admitted(start, tmp_path):
    with pytest.raises(NotAdmitted):
        start("violated")
    start("contained")
    assert files(tmp_path) == {"certificate.json", "admission.json"}


def good_manifest(tmp_path) -> dict:
    return json.loads((tmp_path / "run/admission.json").read_text())


@pytest.mark.parametrize(
    "spoil",
    [
        lambda m: [],
        lambda m: 3,
        lambda m: {},
        lambda m: m | {"format": 2},
        lambda m: m | {"extra": 1},
        lambda m: {k: v for k, v in m.items() if k != "verdict"},
        lambda m: m | {"waivers": 3},
        lambda m: m | {"graphs": []},
        lambda m: m | {"graphs": {"train": m["graphs"]["train"]}},
        lambda m: m | {"environment": 1},
        lambda m: m | {"environment": dict.fromkeys(("train", "infer"), [])},
        lambda m: m | {"environment": dict.fromkeys(("train", "infer"), {"versions": [], "device": "", "kernels": []})},
        lambda m: m | {"environment": dict.fromkeys(("train", "infer"), {"versions": {}, "device": 1, "kernels": []})},
        lambda m: (
            m | {"environment": dict.fromkeys(("train", "infer"), {"versions": {}, "device": "", "kernels": [[]]})}
        ),
    ],
)
def test_an_unreadable_manifest_is_a_clear_error(start, tmp_path, spoil):
    start("contained")
    path = tmp_path / "run/admission.json"
    path.write_text(json.dumps(spoil(good_manifest(tmp_path))))
    with pytest.raises(ManifestError) as refused:
        start("contained")
    assert str(refused.value).startswith(f"{path} is no manifest of a run (")
    assert "move it away: the run is verified again anyway" in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff", b'{"format": 1, "format": 1}'])
def test_a_manifest_that_is_no_json_is_a_clear_error(start, tmp_path, content):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/admission.json").write_bytes(content)
    with pytest.raises(ManifestError, match="is no manifest of a run"):
        start("contained")


def test_a_manifest_reads_back_as_it_was_written(start, tmp_path):
    admission = start("violated", waivers=written(tmp_path, waiver(), BEHIND))
    assert RunManifest.load(tmp_path / "run") == admission.manifest
    assert RunManifest.load(tmp_path) is None


def test_a_run_that_dies_while_writing_leaves_the_old_manifest(start, tmp_path, monkeypatch):
    start("contained", version=1)
    before = (tmp_path / "run/admission.json").read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            start("contained", version=2)
    assert (tmp_path / "run/admission.json").read_bytes() == before
    assert start("contained", version=3).manifest.version == 3
    assert files(tmp_path) == {"certificate.json", "admission.json"}

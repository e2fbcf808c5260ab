"""`compare` and `jetgraph diff`: what changed, in words, both ways; and that equal is said only of equal."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jetgraph.cli import app
from jetgraph.graph import PrecisionGraph, Role
from jetgraph.precision import BF16, Format, Granularity, Precision, Scale, ScaleRule
from jetgraph.viz.compare import KINDS, compare
from jetgraph.viz.compare_report import as_json, folded, text

from .conftest import BLOCKS, ROWS, Builder, tiny

STOCK = Path(__file__).resolve().parents[1] / "data" / "stock_vllm"
GROUPS_OF_64 = Precision(Format.E4M3, Scale(Granularity.per_group(64)))
POWERS_OF_TWO = Precision(Format.E4M3, Scale(Granularity.per_group(128), ScaleRule(power_of_two=True)))


def said(left: PrecisionGraph, right: PrecisionGraph) -> Counter:
    return Counter((c.kind, c.what, c.before, c.after) for c in compare(left, right).changes)


def edited(graph: PrecisionGraph, edit) -> PrecisionGraph:
    """The graph with every node replaced by what ``edit`` returns for it."""
    return PrecisionGraph(graph.name, tuple(map(edit, graph.nodes)), graph.outputs, graph.meta)


def with_rows(precision: Precision):
    def edit(node):
        forward = node.op == "quantize" and node.type.precision == ROWS
        return replaced(node, type=replace(node.type, precision=precision)) if forward else node

    return edit


def replaced(node, **fields):
    names = ("op", "inputs", "attrs", "type", "fqn", "role", "phase", "kernel", "source", "reason")
    return type(node)(**{name: fields.get(name, getattr(node, name)) for name in names})


def run(*args) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"}).invoke(app, [str(a) for a in args])
    return result.exit_code, result.output


@pytest.fixture
def files(tmp_path):
    return tiny().save(tmp_path / "a.json"), tiny(fp8=False).save(tmp_path / "b.json")


# ------------------------------------------------------------------------------------------------------ what is said


def test_a_graph_does_not_differ_from_itself():
    found = compare(tiny(), tiny())
    assert (found.changes, found.run, found.left_out, found.exit_status) == ((), (), "", 0)
    assert "no difference between the graphs" in text(found)


def test_two_policies_change_formats_and_quantisations_and_nothing_else():
    found = said(tiny(layers=2), tiny(layers=2, fp8=False))
    assert {kind for kind, *_ in found} == {"format", "removed", "policy rule"}
    assert found["format", "x of gemm FPROP", "f8e4m3[1x128]", "bf16"] == 2
    assert found["format", "W of gemm FPROP", "f8e4m3[128x128]", "bf16"] == 2
    assert found["format", "dy of gemm DGRAD", "f8e4m3[1x128]", "bf16"] == 2
    assert found["removed", "quantize f8e4m3[128x128]", "present", "–"] == 2


def test_the_other_way_round_says_the_opposite():
    there, back = said(tiny(), tiny(fp8=False)), said(tiny(fp8=False), tiny())
    opposite = {"removed": "added", "added": "removed"}
    assert back == Counter({(opposite.get(k, k), w, b, a): n for (k, w, a, b), n in there.items()})


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (GROUPS_OF_64, ("granularity", "f8e4m3[1x128]", "f8e4m3[1x64]")),
        (POWERS_OF_TWO, ("scale rule", "any scale", "powers of two")),
    ],
)
def test_a_scale_is_named_by_the_field_that_differs(precision, expected):
    kind, before, after = expected
    found = said(tiny(backward=False), edited(tiny(backward=False), with_rows(precision)))
    assert found[kind, "x of gemm FPROP", before, after] == 3
    assert not any(what.startswith("W of") for _, what, *_ in found)


def test_a_number_is_not_taken_for_a_layer():
    floor = Precision(Format.E4M3, Scale(Granularity.per_group(128), ScaleRule(amax_floor=0.001953125)))
    line = next(f for f in folded(compare(tiny(), edited(tiny(), with_rows(floor)))) if f.what == "x of gemm FPROP")
    assert (line.before, line.after) == ("floor 1e-12", "floor 0.001953125")
    assert [str(w) for w in line.where] == ["layers 0–2: proj"]


def test_a_kernel_is_named():
    changed = edited(tiny(), lambda n: replaced(n, kernel="k::other") if n.role is Role.DGRAD else n)
    assert said(tiny(), changed) == Counter({("kernel", "gemm DGRAD", "k::mm", "k::other"): 3})


def test_a_policys_own_name_is_a_fact_of_the_run_and_its_rule_one_of_the_op():
    renamed = edited(tiny(), lambda n: replaced(n, reason=n.reason.replace("jet: ", "mine: ")))
    renamed = PrecisionGraph(renamed.name, renamed.nodes, renamed.outputs, {**renamed.meta, "policy": "mine"})
    found = compare(tiny(), renamed)
    assert (found.changes, found.run) == ((), (("policy", "jet", "mine"),))
    other = edited(tiny(), lambda n: replaced(n, reason="jet: re:x") if n.role is Role.FPROP and n.reason else n)
    assert said(tiny(), other) == Counter({("policy rule", "gemm FPROP", "*", "re:x"): 3})


def test_a_constant_is_compared_where_it_is_read():
    assert said(tiny(), tiny(odd=1)) == Counter(
        {("attribute", "input 1 of add", "constant 1e-05", "constant 1e-06"): 1}
    )


def test_an_engine_that_knows_no_rules_is_not_said_to_have_others():
    assert said(tiny(), edited(tiny(), lambda n: replaced(n, reason=""))) == Counter()


def chain(rounded: bool, wired: bool = True) -> PrecisionGraph:
    b = Builder()
    x, y = b("input", precision=BF16, name="x"), b("input", precision=BF16, name="y")
    z = b("sq", x, fqn="m.layers.0.norm")
    z = b("round", z, precision=BF16, fqn="m.layers.0.norm", format="bf16") if rounded else z
    z = b("sub", z, y if wired else x, fqn="m.layers.0")
    return PrecisionGraph("chain", tuple(b.nodes), {"z": z})


def test_a_missing_rounding_is_said_at_the_edge_and_at_the_op():
    assert said(chain(True), chain(False)) == Counter(
        {("rounding", "input 0 of sub", "bf16", "f32"): 1, ("rounding", "round bf16", "present", "–"): 1}
    )


def test_another_operand_is_wiring():
    found = said(chain(True), chain(True, wired=False))
    assert found["wiring", "input 1 of sub", "input y", "input x"] == 1


def test_the_order_of_a_sum_is_no_difference_and_that_of_a_difference_is():
    def graph(op: str, swapped: bool) -> PrecisionGraph:
        b = Builder()
        x, y = b("input", precision=BF16, name="x"), b("input", precision=BF16, name="y")
        z = b(op, *((y, x) if swapped else (x, y)), fqn="m")
        return PrecisionGraph(op, tuple(b.nodes), {"z": z})

    assert said(graph("add", False), graph("add", True)) == Counter()
    found = said(graph("sub", False), graph("sub", True))
    assert found["wiring", "input 0 of sub", "input x", "input y"] == 1


def test_an_output_that_names_another_value_is_said():
    graph = tiny(backward=False)
    moved = PrecisionGraph(graph.name, graph.nodes, {**graph.outputs, "k.1": graph.outputs["k.0"]}, graph.meta)
    (change,) = compare(graph, moved).changes
    assert (change.kind, change.what) == ("output", "k.1")
    assert (change.before, change.after) == ("round bf16 model.layers.1.proj", "round bf16 model.layers.0.proj")


def test_outputs_that_one_side_has_are_said():
    less = tiny(backward=False)
    less = PrecisionGraph(less.name, less.nodes, {k: v for k, v in less.outputs.items() if k != "k.1"}, less.meta)
    assert said(tiny(backward=False), less) == Counter({("output", "k.1", "bf16", "–"): 1})


def test_training_against_a_rollout_leaves_backward_out_and_says_so():
    found = compare(tiny(), tiny(backward=False))
    assert found.changes == ()
    backward = len(tiny().nodes) - len(compare(tiny(), tiny()).study.train.forward)
    assert found.left_out == f"B has no backward part: {backward} nodes of A that serve it are not compared"
    assert found.exit_status == 1


def test_what_is_unknown_is_never_called_equal():
    b = Builder()
    x = b("input", precision=BF16, name="x")
    outputs = {"y": b("unknown", x, name="vendor::op")}
    graph = PrecisionGraph("odd", tuple(b.nodes), outputs)
    found = compare(graph, graph)
    assert (found.changes, found.exit_status) == ((), 3)
    assert "compared by name alone" in " ".join(text(found).split())


# --------------------------------------------------------------------------------------------------------- the report


def test_equal_layers_and_modules_are_one_line():
    lines = folded(compare(tiny(layers=12), tiny(layers=12, fp8=False)))
    line = next(line for line in lines if line.what == "x of gemm FPROP" and line.kind == "format")
    assert [str(where) for where in line.where] == ["layers 0–11: proj"]
    assert len(line.members) == 12
    assert [list(KINDS).index(line.kind) for line in lines] == sorted(list(KINDS).index(line.kind) for line in lines)


def test_every_change_is_in_exactly_one_line():
    found = compare(tiny(), tiny(fp8=False, backward=False))
    assert Counter(c for line in folded(found) for c in line.members) == Counter(found.changes)


def test_text_fits_80_columns_without_colour_and_says_it_proves_nothing():
    shown = text(compare(tiny(layers=12), tiny(layers=12, fp8=False)))
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown
    assert "x of gemm FPROP, dy of gemm DGRAD: f8e4m3[1x128] → bf16  ×24" in shown
    assert "not a verification" in " ".join(shown.split())


def test_long_names_are_folded_and_never_cut():
    prefix = "model." + "a_very_long_module_name_of_somebody." * 4 + "layers"
    shown = text(compare(tiny(prefix=prefix), tiny(prefix=prefix, odd=1)))
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


def test_json_is_plain_and_points_at_real_nodes():
    left, right = tiny(), tiny(fp8=False)
    facts = json.loads(json.dumps(as_json(compare(left, right))))
    assert (facts["format"], facts["version"], facts["equal"], facts["exit_status"]) == ("jetgraph-diff", 1, False, 1)
    assert set(facts) == {"format", "version", "note", "equal", "exit_status", "left_out", "a", "b", "run", "changes"}
    for change in facts["changes"]:
        assert change["count"] == len(change["members"])
        for member in change["members"]:
            assert member["a"] is None or member["a"] < len(left.nodes)
            assert member["b"] is None or member["b"] < len(right.nodes)
            if member["port"] is not None:
                assert member["port"] < len(right.nodes[member["b"]].inputs)


# ------------------------------------------------------------------------------------------------------ real captures


def load(name: str) -> PrecisionGraph:
    return PrecisionGraph.from_json(gzip.decompress((STOCK / f"{name}.json.gz").read_bytes()))


def test_two_trainings_of_one_model_differ_in_the_scales_of_their_linears_alone():
    """The same two-layer Qwen3 under jet and under jet_ue8m0: 7 linears a layer, an activation and a weight each."""
    found = compare(load("train_jet"), load("train_jet_ue8m0"))
    assert Counter(c.kind for c in found.changes) == Counter({"scale rule": 2 * 7 * 2})
    assert {(c.before, c.after) for c in found.changes} == {("any scale", "powers of two")}
    assert ("policy", "jet", "jet_ue8m0") in found.run


# -------------------------------------------------------------------------------------------------------- the command


def test_command_exit_statuses(files, tmp_path):
    assert run("diff", files[0], files[0])[0] == 0
    status, shown = run("diff", *files)
    assert status == 1
    assert "policy: jet → bf16" in shown
    assert max(map(len, shown.splitlines())) <= 80 + len(str(tmp_path))
    (tmp_path / "bad.json").write_text("{")
    status, shown = run("diff", files[0], tmp_path / "bad.json")
    assert status == 2
    assert shown.startswith("error: ")


def test_command_writes_json_and_the_page(files, tmp_path):
    status, shown = run("diff", *files, "--json")
    assert status == 1
    assert json.loads(shown)["changes"]
    page = tmp_path / "page.html"
    assert run("diff", *files, "--html", page)[0] == 1
    written = page.read_text(encoding="utf-8")
    assert "what changed from A to B (not a verification)" in written
    assert "only in the first graph" in written
    assert "x of gemm FPROP" in written
    assert "CONTAINED" not in written


def test_blocks_are_what_the_weights_use():
    """Guards the tests above: the fixture's weights are quantised by blocks, so ``with_rows`` leaves them alone."""
    assert any(n.type.precision == BLOCKS for n in tiny().nodes)

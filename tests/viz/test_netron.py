"""The ONNX form for Netron: accepted by ONNX's own checker, folded (Z1), and a dtype on every edge (Z6)."""

from __future__ import annotations

import sys

import pytest

from jetgraph.viz.layers import Block
from jetgraph.viz.netron import model, write_netron
from jetgraph.viz.png import PictureError
from jetgraph.viz.study import Side, study

from .conftest import tiny

onnx = pytest.importorskip("onnx")


def made(**options):
    known = study(tiny(**options))
    return known, model(known, known.train)


@pytest.mark.parametrize("options", [{}, {"backward": False}, {"layers": 0, "backward": False}, {"odd": 1}])
def test_onnx_accepts_it_after_a_round_trip(options, tmp_path):
    known, _ = made(**options)
    (path,) = write_netron(tmp_path / "g.onnx", known)
    onnx.checker.check_model(onnx.load(path))


def test_z1_equal_layers_call_one_function():
    small, large = made(layers=3)[1], made(layers=80)[1]
    assert len(small.functions) == len(large.functions)
    assert sum(n.op_type == "layers 0–79" for n in large.graph.node) == 80
    assert len(large.SerializeToString()) < 80_000


def test_functions_hold_every_op_once():
    known, made_model = made(layers=3)
    graph = known.train.graph
    per_call = {f.name: [n.op_type for n in f.node if n.op_type != "const"] for f in made_model.functions}
    beside = [n.op_type for n in made_model.graph.node if n.op_type == "input"]
    shown = [op for node in made_model.graph.node for op in per_call.get(node.op_type, [])] + beside
    assert sorted(shown) == sorted(n.op for n in graph.nodes if n.op != "const")


def test_every_value_that_is_read_was_made_before():
    _, made_model = made(layers=3)
    for nodes, known in [(f.node, set(f.input)) for f in made_model.functions] + [(made_model.graph.node, set())]:
        for node in nodes:
            assert set(node.input) <= known
            known |= set(node.output)


def test_z1_no_edge_runs_from_forward_to_backward_across_the_column():
    _, made_model = made(layers=3)
    maker = {value: node for node in made_model.graph.node for value in node.output}
    calls = [node for node in made_model.graph.node if node.op_type.startswith("layers 0–2")]
    assert len(calls) == 6
    for call in calls:
        backward = call.op_type.endswith("backward")
        for source in (maker[value] for value in call.input):
            if source.op_type != "input" and not source.op_type.startswith("from "):
                assert source.op_type.endswith("backward") is backward
    saved = [node for node in made_model.graph.node if node.name == "layer 1, backward reads"]
    assert [node.op_type for node in saved] == ["from layer 1"]
    assert [value.split()[0] for value in saved[0].output] == ["f8e4m3[128x128]"]


def test_z6_every_edge_has_an_element_type_and_its_name_begins_with_the_precision():
    _, made_model = made(layers=3)
    names = {"bf16": onnx.TensorProto.BFLOAT16, "f32": onnx.TensorProto.FLOAT, "i64": onnx.TensorProto.INT64,
             "f8e4m3": onnx.TensorProto.FLOAT8E4M3FN}  # fmt: skip
    for part in (*made_model.functions, made_model.graph):
        types = {v.name: v.type.tensor_type.elem_type for v in part.value_info}
        for node in part.node:
            for value in (*node.input, *node.output):
                assert types[value] == names[value.split()[0].split("[")[0]]
    function = next(f for f in made_model.functions if f.name == "layers 0–2")
    gemm = next(n for n in function.node if n.op_type == "gemm")
    assert [name.split()[0] for name in gemm.input] == ["f8e4m3[1x128]", "f8e4m3[128x128]"]
    weight = next(n for n in function.node if n.op_type == "parameter")
    assert weight.output[0].split()[0] == "bf16"


def test_a_quantise_node_carries_dtype_granularity_and_rule():
    _, made_model = made()
    node = next(n for f in made_model.functions for n in f.node if n.op_type == "quantize")
    facts = {a.name: a.s.decode() for a in node.attribute}
    assert facts["dtype"] == "f8e4m3"
    assert facts["granularity"] == "1x128"
    assert facts["scale_rule"] == "1x128 f32 dyn div qmax=448 floor=1e-12"
    assert facts["policy_rule"] == "jet: *"


def test_sections_that_wait_for_each_other_are_written_flat():
    known = study(tiny(layers=2, backward=False))
    side = known.train
    first, second = side.blocks[0], side.blocks[1]
    ends = max(first.nodes), max(second.nodes)
    swapped = {0: moved(first, ends[0], ends[1]), 1: moved(second, ends[1], ends[0])}
    knotted = Side(side.name, side.graph, side.paths, side.placed, side.blocks | swapped, side.forward)
    flat = model(known, knotted)
    assert len(flat.functions) == 0
    assert len(flat.graph.node) == len(side.graph.nodes)
    onnx.checker.check_model(flat)


def moved(block: Block, out: int, into: int) -> Block:
    nodes = tuple(into if i == out else i for i in block.nodes)
    return Block(block.place, nodes, block.externals, block.signature)


def test_two_graphs_are_two_files(tmp_path):
    files = write_netron(tmp_path / "g.onnx", study(tiny(), tiny(fp8=False, backward=False)))
    assert [f.name for f in files] == ["g.onnx", "g.infer.onnx"]


def test_without_onnx_it_names_what_to_install(monkeypatch):
    known = study(tiny())
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(PictureError, match=r"package onnx, which is not installed: pip install 'jetgraph\[viz\]'"):
        model(known, known.train)

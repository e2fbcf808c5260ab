"""`jetgraph.diverge` with one planted difference each: the right first edge is known by construction."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

import pytest
import torch
from torch import Tensor

from jetgraph.digest import row_digests
from jetgraph.diverge import (
    Comparison,
    Recording,
    RecordingError,
    RecordingReport,
    Side,
    boundaries,
    compare_graphs,
    compare_recording,
    comparison_json,
    comparison_text,
    difference,
    recording_text,
)
from jetgraph.graph import PrecisionGraph
from jetgraph.interpret import InterpretError, Quantized, Run
from jetgraph.lowering import reference
from jetgraph.lowering.torch_ops import scale_arguments
from jetgraph.precision import BF16, F32, Format, Granularity, Precision, Scale
from jetgraph.verify import Verdict, verify
from tests.verify.mutations import MUTATIONS, apply
from tests.verify.toy_transformer import WEIGHT, build, rewrite, with_meta

T = 9
LAYER = "model.layers.1"
INPUTS = {"token": "input_ids", "position": "positions", "target": "targets"}


@functools.cache
def captured(side: str) -> PrecisionGraph:
    """The toy with the names that captured graphs give their inputs."""
    return renamed(build(side))


def renamed(graph: PrecisionGraph) -> PrecisionGraph:
    return rewrite(graph, lambda b, i, node, inputs, new: _renamed(b, node))


def _renamed(b, node):
    return b.input(INPUTS[str(node.attr("name"))]) if node.op == "input" else None


def leaves() -> dict[str, Tensor]:
    """Random weights and a prompt for the toy."""
    return dict(_leaves())


@functools.cache
def _leaves() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(T + 1) * 7 % 1000
    found: dict[str, Tensor] = {"input_ids": ids[:-1], "targets": ids[1:], "positions": torch.arange(T)}
    shapes = {str(n.attr("name")): n.type.shape for n in build("train").nodes if n.op == "parameter"}
    for name, shape in sorted(shapes.items()):
        found[name] = (torch.randn(shape, generator=generator) * 0.1).to(torch.bfloat16)
    return found


def compared(infer: PrecisionGraph, given: dict | None = None, *, every: bool = False) -> Comparison:
    train, common = captured("train"), leaves()
    return compare_graphs(Side(train, common), Side(infer, given or common), verify(train, infer), every=every)


def mutated(name: str, layer: int | None = 1) -> PrecisionGraph:
    return apply(captured("infer"), MUTATIONS[name].edit, layer=layer)


# ----------------------------------------------------------------------------------------------- graph against graph


def test_the_same_terms_on_the_same_prompt_have_no_differing_edge():
    found = compared(captured("infer"), every=True)
    assert (found.verdict, found.roots, found.exit_status) == (Verdict.CONTAINED, (), 0)
    assert found.num_compared > 150
    assert "no edge differs" in comparison_text(found)


@pytest.mark.parametrize(
    ("name", "edge", "fqn", "precisions"),
    [
        ("silu not rounded", ("silu", "mul"), f"{LAYER}.mlp", ("bf16", "f32")),
        ("residual not rounded before norm", ("add", "round"), f"{LAYER}.input_layernorm", ("bf16", "f32")),
        ("rotary products not rounded", ("mul", "sub"), f"{LAYER}.self_attn.rotary_emb", ("bf16", "f32")),
        ("activation power of two", ("quantize", "gemm"), f"{LAYER}.self_attn.q_proj", None),
        ("activation 1x64", ("quantize", "gemm"), f"{LAYER}.self_attn.q_proj", None),
        ("eps", ("add", "rsqrt"), f"{LAYER}.input_layernorm", ("f32", "f32")),
        ("attention scale", ("attention", "round"), f"{LAYER}.self_attn", ("f32", "f32")),
        ("rotary forgotten on k", ("attention", "round"), f"{LAYER}.self_attn", ("f32", "f32")),
        ("kv cache fp8", ("quantize", "attention"), f"{LAYER}.self_attn", None),
    ],
)
def test_a_planted_difference_is_the_first_edge(name, edge, fqn, precisions):
    """One rounding, one scale rule, one attribute changed in the second layer: everything before is equal."""
    infer = mutated(name)
    found = compared(infer)
    (root,) = found.roots
    node, image = infer.nodes[root.infer], found.train.nodes[root.train]
    assert (node.op, infer.nodes[root.consumer].op) == edge
    assert node.fqn == fqn
    if precisions is not None:
        assert (str(image.type.precision), str(node.type.precision)) == precisions
    assert {f.rule for f in root.explained_by} == {MUTATIONS[name].rule}
    assert (found.verdict, found.exit_status) == (Verdict.VIOLATED, 1)
    assert 0 < root.difference.num_different <= root.difference.num_elements
    text = comparison_text(found)
    for part in ("layer 1", MUTATIONS[name].rule, "modeling.py:", "engine.py:", " ulp apart"):
        assert part in text
    assert json.loads(json.dumps(comparison_json(found)))["roots"][0]["fqn"] == fqn


NO_VALUE = ("one bit of one code", "output read from empty")
"""Codes without a parameter, and uninitialised memory."""
SAME_BITS = ("activation amax floor", "weights quantised twice")
"""No group of this prompt is near zero; a second quantisation by the same rule changes nothing."""


@pytest.mark.parametrize("name", SAME_BITS)
def test_a_fault_that_this_prompt_does_not_show_is_no_difference(name):
    found = compared(mutated(name), every=True)
    assert (found.roots, found.exit_status) == ((), 0)
    assert "verify says VIOLATED" in comparison_text(found)


@pytest.mark.parametrize("name", NO_VALUE)
def test_what_has_no_value_stops_the_walk_by_name(name):
    with pytest.raises(InterpretError, match=r"model\.layers\.1|empty\.1"):
        compared(mutated(name))


@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in NO_VALUE + SAME_BITS])
def test_the_first_edge_of_every_single_fault_is_explained_by_its_rule(name):
    found = compared(mutated(name))
    assert [{f.rule for f in root.explained_by} for root in found.roots] == [{MUTATIONS[name].rule}]


def test_the_numbers_at_the_first_edge_are_those_of_the_definition():
    """silu in FP32 against silu rounded to BF16: the first element, both values and the distance, computed apart."""
    found = compared(mutated("silu not rounded"))
    (root,) = found.roots
    run = Run(found.infer, leaves(), [root.infer])
    value = next(run.values[i] for i in run if i == root.infer)
    rounded = value.bfloat16().float()
    differing = (value != rounded).nonzero()
    first = tuple(differing[0].tolist())
    d = root.difference
    assert (d.num_elements, d.num_different, d.index) == (value.numel(), len(differing), first)
    assert (d.train, d.infer) == (rounded[first].item(), value[first].item())
    step = 2.0 ** (math.floor(math.log2(max(abs(d.train), abs(d.infer)))) - 7)
    assert d.ulps == abs(d.train - d.infer) / step <= 0.5


def with_changed_code(name: str, change: int = 1) -> dict[str, Tensor | Quantized]:
    """Every weight as an engine stores it; to the bits of one code of ``name``, at [3, 5], ``change`` is added."""
    given = leaves()
    for parameter in captured("infer").meta["operands"]:
        given[parameter] = Quantized(*reference.quantize(given[parameter], *scale_arguments(WEIGHT)))
    codes = given[name].codes.view(torch.int8)
    codes[3, 5] += change
    return given


def test_one_code_of_one_stored_weight():
    name = f"{LAYER}.mlp.up_proj.weight"
    infer = captured("infer")
    operands = dict(infer.meta["operands"])
    operands[name] = operands[name] | {"digest": "another"}
    found = compared(with_meta(infer, operands=operands), with_changed_code(name))
    (root,) = found.roots
    node, consumer = found.infer.nodes[root.infer], found.infer.nodes[root.consumer]
    assert (node.op, consumer.op, consumer.fqn) == ("quantize", "gemm", f"{LAYER}.mlp.up_proj")
    assert found.infer.nodes[node.inputs[0]].attr("name") == name
    d = root.difference
    assert (d.what, d.num_different, d.index, d.ulps) == ("codes", 1, (3, 5), 1)
    assert [(f.rule, f.fqn) for f in root.explained_by] == [("JG017", name)]


def test_a_difference_that_no_entry_explains_says_so():
    """Graphs agree, weights do not, and the digests in the graphs hide it: CONTAINED, and still named."""
    given = leaves()
    weight = given["model.norm.weight"].clone()
    weight[17] = -weight[17]
    found = compared(captured("infer"), {**given, "model.norm.weight": weight}, every=True)
    (root,) = found.roots
    assert found.verdict is Verdict.CONTAINED
    assert found.infer.nodes[root.infer].attr("name") == "model.norm.weight"
    assert (root.difference.index, root.difference.num_different, root.explained_by) == ((0, 17), 1, ())
    assert "explained by no entry" in comparison_text(found)
    assert found.exit_status == 1


def test_every_root_is_listed_once_and_echoes_are_not():
    found = compared(mutated("silu not rounded", layer=None), every=True)
    assert [found.infer.nodes[r.infer].fqn for r in found.roots] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert all(r.explained_by for r in found.roots)
    assert "2 roots, 0 without an entry" in comparison_text(found)


def test_one_root_where_the_other_format_cannot_take_trainings_value():
    """kv_cache_fp8 in one layer: K and V are quantised, nothing behind them is a root of its own."""
    found = compared(mutated("kv cache fp8"), every=True)
    assert [found.infer.nodes[r.infer].op for r in found.roots] == ["quantize", "quantize"]


def test_what_cannot_be_run_as_it_ran_is_unknown_not_equal():
    infer = captured("infer")
    failed = with_meta(infer, replay={"passed": False, "cases": ["body: off by 1"], "injected": []})
    found = compared(failed)
    assert (found.roots, found.exit_status) == ((), 3)
    assert "infer: its replay failed" in comparison_text(found)


def test_a_kernel_without_an_implementation_here_takes_trainings_result():
    """Its attributes differ, which would show: but what it computes is not known, so nothing is claimed of it."""
    infer = mutated("attention scale")
    replay = {"passed": True, "cases": ["prefill"], "injected": ["ref.attention"]}
    found = compared(with_meta(infer, replay=replay), every=True)
    assert (found.roots, found.exit_status) == ((), 3)
    assert "ref.attention cannot be run here" in comparison_text(found)


def test_a_graph_from_another_kind_of_device_is_unknown():
    found = compared(with_meta(captured("infer"), device="cuda"))
    assert (found.roots, found.exit_status) == ((), 3)
    assert "infer: captured on cuda and run on cpu" in comparison_text(found)


def test_an_output_that_was_not_compared_is_unknown():
    """A longer vocabulary: logits of another width have no counterpart, and equality is not claimed of them."""
    name = "model.embed_tokens.weight"
    given = leaves()
    given[name] = torch.nn.functional.pad(given[name], (0, 0, 0, 24))
    found = compared(renamed(build("infer", vocabulary=1024)), given, every=True)
    assert any("logits could not be compared" in text for text in found.unknown)
    assert dataclasses.replace(found, roots=()).exit_status == 3


def test_a_missing_weight_is_named():
    given = leaves()
    del given["model.norm.weight"]
    with pytest.raises(InterpretError, match=r"model\.norm\.weight"):
        compared(captured("infer"), given)


# ------------------------------------------------------------------------------------------------------- two values


def bf16(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.bfloat16)


def test_distances_in_units_of_the_last_place():
    plain = (BF16, BF16)
    assert difference(bf16(1.0, 2.0), bf16(1.0, 2.0), plain) is None
    d = difference(bf16(1.0, 2.0), bf16(1.0, 2.0 + 2**-6), plain)
    assert (d.num_different, d.index, d.ulps) == (1, (0, 1), 1)
    assert difference(bf16(-1.0), bf16(-1.0 - 2**-6), plain).ulps == 2
    smallest = 2.0**-133
    assert difference(bf16(smallest), bf16(-smallest), plain).ulps == 2  # through both zeros, which are one number
    signs = difference(bf16(0.0), bf16(-0.0), plain)
    assert (signs.num_different, signs.ulps) == (1, 0)  # bits differ, numbers do not
    assert difference(bf16(1.0), bf16(math.inf), plain).ulps == math.inf
    nan = bf16(math.nan)
    assert difference(nan, nan.clone(), plain) is None


def test_across_formats_numbers_are_compared():
    exact = torch.tensor([[1.0, 1.5]])
    assert difference(bf16(1.0, 1.5), exact, (BF16, F32)) is None
    d = difference(bf16(1.0, 1.5), exact + torch.tensor([[0.0, 2.0**-9]]), (BF16, F32))
    assert (d.what, d.index, d.ulps) == ("numbers", (0, 1), 0.25)


def test_codes_and_scales():
    precision = Precision(Format.E4M3, Scale(Granularity.per_group(128)))
    halved = Precision(Format.E4M3, Scale(Granularity.per_group(64)))
    x = Quantized(*reference.quantize(torch.ones(2, 128, dtype=torch.bfloat16), *scale_arguments(precision.scale)))
    assert difference(x, x, (precision, precision)) is None
    other = Quantized(x.codes, x.scales * 2)
    d = difference(x, other, (precision, precision))
    assert (d.what, d.num_different, d.infer) == ("scales", 2, 2 * d.train)
    finer = Quantized(x.codes, x.scales.repeat(1, 2))
    assert difference(x, finer, (precision, halved)) is None  # the same numbers
    numbers = x.codes.double() * x.scales.double()
    assert difference(x, numbers, (precision, BF16)) is None
    assert difference(x, bf16(*[1.0] * 128).repeat(2, 1), (precision, BF16)).num_different == 256  # 448 · fl(1/448) ≠ 1
    with pytest.raises(ValueError, match="shape"):
        difference(bf16(1.0), bf16(1.0, 2.0), (BF16, BF16))


# ------------------------------------------------------------------------------------------------------- live engine

PROMPT = 5


def recorded(infer: PrecisionGraph, given: dict | None = None) -> Recording:
    """What hooks in an engine that runs ``infer`` would record: a prefill of five tokens, then one at a time."""
    given = given or leaves()
    ids = [*given["input_ids"].tolist(), int(given["targets"][-1])]
    places = {b.name: b.node for b in boundaries(infer)}
    output = infer.outputs["logprob"]
    values = {}
    run = Run(infer, given, [*places.values(), output])
    for index in run:
        if index in places.values() or index == output:
            values[index] = run.values[index]
    digests = {name: row_digests(values[node]) for name, node in places.items()}
    logprobs = tuple(values[output].flatten().tolist())
    return Recording(tuple(ids[:PROMPT]), tuple(ids[PROMPT:]), logprobs, (PROMPT, *[1] * (T - PROMPT)), digests)


def held(recording: Recording, infer: PrecisionGraph | None = None) -> RecordingReport:
    train = captured("train")
    faults = verify(train, infer).faults if infer else ()
    return compare_recording(Side(train, leaves()), recording, faults)


def test_borders_are_inputs_and_outputs_of_linears_in_order():
    names = [b.name for b in boundaries(captured("train"))]
    assert names[0] == "model.embed_tokens:output"
    assert names[-1] == "lm_head:output"
    assert len(names) == 1 + 2 * (2 * 7 + 1)
    order = [
        names.index(f"{LAYER}.{n}") for n in ("self_attn.q_proj:input", "self_attn.o_proj:input", "mlp.up_proj:output")
    ]
    assert order == sorted(order)


def test_an_engine_that_computes_the_same_differs_at_no_border():
    report = held(recorded(captured("infer")))
    assert (report.first, report.exit_status, report.num_borders) == ("", 0, 31)
    assert "no border differs" in recording_text(report)


@pytest.mark.parametrize(
    ("name", "first", "after"),
    [
        ("silu not rounded", "mlp.down_proj:input", "mlp.up_proj:output"),
        ("attention scale", "self_attn.o_proj:input", "self_attn.v_proj:output"),
        ("eps", "self_attn.k_proj:input", None),
    ],
)
def test_the_first_border_that_differs_and_the_entry_about_what_lies_between(name, first, after):
    infer = mutated(name)
    report = held(recorded(infer), infer)
    assert report.first == f"{LAYER}.{first}"
    assert after is None or report.after == f"{LAYER}.{after}"
    assert {f.rule for f in report.explained_by} == {MUTATIONS[name].rule}
    assert report.exit_status == 1
    assert MUTATIONS[name].rule in recording_text(report)


def test_one_stored_code_shows_at_the_output_of_its_linear():
    recording = recorded(captured("infer"), with_changed_code(f"{LAYER}.mlp.up_proj.weight", -128))  # its sign
    report = held(recording)
    assert report.first == f"{LAYER}.mlp.up_proj:output"
    train = captured("train")
    assert {train.nodes[i].op for i in report.between} == {"parameter", "quantize", "gemm", "round"}


def test_a_row_that_only_decoding_gets_wrong_says_so():
    recording = recorded(captured("infer"))
    name = f"{LAYER}.self_attn.o_proj:output"
    digests = {**recording.digests, name: [*recording.digests[name][:7], "0" * 16, "1" * 16]}
    report = held(dataclasses.replace(recording, digests=digests))
    assert (report.first, report.row, report.num_different, report.how) == (name, 7, 2, "in a step of its own")


def test_logprobs_are_the_last_border():
    recording = recorded(captured("infer"))
    wrong = dataclasses.replace(recording, logprobs=(*recording.logprobs[:-1], recording.logprobs[-1] - 1e-3))
    report = held(wrong)
    assert (report.first, report.after, report.row) == ("logprob", "lm_head:output", T - 1)


def test_a_border_without_a_module_is_named_and_a_foreign_recording_refused():
    recording = recorded(captured("infer"))
    some = {name: found for name, found in recording.digests.items() if not name.startswith("lm_head")}
    report = held(dataclasses.replace(recording, digests=some))
    assert report.not_recorded == ("lm_head:input", "lm_head:output")
    with pytest.raises(RecordingError, match="training's borders are"):
        held(dataclasses.replace(recording, digests={"x:input": ["0"] * T}))
    with pytest.raises(RecordingError, match="8 rows"):
        dataclasses.replace(recording, steps=(PROMPT, 1, 1, 1))

"""Policies are data: whole-path patterns, rules that must decide something, overrides on both sides, strict JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetgraph.engines import check_merged
from jetgraph.policy import (
    FP8Recipe,
    LinearPrecision,
    Policy,
    PolicyError,
    Rule,
    WgradSource,
    check_matches,
    get_policy,
    policies,
)
from jetgraph.precision import Division, Precision, ScaleRule

LEAVES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
BLOCKS = [f"model.layers.{i}.{leaf}" for i in (0, 1, 10) for leaf in LEAVES]
MODEL = [*BLOCKS, "lm_head"]
"""The linears of a dense Qwen3: what N1 runs on."""
PREFIXED = [f"model.language_model.layers.{i}.{leaf}" for i in (0, 1) for leaf in LEAVES] + ["lm_head"]
JET = get_policy("jet")
Q_PROJ = "model.layers.0.self_attn.q_proj"


def policy(*rules: Rule) -> Policy:
    return Policy("test", "", rules)


def fp8_linears(chosen: Policy, *, rollout: bool = False) -> set[str]:
    return {name for name in MODEL if chosen.linear(name, rollout=rollout).quantized}


# ------------------------------------------------------------------------------------------------------------- patterns


def test_a_dotted_path_is_not_a_substring():  # [N1, W12]
    chosen = policy(Rule("lm_head", None), Rule("model.layers.0.mlp.gate", None), Rule("*", FP8Recipe()))
    assert chosen.linear("model.layers.0.mlp.gate_proj").quantized
    assert chosen.linear("model.layers.0.mlp.up_proj").quantized
    assert not chosen.linear("model.layers.0.mlp.gate").quantized
    assert not chosen.linear("lm_head").quantized


def test_layer_1_is_not_layer_10():  # [N1]
    for pattern in (r"re:model\.layers\.1\..*", r"re:model\.layers\.1\.mlp\.\w+"):
        chosen = policy(Rule(pattern, None), Rule("*", FP8Recipe()))
        assert not chosen.linear("model.layers.1.mlp.up_proj").quantized
        assert chosen.linear("model.layers.10.mlp.up_proj").quantized


def test_first_match_wins_and_the_reason_is_kept():
    decided = JET.linear("model.layers.3.self_attn.q_proj")
    assert decided.quantized
    assert decided.reason.startswith("jet: re:")
    assert str(decided.activation.scale.granularity) == "1x128"
    assert str(decided.weight.scale.granularity) == "128x128"
    assert str(decided.gradient.scale.granularity) == "1x128"
    assert str(decided.wgrad.scale.granularity) == "128x1"
    assert JET.linear("lm_head").reason == "jet: lm_head"
    assert JET.linear("embed_out").reason == "jet: no rule matches"


@pytest.mark.parametrize("pattern", ["", "model..mlp", ".mlp", "mlp.", "model.layers.*.mlp", "a b", "re:(", "lm_head$"])
def test_what_is_no_pattern_is_refused_where_it_is_written(pattern):
    with pytest.raises(ValueError, match="pattern"):
        Rule(pattern, None)


# ------------------------------------------------------------------------------ a rule that decides nothing is an error


@pytest.mark.parametrize("name", sorted(policies()))
@pytest.mark.parametrize("names", [MODEL, BLOCKS, PREFIXED, [*BLOCKS, "embed_out"]], ids=len)
def test_built_in_policies_fit_any_model_with_decoder_blocks(name, names):
    check_matches(get_policy(name), names)


def test_an_ignored_name_that_no_linear_has_is_an_error_with_the_nearest():  # [N1, W12]
    with pytest.raises(PolicyError, match=r"rule train\[0\] 'model.layers.0.mlp.gate' matches no linear") as caught:
        check_matches(JET.override("model.layers.0.mlp.gate", None), MODEL)
    assert "nearest: model.layers.0.mlp.gate_proj" in str(caught.value)


def test_a_prefix_on_the_names_makes_every_ignore_entry_an_error():  # [N1, W11]
    chosen = JET.override("model.layers.0.mlp.down_proj", None).override("model.layers.1.mlp.up_proj", None)
    check_matches(chosen, MODEL)
    with pytest.raises(PolicyError) as caught:
        check_matches(chosen, PREFIXED)
    message = str(caught.value)
    assert "'model.layers.0.mlp.down_proj' matches no linear" in message
    assert "'model.layers.1.mlp.up_proj' matches no linear" in message
    assert "model.language_model.layers.0.mlp.down_proj" in message


def test_blocks_of_another_name_are_an_error_not_a_bf16_model():
    with pytest.raises(PolicyError, match="matches no linear of the model; nearest: transformer.h.0"):
        check_matches(JET, [f"transformer.h.{i}.attn.c_proj" for i in range(2)])


def test_an_ignore_entry_after_the_rule_that_takes_all_is_an_error():
    chosen = policy(Rule("*", FP8Recipe()), Rule("lm_head", None))
    assert chosen.linear("lm_head").quantized
    with pytest.raises(PolicyError, match=r"'lm_head' decides nothing, because '\*' comes before it"):
        check_matches(chosen, MODEL)
    part = policy(Rule(r"re:.*\.0\..*", None), Rule(r"re:.*mlp.*", FP8Recipe()))  # decides in layers 1 and 10
    check_matches(part, MODEL)


def test_only_an_optional_rule_may_decide_nothing():
    rules = [Rule("lm_head", None, optional=True), Rule("lm_head", None)]
    for rule in rules:
        chosen = policy(rule, Rule(r"re:model\..*", FP8Recipe()))
        check_matches(chosen, MODEL)
        if rule.optional:
            check_matches(chosen, BLOCKS)
        else:
            with pytest.raises(PolicyError, match="'lm_head' matches no linear"):
                check_matches(chosen, BLOCKS)


def test_rules_of_the_rollout_are_checked_too():
    chosen = Policy("test", "", train=JET.train, rollout=(Rule("nothing.here", None), *JET.train))
    with pytest.raises(PolicyError, match=r"rollout\[0\] 'nothing.here'"):
        check_matches(chosen, MODEL)


# ------------------------------------------------------------------------------------------------ overrides, both sides


def test_an_override_changes_training_and_rollout_and_nothing_else():  # [Q15]
    for base in policies().values():
        name = "model.layers.1.mlp.down_proj"
        for recipe in (None, FP8Recipe(group=64), FP8Recipe(rule=ScaleRule(power_of_two=True))):
            changed = base.override(name, recipe)
            for rollout in (False, True):
                expected = LinearPrecision() if recipe is None else recipe.precision("")
                got = changed.linear(name, rollout=rollout)
                assert (got.activation, got.weight) == (expected.activation, expected.weight)
                assert got.reason == f"{base.name}+{name}: {name}"
                for other in set(MODEL) - {name}:
                    one, two = (p.linear(other, rollout=rollout) for p in (base, changed))
                    assert (one.activation, one.weight, one.wgrad) == (two.activation, two.weight, two.wgrad)
            assert changed.same_on_both_sides is base.same_on_both_sides
            assert changed.name not in policies()


def test_an_override_of_the_same_pattern_replaces_the_rule():
    changed = JET.override("lm_head", None).override("lm_head", FP8Recipe(), name="head too")
    assert changed.name == "head too"
    assert [r.pattern for r in changed.train].count("lm_head") == 1
    assert changed.linear("lm_head").quantized


def test_the_negative_control_differs_between_its_sides():
    control = get_policy("bf16_train_fp8_rollout")
    name = "model.layers.0.mlp.up_proj"
    assert not control.same_on_both_sides
    assert not control.linear(name).quantized
    wanted = JET.linear(name)
    got = control.linear(name, rollout=True)
    assert (got.activation, got.weight) == (wanted.activation, wanted.weight)
    assert JET.same_on_both_sides


# ------------------------------------------------------------------------------------------------- merged modules [W13]


def test_a_merged_module_with_mixed_precision_is_refused_by_name():  # [W13]
    for chosen in policies().values():
        check_merged(chosen, MODEL)
    with pytest.raises(PolicyError) as caught:
        check_merged(JET.override(Q_PROJ, None), MODEL)
    message = str(caught.value)
    assert "model.layers.0.self_attn.qkv_proj: q_proj bf16 (by model.layers.0.self_attn.q_proj)" in message
    assert "k_proj f8e4m3[128x128] (by re:" in message
    assert "gate_up_proj" not in message
    assert "layers.1." not in message


def test_parts_that_differ_in_one_field_of_the_scale_rule_are_mixed():  # [W13]
    other = FP8Recipe(rule=ScaleRule(amax_floor=1e-10))
    with pytest.raises(PolicyError, match=r"gate_up_proj: gate_proj .*floor=1e-10.* up_proj .*floor=1e-12"):
        check_merged(JET.override("model.layers.10.mlp.gate_proj", other), MODEL)


def test_parts_may_differ_from_the_rest_of_the_block_and_a_lone_part_is_not_mixed():
    for pattern in (r"re:model\.layers\.0\.self_attn\.[qkv]_proj", "model.layers.1.mlp.down_proj"):
        check_merged(JET.override(pattern, None), MODEL)
    lone = [name for name in MODEL if not re.search(r"0\.self_attn\.[kv]_proj", name)]
    check_merged(JET.override(Q_PROJ, None), lone)


# ----------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("name", sorted(policies()))
def test_json_gives_back_the_same_policy(name, tmp_path):
    chosen = get_policy(name)
    assert Policy.from_json(chosen.to_json()) == chosen
    file = tmp_path / "policy.json"
    file.write_text(chosen.to_json())
    assert get_policy(str(file)) == chosen


SCALE_RULES = st.builds(
    ScaleRule,
    st.floats(2, 448),
    st.floats(1e-30, 1e3),
    st.sampled_from(Division),
    st.booleans(),
)
RECIPES = st.builds(FP8Recipe, st.integers(1, 1 << 20), SCALE_RULES)
PATTERNS = st.sampled_from(["*", "lm_head", "model.layers.0.mlp.up_proj", r"re:.*\.(q|k)_proj|a", "re:.*é"])
RULES = st.lists(st.builds(Rule, PATTERNS, st.none() | RECIPES, st.booleans()), min_size=1, max_size=3).map(tuple)


@given(st.builds(Policy, st.text(min_size=1).filter(str.strip), st.text(), RULES, RULES, st.sampled_from(WgradSource)))
def test_any_policy_and_what_it_decides_survive_their_texts(chosen):
    """Also floats that have no short decimal, ``|`` in a pattern (it separates fields), and any name."""
    assert Policy.from_json(chosen.to_json()) == chosen
    decided = chosen.linear("model.layers.0.mlp.up_proj")
    assert LinearPrecision.parse(str(decided)) == decided
    for precision in (decided.activation, decided.wgrad):
        assert Precision.parse(str(precision)) == precision


def test_what_is_left_out_is_the_default_and_rollout_is_training():
    short = '{"name": "mine", "description": "", "train": [{"pattern": "re:.*proj", "fp8": {}}]}'
    assert Policy.from_json(short) == Policy("mine", "", (Rule("re:.*proj", FP8Recipe()),))


def changed(**values: object) -> dict:
    return {**JET.to_plain(), **values}


def recipe(**fields: object) -> dict:
    return changed(train=[{"pattern": "a", "fp8": fields}])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], r"^the file is \[\]: expected an object"),
        ({}, "^name is missing"),
        (changed(trian=[]), "^trian is not known: did you mean 'train'"),
        (changed(train={}), r"^train is \{\}: expected a list"),
        (changed(train=[]), "at least one rule"),
        (changed(name=" "), "needs a name"),
        (changed(wgrad_source="twice"), r"^wgrad_source is 'twice': expected one of 'both', 'requantize'"),
        (changed(train=[{"fp8": None}]), r"^train\[0\].pattern is missing"),
        (changed(train=[{"pattern": "lm_head"}]), r"^train\[0\].fp8 is missing"),
        (changed(train=[{"pattern": "mlp.*", "fp8": None}]), r"^train\[0\]: pattern 'mlp.\*': expected a dotted path"),
        (changed(train=[{"pattern": "a", "fp8": None, "optional": 1}]), r"^train\[0\].optional is 1: expected true or"),
        (
            recipe(group="128"),
            r"^train\[0\].fp8.group is '128': expected a whole",
        ),
        (recipe(group=128.0), r"group is 128.0: expected a whole number"),
        (recipe(group=0), r"^train\[0\].fp8: group 0: expected a positive"),
        (
            recipe(rule={"qmax": True}),
            r"fp8.rule.qmax is True: expected a number",
        ),
        (
            recipe(rule={"qmax": 449}),
            r"fp8.rule: qmax 449: expected a number from",
        ),
        (
            recipe(rule={"amax_floor": 0}),
            r"fp8.rule: amax_floor 0: expected a fin",
        ),
        (recipe(rule={"amax_floor": 1e999}), "Infinity is not a number"),
        (
            recipe(rule={"amax_floor": 10**400}),
            "amax_floor is .*: expected a num",
        ),
        (
            recipe(rule={"pow2": True}),
            r"rule.pow2 is not known: expected one of",
        ),
        (changed(wgrad_source="requantize", train=[{"pattern": "*", "fp8": {"group": None}}]), "needs groups"),
    ],
)
def test_bad_policy_files_say_where(data, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Policy.from_json(json.dumps(data))
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=re.escape(str(file))):
        get_policy(str(file))


@pytest.mark.parametrize("text", ["", "{", '{"name": "a", "name": "b"}', "nonsense"])
def test_what_is_not_json_is_refused(text):
    with pytest.raises(ValueError, match="not JSON"):
        Policy.from_json(text)


def test_a_file_may_not_call_another_policy_by_a_built_in_name(tmp_path):
    file = tmp_path / "jet.json"
    file.write_text(json.dumps(changed(train=[{"pattern": "*", "fp8": None}])))
    with pytest.raises(ValueError, match="name 'jet' belongs to a built-in policy that differs"):
        get_policy(str(file))


def test_unknown_policies_are_named():
    with pytest.raises(ValueError, match="policy 'fp8' does not exist; choose one of bf16, .*, jet, jet_ue8m0, or the"):
        get_policy("fp8")
    with pytest.raises(ValueError, match="nowhere.json cannot be read"):
        get_policy("nowhere.json")


# -------------------------------------------------------------------------------------------- the texts a graph carries


@pytest.mark.parametrize(
    "text",
    [
        "",
        "bf16|bf16|bf16|bf16|both",
        "bf16|bf16|bf16|bf16|Both|x",
        "bf16|bf16|bf16|both|x",
        str(JET.linear(Q_PROJ)).replace("floor=1e-12", "floor=1E-12", 1),
        str(JET.linear(Q_PROJ)).replace("1x128", "01x128", 1),
        str(JET.linear(Q_PROJ)).replace(" dyn ", " dynamic ", 1),
        str(JET.linear(Q_PROJ)).replace("floor=1e-12", "floor=1e-12 pow3", 1),
        str(JET.linear(Q_PROJ)).replace("floor=1e-12", "floor=0", 1),
    ],
)
def test_only_what_was_printed_is_parsed(text):
    with pytest.raises(ValueError):  # noqa: PT011  (each part has its own sentence)
        LinearPrecision.parse(text)


def test_the_policies_differ_as_they_say():
    name = "model.layers.0.mlp.up_proj"
    pow2 = get_policy("jet_ue8m0").linear(name)
    assert pow2.activation.scale.rule.power_of_two
    assert pow2.weight.scale.rule.power_of_two
    assert str(pow2.weight).replace(" pow2", "") == str(JET.linear(name).weight)
    whole = get_policy("fp8_tensorwise").linear(name)
    assert {str(p.scale.granularity) for p in (whole.activation, whole.weight, whole.gradient, whole.wgrad)} == {"*x*"}
    assert whole.group == 0
    assert get_policy("jet_ue8m0").same_on_both_sides
    assert get_policy("fp8_tensorwise").same_on_both_sides


def test_the_policy_file_of_the_documentation_is_one():
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    (block,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    shown = Policy.from_json(block)
    assert shown.train[1] == JET.train[1]
    assert fp8_linears(shown) == set(BLOCKS) - {"model.layers.0.mlp.down_proj"}
    assert all(f"| `{name}` |" in page for name in policies())

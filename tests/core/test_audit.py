"""The audit without an engine: facts as sets, differences with their remedies, and what real H200 captures say."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence

import pytest
from rich.console import Console
from typer.testing import CliRunner

from jetgraph.audit import Audit, Quantiser, Role, Row, annotation, compare
from jetgraph.cli import app
from jetgraph.policy import FP8Recipe, get_policy

JET = get_policy("jet")
LINEARS = [f"model.layers.{i}.{m}" for i in range(3) for m in ("self_attn.q_proj", "mlp.gate_proj", "mlp.down_proj")]
LINEARS.append("lm_head")


def loaded(policy=JET) -> list[Row]:
    """What an engine that follows ``policy`` to the letter has."""
    rows = []
    for name in LINEARS:
        p = policy.linear(name, rollout=True)
        role = Role.HEAD if name == "lm_head" else Role.LINEAR
        rows.append(Row(name, role, name, "kernel", Quantiser.of(p.weight), Quantiser.of(p.activation)))
    bf16 = Quantiser("bf16")
    rows.append(Row("model.embed_tokens", Role.EMBEDDING, "", "", bf16))
    rows.append(Row("model.norm", Role.NORM, "", "", bf16, arithmetic="training's"))
    rows += [Row(f"model.layers.{i}.self_attn.attn", Role.ATTENTION, "", "", kv_cache="bf16") for i in range(3)]
    return rows


def differences(rows: Sequence[Row], policy=JET) -> list[tuple[str, str, str, str, tuple[str, ...]]]:
    found = compare(policy, LINEARS, rows, lambda d, rows: "")
    return [(d.operand, d.field, d.expected, d.got, d.layers) for d in found]


def changed(name: str, **fields) -> list[Row]:
    return [dataclasses.replace(row, **fields) if row.name == name else row for row in loaded()]


def test_what_follows_the_policy_is_equal_as_a_set():  # [N1]
    assert differences(loaded()) == []
    assert annotation(JET, LINEARS, loaded()) == {fact for row in loaded() for fact in row.facts()}
    assert {f.value for f in annotation(JET, LINEARS, []) if f.layer == "lm_head"} == {"bf16"}


def test_a_swallowed_gate_proj_is_one_difference_and_names_its_layers():  # [N1, W12]
    """An ignore list that takes mlp.gate for mlp.gate_proj: BF16 in the rollout, FP8 in training."""
    bf16 = Quantiser("bf16")
    rows = [
        dataclasses.replace(row, weight=bf16, activation=bf16) if row.name.endswith("gate_proj") else row
        for row in loaded()
    ]
    gates = tuple(f"model.layers.{i}.mlp.gate_proj" for i in range(3))
    assert differences(rows) == [
        ("activation", "format", "f8e4m3", "bf16", gates),
        ("weight", "format", "f8e4m3", "bf16", gates),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("granularity", "*x*"),
        ("scale", "e8m0"),
        ("dynamic", "static"),
        ("division", "mulq/a"),
        ("qmax", "240"),
        ("floor", "1e-10"),
        ("power_of_two", "yes"),
    ],
)
def test_every_field_of_a_precision_is_a_fact(field, value):  # [Q3, Q8, Q9, W18]
    name = "model.layers.1.mlp.down_proj"
    row = next(row for row in loaded() if row.name == name)
    expected = getattr(row.activation, field)
    rows = changed(name, activation=dataclasses.replace(row.activation, **{field: value}))
    assert differences(rows) == [("activation", field, expected, value, (name,))]


def test_a_quantised_head_or_cache_or_norm_is_a_difference():  # [W15, JG008]
    fp8 = Quantiser.of(JET.linear(LINEARS[0]).weight)
    assert differences(changed("lm_head", weight=fp8)) == [("weight", "format", "bf16", "f8e4m3", ("lm_head",))]
    attention = "model.layers.2.self_attn.attn"
    assert differences(changed(attention, kv_cache="fp8")) == [("kv cache", "format", "bf16", "fp8", (attention,))]
    assert differences(changed("model.norm", arithmetic="rounds once")) == [
        ("result", "arithmetic", "training's", "rounds once", ("model.norm",))
    ]
    f32 = Quantiser("f32")
    assert differences(changed("model.norm", weight=f32)) == [("weight", "format", "bf16", "f32", ("model.norm",))]


def test_a_linear_that_is_not_loaded_and_one_too_many_are_differences():  # [W11]
    rows = [dataclasses.replace(row, name=row.name.replace("model.", "model.language_model.", 1)) for row in loaded()]
    found = differences(rows)
    assert {(e, g) for _, _, e, g, _ in found} == {
        ("f8e4m3", "absent"), ("absent", "f8e4m3")}  # fmt: skip
    assert sum(len(layers) for *_, layers in found) == 2 * 2 * 9


def test_a_rank_that_differs_is_seen():
    rows = loaded()
    other = dataclasses.replace(rows[0], weight=Quantiser("bf16"))
    assert differences([*rows, other]) == [("weight", "format", "f8e4m3", "bf16", (rows[0].name,))]


def test_what_could_not_be_read_is_neither_equal_nor_different():
    name = LINEARS[0]
    row = loaded()[0]
    rows = changed(name, weight=dataclasses.replace(row.weight, floor="?"))
    (found,) = compare(JET, LINEARS, rows, lambda d, rows: "")
    assert found.unknown
    audit = Audit("engine", tuple(rows), {}, "jet", (found,))
    assert (audit.equal, audit.exit_status) == (False, 3)
    different = dataclasses.replace(found, got="1e-10")
    assert Audit("engine", tuple(rows), {}, "jet", (found, different)).exit_status == 1
    assert Audit("engine", tuple(rows), {}, "jet").exit_status == 0
    assert not Audit("engine", tuple(rows), {}).equal, "compared with nothing"


def test_an_override_changes_the_annotation():  # [Q15]
    kept = "model.layers.0.mlp.down_proj"
    assert {d[-1] for d in differences(loaded(), JET.override(kept, None))} == {(kept,)}
    assert differences(loaded(), JET.override(kept, FP8Recipe(group=64))) != []


def test_an_audit_is_plain_data_and_a_short_table():
    found = compare(JET, LINEARS, changed(LINEARS[0], weight=Quantiser("bf16")), lambda d, rows: "do this")
    audit = Audit("vllm", tuple(loaded()), {"mode": 3}, "jet", found)
    assert Audit.from_plain(json.loads(json.dumps(audit.to_plain()))) == audit
    text = io.StringIO()
    Console(file=text, width=200).print(audit.view())
    shown = text.getvalue()
    assert "model.layers.0–2.mlp.down_proj" in shown
    assert "model.layers.1.mlp.down_proj" not in shown
    assert "not equal to policy jet: 1 different, 0 that could not be read" in shown
    assert "do this" in shown
    nothing = dataclasses.replace(found[0], remedy="")
    Console(file=text, width=200).print(dataclasses.replace(audit, differences=(nothing,)).view())
    assert "no setting is known" in text.getvalue()


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def command(monkeypatch, tmp_path):
    """`jetgraph audit FOLDER …` with an engine that has loaded ``loaded(policy)``; notes what it was asked for."""
    (tmp_path / "config.json").write_text("{}")
    asked = {}

    class Engine:
        held = JET

        def audit(self, model_dir, policy, options, *, say):
            asked.update(model=model_dir, policy=policy, options=options)
            rows = tuple(loaded(self.held))
            found = () if policy is None else compare(policy, LINEARS, rows, lambda d, rows: "")
            return Audit("vllm", rows, {}, "" if policy is None else policy.name, found)

    engine = Engine()
    monkeypatch.setattr("jetgraph.engines.get_engine", lambda name: engine)

    def run(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["audit", str(tmp_path), *arguments])
        return result.exit_code, result.output

    run.asked, run.engine, run.folder = asked, engine, tmp_path
    return run


def test_the_command_compares_with_what_the_folder_declares(command):
    status, text = command()
    assert status == 0
    assert command.asked["policy"] is None, "a folder that declares nothing, and no --policy: only the table"
    assert "policy" not in text
    own = {"jetgraph": {"policy": "jet", "rules": JET.to_plain()}}
    (command.folder / "config.json").write_text(json.dumps({"quantization_config": own}))
    assert command()[0] == 0
    assert command.asked["policy"] == JET
    assert command("--policy", "bf16")[0] == 1
    assert command.asked["policy"].name == "bf16"


def test_the_command_passes_the_engines_own_settings(command):
    assert command("--options", '{"enforce_eager": true}')[0] == 0
    assert command.asked["options"] == {"enforce_eager": True}
    for wrong in ("[1]", "{"):
        assert command("--options", wrong)[0] == 2


def test_the_command_prints_json(command):
    command.engine.held = JET.override(LINEARS[0], None)
    status, text = command("--policy", "jet", "--json")
    found = json.loads(text)
    assert (status, found["equal"], len(found["differences"])) == (1, False, 2)
    assert found["differences"][0]["layers"] == [LINEARS[0]]


def test_the_command_refuses_what_is_no_folder_or_policy(command, tmp_path):
    assert command("--policy", "nope")[0] == 2
    assert CliRunner().invoke(app, ["audit", str(tmp_path / "nowhere")]).exit_code == 2

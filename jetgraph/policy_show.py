"""The terminal view of one policy (`jetgraph policy show`): its rules, and what they make of every linear of a model.

80 columns, readable without colour, the same facts as JSON.
"""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from jetgraph.engines import check_merged
from jetgraph.model_linears import ModelLinears
from jetgraph.policy import FP8Recipe, LinearPrecision, Policy, PolicyError, Rule, WgradSource, check_matches
from jetgraph.viz.layers import layer_of, relative, spans

WGRAD = {
    WgradSource.BOTH: "quantised from the BF16 activation, once more along the tokens",
    WgradSource.REQUANTIZE: "the saved codes, quantised a second time along the tokens",
}


def misfit(policy: Policy, model: ModelLinears) -> str:
    """Why the policy cannot be used for the model; empty if it can."""
    try:
        check_matches(policy, model.shapes)
        check_merged(policy, model.shapes)
    except PolicyError as error:
        return str(error)
    return ""


def as_json(policy: Policy, model: ModelLinears | None = None) -> dict[str, Any]:
    """The policy as `Policy.to_plain` has it; with a model, every linear and the number of the rule that decided it."""
    shown: dict[str, Any] = {"policy": policy.to_plain(), "same_on_both_sides": policy.same_on_both_sides}
    if model is not None:
        shown["model"] = model.architecture
        shown["misfit"] = misfit(policy, model) or None
        shown["linears"] = [
            {"name": name, "shape": list(shape)}
            | {side: _decision(policy, name, side == "rollout") for side in ("train", "rollout")}
            for name, shape in model.shapes.items()
        ]
    return shown


def _decision(policy: Policy, name: str, rollout: bool) -> dict[str, Any]:
    precision = policy.linear(name, rollout=rollout)
    operands = ("activation", "weight", "gradient", "wgrad")
    return {"rule": _number(policy, name, rollout)} | {key: str(getattr(precision, key)) for key in operands}


def _number(policy: Policy, name: str, rollout: bool) -> int | None:
    """Which rule of its side decides a linear, counted from 1."""
    return next((i for i, rule in enumerate(policy.rules(rollout=rollout), 1) if rule.matches(name)), None)


def view(policy: Policy, model: ModelLinears | None = None) -> Group:
    """Everything `jetgraph policy show` prints, as one rich renderable."""
    parts: list[RenderableType] = [Text(policy.name, style="bold"), Text(policy.description)]
    if any(rule.fp8 and rule.fp8.group for rule in policy.train):
        parts.append(Text(f"WGRAD's activation: {WGRAD[policy.wgrad_source]}"))
    sides = {"training and rollout": False} if policy.same_on_both_sides else {"training": False, "rollout": True}
    for side, rollout in sides.items():
        parts.append(_title(f"rules for {side}: the first that matches decides"))
        parts.append(_rules(policy.rules(rollout=rollout), _counts(policy, model, rollout)))
    if model is not None:
        parts.append(_title(f"linears of {model.architecture}: {len(model.shapes)}"))
        parts.append(_linears(policy, model))
    return Group(*parts)


def _title(text: str) -> Text:
    return Text(f"\n{text}", style="bold")


def _counts(policy: Policy, model: ModelLinears | None, rollout: bool) -> list[int] | None:
    """How many linears each rule of a side decides."""
    if model is None:
        return None
    deciders = [_number(policy, name, rollout) for name in model.shapes]
    return [deciders.count(i + 1) for i in range(len(policy.rules(rollout=rollout)))]


def _rules(rules: tuple[Rule, ...], counts: list[int] | None) -> Table:
    table = _table()
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("pattern", overflow="fold")
    table.add_column("makes linears", overflow="fold")
    if counts is not None:
        table.add_column("decides", justify="right", no_wrap=True)
    for i, rule in enumerate(rules):
        pattern = rule.pattern + (" (optional)" if rule.optional else "")
        table.add_row(str(i + 1), Text(pattern), Text(_recipe(rule.fp8)), *([] if counts is None else [str(counts[i])]))
    return table


def _recipe(recipe: FP8Recipe | None) -> str:
    if recipe is None:
        return "bf16"
    p = recipe.precision("")
    x, weight, wgrad = (q.scale.granularity if q.scale else None for q in (p.activation, p.weight, p.wgrad))
    grids = f"x, dy {x} · W {weight} · WGRAD {wgrad}" if recipe.group else "one scale for each tensor"
    return f"{grids}\n{p.weight.format} {recipe.rule}"


def _linears(policy: Policy, model: ModelLinears) -> Table:
    """One row for equal linears of several layers."""
    table = _table()
    table.add_column("linear", overflow="fold")
    table.add_column("out x in", justify="right", no_wrap=True)
    sides = {"x · W": False} if policy.same_on_both_sides else {"training": False, "rollout": True}
    for side in sides:
        table.add_column(side, overflow="fold")
        table.add_column("rule", justify="right", no_wrap=True)
    rows: dict[tuple, list[int]] = {}
    for name, shape in model.shapes.items():
        cells = [
            cell
            for rollout in sides.values()
            for cell in (
                _operands(policy.linear(name, rollout=rollout), brief=len(sides) > 1),
                str(_number(policy, name, rollout) or "none"),
            )
        ]
        rows.setdefault((relative(name), shape, *cells), []).append(-1 if (i := layer_of(name)) is None else i)
    for (path, (num_out, num_in), *cells), layers in rows.items():
        shown = path.replace("*", spans(layers), 1) if "*" in path else path
        table.add_row(Text(shown), f"{num_out} x {num_in}", *map(Text, cells))
    return table


def _operands(precision: LinearPrecision, *, brief: bool) -> str:
    if precision.activation.scale is None or precision.weight.scale is None:
        return "BF16"
    grids = f" {precision.activation.scale.granularity} · {precision.weight.scale.granularity}"
    return "FP8" + ("" if brief else grids)


def _table() -> Table:
    return Table(box=None, pad_edge=False)

"""Conformance: every linear has the precision its policy demands, on each side.  It comes before containment.

Two graphs that are both silently bf16 contain each other; only the policy's scope notices.  ``meta["scope"]`` says, per
linear FQN, the λ of its activation and weight.
"""

from __future__ import annotations

from collections.abc import Iterator

from jetgraph.graph import Role
from jetgraph.verify.fault import Fault, on
from jetgraph.verify.forward import Forward


def conformance(train: Forward, infer: Forward) -> list[Fault]:
    """JG021 for each linear that is not what its own side's policy demands, and where the two scopes differ."""
    faults = [*_side(train, "train"), *_side(infer, "infer")]
    scopes = [f.graph.meta.get("scope", {}) for f in (train, infer)]
    for fqn in sorted(set(scopes[0]) | set(scopes[1])):
        demands = [_demand(scope[fqn]) if fqn in scope else "nothing" for scope in scopes]
        if demands[0] != demands[1]:
            faults.append(Fault("JG021", "policy", fqn, f"{demands[0]}, as the trainer's policy demands", demands[1]))
    return faults


def _side(forward: Forward, side: str) -> Iterator[Fault]:
    graph = forward.graph
    scope = graph.meta.get("scope")
    if not scope:
        yield Fault("JG091", side, graph.name, f"the policy's scope in the {side} graph (meta 'scope')", "none")
        return
    seen: set[str] = set()
    for index in forward.live:
        node = graph.nodes[index]
        if node.op != "gemm":
            continue
        if node.role is Role.FPROP and node.fqn in scope:
            seen.add(node.fqn)
            got = [graph.nodes[i].type.precision for i in node.inputs]
            demand = scope[node.fqn]
            if [str(p) for p in got] != [demand["activation"], demand["weight"]]:
                short = " · ".join(p.short() for p in got)
                if short == _demand(demand):
                    short = " · ".join(map(str, got))
                yield on(side, graph, index, "JG021", f"{_demand(demand)} ({side} policy)", short)
            continue
        if any(graph.nodes[i].op == "quantize" for i in node.inputs):
            e = f"bf16 · bf16: the {side} policy's scope does not have {node.fqn or 'this gemm'}"
            yield on(
                side, graph, index, "JG021", e, " · ".join(graph.nodes[i].type.precision.short() for i in node.inputs)
            )
    for fqn in sorted(set(scope) - seen):
        yield Fault("JG021", "gemm", fqn, f"a gemm with {_demand(scope[fqn])} in the {side} graph", "no gemm")


def _demand(demand: dict[str, str]) -> str:
    """A scope entry in short: ``f8e4m3[1x128] · f8e4m3[128x128]``."""
    return " · ".join(_short(demand[k]) for k in ("activation", "weight"))


def _short(precision: str) -> str:
    return precision if " " not in precision else precision[: precision.index(" ")] + "]"

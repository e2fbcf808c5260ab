"""A `torch.export` program as a module that `jetgraph.compile` can take: its linears become modules again.

An exported graph holds `aten.linear` calls and the FQN each came from.  Putting an `nn.Linear` back at that FQN, on the
very same parameters, makes an exported model like any other: policies decide by FQN, linears declare their precision.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

aten = torch.ops.aten


class ExportError(ValueError):
    """The exported program cannot be compiled: says which node and why."""


def module_of(program: ExportedProgram) -> GraphModule:
    """``program`` as a trainable module with an `nn.Linear` wherever it was exported from one.

    Raises:
        ExportError: a linear of the program cannot be told by FQN, or its weight is computed, not stored.
    """
    module = program.module()
    assert isinstance(module, GraphModule)
    for node in list(module.graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            _inline(module, node)
    calls = [n for n in module.graph.nodes if n.op == "call_function" and n.target is aten.linear.default]
    for node in calls:
        _restore(module, node)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module


def plain_attention(module: torch.nn.Module) -> str | None:
    """The name of a node that runs torch's own attention, if there is one."""
    if not isinstance(module, GraphModule):
        return None
    return next((n.name for n in module.graph.nodes if n.target is aten.scaled_dot_product_attention.default), None)


def _inline(module: GraphModule, node: Node) -> None:
    """A part exported under another grad mode (the rotary table), in place; Dynamo cannot trace it with sizes in it."""
    enabled, inner, *arguments = node.args
    part = getattr(module, str(inner.target))  # type: ignore[union-attr]
    graph, switch = module.graph, torch._C._set_grad_enabled
    with graph.inserting_before(node):
        graph.call_function(switch, (enabled,))
        placeholders = [n for n in part.graph.nodes if n.op == "placeholder"]
        results = graph.graph_copy(part.graph, dict(zip(placeholders, arguments, strict=True)))
        graph.call_function(switch, (not enabled,))
    for user in list(node.users):
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
        graph.erase_node(user)
    graph.erase_node(node)


def _restore(module: GraphModule, node: Node) -> None:
    stack = node.meta.get("nn_module_stack")
    fqn = list(stack.values())[-1][0] if stack else ""
    x, weight, *bias = node.args
    modules = dict(module.named_modules())
    is_leaf = fqn != "" and (fqn not in modules or not any(True for _ in modules[fqn].children()))
    if not is_leaf or not _is_stored(weight) or (bias and not _is_stored(bias[0])):
        raise ExportError(
            f"node {node.name} is a linear {f'inside {fqn}' if fqn else 'of no module'}; expected one of an nn.Linear "
            "whose module is known and whose weight and bias are parameters. Export with strict=False from the "
            "original model"
        )
    stored = _attribute(module, weight)  # type: ignore[arg-type]
    linear = torch.nn.Linear(stored.shape[1], stored.shape[0], bias=bool(bias), device="meta")
    linear.weight = stored  # type: ignore[assignment]
    if bias:
        linear.bias = _attribute(module, bias[0])  # type: ignore[arg-type, assignment]
    parent, _, name = fqn.rpartition(".")
    if parent not in modules:
        module.add_submodule(parent, torch.nn.Module())
    setattr(module.get_submodule(parent), name, linear)
    with module.graph.inserting_before(node):
        call = module.graph.call_module(fqn, (x,))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call)
    module.graph.erase_node(node)


def _is_stored(argument: object) -> bool:
    return isinstance(argument, Node) and argument.op == "get_attr"


def _attribute(module: GraphModule, node: Node) -> torch.nn.Parameter:
    value: object = module
    for part in str(node.target).split("."):
        value = getattr(value, part)
    assert isinstance(value, torch.nn.Parameter)
    return value

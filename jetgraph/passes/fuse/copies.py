"""Quantise along the features and along the tokens in one read.

requires: lowered linears
ensures:  two quantisers of one tensor with one group and rule are one `jetgraph::quantize_rows_and_tokens`
numerics: unchanged, checked when applied
"""

from __future__ import annotations

from torch.fx import GraphModule

from jetgraph.passes import edit
from jetgraph.passes.fuse.legality import Fusion, disagreement
from jetgraph.passes.fuse.match import first_of, ops, replace
from jetgraph.passes.linears import module_of

OPERATOR = "jetgraph::quantize_rows_and_tokens"


def fuse_copies(module: GraphModule) -> list[Fusion]:
    graph, tried = module.graph, []
    for rows in [n for n in graph.nodes if n.target is ops.quantize.default and n.args[1] == 1 and n.args[2]]:
        source, _, *grouping = rows.args
        phase = edit.is_forward(rows)
        twins = [
            n
            for n in source.users
            if n.target is ops.quantize_tokens.default and list(n.args[1:]) == grouping and edit.is_forward(n) == phase
        ]
        if not twins:
            continue
        old = [n for quantiser in (rows, twins[0]) for n in edit.results(graph, quantiser, 2)]
        with graph.inserting_before(first_of(graph, [rows, twins[0]])):
            both = edit.call(graph, ops.quantize_rows_and_tokens.default, (source, *grouping), rows, phase)
        new = edit.results(graph, both, 4)
        refusal = disagreement(old, new, [source])
        if not refusal:
            for quantiser, results in ((rows, new[:2]), (twins[0], new[2:])):
                for item in list(quantiser.users):
                    replace(item, results[item.args[1]])
        tried.append(Fusion(OPERATOR, module_of(rows)[0], refusal))
        graph.eliminate_dead_code()
    return tried

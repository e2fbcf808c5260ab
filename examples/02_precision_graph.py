"""Capture a live training step as a graph, run the graph, and get the step's own bits back.

python examples/02_precision_graph.py [MODEL_DIR]
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import jetgraph
from jetgraph.interpret import interpret
from jetgraph.models import write_smollm2
from jetgraph.trainer import capture_step

folder = sys.argv[1] if len(sys.argv) > 1 else write_smollm2(".cache/smollm2")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
jetgraph.compile(model, policy="jet")

step = capture_step(model.jetgraph)
graph = step.graph
print(f"{len(graph.nodes)} nodes, {graph.num_edges} edges, unknown operators: {graph.meta['unknown'] or 'none'}")

for node in graph.nodes:  # the first linear's three GEMMs and what feeds them
    if node.fqn.endswith("layers.0.self_attn.q_proj") and node.op == "gemm":
        operands = " x ".join(graph.nodes[i].type.precision.short() for i in node.inputs)
        print(f"  {node.role.value}: {operands:40} {node.kernel:22} decided by {node.reason!r}")

leaves = {**step.inputs, **dict(model.named_parameters()), **dict(model.named_buffers())}
with torch.no_grad():
    values = interpret(graph, leaves)
print("logits bit for bit:", torch.equal(values["logits"], step.logits[0]))
equal = [torch.equal(values[f"grad.{n}"].reshape(g.shape), g) for n, g in step.gradients.items()]
print(f"gradients bit for bit: {sum(equal)} of {len(equal)}")

assert jetgraph.PrecisionGraph.from_text(graph.to_text()) == graph
print("semantic digest:", graph.semantic_digest)

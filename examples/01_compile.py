"""Train one step in the jet precision flow and see what was lowered and what is kept for backward.

python examples/01_compile.py [MODEL_DIR]
"""

import sys

import torch
from transformers import AutoModelForCausalLM

import jetgraph
from jetgraph.models import write_smollm2

folder = sys.argv[1] if len(sys.argv) > 1 else write_smollm2(".cache/smollm2")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()

jetgraph.compile(model, policy="jet")  # same module, same parameters, same state_dict

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
ids = torch.arange(10, 74)[None]
for step in range(2):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")

compiled = model.jetgraph
print(f"{len(compiled.regions)} equal blocks, {compiled.num_compiles} compile, {compiled.seconds:.1f} s")
block = next(iter(compiled.regions.values())).compiled[0]
for gemm in block.lowered:
    print(f"  {gemm.role.value}  {gemm.fqn:20} {gemm.reason}")
print("kept for backward:")
for tensor in compiled.saved():
    print(f"  {tensor.dtype:14} made by {tensor.made_by:26} read by {', '.join(tensor.consumers)}")

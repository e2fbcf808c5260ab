"""What a counterexample looks like: two trainings with different policies, one page with every difference.

    python examples/04_counterexample.py [MODEL_DIR]

The second training stands in for a rollout here, so that no engine is needed; the graphs are still captured from two
separate live runs.
"""

import dataclasses
import sys

import torch
from transformers import AutoModelForCausalLM

import jetgraph
from jetgraph.extract import expected_rollout
from jetgraph.models import write_smollm2
from jetgraph.replay import replay_step
from jetgraph.show import write_page
from jetgraph.trainer import capture_step
from jetgraph.verify import verify

folder = sys.argv[1] if len(sys.argv) > 1 else write_smollm2(".cache/smollm2")


def live_graph(policy: str) -> jetgraph.PrecisionGraph:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
    jetgraph.compile(model, policy)
    return replay_step(model, capture_step(model.jetgraph, backward=False))


train = live_graph("jet")
rollout = expected_rollout(live_graph("bf16"))
rollout = dataclasses.replace(rollout, meta={**rollout.meta, "side": "infer"})

result = verify(train, rollout)
print(result.text())
print("page:", write_page("out/counterexample.html", train, rollout))

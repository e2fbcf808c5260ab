"""200 steps of fine-tuning on the GPU, BF16 against jet:  python -m benchmarks.finetune --data FILE [--json FILE]

SmolLM2 learns sums of reasoning-gym from FP32 masters (AdamW), the same batches in the same order for every arm; the
loss is on the answers.  Two figures an arm: the mean loss of the last 20 steps, and the loss on problems never trained
on, in eval mode and in the arm's own precision flow.  jet's must be within 1 % of BF16's.  A second BF16 arm takes the
batches in another order: it says how much of a difference is luck.  Attention and head are the same for all arms.

The GPU machine has no network: ``--write-data FILE`` tokenises the problems elsewhere, with reasoning-gym installed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks.gpu_time import device_name
from benchmarks.report import Row, report, versions
from examples.finetune import Arm, batches, draw

STEPS, BATCH, LENGTH, LAST = 200, 16, 40, 20
PROBLEMS = {"terms": 4, "digits": 3}
ARMS = {"bf16": "bf16", "jet": "jet", "bf16, other order": "bf16"}
"""Name → policy."""
WITHIN = 0.01


def write_data(path: Path, folder: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    data = {
        "train": list(batches(tokenizer, STEPS, BATCH, LENGTH, **PROBLEMS)),
        "held out": list(batches(tokenizer, 16, BATCH, LENGTH, **PROBLEMS, seed=1)),
    }
    torch.save(data, path)


@torch.no_grad()
def held_out(arm: Arm, data: list) -> float:
    """Mean loss over the batches."""
    arm.model.eval()
    losses = [arm.model(input_ids=ids, labels=labels, use_cache=False).loss.item() for ids, labels in data]
    arm.model.train()
    return sum(losses) / len(losses)


def train(name: str, policy: str, options: argparse.Namespace, data: dict[str, list]) -> dict:
    arm = Arm(options.model, policy, options.lr, options.device)
    start = held_out(arm, data["held out"])
    order = data["train"] if "other order" not in name else data["train"][::-1]
    for number, batch in enumerate(order, 1):
        loss = arm.step(*batch)
        if number % 20 == 0:
            print(f"{name}, step {number}: loss {loss:.4f}", flush=True)
    if policy != "bf16":
        arm.model.jetgraph.coverage().require()
    return arm.measured | {"held out": held_out(arm, data["held out"]), "held out before": start}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=".cache/smollm2", help="folder of SmolLM2's weights")
    parser.add_argument("--write-data", type=Path, help="only tokenise the problems into this file")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--picture", type=Path, default=Path("out/finetune-gpu.svg"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.write_data:
        write_data(options.write_data, options.model)
        return 0
    if options.data is None:
        parser.error("--data FILE is needed; --write-data FILE makes it")
    data = {
        part: [(ids.to(options.device), labels.to(options.device)) for ids, labels in batches_of_part]
        for part, batches_of_part in torch.load(options.data).items()
    }
    data["train"] = data["train"][: options.steps]
    measured = {name: train(name, policy, options, data) for name, policy in ARMS.items()}
    options.picture.parent.mkdir(parents=True, exist_ok=True)
    draw(measured, options.picture)
    curves = {"versions": versions(), "batch": BATCH, "lr": options.lr, "masters": "float32", "arms": measured}
    options.picture.with_suffix(".json").write_text(json.dumps(curves) + "\n")
    rows = []
    last = {name: sum(m["loss"][-LAST:]) / len(m["loss"][-LAST:]) for name, m in measured.items()}
    for name, arm in measured.items():
        rows.append(Row.fact(f"{name}, mean loss of the last {LAST} steps", last[name]))
        rows.append(Row.fact(f"{name}, held out, before", arm["held out before"]))
        rows.append(Row.fact(f"{name}, held out, after", arm["held out"]))
    for what, value in (("last steps", last), ("held out", {n: m["held out"] for n, m in measured.items()})):
        rows.append(Row.below(f"jet against bf16, {what}", abs(value["jet"] / value["bf16"] - 1), "", WITHIN))
    luck = abs(measured["bf16, other order"]["held out"] / measured["bf16"]["held out"] - 1)
    rows.append(Row.fact("bf16 against itself in another order, held out", luck))
    return report(rows, options.json, device_name() if options.device == "cuda" else options.device)


if __name__ == "__main__":
    sys.exit(main())

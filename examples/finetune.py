"""Fine-tune SmolLM2 on arithmetic under several precision flows: one start, the same data, their losses on one picture.

python examples/finetune.py [MODEL_DIR] [--steps 50] [--policy bf16 --policy jet]   (tens of CPU seconds a step)

Questions and answers come from reasoning-gym; the loss is on the answers.  The masters are FP32: AdamW updates them and
the model holds their BF16 copy, from which both policies start.  BF16 masters would round most updates this small away.
"""

import argparse
import json
import time
from importlib.metadata import version
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import jetgraph
from jetgraph.models import write_smollm2

IGNORED = -100  # no loss on tokens with this label


def batches(tokenizer, num_steps: int, batch: int, length: int, terms: int = 2, digits: int = 2, seed: int = 0):
    """Per step: ids and labels [batch, length], padded on the right; labels name the answer's tokens alone."""
    import reasoning_gym

    options = {"min_terms": 2, "max_terms": terms, "max_digits": digits, "seed": seed}
    sums = reasoning_gym.create_dataset("chain_sum", size=num_steps * batch, **options)
    for step in range(num_steps):
        ids = torch.zeros(batch, length, dtype=torch.long)
        labels = torch.full_like(ids, IGNORED)
        for row in range(batch):
            item = sums[step * batch + row]
            question = tokenizer(item["question"].split(": ")[-1])["input_ids"]
            answer = tokenizer(f" {item['answer']}\n")["input_ids"]
            end = len(question) + len(answer)
            if end > length:
                raise ValueError(f"{item['question']!r} and its answer are {end} tokens; raise --length")
            ids[row, :end] = torch.tensor(question + answer)
            labels[row, len(question) : end] = torch.tensor(answer)
        yield ids, labels


class Arm:
    """One policy: a BF16 model, its FP32 masters, and what was measured so far."""

    def __init__(self, folder: str, policy: str, learning_rate: float, device: str = "cpu") -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).train()
        self.policy, self.model = policy, jetgraph.compile(model, policy)
        self.pairs = [(p.detach().float(), p) for p in model.parameters()]  # master, what the model computes with
        self.optimizer = torch.optim.AdamW([m for m, _ in self.pairs], lr=learning_rate, weight_decay=0.0)
        self.measured = {"loss": [], "seconds": []}

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> float:
        start = time.perf_counter()
        loss = self.model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        for master, parameter in self.pairs:
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in self.pairs:
                parameter.copy_(master)
        self.measured["loss"].append(loss.item())
        self.measured["seconds"].append(time.perf_counter() - start)
        return loss.item()


def draw(measured: dict, path: Path) -> None:
    figure, axes = plt.subplots(num="losses", clear=True, figsize=(7, 3.6), layout="constrained")
    for policy, arm in measured.items():
        axes.plot(range(1, len(arm["loss"]) + 1), arm["loss"], label=policy)
    axes.set(xlabel="step", ylabel="loss on the answers", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    parser.add_argument("--policy", action="append", help="repeat for several; default bf16 and jet")
    for name, default in (("steps", 50), ("batch", 5), ("length", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-5)
    parser.add_argument("--out", type=Path, default=Path("out/finetune"), help="writes OUT.json and OUT.svg")
    o = parser.parse_args()
    folder = o.model or write_smollm2(".cache/smollm2")
    arms = [Arm(folder, policy, o.lr) for policy in o.policy or ["bf16", "jet"]]
    o.out.parent.mkdir(parents=True, exist_ok=True)
    versions = {name: version(name) for name in ("torch", "transformers", "reasoning-gym")}
    settings = {name: getattr(o, name) for name in ("batch", "length", "lr")} | {"masters": "float32", "device": "cpu"}
    for step, data in enumerate(batches(AutoTokenizer.from_pretrained(folder), o.steps, o.batch, o.length), 1):
        print(f"step {step:3}", *(f"{arm.policy} {arm.step(*data):.4f}" for arm in arms), sep="   ", flush=True)
        measured = {arm.policy: arm.measured for arm in arms}
        o.out.with_suffix(".json").write_text(
            json.dumps({**settings, "versions": versions, "arms": measured}, indent=1) + "\n"
        )
        draw(measured, o.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()

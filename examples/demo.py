"""`make demo`: the main job on a real model with a real engine, on CPU.

SmolLM2-135M-Instruct is trained one step under each policy and rolled out by vLLM; each runs in its own process.  Both
sides' graphs are captured as they execute, replayed bit for bit, and verified.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from jetgraph.extract import expected_rollout
from jetgraph.graph import PrecisionGraph
from jetgraph.models import write_smollm2
from jetgraph.modes import THREE_MODES, demo_prompts, run_modes
from jetgraph.pair import verify_files
from jetgraph.show import write_page
from jetgraph.verify.checker import main as check

CACHE, OUT = Path(".cache"), Path("out")
console = Console(highlight=False, width=120)
start = time.perf_counter()


def say(text: str) -> None:
    console.print(f"[dim]{time.perf_counter() - start:5.0f} s[/dim]  {text.replace('[', chr(92) + '[')}")


def main() -> int:
    say("SmolLM2-135M-Instruct: 30 layers, hidden 576 = 4.5 x 128, 9 heads, 3 KV heads, tied embeddings")
    model = write_smollm2(CACHE / "smollm2")
    reports = {
        r.mode.name: r for r in run_modes(model, THREE_MODES, demo_prompts(model, 4), OUT, max_tokens=20, say=say)
    }
    jet, naive = reports["jet"], reports["bf16_train_fp8_rollout"]

    title = "\n|Δlogprob| of sampled and prompt tokens, engine against training's forward"
    table = Table(title=title, title_justify="left")
    for column in ("mode", "tokens", "exactly 0", "mean", "max", "k3", "verdict", "bitwise", "root faults"):
        table.add_column(column, no_wrap=True)
    for name, report in reports.items():
        m, result = report.mismatch, report.result
        faults = f"{len(result.faults)} ({len(result.folded)} lines)" if result.faults else "–"
        row = (str(m.num_tokens), f"{m.fraction_exact:.1%}", f"{m.mean:.2g}", f"{m.max:.2g}", f"{m.k3:.1e}")
        table.add_row(name, *row, str(result.verdict), "yes" if result.bitwise else "no", faults)
    console.print(table)

    console.print("\nwhere bf16_train_fp8_rollout differs (the first lines of `jetgraph verify`):")
    console.print("\n".join(naive.result.text().splitlines()[:9]), markup=False, style="dim")
    control = verify_files(jet.train, reports["bf16"].infer)
    console.print(f"\njet training against the live BF16 engine: {control.verdict}, {len(control.faults)} root faults")

    train, infer = PrecisionGraph.load(jet.train), PrecisionGraph.load(jet.infer)
    forward = {k: i for k, i in train.outputs.items() if not k.startswith("grad.")}
    trainer = jet.trainer
    print()
    print_facts(
        {
            "compile time": f"{trainer.compile_seconds:.1f} s, {trainer.num_compiles} compile for 30 equal layers",
            "G_train": f"{size(train)}, of which forward {size(train.restrict(forward))}",
            "G_infer": size(infer),
            "replayed bit for bit": " + ".join(str(len(g.meta["replay"]["cases"])) for g in (train, infer)) + " cases",
            "digest of G_infer": infer.semantic_digest,
            "expected from G_train": expected_rollout(train).semantic_digest,
        }
    )
    if jet.result.certificate is None:
        console.print(jet.result.text(), markup=False)
        return 1
    certificate = OUT / "certificate.json"
    jet.result.certificate.save(certificate)
    print_facts({"certificate": str(certificate)})
    status = check([str(certificate), str(jet.train), str(jet.infer)])
    page = write_page(OUT / "jet.html", train, infer)
    write_page(OUT / "bf16_train_fp8_rollout.html", PrecisionGraph.load(naive.train), PrecisionGraph.load(naive.infer))
    print_facts({"pictures": f"{page}, {OUT / 'bf16_train_fp8_rollout.html'}"})
    say("done")
    exact = jet.mismatch.num_exact == jet.mismatch.num_tokens
    return status if exact and jet.result.bitwise and str(naive.result.verdict) == "VIOLATED" else 1


def size(graph: PrecisionGraph) -> str:
    return f"{len(graph.nodes)} nodes, {graph.num_edges} edges"


def print_facts(facts: dict[str, str]) -> None:
    for name, value in facts.items():
        console.print(f"{name:24} {value}", markup=False)


if __name__ == "__main__":
    sys.exit(main())

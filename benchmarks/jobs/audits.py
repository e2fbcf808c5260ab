"""Live engines against the annotation that they should hold:  python -m benchmarks.jobs.audits MODEL WORK

MODEL is a BF16 folder.  Audited are our engine on what `jetgraph export` writes, which must equal the policy as a set
of facts, and stock vLLM in the settings that training can follow, on a checkpoint without a word of us: there no fact
of a linear that can be read may be another, and facts that its tensors do not show are counted.  How stock norms and
rotary embeddings round is not in the annotation; it is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from jetgraph_vllm import stock_settings
from rich.console import Console
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: F401  (two threads that import it at once break it)

from benchmarks.arms import cache_options
from benchmarks.gpu_time import device_name
from benchmarks.report import Row, report, save
from jetgraph.audit import Audit
from jetgraph.engines import get_engine
from jetgraph.export import export_checkpoint
from jetgraph.followed import get_followed
from jetgraph.policy import get_policy

FOLLOWED = "vllm-stock"
LINEAR = ("weight", "activation")
"""Operands that a policy speaks of."""
ARMS = ("ours", "stock")


def audited(arm: str, model: Path, work: Path, policy: str) -> Audit:
    device, options = "cpu", {}
    if torch.cuda.is_available():
        device, options = "cuda", cache_options(model, 2048)
    engine = get_engine("vllm")
    if arm == "ours":
        folder = export_checkpoint(model, work / "audited", policy, device=device)
        return engine.audit(folder, get_policy(policy), options)
    folder = export_checkpoint(model, work / "audited-stock", policy, engine=FOLLOWED, device=device)
    options |= {"compilation_config": stock_settings.COMPILATION} if device == "cuda" else {"enforce_eager": True}
    return engine.audit(folder, get_followed(FOLLOWED).policy(get_policy(policy)), options)


def rows(arm: str, audit: Audit) -> list[Row]:
    facts = sum(1 for row in audit.rows for _ in row.facts())
    differences = [d for d in audit.differences if arm == "ours" or d.operand in LINEAR]
    different = sum(len(d.layers) for d in differences if not d.unknown)
    unknown = sum(len(d.layers) for d in differences if d.unknown)
    return [
        Row.fact(f"{arm}: facts read", facts),
        Row(f"{arm}: facts that differ from {audit.policy}", different, "", "= 0", different == 0),
        Row(f"{arm}: facts that could not be read", unknown, "", *(("= 0", unknown == 0) if arm == "ours" else ())),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("work", type=Path, help="exported checkpoints go there")
    parser.add_argument("--json", type=Path, help="where the rows go; the audits themselves lie beside it")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--policy", default="jet")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    os.environ |= stock_settings.ENVIRONMENT  # ours does not look at it
    found: dict[str, Any] = {}
    failed = []
    with ThreadPoolExecutor(2 if torch.cuda.is_available() else 1) as pool:
        for arm in options.arms:
            found[arm] = pool.submit(audited, arm, options.model, options.work, options.policy)
    device = device_name() if torch.cuda.is_available() else "cpu"
    table: list[Row] = []
    for arm, waiting in found.items():
        try:
            audit = waiting.result()
        except (RuntimeError, ValueError) as error:
            print(f"{arm}: left out: {type(error).__name__}: {error}", flush=True)
            failed.append(arm)
            continue
        Console(width=160).print(audit.view())
        table += rows(arm, audit)
        if options.json is not None:
            path = options.json.with_stem(f"{options.json.stem}-{arm}")
            path.write_text(json.dumps(audit.to_plain(), indent=1, ensure_ascii=False) + "\n")
        save(table, options.json, device)
    return max(report(table, options.json, device), int(bool(failed)))


if __name__ == "__main__":
    sys.exit(main())

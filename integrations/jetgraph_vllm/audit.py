"""`jetgraph audit` for vLLM: every layer of a loaded engine, ours or anybody's, against a policy.

    audit(llm)                      # a live `vllm.LLM`: the table of what it holds
    audit(llm, "jet").equal         # and whether that is policy jet's annotation, as a set of facts

``python -m jetgraph_vllm.audit JOB.json`` does it in a process of its own; the job is
``{"model": folder, "policy": plain policy or null, "llm": {keywords of vllm.LLM}, "out": file}``.
The engine is started as a user starts it, with its own defaults: no plugin setting, no compile backend of ours.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from jetgraph.audit import Audit, Row, compare
from jetgraph.model_linears import linears_of_config
from jetgraph.policy import Policy, get_policy
from jetgraph_vllm import stock_facts
from jetgraph_vllm.audit_advice import adviser
from jetgraph_vllm.audit_layers import other_rows
from jetgraph_vllm.audit_linears import LinearFacts, captured_linears, read_linears
from jetgraph_vllm.audit_precision import linear_row
from jetgraph_vllm.stock_format import StockCapture


def audit(llm: Any, policy: str | Policy | None = None, linears: Sequence[str] | None = None) -> Audit:
    """Read a live engine, on every rank; compare with ``policy`` if one is given.

    Args:
        llm: a `vllm.LLM` (or a `jetgraph_vllm.engine.Engine`).
        linears: FQNs of all linears of the model; read from the engine's model folder if not given.

    Raises:
        ValueError: the policy does not exist, or the model folder has no config that says which linears there are.
    """
    llm = getattr(llm, "llm", llm)
    config = llm.llm_engine.vllm_config
    settings = stock_facts.settings(config)
    rows = merge_ranks([rank_rows(*read, settings) for read in llm.apply_model(read_model)])
    if policy is None:
        return Audit("vllm", rows, settings)
    if linears is None:
        linears = list(linears_of_config(config.model_config.model).shapes)
    return against("vllm", rows, settings, get_policy(policy), linears)


def audit_capture(capture: StockCapture, policy: str | Policy, linears: Sequence[str] | None = None) -> Audit:
    """The same from a stored capture, which holds the facts of its engine's linears and nothing else."""
    rows = tuple(linear_row(facts, capture.settings) for facts in captured_linears(capture.linears))
    return against(capture.label, rows, capture.settings, get_policy(policy), linears or [row.name for row in rows])


def against(
    label: str, rows: tuple[Row, ...], settings: dict[str, Any], policy: Policy, linears: Sequence[str]
) -> Audit:
    return Audit(
        label, rows, settings, policy.name, compare(policy, linears, rows, adviser(settings, policy.name))
    )  # fmt: skip


def read_model(model: torch.nn.Module) -> tuple[list[LinearFacts], list[Row]]:
    """Runs in each worker; returns plain data."""
    return read_linears(model), list(other_rows(model))


def rank_rows(linears: list[LinearFacts], others: list[Row], settings: dict[str, Any]) -> list[Row]:
    return [*(linear_row(facts, settings) for facts in linears), *others]


def merge_ranks(ranks: list[list[Row]]) -> tuple[Row, ...]:
    """The first rank's rows, and those of others that say something else of the same layer."""
    first, *rest = ranks
    seen = {fact for row in first for fact in row.facts()}
    return (*first, *(row for rank in rest for row in rank if not seen.issuperset(row.facts())))


# ------------------------------------------------------------------------------------------------- its own process

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
OPTIONS: dict[str, Any] = {"dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 8}
"""Of `vllm.LLM`, where the job says nothing: a small cache, because nothing is generated."""


def main(arguments: list[str]) -> int:
    job = json.loads(Path(arguments[0]).read_text())
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import jetgraph_vllm

    jetgraph_vllm.register()
    import vllm

    print(f"jetgraph_vllm: vLLM {vllm.__version__} loads {job['model']}, as to serve it", file=sys.stderr, flush=True)
    llm = vllm.LLM(model=job["model"], **{**OPTIONS, **job.get("llm", {})})
    policy = None if job.get("policy") is None else Policy.from_plain(job["policy"])
    Path(job["out"]).write_text(json.dumps(audit(llm, policy).to_plain(), ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

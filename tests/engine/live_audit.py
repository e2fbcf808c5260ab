"""Run by `test_audit`: two live engines in one process, ours and stock BF16, audited as they are loaded.

python -m tests.engine.live_audit BF16_FOLDER EXPORTED_FOLDER OUT.json
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jetgraph_vllm
import torch
from jetgraph_vllm.audit import ENVIRONMENT, audit
from jetgraph_vllm.sync import attach
from transformers import AutoModelForCausalLM

from jetgraph.export import policy_of_folder
from jetgraph.sync import SyncRefused, publish

os.environ.update(ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1"})

from vllm import LLM, SamplingParams

OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
}


def down_proj(llm: Any) -> Any:
    core = llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner.get_model().model.layers[0].mlp.down_proj


def main(bf16: str, exported: str, out: str) -> None:
    jetgraph_vllm.register()
    found: dict[str, Any] = {}
    ours = LLM(model=exported, **OPTIONS)
    for policy in ("jet", "bf16", "jet_ue8m0"):
        found[f"ours {policy}"] = audit(ours, policy).to_plain()
    found["ours declared"] = audit(ours, policy_of_folder(Path(exported))).to_plain()
    found["table only"] = audit(ours).to_plain()
    found["ours rescaled"] = rescaled(ours)
    stock = LLM(model=bf16, **OPTIONS)
    for policy in ("jet", "bf16"):
        found[f"stock {policy}"] = audit(stock, policy).to_plain()
    found["stock sync"] = synced(stock, bf16)
    Path(out).write_text(json.dumps(found))


def synced(llm: Any, folder: str) -> dict[str, Any]:
    """A stock BF16 engine takes weights too where its kernels read them in place, and is refused where they do not."""
    module = down_proj(llm)
    keep, copy = module.cpu_linear, module.weight.data.clone()
    if not copy.numel() or getattr(getattr(keep, "__code__", None), "co_freevars", ()):  # this CPU has them packed
        return {"packed by vLLM": True, "refused": raised(lambda: attach(llm))}
    module.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, copy, bias)  # as packing does
    refused = raised(lambda: attach(llm))
    module.cpu_linear = keep
    trainer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.mul_(1.25)
    live, before = attach(llm), sampled(llm)
    live.update(publish(trainer, 1, "bf16"))
    slots = live.receiver.store.slots
    equal = [torch.equal(slots[name].live, parameter) for name, parameter in trainer.named_parameters()]
    return {"refused": refused, "equal": equal, "slots": len(slots), "before": before, "after": sampled(llm)}


def sampled(llm: Any) -> list[Any]:
    """The engine's own logprobs, and the versions of the tokens."""
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0, detokenize=False)
    out = llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}], sampling, use_tqdm=False)[0].outputs[0]
    logprobs = [entry[t].logprob for entry, t in zip(out.logprobs, out.token_ids, strict=True)]
    return [logprobs, list(out.weight_versions)]


def raised(action: Any) -> str:
    try:
        action()
    except SyncRefused as error:
        return str(error)
    return ""


def rescaled(llm: Any) -> dict[str, Any]:
    """[Q9] Codes that reach 240 only: made by another qmax than the method declares."""
    weight = down_proj(llm).weight.data
    keep = weight.clone()
    weight.copy_(weight.float().clamp(-240, 240).to(torch.float8_e4m3fn))
    try:
        return audit(llm, "jet").to_plain()
    finally:
        weight.copy_(keep)


if __name__ == "__main__":
    main(*sys.argv[1:])

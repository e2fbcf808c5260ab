"""Run by `test_nothing_set`: what anybody does, `vllm.LLM(folder)`, with a worker process of vLLM's own."""

from __future__ import annotations

import json
import sys


def main(folder: str, asked: str, out: str) -> None:
    from vllm import LLM, SamplingParams

    asked = json.loads(asked)
    # a random model has no tokenizer; by default a CPU engine asks for 92 % of the machine's memory to be free
    llm = LLM(folder, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=4, gpu_memory_utilization=0.2)
    client = type(llm.llm_engine.engine_core).__name__
    sampling = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False)
        for seed in asked["seeds"]
    ]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in asked["prompts"]], sampling, use_tqdm=False)
    found = [o.outputs[0] for o in outputs]
    logprobs = [[e[t].logprob for e, t in zip(o.logprobs, o.token_ids, strict=True)] for o in found]
    with open(out, "w") as file:
        json.dump({"client": client, "tokens": [list(o.token_ids) for o in found], "logprobs": logprobs}, file)


if __name__ == "__main__":  # vLLM starts its worker by spawning, which imports this file again
    main(*sys.argv[1:])

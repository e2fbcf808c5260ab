"""What is asked and how answers are rewarded: chain sums of reasoning-gym, or random prompts for a random model.

    problems = Problems.load("problems.json")       # made elsewhere, by `chain_sums(...).save(...)`
    prompts, answers = problems.take(step, 16)
    problems.reward(token_ids, answers[0])

Prompts are token ids, so that whoever trains needs the model's tokenizer for decoding answers alone, and no
reasoning-gym.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

INSTRUCTIONS = {
    "short": "Answer with the number only.",
    "long": "Think step by step, and write the result as the last number.",
}
"""``short`` answers end after a few tokens; ``long`` ones fill what they are given."""
DRAWS = 8
WRONG_NUMBER = 0.1
"""Reward of an answer that has a number, but not the right one."""
LETTERS = 7
"""Rewards of a random model: multiples of 1/6, as good as random, so that advantages are not all zero."""


@dataclass(frozen=True)
class Problems:
    """``prompts[i]`` are token ids, ``answers[i]`` the right number; a model stops at any of ``stop``.

    ``tokenizer`` is a folder, or None for a random model, whose answers are no text.
    """

    prompts: list[list[int]]
    answers: list[str]
    stop: list[int]
    tokenizer: str | None = None

    def take(self, step: int, count: int) -> tuple[list[list[int]], list[str]]:
        """The ``count`` problems of step 0, 1, …; no problem comes twice.

        Raises:
            ValueError: there are not so many.
        """
        start = step * count
        if start + count > len(self.prompts):
            raise ValueError(
                f"step {step} needs problems {start} to {start + count - 1} and there are {len(self.prompts)}: write "
                "more, or train fewer steps"
            )
        return self.prompts[start : start + count], self.answers[start : start + count]

    def reward(self, tokens: list[int], answer: str) -> float:
        if self.tokenizer is None:
            return sum(tokens) % LETTERS / (LETTERS - 1)
        return number_reward(self._decoder.decode(tokens, skip_special_tokens=True), answer)

    @cached_property
    def _decoder(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.tokenizer)

    def save(self, path: Path) -> None:
        """Everything but the tokenizer's folder, which another machine has elsewhere."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self) | {"tokenizer": None}) + "\n")

    @classmethod
    def load(cls, path: Path, tokenizer: str | None) -> Problems:
        return cls(**json.loads(path.read_text()) | {"tokenizer": tokenizer})


def number_reward(text: str, answer: str) -> float:
    """1 if the last integer of ``text`` is ``answer``, `WRONG_NUMBER` if there is an integer at all, else 0."""
    numbers = re.findall(r"-?\d[\d,]*", text)
    if not numbers:
        return 0.0
    return 1.0 if numbers[-1].replace(",", "") == answer.strip() else WRONG_NUMBER


def chain_sums(folder: str, count: int, *, terms: int, digits: int, style: str, seed: int = 0) -> Problems:
    """``count`` different chat prompts for the tokenizer in ``folder``; needs reasoning-gym.

    Raises:
        ValueError: there are not so many sums of this size among `DRAWS` times as many draws.
    """
    import reasoning_gym
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = GenerationConfig.from_pretrained(folder).eos_token_id  # the tokenizer's own may be another one
    sums = reasoning_gym.create_dataset(
        "chain_sum", size=DRAWS * count, seed=seed, min_terms=2, max_terms=terms, max_digits=digits
    )
    found: dict[str, str] = {}
    for item in sums:
        found.setdefault(item["question"], item["answer"])
        if len(found) == count:
            break
    else:
        raise ValueError(f"only {len(found)} different sums for {count} problems: allow more --terms or --digits")
    prompts = []
    for question in found:
        chat = [{"role": "user", "content": f"{question} {INSTRUCTIONS[style]}"}]
        prompts.append(list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)))
    return Problems(prompts, list(found.values()), ends if isinstance(ends, list) else [ends], folder)


def random_problems(vocabulary: int, count: int, length: int) -> Problems:
    """Random prompts of ``length`` tokens; nothing stops an answer."""
    import torch

    draw = torch.Generator().manual_seed(5)
    return Problems(
        torch.randint(0, vocabulary, (count, length), generator=draw).tolist(), [""] * count, [], tokenizer=None
    )

"""Chain sums from reasoning-gym as VeRL's parquet rows, and the rule that scores an answer.

python examples/rl/chain_sum.py OUT [--train 64] [--test 16] [--terms 3]
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

SOURCE = "reasoning_gym/chain_sum"
INSTRUCTION = "Answer with the number only."
FILES = "train.parquet", "test.parquet"


def rows(count: int, seed: int, split: str, terms: int = 3) -> list[dict]:
    """``count`` sums of 2 to ``terms`` numbers with their right answers; the same for the same seed."""
    import reasoning_gym

    tasks = reasoning_gym.create_dataset("chain_sum", size=count, seed=seed, min_terms=2, max_terms=terms, max_digits=2)
    return [
        {
            "data_source": SOURCE,
            "prompt": [{"role": "user", "content": f"{task['question']} {INSTRUCTION}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": task["answer"]},
            "extra_info": {"index": index, "split": split},
        }
        for index, task in enumerate(tasks)
    ]


def write(folder: Path, train: int, test: int, terms: int = 3) -> tuple[Path, Path]:
    """Write `FILES`."""
    import pandas

    folder.mkdir(parents=True, exist_ok=True)
    paths = folder / FILES[0], folder / FILES[1]
    for path, count, seed in zip(paths, (train, test), (0, 1), strict=True):
        pandas.DataFrame(rows(count, seed, path.stem, terms)).to_parquet(path)
    return paths


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """1 if the first integer of the answer is the right one, 0.1 if there is an integer at all, else 0."""
    found = re.search(r"-?\d[\d,]*", solution_str)
    if found is None:
        return 0.0
    return 1.0 if found[0].replace(",", "") == str(ground_truth).strip() else 0.1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--train", type=int, default=64)
    parser.add_argument("--test", type=int, default=16)
    parser.add_argument("--terms", type=int, default=3, help="at most so many numbers a sum")
    given = parser.parse_args()
    print(*write(given.out, given.train, given.test, given.terms))

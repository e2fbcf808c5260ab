"""What a run has learned from, a line a step, so that it goes on anywhere: on another machine, or after a kill −9.

A trainer with its optimizer is 12 bytes a parameter, 1.6 GB for SmolLM2.  Its updates are made of the answers and their
advantages, a byte or two a token.  To go on is to take the same updates again; where the trainer's kernels add in a
changing order the weights come out alike, not equal, so each line holds the norm of its gradient to compare with.
"""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path


@dataclass(frozen=True)
class Lesson:
    """One update: what was sampled for each prompt of the step, and how much better than its group it was."""

    step: int
    tokens: list[list[int]]
    advantages: list[float]
    grad_norm: float

    def to_line(self) -> str:
        flat = array("i", [token for answer in self.tokens for token in answer])
        fields = {
            "step": self.step,
            "advantages": self.advantages,
            "grad_norm": self.grad_norm,
            "lengths": list(map(len, self.tokens)),
            "tokens": base64.b64encode(zlib.compress(flat.tobytes(), 9)).decode(),
        }
        return json.dumps(fields) + "\n"

    @classmethod
    def of_line(cls, line: str) -> Lesson:
        """
        Raises:
            ValueError, KeyError: it is no whole line.
        """
        fields = json.loads(line)
        flat = array("i")
        flat.frombytes(zlib.decompress(base64.b64decode(fields["tokens"])))
        ends = accumulate(fields["lengths"], initial=0)
        tokens = [flat[start:end].tolist() for start, end in pairwise(ends)]
        return cls(fields["step"], tokens, fields["advantages"], fields["grad_norm"])


def read(path: Path) -> list[Lesson]:
    """Steps 1, 2, … as far as whole lines go; a process that was stopped may have left half a one."""
    lessons: list[Lesson] = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            lesson = Lesson.of_line(line)
        except (ValueError, KeyError, zlib.error):
            break
        if lesson.step != len(lessons) + 1:
            break
        lessons.append(lesson)
    return lessons


def write(path: Path, lessons: Sequence[Lesson]) -> None:
    """These and no others."""
    path.write_text("".join(lesson.to_line() for lesson in lessons))

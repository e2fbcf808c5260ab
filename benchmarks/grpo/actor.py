"""The trainer of the loop: a compiled model with FP32 masters, which scores answers and learns from them.

One update a batch of answers, so the policy that is differentiated is the one that is scored and PPO's ratio is 1:
there is nothing to clip, and GRPO's gradient is the mean over tokens of −advantage · ∇ log p.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import jetgraph
from jetgraph.trainer import token_logprobs

MULTIPLE = 64
"""Rows are padded to a multiple of so many tokens: fewer shapes for kernels to be chosen for."""
MAX_GRAD_NORM = 1.0


@dataclass(frozen=True)
class Answer:
    """A finished request: prompt and sampled tokens, and the engine's own logprob of each sampled token."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class Actor:
    """``policy`` and ``provider`` as of `jetgraph.compile`; ``micro_batch`` is the most tokens of one forward.

    AdamW (0.9, 0.999; no weight decay) steps FP32 masters; the model holds their BF16 copy, which every policy reads.
    """

    def __init__(
        self, folder: str, policy: str, provider: str, *, learning_rate: float, micro_batch: int, device: str
    ) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).train()
        self.model = jetgraph.compile(model, policy, provider=provider)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._first = [p.detach().clone() for p in self.parameters]
        self.micro_batch = micro_batch
        self._learning_rate, self._device = learning_rate, torch.device(device)
        self.restart()

    def restart(self) -> None:
        """The folder's weights and a fresh optimizer."""
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self._first)
        self.masters = [p.detach().float() for p in self.parameters]
        self._optimizer = torch.optim.AdamW(
            self.masters, lr=self._learning_rate, weight_decay=0.0, fused=self._device.type == "cuda"
        )

    def save(self, path: Path, steps: int) -> None:
        """What `resume` needs to go on after ``steps`` steps; the file is there once it is whole."""
        part = path.with_suffix(".part")
        torch.save({"steps": steps, "masters": self.masters, "optimizer": self._optimizer.state_dict()}, part)
        part.replace(path)

    def resume(self, path: Path) -> int:
        """Go on from what `save` wrote; how many steps lie behind it."""
        self.restart()
        state = torch.load(path, map_location=self._device, weights_only=True)
        self._optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            torch._foreach_copy_(self.masters, state["masters"])
            torch._foreach_copy_(self.parameters, self.masters)
        return state["steps"]

    @torch.no_grad()
    def score(self, answers: Sequence[Answer]) -> list[list[float]]:
        """The trainer's logprob of each sampled token, by the forward that it also trains with."""
        scores: list[list[float]] = [[] for _ in answers]
        with self.model.jetgraph.hold_weights():  # quantised once for all micro-batches
            for rows in self._micro_batches(answers):
                logprobs, mask = self._forward([answers[row] for row in rows])
                for row, values, kept in zip(rows, logprobs, mask, strict=True):
                    scores[row] = values[kept].tolist()
        return scores

    def learn(self, answers: Sequence[Answer], advantages: Sequence[float]) -> float:
        """One step of the optimizer; returns the norm of the gradient before it is clipped."""
        num_tokens = sum(len(answer.tokens) for answer in answers)
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        with self.model.jetgraph.hold_weights():
            for rows in self._micro_batches(answers):
                logprobs, mask = self._forward([answers[row] for row in rows])
                weights = torch.tensor([advantages[row] for row in rows], device=self._device)
                loss = -torch.where(mask, logprobs * weights[:, None], 0.0).sum() / num_tokens
                loss.backward()
                self._collect_gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.masters, MAX_GRAD_NORM)
        self._optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        return norm.item()

    def _collect_gradients(self) -> None:
        """Add BF16 gradients to the masters' in FP32: sums over micro-batches lose nothing."""
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            if parameter.grad is not None:
                master.grad.add_(parameter.grad)  # type: ignore[union-attr]
                parameter.grad = None

    def _micro_batches(self, answers: Sequence[Answer]) -> Iterator[list[int]]:
        """Indices of answers of similar length, at most `micro_batch` tokens with padding (or one answer)."""
        lengths = [_padded(len(answer.prompt) + len(answer.tokens)) for answer in answers]
        rows: list[int] = []
        for row in sorted(range(len(answers)), key=lengths.__getitem__):
            if rows and lengths[row] * (len(rows) + 1) > self.micro_batch:
                yield rows
                rows = []
            rows.append(row)
        if rows:
            yield rows

    def _forward(self, answers: Sequence[Answer]) -> tuple[Tensor, Tensor]:
        """Logprobs of each row's next tokens [B, S − 1] FP32, and which of them were sampled [B, S − 1].

        Rows are padded on the right, where causal attention lets nobody look, so there is no mask to apply.
        """
        length = _padded(max(len(answer.prompt) + len(answer.tokens) for answer in answers))
        ids = torch.zeros(len(answers), length, dtype=torch.long)
        sampled = torch.zeros(len(answers), length, dtype=torch.bool)
        for row, answer in enumerate(answers):
            end = len(answer.prompt) + len(answer.tokens)
            ids[row, :end] = torch.tensor(answer.prompt + answer.tokens)
            sampled[row, len(answer.prompt) : end] = True
        ids, sampled = ids.to(self._device), sampled.to(self._device)
        logits = self.model(input_ids=ids, use_cache=False).logits
        return token_logprobs(logits[:, :-1], ids[:, 1:]), sampled[:, 1:]


def _padded(length: int) -> int:
    return -(-length // MULTIPLE) * MULTIPLE


def group_advantages(rewards: Sequence[float], group: int) -> list[float]:
    """GRPO: (reward − mean) / (standard deviation + 1e-6) within each ``group`` of answers to one prompt.

    https://arxiv.org/abs/2402.03300, section 4.1.2; a group whose rewards are all equal teaches nothing.
    """
    table = torch.tensor(rewards, dtype=torch.float64).view(-1, group)
    spread = table.std(1, keepdim=True)
    return ((table - table.mean(1, keepdim=True)) / (spread + 1e-6)).flatten().tolist()


def repeat(prompts: Sequence[list[int]], group: int) -> list[list[int]]:
    """Each prompt ``group`` times, neighbours: the order that `group_advantages` expects."""
    return list(itertools.chain.from_iterable([prompt] * group for prompt in prompts))

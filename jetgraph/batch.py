"""How the tokens of a captured step lie in memory, and the proof that its masks are causal attention.

Terms speak of a token and its own sequence's prefix.  A captured step speaks of rows: several sequences side by side
[B, S], several packed into one row, rows padded on either side.  What connects the two is evidence: mask tensors count
as causal if their recorded *values* are what the batch's own description says they must be.

B rows, S positions, T = B·S tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jetgraph.lift.lifter import SequenceMask, SequenceStarts


@dataclass(frozen=True)
class Batch:
    """The arrangement of a run's tokens, for kernels that look across tokens.

    ``first`` [B, S] and ``masks`` (by window) are the tensors that the run gave to attention, if it gave any.
    """

    num_rows: int = 1
    first: Tensor | None = None
    masks: Mapping[int, Tensor] = field(default_factory=dict)

    def token_axes(self, num_tokens: int) -> tuple[int, ...]:
        """The sizes of the token axes as a tensor of the run has them: rows and positions, or the longer of the two."""
        return tuple(n for n in (self.num_rows, num_tokens // self.num_rows) if n != 1) or (num_tokens,)


ONE_SEQUENCE = Batch()


@dataclass(frozen=True)
class Sequences:
    """Where the sequences of a batch are, by the batch's own description.

    ``starts`` [B, S] int64: the position in the row at which a token's sequence starts.  ``real`` [B, S] bool: the
    tokens that are no padding; nothing is claimed about the others.
    """

    starts: Tensor
    real: Tensor

    @classmethod
    def of(cls, positions: Tensor, real: Tensor) -> Sequences:
        """A token starts a sequence if nothing real is before it or its position does not follow its neighbour's.

        What is seen is compared on the CPU, wherever the step runs.
        """
        positions, real = positions.cpu(), real.cpu()
        index = torch.arange(positions.shape[1]).expand_as(positions)
        follows = torch.zeros_like(real)
        follows[:, 1:] = (positions[:, 1:] == positions[:, :-1] + 1) & real[:, :-1]
        starts = torch.where(follows, 0, index).cummax(1).values
        return cls(starts, real)

    @property
    def rows_are_sequences(self) -> bool:
        """Each row is one sequence from position 0 on; padding, if any, follows it."""
        return not self.starts[self.real].any()

    def recognise(self, tensor: Tensor) -> SequenceStarts | SequenceMask | None:
        """What this tensor of the captured step is seen to hold, for every token that is no padding; else None."""
        if tensor.ndim == 4 and tensor.stride(1) == 0:  # one mask that torch shows to every head
            tensor = tensor[:, :1]
        shape, tensor = self.starts.shape, tensor.cpu()
        if tensor.dtype is torch.int64 and tensor.shape == shape:
            return SequenceStarts() if torch.equal(tensor[self.real], self.starts[self.real]) else None
        if tensor.ndim == 4 and tensor.shape[1] == 1 and tensor.shape[0] in (1, shape[0]):
            return self._mask(tensor[:, 0]) if tensor.shape[2:] == (shape[1], shape[1]) else None
        return None

    def _mask(self, tensor: Tensor) -> SequenceMask | None:
        """``tensor`` [1 or B, S, S] holds truth values, or 0 and nothing above the lowest finite number."""
        additive = tensor.is_floating_point()
        if not additive and tensor.dtype is not torch.bool:
            return None
        seen = tensor == 0 if additive else tensor
        if additive and (tensor[~seen] > torch.finfo(tensor.dtype).min).any():
            return None
        seen = seen.expand(self.starts.shape[0], -1, -1)[self.real]
        position = torch.arange(self.starts.shape[1])
        query = position.expand_as(self.starts)[self.real][:, None]
        prefix = (position <= query) & (position >= self.starts[self.real][:, None])
        widest = int(seen.sum(1).max())
        for window in (0, widest):
            if torch.equal(seen, prefix & (position > query - window) if window else prefix):
                return SequenceMask(window, additive)
        return None

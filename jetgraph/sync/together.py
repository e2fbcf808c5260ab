"""All tensors of a device in one launch: what an engine waits for during a flip is bytes, not launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

WORD = 8


@dataclass(frozen=True)
class Together:
    """Live tensors of one CUDA device, and the new ones beside them, which must live on as long as this.

    ``names`` are those that qualify: both contiguous on that device, of whole words of 8 bytes.  The rest is copied one
    by one by whoever asks.
    """

    names: tuple[str, ...]
    _table: Tensor
    _sums: Tensor

    @classmethod
    def prepare(cls, live: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Together | None:
        """The table on the device, and both kernels compiled; None where there is no GPU, or nothing qualifies."""
        device = next((t.device for t in live.values() if t.device.type == "cuda"), None)
        if device is None:
            return None
        together = cls.on_device(live, new, device)
        if together is not None:
            together.sums()  # compiles, as the next line does: nothing may be compiled while the engine waits
            Together.on_device({"": torch.zeros_like(together._sums)}, {"": together._sums}, device).copy()  # type: ignore[union-attr]
            torch.cuda.synchronize(device)
        return together

    @classmethod
    def on_device(cls, live: Mapping[str, Tensor], new: Mapping[str, Tensor], device: torch.device) -> Together | None:
        from jetgraph.lowering.triton_copy import CHUNK

        names = tuple(name for name in live if _of_words(live[name], device) and _of_words(new[name], device))
        rows = []
        for index, name in enumerate(names):
            source, target, num_bytes = new[name].data_ptr(), live[name].data_ptr(), live[name].nbytes
            for start in range(0, num_bytes, CHUNK * WORD):
                num_words = min(CHUNK, (num_bytes - start) // WORD)
                rows.append((source + start, target + start, num_words, index))
        if not rows:
            return None
        table = torch.tensor(rows, dtype=torch.int64).to(device)
        return cls(names, table, torch.zeros(len(names), dtype=torch.int64, device=device))

    def copy(self) -> None:
        """The new bytes over the live ones; returns before they are there, like every launch."""
        from jetgraph.lowering.triton_copy import copy_chunks

        copy_chunks(self._table)

    def sums(self) -> dict[str, int]:
        """Σ of each live tensor's words, modulo 2^64, as `torch.sum` of int64 has it."""
        from jetgraph.lowering.triton_copy import add_chunks

        add_chunks(self._table, self._sums.zero_())
        return dict(zip(self.names, self._sums.tolist(), strict=True))


def _of_words(tensor: Tensor, device: torch.device) -> bool:
    whole = tensor.nbytes % WORD == 0 and tensor.data_ptr() % WORD == 0 and tensor.nbytes > 0
    return tensor.device == device and tensor.is_contiguous() and whole

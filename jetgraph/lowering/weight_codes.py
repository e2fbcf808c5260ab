"""Codes of weights, quantised once and shared: by FPROP and DGRAD, by recomputed blocks, by accumulated micro-batches.

    with hold(model.named_parameters()):     # one optimizer step
        for batch in micro_batches:
            model(batch).loss.backward()
    optimizer.step()

Outside of it every forward and every backward quantises its weights afresh, and nothing can be stale.  Inside, codes
are kept for each weight as long as torch says that it has not changed (its version).  Some changes torch does not
count: ``p.data.copy_(…)``, kernels of other libraries.  So at the end every weight that was held is quantised once
more, and one that differs in a bit raises `StaleWeights` — before the gradients are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Codes = tuple[Tensor, Tensor]


class StaleWeights(RuntimeError):
    """A weight changed, unseen by torch, while its codes were held; gradients since then are of both weights."""


@dataclass
class Entry:
    """A weight's codes; ``weight`` shares its memory, not its autograd."""

    weight: Tensor
    version: int
    codes: Codes
    quantize: Callable[[Tensor], Codes]


@dataclass
class Held:
    """What is held now; ``num_quantized`` counts the quantisations that were really made."""

    names: dict[int, str]
    entries: dict[tuple, Entry] = field(default_factory=dict)
    num_quantized: int = 0

    def codes(self, weight: Tensor, arguments: tuple, quantize: Callable[[Tensor], Codes]) -> Codes:
        key = (_storage(weight), weight.storage_offset(), weight.shape, weight.stride(), arguments)
        entry = self.entries.get(key)
        if entry is None or entry.version != weight._version:
            self.num_quantized += 1
            entry = self.entries[key] = Entry(weight.detach(), weight._version, quantize(weight), quantize)
        return entry.codes

    def check(self) -> None:
        """
        Raises:
            StaleWeights: the codes of a weight are not those of its numbers now.
        """
        for (storage, *_), entry in self.entries.items():
            name = self.names.get(storage, f"a weight {list(entry.weight.shape)}")
            if not entry.weight.untyped_storage().nbytes():
                raise StaleWeights(
                    f"{name}: its memory was given back (FSDP2 reshards after forward), so that what was held cannot "
                    "be checked; do not hold weights under FSDP2"
                )
            if entry.version != entry.weight._version:
                continue  # changed after its last use, and torch counted it
            fresh = entry.quantize(entry.weight)
            if not all(torch.equal(_bits(a), _bits(b)) for a, b in zip(entry.codes, fresh, strict=True)):
                raise StaleWeights(
                    f"{name} changed while its codes were held, in a way that torch does not count (p.data, another "
                    "library's kernel); expected the weights of one optimizer step. Change it outside of the block, or "
                    "with an operator of torch under torch.no_grad()"
                )


_active: Held | None = None
"""One for the process: backward of a CUDA graph runs in threads of its own."""


@contextmanager
def hold(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[Held]:
    """Share codes within; ``parameters`` (names and tensors) are for messages.

    Raises:
        RuntimeError: weights are held already.
        StaleWeights: on leaving, a weight changed unseen.
    """
    global _active
    if _active is not None:
        raise RuntimeError("weights are held already; one block is one optimizer step")
    held = _active = Held({_storage(p): name for name, p in parameters if type(p.data) is Tensor})
    try:
        yield held
        held.check()
    finally:
        _active = None


def are_held() -> bool:
    return _active is not None


def codes_of(weight: Tensor, arguments: tuple, quantize: Callable[[Tensor], Codes]) -> Codes:
    """Codes of ``weight`` by ``quantize`` with ``arguments`` (its grid and rule), from what is held if it is there."""
    return quantize(weight) if _active is None else _active.codes(weight, arguments, quantize)


def _storage(tensor: Tensor) -> int:
    return StorageWeakRef(tensor.untyped_storage()).cdata


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int32)

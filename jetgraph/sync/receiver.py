"""The engine's end: stage everything, verify everything, then write in place between two steps, or change nothing.

A transaction moves no live byte before its last check has passed.  The old bytes are copied while they still serve, so
a flip that fails half-way is taken back, and the flip itself, in which no step can run, is one copy and one sum of what
it wrote; on a GPU each is one launch (`Together`).  Addresses never change (CUDA graphs and merged weights hold them),
and the version is one assignment, after all bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch
from torch import Tensor

from jetgraph.digest import tensor_digests
from jetgraph.sync.manifest import Manifest, SyncRefused, TensorSpec, WeightsLost, check_pairs, some
from jetgraph.sync.store import CommitReport, Slot, ValueReport, WeightStore
from jetgraph.sync.together import Together


class Receiver:
    """One engine's end of weight sync.  The weights found are version ``version``; later ones must be greater."""

    def __init__(self, store: WeightStore, version: int = 0, staging: torch.device | str | None = None) -> None:
        self.store = store
        self.staging = staging
        """Where updates wait, and the bytes that they replace: None is each tensor's own device; "cpu" spares the GPU
        two more copies of the model."""
        self.addresses = {name: slot.live.data_ptr() for name, slot in store.slots.items()}
        self.manifest = self._read(version, "as loaded")
        self.serving = True
        self.asleep = 0
        """The level at which the engine sleeps; `jetgraph.sync.sleeping.SleepGuard` keeps it."""
        self._open: Transaction | None = None

    @property
    def version(self) -> int:
        """Of the weights that serve now."""
        return self.manifest.version

    def begin(self, version: int) -> Transaction:
        """Open a transaction.  One for a newer version replaces one that is still open: its trainer is gone.

        A version whose weights were lost may be sent again; its bytes must be the same.

        Raises:
            SyncRefused: ``version`` is served already or is not newer than the open transaction's.
        """
        if version < self.version or (version == self.version and self.serving):
            raise SyncRefused(
                f"version {version} comes after version {self.version} is served: a repeated or late update; send "
                f"{self.version + 1} or more"
            )
        if self._open is not None and version <= self._open.version:
            raise SyncRefused(
                f"version {version} begins while version {self._open.version} is being sent: abort that one, or send "
                f"{self._open.version + 1} or more"
            )
        if self._open is not None:
            self._open.abort()
        self._open = Transaction(self, version)
        return self._open

    def require_serving(self) -> None:
        """Raises:
        WeightsLost: the weights are of no version, or not in memory.
        """
        if self.asleep:
            raise WeightsLost(f"the engine sleeps at level {self.asleep}: wake it before generating")
        if not self.serving:
            raise WeightsLost(
                f"the engine's weights are not those of version {self.version} any more: send a complete update before "
                "generating"
            )

    def lose_weights(self) -> None:
        """The live bytes are of no version (sleep level 2 discards them): nothing is served until a complete update."""
        self.serving = False

    def require_values(self) -> ValueReport:
        """`verify_values`, and an engine whose bytes are not those of its version stops serving.

        Raises:
            WeightsLost: see `ValueReport.require`.
        """
        report = self.verify_values()
        if report.differing or report.moved:
            self.lose_weights()
        return report.require()

    def verify_values(self) -> ValueReport:
        """Read every live tensor again and compare with the manifest of the version served."""
        found = self._read(self.version, self.manifest.policy).tensors
        addresses = {name: slot.live.data_ptr() for name, slot in self.store.slots.items()}
        return ValueReport(
            self.version,
            self.manifest.digest,
            {name: spec.digest for name, spec in found.items()},
            addresses,
            tuple(name for name, spec in found.items() if spec.digest != self.manifest.tensors[name].digest),
            tuple(name for name, address in addresses.items() if address != self.addresses[name]),
        )

    def _read(self, version: int, policy: str) -> Manifest:
        slots = self.store.slots
        digests = tensor_digests(slot.live for slot in slots.values())
        return Manifest(
            version,
            policy,
            tuple(
                TensorSpec(name, slot.dtype, tuple(slot.live.shape), digest, slot.precision)
                for (name, slot), digest in zip(slots.items(), digests, strict=True)
            ),
        )


@dataclass
class Transaction:
    """One update on its way in.  Any refusal ends it: what was staged is dropped, what is live was not touched."""

    receiver: Receiver
    version: int
    staged: dict[str, Tensor] = field(default_factory=dict)
    _came_as: dict[str, str] = field(default_factory=dict)
    _start: float = field(default_factory=time.perf_counter)

    def put(self, name: str, tensor: Tensor) -> None:
        """Stage a copy of one tensor; any order.

        Raises:
            SyncRefused: the transaction is over; or the tensor has no place, came before, has another dtype or shape,
                or is tied in the engine to one that came with other bytes.
        """
        self._require_open()
        given, name = name, self.receiver.store.aliases.get(name, name)
        slot = self.receiver.store.slots.get(name)
        if slot is None:
            self._refuse(f"{name} has no place in the engine: another model, or names with a prefix")
        if tensor.dtype != slot.live.dtype:
            got, expected = (str(d).removeprefix("torch.") for d in (tensor.dtype, slot.live.dtype))
            self._refuse(f"{name} is {got}, the engine holds {expected}: send it as the engine's policy has it")
        if tensor.shape != slot.live.shape:
            self._refuse(
                f"{name} has shape {list(tensor.shape)}, the engine's {list(slot.live.shape)}: another model, block "
                "size or layout (scales are the row-major grid of blocks; packing them is the engine's business)"
            )
        before = self._came_as.setdefault(name, given)
        if name in self.staged:
            if before == given:
                self._refuse(f"{given} came twice: one update has one value of each tensor")
            if not same_bytes(self.staged[name].cpu(), tensor.cpu()):
                self._refuse(f"{given} and {before} are one tensor in the engine and came with two values: untied")
            return
        device = slot.live.device if self.receiver.staging is None else self.receiver.staging
        with self._room("an update beside the weights"):
            self.staged[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor.detach())

    def commit(self, manifest: Manifest) -> CommitReport:
        """Verify all that was staged against what the trainer says it sent, and make it live.

        Raises:
            SyncRefused: a tensor is missing or differs, has another precision than the engine reads it with, or the
                engine could not stop.  The old version serves.
        """
        self._require_open()
        accepted = self._check(manifest)
        slots = self.receiver.store.slots
        changed: dict[str, tuple[int, int]] = {}
        for name, new in self.staged.items():  # before the flip: what fails after it would look like a refusal
            counted = changed.get(slots[name].dtype, (0, 0))
            changed[slots[name].dtype] = (counted[0] + num_changed(slots[name].live, new), counted[1] + new.numel())
        num_bytes = sum(tensor.nbytes for tensor in self.staged.values())
        with self._room("the update and the bytes that it replaces"):
            old = {name: torch.empty_like(new).copy_(slots[name].live) for name, new in self.staged.items()}
            together = Together.prepare({name: slot.live for name, slot in slots.items()}, self.staged)
        sums = word_sums(self.staged)
        synchronize(slots.values())
        start = time.perf_counter()
        try:
            self.receiver.store.stop()
        except SyncRefused:
            self.abort()
            raise
        self._flip(accepted, old, sums, together)
        stall = time.perf_counter() - start
        self.abort()  # the old version's bytes are of no more use
        return CommitReport(self.version, len(slots), num_bytes, time.perf_counter() - self._start, stall, changed)

    def abort(self) -> None:
        """Drop everything staged.  Live tensors are as they were; a transaction that is over stays over."""
        self.staged = {}
        if self.receiver._open is self:
            self.receiver._open = None

    # ------------------------------------------------------------------------------------------------------- checks

    def _require_open(self) -> None:
        if self.receiver._open is not self:
            raise SyncRefused(f"the update to version {self.version} is over: it was refused, aborted or replaced")

    def _check(self, manifest: Manifest) -> Manifest:
        """The manifest under the engine's own names, if it says exactly what was staged."""
        store = self.receiver.store
        if self.receiver.asleep:
            self._refuse(f"the engine sleeps at level {self.receiver.asleep}: wake it, then send and commit")
        if manifest.version != self.version:
            self._refuse(f"the manifest is of version {manifest.version}, the update of {self.version}")
        sent = {store.aliases.get(name, name): spec for name, spec in manifest.tensors.items()}
        try:
            check_pairs({name: store.slots[name].dtype for name in self.staged}, self.version)
        except SyncRefused as error:
            self._refuse(str(error))
        if missing := [name for name in store.slots if name not in self.staged]:
            self._refuse(f"{some(missing)} did not come: an update is complete or none ({len(missing)} missing)")
        if unsent := [name for name in self.staged if name not in sent]:
            self._refuse(f"{some(unsent)} came but the manifest does not have them")
        digests = dict(zip(self.staged, tensor_digests(self.staged.values()), strict=True))
        for spec in manifest.specs:  # both names of a tied tensor, if the manifest has both
            name = store.aliases.get(spec.name, spec.name)
            if name not in self.staged:
                self._refuse(f"{name} is in the manifest but did not come")
            staged = self.staged[name]
            if (spec.dtype, spec.shape) != (store.slots[name].dtype, tuple(staged.shape)):
                self._refuse(
                    f"{spec.name} is {spec.dtype} {list(spec.shape)} in the manifest, but came as "
                    f"{store.slots[name].dtype} {list(staged.shape)}"
                )
            expected = store.slots[name].precision
            if spec.precision != expected:
                self._refuse(f"{name} was made as {spec.precision}, the engine reads it as {expected}: one policy")
            if (got := digests[name]) != spec.digest:
                self._refuse(
                    f"{spec.name} has digest {got[:16]}, the trainer sent {spec.digest[:16]}: damaged on the way, send "
                    "again"
                )
        accepted = Manifest(self.version, manifest.policy, tuple(replace(sent[n], name=n) for n in store.slots))
        serving = self.receiver.manifest
        if serving.version == self.version and serving.digest != accepted.digest:
            self._refuse(f"version {self.version} was served with other weights: send these as {self.version + 1}")
        return accepted

    @contextmanager
    def _room(self, what: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            self._refuse(f'the device has no room for {what}: attach with staging="cpu"')

    def _refuse(self, why: str) -> NoReturn:
        serving = self.receiver.version
        self.abort()
        raise SyncRefused(f"{why}. The engine serves version {serving}")

    # --------------------------------------------------------------------------------------------------------- flip

    def _flip(
        self, accepted: Manifest, old: Mapping[str, Tensor], sums: Mapping[str, int], together: Together | None
    ) -> None:
        """Write every staged tensor over the live one; the version is the last thing that changes.

        Raises:
            SyncRefused: some write failed or did not store what it was given; all were taken back.
            WeightsLost: taking them back failed too.
        """
        receiver, slots = self.receiver, self.receiver.store.slots
        done: list[str] = []
        try:
            if together is not None:
                done.extend(together.names)
                write_together(together)
            written = set(done)
            for name, slot in slots.items():
                if name not in written:
                    done.append(name)
                    write(slot.live, self.staged[name], name)
            receiver.store.refresh()  # a GPU writes meanwhile
            require_written(slots, sums, together)
            synchronize(slots.values())
            receiver.manifest, receiver.serving = accepted, True
        except BaseException as error:
            if receiver.manifest is accepted:
                raise
            try:
                take_back(slots, old, done)
                receiver.store.refresh()
            except BaseException as second:
                receiver.lose_weights()
                raise WeightsLost(f"the flip to version {self.version} failed ({error}); so did undoing it") from second
            finally:
                self.abort()
            if not isinstance(error, Exception):
                raise  # an interrupt is not a refusal
            raise SyncRefused(
                f"the flip to version {self.version} failed: {error}. All was taken back. The engine serves version "
                f"{receiver.version}"
            ) from error


def write(live: Tensor, new: Tensor, name: str) -> None:
    """In place; ``name`` is for whoever watches."""
    with torch.inference_mode():  # an engine may have made its tensors under it; elsewhere they refuse writes
        live.copy_(new)


def write_together(together: Together) -> None:
    """In place, all at once; here for whoever watches."""
    together.copy()


def require_written(slots: Mapping[str, Slot], sums: Mapping[str, int], together: Together | None) -> None:
    """A write that was not one must not become a version.

    Compared are sums of words, one read of the memory and one answer for all tensors: the engine waits meanwhile.
    """
    found = {} if together is None else together.sums()
    found |= word_sums({name: slot.live for name, slot in slots.items() if name not in found})
    if wrong := [name for name in slots if found[name] != sums[name]]:
        raise RuntimeError(f"{wrong[0]} did not take the bytes it was given ({len(wrong)} of {len(slots)} tensors)")


def word_sums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Σ of each tensor's words of 8 bytes, or of its bytes if it has no whole number of words, modulo 2^64."""
    sums = []
    for tensor in tensors.values():
        numbers = tensor.detach().reshape(-1).view(torch.uint8)
        if numbers.numel() % 8 == 0:
            aligned = numbers if numbers.data_ptr() % 8 == 0 else numbers.clone()
            numbers = aligned.view(torch.int64)
        sums.append(numbers.sum(dtype=torch.int64))
    on_one_device = [total.to(sums[0].device) for total in sums]
    return dict(zip(tensors, torch.stack(on_one_device).tolist() if sums else [], strict=True))


def take_back(slots: Mapping[str, Slot], saved: Mapping[str, Tensor], done: Iterable[str]) -> None:
    """The old bytes again, every one read back: the fault that spoiled the new ones may spoil them too."""
    for name in done:
        live, old = slots[name].live, saved[name]
        with torch.inference_mode():
            live.copy_(old)
        if not same_bytes(live, old.to(live.device)):
            raise RuntimeError(f"{name} did not take its old bytes back")


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """NaN equals the same NaN, and −0 is not 0."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def num_changed(a: Tensor, b: Tensor) -> int:
    """How many elements differ in any bit."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return int((a.reshape(-1).view(width) != b.to(a.device).reshape(-1).view(width)).sum())


def synchronize(slots: Iterable[Slot]) -> None:
    """Wait for the copies: the next step may run on another stream."""
    for device in {slot.live.device for slot in slots}:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

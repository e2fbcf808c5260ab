"""The trainer's end: masters → the codes, scales and BF16 tensors that its own next forward uses, one by one.

The codes come from `torch.ops.jetgraph.quantize` on the BF16 master, the operator and operand of training's forward.
FP32 masters are cast to BF16 once, as FSDP2's mixed precision and autocast do before a linear, and then quantised.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from jetgraph.digest import HASHING, tensor_digest
from jetgraph.export import export_linear, rollout_linears
from jetgraph.model_linears import linears_of_model
from jetgraph.policy import LinearPrecision, Policy, get_policy
from jetgraph.sync.manifest import SCALE_SUFFIX, Manifest, TensorSpec
from jetgraph.sync.store import CommitReport


class Update:
    """One version of a model's weights as a stream of (name, tensor), and the manifest of what was streamed.

    A tensor is made when it is asked for and hashed while the next ones are made, so no second copy of the model exists
    on this side, but the last `HASHING` tensors.  Tied parameters are one
    tensor under their first name.  ``policy`` is the rollout's; a model that `jetgraph.compile` compiled has its own.

    Raises:
        ValueError: the model was not compiled and no policy is given.
        PolicyError: the policy does not fit the model, or what an engine can load (`jetgraph.export.rollout_linears`).
    """

    def __init__(self, model: torch.nn.Module, version: int, policy: str | Policy | None = None) -> None:
        compiled = getattr(model, "jetgraph", None)
        if policy is None and compiled is None:
            raise ValueError("which policy?  The model was not compiled by jetgraph: give the rollout's policy")
        self.model = model
        self.version: int = version
        self.policy = get_policy(compiled.policy if policy is None else policy)  # type: ignore[union-attr]
        self._linears = rollout_linears(self.policy, linears_of_model(model))
        self._manifest: Manifest | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        sending: list[tuple[str, str, tuple[int, ...], Future[str], str]] = []
        with ThreadPoolExecutor(HASHING) as pool:
            for name, parameter in self.model.named_parameters():
                module, _, leaf = name.rpartition(".")
                linear = self._linears.get(module, LinearPrecision()) if leaf == "weight" else LinearPrecision()
                for sent, tensor in export_linear(name, in_bf16(name, parameter), linear).items():
                    precision = "f32" if sent.endswith(SCALE_SUFFIX) else str(linear.weight)
                    dtype = str(tensor.dtype).removeprefix("torch.")
                    digest = pool.submit(tensor_digest, tensor)
                    sending.append((sent, dtype, tuple(tensor.shape), digest, precision))
                    if len(sending) > HASHING:
                        sending[-HASHING][3].result()
                    yield sent, tensor
            specs = (TensorSpec(name, dtype, shape, digest.result(), p) for name, dtype, shape, digest, p in sending)
            self._manifest = Manifest(self.version, self.policy.name, tuple(specs))

    @property
    def manifest(self) -> Manifest:
        """Of everything streamed.

        Raises:
            RuntimeError: the stream was not read to its end.
        """
        if self._manifest is None:
            raise RuntimeError(f"the manifest of version {self.version} exists once every tensor was sent")
        return self._manifest


def publish(model: torch.nn.Module, version: int, policy: str | Policy | None = None) -> Update:
    """The weights of ``model`` as they are when each tensor is read; do not step the optimizer while it is sent."""
    return Update(model, version, policy)


def in_bf16(name: str, parameter: Tensor) -> Tensor:
    """A master as training's forward reads it: whole, BF16, finite.

    Raises:
        ValueError: it is neither BF16 nor FP32, or holds NaN or ±inf: an engine would serve NaN to every request.
    """
    value = parameter.detach()
    if hasattr(value, "full_tensor"):  # a DTensor's shard: codes are those of the whole weight
        value = value.full_tensor()
    if value.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"{name} is {value.dtype}: expected torch.bfloat16 or torch.float32 masters")
    value = value.to(torch.bfloat16)
    finite = value.isfinite()
    if not finite.all():
        count, first = int((~finite).sum()), (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"{name} holds {count} values that are not finite, the first at {first}: the update ends here, the "
            "engine keeps its weights; look at the training step before this one"
        )
    return value


class Source(Protocol):
    """One version's tensors, and after the last of them their manifest: an `Update`, or one read from a folder."""

    @property
    def version(self) -> int: ...
    @property
    def manifest(self) -> Manifest: ...
    def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...


class Endpoint(Protocol):
    """The engine's end as `send` needs it; `jetgraph.sync.Receiver` is one."""

    def begin(self, version: int) -> Sink: ...


class Sink(Protocol):
    def put(self, name: str, tensor: Tensor) -> None: ...
    def commit(self, manifest: Manifest) -> CommitReport: ...
    def abort(self) -> None: ...


def send(update: Source, endpoint: Endpoint) -> CommitReport:
    """Stream an update into an engine and commit it; whatever is raised on the way, the engine keeps what it had."""
    transaction = endpoint.begin(update.version)
    try:
        for name, tensor in update:
            transaction.put(name, tensor)
        return transaction.commit(update.manifest)
    except BaseException:
        transaction.abort()
        raise

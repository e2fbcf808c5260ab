"""Which provider runs which GEMM of a model: a wish per role, resolved before anything compiles.

    Kernels.parse("auto")                        the registry chooses, by shape
    Kernels.parse("triton")                      all three GEMMs of every linear
    Kernels.parse("wgrad=deep_gemm")             that role; the others as the registry chooses

A compiled graph names the provider on every GEMM, so that the kernel that a certificate speaks of is the one that ran.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from jetgraph.lowering import registry
from jetgraph.lowering.provider import Gemm, ProviderError

AUTO = "auto"
ROLES = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Kernels:
    """A provider's name per role; None leaves the choice to the registry."""

    fprop: str | None = None
    dgrad: str | None = None
    wgrad: str | None = None

    @classmethod
    def parse(cls, text: str) -> Kernels:
        """
        Raises:
            ProviderError: ``text`` is none of the forms above, or names a role twice, or a role or a provider that does
                not exist.
        """
        if "=" not in text:
            return cls(*[_known(text)] * 3)
        parts = [part.strip().partition("=")[::2] for part in text.split(",")]
        wishes = dict(parts)
        if len(wishes) != len(parts):
            raise ProviderError(f"kernels {text!r}: a role is named twice; one provider runs it")
        unknown = [role for role in wishes if role not in ROLES]
        if unknown:
            raise ProviderError(f"kernels {text!r}: no role {unknown[0]!r}; expected {', '.join(ROLES)}")
        return cls(**{role: _known(name) for role, name in wishes.items()})

    def __str__(self) -> str:
        if len({self.fprop, self.dgrad, self.wgrad}) == 1:
            return self.fprop or AUTO
        return ",".join(f"{role}={name}" for role in ROLES if (name := getattr(self, role)))

    def provider(self, gemm: Gemm, device: torch.device) -> str:
        """Who runs ``gemm`` on ``device``.

        Raises:
            ProviderError: the one that was asked for cannot.
        """
        return registry.choose(gemm, device, getattr(self, gemm.role.lower())).name

    def check(self, gemms: Iterable[tuple[str, Gemm]], device: torch.device) -> None:
        """Raise `ProviderError` for the first of ``gemms`` (FQN of its linear, GEMM) that cannot run as wished."""
        for fqn, gemm in gemms:
            try:
                self.provider(gemm, device)
            except ProviderError as error:
                raise ProviderError(f"{fqn}: {error}") from None


def _known(name: str) -> str | None:
    if name == AUTO:
        return None
    if name not in registry.PROVIDERS:
        raise ProviderError(f"provider {name!r}: expected {AUTO} or one of {', '.join(registry.PROVIDERS)}")
    return name

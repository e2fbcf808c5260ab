"""The written witness of containment: φ, and everything it holds for, in one canonical JSON file.

Made from what the finder returns; believed only after `checker.check` has followed it through the two graph files.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

VERSION = 1


def _checker() -> ModuleType:
    """Imported late: `python -m jetgraph.verify.checker` must not find itself imported by its package already."""
    from jetgraph.verify import checker

    return checker


class CertificateError(ValueError):
    """A file that should hold a certificate does not, or what it certifies does not hold."""


@dataclass(frozen=True)
class Certificate:
    """``phi[i]`` is the train node of infer node i, None where no observable needs it.

    ``graphs`` has, per side, the graph's name, the sha256 of its file and its semantic and execution digests;
    ``weights`` is the digest of the weight manifest of both sides, ``capture`` that of the capture settings.
    """

    verdict: str
    bitwise: bool
    graphs: dict[str, dict[str, str]]
    sigma: dict[str, str]
    phi: tuple[int | None, ...]
    rules: dict[str, Any]
    axioms: list[str]
    kernels: dict[str, list[str]]
    versions: dict[str, Any]
    guards: dict[str, list[str] | None]
    replay: dict[str, Any]
    weights: str
    capture: str

    @classmethod
    def of(cls, train: bytes, infer: bytes, phi: tuple[int | None, ...], *, bitwise: bool) -> Certificate:
        """The certificate of two graph files, given as their bytes."""
        checker = _checker()
        graphs = [checker.Graph(json.loads(data), side) for data, side in ((train, "train"), (infer, "infer"))]
        stated, named = checker.facts(*graphs)
        live = set(graphs[1].live())
        for side, data in (("train", train), ("infer", infer)):
            named[side]["file"] = checker.sha(data)
        kept = tuple(image if i in live else None for i, image in enumerate(phi))
        return cls("CONTAINED", bitwise, named, {"T": "T"}, kept, **stated)

    @property
    def digest(self) -> str:
        return _checker().sha(self._body())

    def to_bytes(self) -> bytes:
        return _checker().canonical(self._body() | {"digest": self.digest})

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        path.write_bytes(self.to_bytes())
        return path

    @classmethod
    def load(cls, path: str | Path) -> Certificate:
        """Read a certificate.  Reading is not checking: `checker.check` says whether it holds.

        Raises:
            CertificateError: the file cannot be read or is no certificate of this version.
        """
        try:
            data = json.loads(Path(path).read_bytes())
            if data.pop("jetgraph_certificate") != VERSION:
                raise CertificateError(
                    f"{path}: expected a certificate of version {VERSION}; make it again with verify"
                )
            digest = data.pop("digest")
            certificate = cls(**data | {"phi": tuple(data["phi"])})
        except CertificateError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CertificateError(f"{path}: not a jetgraph certificate: {type(error).__name__}: {error}") from error
        if certificate.digest != digest:
            raise CertificateError(f"{path}: the certificate was changed; make it again with verify")
        return certificate

    def check(self, train: bytes, infer: bytes) -> None:
        """Follow the certificate through the two graph files.

        Raises:
            CertificateError: with the checker's reason, if it does not hold.
        """
        checker = _checker()
        try:
            checker.check(self.to_bytes(), train, infer)
        except checker.Refused as reason:
            raise CertificateError(str(reason)) from reason

    def _body(self) -> dict[str, Any]:
        return {"jetgraph_certificate": VERSION, **asdict(self), "phi": list(self.phi)}

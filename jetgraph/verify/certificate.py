"""The written witness of containment: φ, and everything it holds for, in one canonical JSON file.

Made from what the finder returns; believed only after `checker.check` has followed it through the two graph files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jetgraph import bounded_json

if TYPE_CHECKING:
    from jetgraph.verify import checker

VERSION = 2


def the_checker() -> ModuleType:
    """Imported late: `python -m jetgraph.verify.checker` must not find itself imported by its package already."""
    from jetgraph.verify import checker

    return checker


class CertificateError(ValueError):
    """A file that should hold a certificate does not, or what it certifies does not hold."""


@contextmanager
def refusals() -> Iterator[None]:
    """What the checker refuses is an error of the certificate."""
    try:
        yield
    except the_checker().Refused as reason:
        raise CertificateError(str(reason)) from reason


@dataclass(frozen=True)
class Certificate:
    """``phi[i]`` is the train node of infer node i, None where no observable needs it.

    ``graphs`` has, per side, the graph's name, the sha256 of its file and its semantic and execution digests;
    ``verdict`` is CONTAINED, or CONTAINED modulo what qualified rules name, such as reduction order (JG016);
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
    def of(
        cls,
        train: checker.Graph,
        infer: checker.Graph,
        phi: tuple[int | None, ...],
        *,
        bitwise: bool,
        modulo: Sequence[str] = (),
    ) -> Certificate:
        """The certificate of two graphs as the checker reads them, if it holds.

        Raises:
            CertificateError: with the checker's reason, if it does not.
        """
        checker = the_checker()
        live = set(infer.live)
        kept = tuple(image if i in live else None for i, image in enumerate(phi))
        verdict = "CONTAINED" + (f" modulo {' and '.join(modulo)}" if modulo else "")
        stated = checker.facts(train, infer)
        certificate = cls(verdict, bitwise, sigma={"T": "T"}, phi=kept, **stated)
        with refusals():
            checker.holds(certificate._body(), train, infer, stated)
        return certificate

    @property
    def digest(self) -> str:
        return the_checker().sha(self._body())

    def to_bytes(self) -> bytes:
        return the_checker().canonical(self._body() | {"digest": self.digest})

    def save(self, path: str | Path) -> Path:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.to_bytes())
        return path

    @classmethod
    def load(cls, path: str | Path) -> Certificate:
        """Read a certificate.  Reading is not checking: `checker.check` says whether it holds.

        Raises:
            CertificateError: the file cannot be read or is no certificate of this version.
        """
        try:
            data = bounded_json.parse(bounded_json.read_bytes(path))
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
        with refusals():
            the_checker().check(self.to_bytes(), train, infer)

    def _body(self) -> dict[str, Any]:
        stated = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"jetgraph_certificate": VERSION, **stated, "phi": list(self.phi)}

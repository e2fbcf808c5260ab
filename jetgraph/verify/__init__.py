"""Proves that what the rollout engine runs is contained in what the trainer runs, or says exactly where it is not.

`verify` is the whole pipeline: conformance → finder → evidence → certificate → checker.  No torch in this room.

    result = verify(train, infer)
    print(result.text())
    if result.certificate: result.certificate.save("run.cert.json")
"""

from __future__ import annotations

from jetgraph.graph import PrecisionGraph
from jetgraph.verify.certificate import Certificate, CertificateError
from jetgraph.verify.conformance import conformance
from jetgraph.verify.evidence import bitwise, evidence, explain_away
from jetgraph.verify.fault import Fault
from jetgraph.verify.finder import find
from jetgraph.verify.fold import Folded, fold
from jetgraph.verify.forward import Forward
from jetgraph.verify.result import Result, Verdict
from jetgraph.verify.rules import RULES, Rule, Severity

__all__ = [
    "RULES",
    "Certificate",
    "CertificateError",
    "Fault",
    "Folded",
    "Result",
    "Rule",
    "Severity",
    "Verdict",
    "fold",
    "verify",
]


def verify(
    train: PrecisionGraph, infer: PrecisionGraph, *, train_file: bytes | None = None, infer_file: bytes | None = None
) -> Result:
    """Whether the forward part of ``train`` contains ``infer``.

    The certificate is bound to files: pass the bytes the graphs were loaded from, or it is made for what `save` writes.
    A certificate is returned only if the checker accepts it.
    """
    forward_train, forward_infer = Forward(train), Forward(infer)
    finding = find(forward_train, forward_infer)
    other = [*conformance(forward_train, forward_infer), *evidence(forward_train, forward_infer)]
    faults = (*finding.faults, *explain_away(other, finding.faults, forward_train, forward_infer))
    guards = tuple(f"{g.meta.get('side', '?')}: {guard}" for g in (train, infer) for guard in g.meta.get("guards", ()))
    if Verdict.of(faults) is not Verdict.CONTAINED:
        return Result(train.name, infer.name, faults, guards)
    faults = (*faults, *bitwise(forward_train, forward_infer, finding.phi))
    files = (train_file or train.to_json().encode(), infer_file or infer.to_json().encode())
    certificate = Certificate.of(*files, finding.phi, bitwise=not faults)
    try:
        certificate.check(*files)
    except CertificateError as reason:
        refused = Fault("JG091", "checker", "the certificate", "a witness that the checker accepts", str(reason))
        return Result(train.name, infer.name, (*faults, refused), guards)
    return Result(train.name, infer.name, faults, guards, certificate)

"""Proves that what the rollout engine runs is contained in what the trainer runs, or says exactly where it is not.

`verify` is the whole pipeline: finder → conformance, evidence, declarations → certificate → checker.  No torch here.

    result = verify(train, infer)
    print(result.text())
    if result.certificate: result.certificate.save("run.cert.json")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jetgraph.graph import PrecisionGraph
from jetgraph.verify.certificate import Certificate, CertificateError
from jetgraph.verify.conformance import conformance
from jetgraph.verify.declared import declared
from jetgraph.verify.evidence import bitwise, evidence, explain_away
from jetgraph.verify.fault import Fault
from jetgraph.verify.finder import find
from jetgraph.verify.fold import Folded, fold
from jetgraph.verify.forward import Forward
from jetgraph.verify.reduction import reduction_faults, sequential
from jetgraph.verify.result import Result, Verdict
from jetgraph.verify.rules import RULES, Rule, Severity
from jetgraph.verify.source import Source, without_garbage_collection
from jetgraph.verify.weights import compare

if TYPE_CHECKING:  # the checker runs as a program of its own too, and must not be loaded already then
    from jetgraph.verify import checker

__all__ = [
    "RULES",
    "Certificate",
    "CertificateError",
    "Fault",
    "Folded",
    "Result",
    "Rule",
    "Severity",
    "Source",
    "Verdict",
    "fold",
    "verify",
]


def verify(train: PrecisionGraph | Source, infer: PrecisionGraph | Source) -> Result:
    """Whether the forward part of ``train`` contains ``infer``.

    The certificate is bound to files: the bytes a `Source` was read from, for a graph what its `save` writes.  A
    certificate is returned only if the checker accepts it.
    """
    graphs = (_graph(train), _graph(infer))
    with without_garbage_collection():
        forward_train, forward_infer = Forward(graphs[0]), Forward(graphs[1])
        views = sequential(forward_train), sequential(forward_infer)
        finding = find(*views)
        split = reduction_faults(forward_train, forward_infer, finding.phi)
        found = (*finding.faults, *split, *declared(*views))
        roots = tuple(fault for fault in found if fault.severity is Severity.VIOLATION)
        standing, echoes = explain_away([*conformance(*views), *evidence(*views)], roots, *views)
        faults = (*found, *standing)
        weights = compare(*graphs)
        names = (graphs[0].name, graphs[1].name)
        guards = tuple(f"{g.meta.get('side', '?')}: {guard}" for g in graphs for guard in g.meta.get("guards", ()))
        if Verdict.of(faults) is not Verdict.CONTAINED:
            return Result(*names, faults, guards, weights=weights, echoes=tuple(echoes))
        faults = (*faults, *bitwise(forward_train, forward_infer, finding.phi))
        try:
            reads = (_read(train, "train"), _read(infer, "infer"))
            modulo = Result(*names, faults).modulo
            certificate = Certificate.of(*reads, finding.phi, bitwise=not faults, modulo=modulo)
        except CertificateError as reason:
            refused = Fault("JG091", "checker", "the certificate", "a witness that the checker accepts", str(reason))
            return Result(*names, (*faults, refused), guards, weights=weights)
    return Result(*names, faults, guards, certificate, weights)


def _graph(side: PrecisionGraph | Source) -> PrecisionGraph:
    return side.graph if isinstance(side, Source) else side


def _read(graph: PrecisionGraph | Source, side: str) -> checker.Graph:
    return (graph if isinstance(graph, Source) else Source.of(graph, side)).read

"""Which provider a test gets; a refusal must not pass as success."""

from __future__ import annotations

import pytest
import torch

from jetgraph.lowering import registry
from jetgraph.lowering.provider import Provider


def provider_or_skip(name: str, device: torch.device) -> Provider:
    """The provider ``name``.  On a Hopper, what is installed must pass its self-test; elsewhere a refusal skips."""
    finding = registry.probe(name, device)
    print(finding)
    if not finding.ok:
        reason = f"{name} is refused here: {finding.reason}"
        if torch.cuda.get_device_capability(device) == (9, 0) and "not installed" not in finding.reason:
            pytest.fail(reason)
        pytest.skip(reason)
    return registry.PROVIDERS[name]

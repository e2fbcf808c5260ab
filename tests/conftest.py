"""Shared fixtures: a clean compiler per test, skips with a stated reason, and the real model."""

from __future__ import annotations

import sys

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True)
def clean_compiler():
    """Dynamo counts recompilations per code object, across models; each test starts from zero."""
    yield
    if "torch" in sys.modules:
        import torch

        torch._dynamo.reset()


def pytest_collection_modifyitems(items):
    import importlib.util

    has_cuda = False
    if any("gpu" in item.keywords for item in items) and importlib.util.find_spec("torch"):
        import torch

        has_cuda = torch.cuda.is_available()
    for item in items:
        if "gpu" in item.keywords and not has_cuda:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and this machine has none"))

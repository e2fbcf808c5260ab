"""Shared fixtures: a clean compiler per test, skips with a stated reason, and the real model."""

from __future__ import annotations

import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# A suite says the same of the same code every time: examples are drawn from a fixed seed.  To look for new ones:
# JETGRAPH_EXPLORE=20 draws at random, twenty times as many as a test asks for.
_explore = int(os.environ.get("JETGRAPH_EXPLORE", "0"))
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=not _explore
)
settings.load_profile("any machine")


def pytest_itemcollected(item):
    declared = getattr(getattr(item, "obj", None), "_hypothesis_internal_use_settings", None)
    if _explore and declared:
        item.obj._hypothesis_internal_use_settings = settings(declared, max_examples=_explore * declared.max_examples)


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

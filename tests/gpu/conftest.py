"""Everything under tests/gpu needs a CUDA device; without one each test is skipped with that reason."""

from __future__ import annotations

import os
from glob import glob
from pathlib import Path

import pytest

if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # processes of pytest-xdist share the machine's GPUs
    num_gpus = len(glob("/dev/nvidia[0-9]*"))
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", str(int(worker.removeprefix("gw")) % max(num_gpus, 1)))

COMPILE_MODELS = ("test_capture", "test_rounding")
"""Their tests share compiled models: with pytest-xdist (``--dist loadgroup``) one process has all that share one."""


def pytest_collection_modifyitems(config, items):
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        if config.pluginmanager.hasplugin("xdist") and item.path.stem in COMPILE_MODELS:
            given = item.callspec.params if hasattr(item, "callspec") else {}
            item.add_marker(
                pytest.mark.xdist_group(f"{item.path.stem} {given.get('compiled', given.get('policy', ''))}")
            )

"""Everything under tests/gpu needs a CUDA device; without one each test is skipped with that reason."""

from __future__ import annotations

from pathlib import Path

import pytest

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

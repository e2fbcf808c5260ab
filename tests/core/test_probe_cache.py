"""Findings of slow self-tests are recalled for the same machine and sources, and only if the test passed."""

from __future__ import annotations

import pwd
from dataclasses import dataclass, field

import pytest
import torch

from jetgraph.lowering import probe_cache
from jetgraph.lowering.provider import UNKNOWN_VERSION, Finding

DEVICE = torch.device("cuda", 0)


@dataclass
class Slow:
    """A provider that counts its self-tests."""

    name: str = "triton_exact"
    ok: bool = True
    tests: list = field(default_factory=list)

    def probe(self, device: torch.device) -> Finding:
        self.tests.append(device)
        return Finding(self.name, self.ok, "said so", (("triton", "3"),), 1.5, row_invariant=True)


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """A machine with an H200, as far as the cache asks; its folder."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(probe_cache, "triton_version", lambda: "3.6.0")
    monkeypatch.setenv("JETGRAPH_CACHE", str(tmp_path))
    return tmp_path


def test_a_success_is_recalled_with_every_field(hopper):
    first, second = Slow(), Slow()
    found = probe_cache.probe(first, DEVICE)
    assert probe_cache.probe(second, DEVICE) == found == Slow().probe(DEVICE)
    assert (len(first.tests), len(second.tests)) == (1, 0)
    probe_cache.probe(second, DEVICE, fresh=True)
    assert len(second.tests) == 1


def test_a_refusal_is_never_recalled(hopper):
    refused = Slow(ok=False)
    for _ in range(2):
        assert not probe_cache.probe(refused, DEVICE).ok
    assert len(refused.tests) == 2


@pytest.mark.parametrize("what", ["device", "torch", "triton", "sources", "provider"])
def test_whatever_decides_bits_makes_it_test_again(hopper, monkeypatch, what):
    probe_cache.probe(Slow(), DEVICE)
    changed = Slow("triton_fused" if what == "provider" else "triton_exact")
    if what == "device":  # "gpu" would be taken for the marker
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    elif what == "torch":
        monkeypatch.setattr(torch, "__version__", "2.12.0")
    elif what == "triton":
        monkeypatch.setattr(probe_cache, "triton_version", lambda: "3.7.0")
    elif what == "sources":
        monkeypatch.setattr(probe_cache, "sources", lambda: "other")
    probe_cache.probe(changed, DEVICE)
    assert len(changed.tests) == 1


def test_a_damaged_file_and_a_folder_that_cannot_be_written_cost_one_test(hopper, monkeypatch):
    probe_cache.probe(Slow(), DEVICE)
    (file,) = (hopper / "probes").iterdir()
    file.write_text("{")
    again = Slow()
    assert probe_cache.probe(again, DEVICE).ok
    assert len(again.tests) == 1
    monkeypatch.setenv("JETGRAPH_CACHE", str(file))  # a file where the folder should be
    blocked = Slow()
    assert probe_cache.probe(blocked, DEVICE).ok
    monkeypatch.setenv("JETGRAPH_CACHE", "")
    assert probe_cache.probe(blocked, DEVICE).ok
    assert len(blocked.tests) == 2


def test_without_a_home_nothing_is_kept(hopper, monkeypatch):
    """A container's user may have none; a folder that was named needs none."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda user: {}[user])
    named, homeless = Slow(), Slow()
    for _ in range(2):
        assert probe_cache.probe(named, DEVICE).ok
    assert len(named.tests) == 1
    monkeypatch.delenv("JETGRAPH_CACHE")
    for _ in range(2):
        assert probe_cache.probe(homeless, DEVICE).ok
    assert len(homeless.tests) == 2


@pytest.mark.parametrize("version", [None, UNKNOWN_VERSION])
def test_a_triton_of_unknown_version_is_tested_each_time(hopper, monkeypatch, version):
    monkeypatch.setattr(probe_cache, "triton_version", lambda: version)
    tested = Slow()
    for _ in range(2):
        assert probe_cache.probe(tested, DEVICE).ok
    assert len(tested.tests) == 2

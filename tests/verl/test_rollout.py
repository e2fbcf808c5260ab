"""One weight sync that fails, at every place where it can: nothing is left behind and nothing is reported."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from jetgraph.policy import get_policy
from jetgraph.sync import StoredUpdate, SyncRefused, transfer
from tests.core.small_models import random_model

pytestmark = pytest.mark.slow  # importing VeRL's vLLM rollout takes some ten seconds


class Remote:
    """``handle.method.remote(...)`` of a Ray actor."""

    def __init__(self, method) -> None:
        self.method = method

    async def remote(self, *args):
        return self.method(*args)


class Server:
    """The server actor's two methods; reads the update as the engine would, and may refuse."""

    def __init__(self, refuses: Exception | None = None, dies: Exception | None = None) -> None:
        self.refuses, self.dies = refuses, dies
        self.seen: list[Path] = []
        self.versions: list[int] = []
        self.take_weights, self.set_global_steps = Remote(self._take), Remote(self._set)

    def _take(self, folder: str) -> dict:
        self.seen.append(Path(folder))
        update = StoredUpdate(folder)
        names = [name for name, _ in update]
        if self.refuses:
            raise self.refuses
        return {"version": update.version, "bytes": 1, "tensors": len(names), "served": update.manifest.digest}

    def _set(self, version: int) -> None:
        if self.dies:
            raise self.dies
        self.versions.append(version)


@pytest.fixture
def sync(verl_on_cpu, tmp_path, monkeypatch):
    """``sync(server, version)``: one `update_weights` of a small model, in-process."""
    from jetgraph_verl import rollout
    from jetgraph_verl.actor import Weights

    memory = tmp_path / "shm"
    memory.mkdir()
    monkeypatch.setattr(transfer, "SHARED_MEMORY", memory)
    model = random_model("llama", layers=1)

    def sync(server: Server | None, version: int | None):
        adapter = object.__new__(rollout.JetgraphAdapter)
        adapter.options = SimpleNamespace(folder=str(tmp_path / "run"))
        adapter.server_handle, adapter.replica_rank = server, 2
        adapter._has_server = server is not None
        asyncio.run(adapter.update_weights(Weights(model, get_policy("jet")), version, peft_config=None))

    sync.memory, sync.model, sync.folder = memory, model, tmp_path / "run"
    return sync


def test_a_sync_leaves_a_report_and_no_files(sync):
    from jetgraph_verl.rollout import sync_report_path

    server = Server()
    sync(server, 5)
    assert server.versions == [5]
    report = json.loads(sync_report_path(sync.folder, 5, 2).read_text())
    assert report["version"] == 5
    assert report["served"] == report["manifest"]
    assert report["seconds"] > 0
    assert [path.parent for path in server.seen] == [sync.memory]
    assert list(sync.memory.iterdir()) == []


def test_a_refusal_is_raised_and_leaves_neither_files_nor_report(sync):
    server = Server(refuses=SyncRefused("no such tensor. The engine serves version 4"))
    with pytest.raises(SyncRefused, match="The engine serves version 4"):
        sync(server, 5)
    assert len(server.seen) == 1
    assert server.versions == []  # VeRL must not take the old weights for new ones
    assert list(sync.memory.iterdir()) == []
    assert not sync.folder.exists()


def test_an_engine_that_dies_between_weights_and_version_leaves_no_report(sync):
    with pytest.raises(ConnectionError):
        sync(Server(dies=ConnectionError("actor died")), 5)
    assert list(sync.memory.iterdir()) == []
    assert not sync.folder.exists()


def test_weights_that_are_not_finite_never_reach_the_engine(sync):
    with torch.no_grad():
        sync.model.model.norm.weight[3] = float("nan")
    server = Server()
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds 1 values that are not finite"):
        sync(server, 5)
    assert server.seen == []
    assert list(sync.memory.iterdir()) == []
    assert not sync.folder.exists()


def test_weights_without_a_version_are_refused_before_anything_is_written(sync):
    server = Server()
    with pytest.raises(ValueError, match="weights without a version"):
        sync(server, None)
    assert server.seen == []
    assert list(sync.memory.iterdir()) == []


def test_a_rank_without_a_server_streams_and_reports_nothing(sync):
    sync(None, 5)
    assert list(sync.memory.iterdir()) == []
    assert not sync.folder.exists()


def test_shared_memory_that_is_too_small_is_not_used(sync, monkeypatch):
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    server = Server()
    sync(server, 5)
    assert server.seen[0].parent != sync.memory
    assert not server.seen[0].exists()


def test_the_adapter_is_what_verl_finds(verl_on_cpu, monkeypatch, tmp_path):
    from jetgraph_verl import rollout
    from verl.workers.rollout import base

    monkeypatch.setattr(base, "_ROLLOUT_REGISTRY", dict(base._ROLLOUT_REGISTRY))
    monkeypatch.setattr(rollout.JetgraphAdapter, "options", None, raising=False)
    rollout.install_adapter(SimpleNamespace(folder=str(tmp_path)))
    assert base.get_rollout_class("vllm", "async") is rollout.JetgraphAdapter

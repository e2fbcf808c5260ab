"""Folders that updates travel in: gone with their owner, whatever ends it, and never taken from a living one."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from jetgraph.sync import remove_orphans, transfer, transfer_folder


@pytest.fixture
def memory(tmp_path, monkeypatch) -> Path:
    """What stands for /dev/shm; the folder for temporary files is beside it."""
    memory, disk = tmp_path / "shm", tmp_path / "disk"
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(transfer, "SHARED_MEMORY", memory)
    monkeypatch.setattr(transfer.tempfile, "tempdir", str(disk))
    return memory


def owner(ready: Connection, num_bytes: int) -> None:
    with transfer_folder(num_bytes) as folder:
        (folder / "update.safetensors").write_bytes(b"half an update")
        ready.send(folder)
        time.sleep(600)


@pytest.fixture
def started():
    """``started(num_bytes)``: a process that is writing an update, and its folder."""
    context, processes = multiprocessing.get_context("fork"), []

    def start(num_bytes: int = 1):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=owner, args=(theirs, num_bytes)))
        processes[-1].start()
        assert ours.poll(60)
        return processes[-1], ours.recv()

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("num_bytes", [1, 1 << 62], ids=["in memory", "on disk"])
def test_the_folder_of_a_killed_owner_goes_and_that_of_a_living_one_stays(memory, started, num_bytes):
    dead, orphan = started(num_bytes)
    _, used = started(num_bytes)
    assert (orphan.parent == used.parent == memory) is (num_bytes == 1)
    assert remove_orphans() == []
    dead.kill()  # -9, in the middle of an update
    dead.join()
    assert orphan.is_dir()
    assert remove_orphans() == [orphan]
    assert not orphan.exists()
    assert (used / "update.safetensors").read_bytes() == b"half an update"


def test_the_next_update_removes_what_a_killed_run_left_before_it_counts_the_room(memory, started, monkeypatch):
    dead, orphan = started()
    dead.kill()
    dead.join()
    counted = []
    usage = transfer.shutil.disk_usage
    monkeypatch.setattr(transfer.shutil, "disk_usage", lambda path: counted.append(orphan.exists()) or usage(path))
    with transfer_folder(1) as folder:
        assert list(memory.iterdir()) == [folder]
    assert counted == [False]
    assert list(memory.iterdir()) == []


def test_one_process_may_have_two_folders_and_touches_neither(memory):
    with transfer_folder(1) as first, transfer_folder(1) as second:
        assert remove_orphans() == []
        assert first.is_dir()
        assert second.is_dir()
    assert list(memory.iterdir()) == []


def test_an_error_inside_leaves_nothing(memory):
    def fails() -> None:
        with transfer_folder(1) as folder:
            (folder / "part").touch()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert list(memory.iterdir()) == []


def test_what_only_looks_like_one_of_ours_stays(memory, tmp_path):
    mine = tmp_path / "elsewhere"
    mine.mkdir()
    (memory / f"{transfer.PREFIX}link").symlink_to(mine)
    (memory / f"{transfer.PREFIX}file").touch()
    (memory / "jetgraph-other").mkdir()
    assert remove_orphans() == []
    assert len(list(memory.iterdir())) == 3
    assert mine.is_dir()


def test_another_users_folder_stays(memory, monkeypatch):
    (memory / f"{transfer.PREFIX}theirs").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 12345)
        assert remove_orphans() == []
    assert len(remove_orphans()) == 1


def test_a_new_folder_that_is_taken_for_an_orphan_before_it_is_locked_is_made_again(memory, monkeypatch):
    made, flock = [], transfer.fcntl.flock

    def raced(lock: int, operation: int) -> None:
        if not made:
            (orphan,) = memory.iterdir()
            made.append(orphan)
            assert remove_orphans() == [orphan]  # somebody else starts between mkdir and lock
        flock(lock, operation)

    monkeypatch.setattr(transfer.fcntl, "flock", raced)
    with transfer_folder(1) as folder:
        assert folder != made[0]
        assert folder.is_dir()
        assert remove_orphans() == []

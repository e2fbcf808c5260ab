"""An update as a folder, for a trainer and an engine that share no process: tensors first, the manifest last.

    write_update(publish(model, 3), folder)           # trainer
    send(StoredUpdate(folder), receiver)              # engine

The manifest appears by renaming a complete file, so a folder with a manifest holds everything that it lists; a writer
that died leaves a folder that cannot be read.  Damaged tensors are the receiver's to refuse, by digest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from json import dumps
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetgraph import bounded_json
from jetgraph.sync.manifest import Manifest, SyncRefused
from jetgraph.sync.masters import Update

TENSORS, MANIFEST = "update.safetensors", "manifest.json"


def write_update(update: Update, folder: str | Path) -> Manifest:
    """Write ``update`` into ``folder``, which may hold an older one; returns the manifest."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).unlink(missing_ok=True)  # from here on, and until the end, there is no update here
    save_file({name: tensor.contiguous().cpu() for name, tensor in update}, folder / TENSORS)
    part = folder / f"{MANIFEST}.part"
    part.write_text(dumps(update.manifest.to_plain()))
    os.replace(part, folder / MANIFEST)
    return update.manifest


class StoredUpdate:
    """What `write_update` wrote, as a source for `jetgraph.sync.send`.

    Raises:
        SyncRefused: the folder has no complete update.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / MANIFEST).is_file():
            raise SyncRefused(
                f"{folder} holds no complete update: its trainer is still writing, or died; write it again"
            )

    @cached_property
    def manifest(self) -> Manifest:
        path = self.folder / MANIFEST
        try:
            return Manifest.from_plain(bounded_json.parse(bounded_json.read_bytes(path)))
        except (ValueError, KeyError, TypeError) as error:
            raise SyncRefused(f"{path} is not a manifest ({error}): write the update again") from error

    @property
    def version(self) -> int:
        return self.manifest.version

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        path = self.folder / TENSORS
        try:
            with safe_open(path, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  (a safetensors handle is not a dict)
                    yield name, handle.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise SyncRefused(f"{path} cannot be read ({error}): write the update again") from error

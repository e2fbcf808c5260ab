"""Weights from a trainer into a running engine: staged, verified, then flipped at once, or not at all.

    update = publish(model, version=1)          # trainer: codes, scales and BF16 tensors of its masters, one by one
    report = send(update, receiver)             # engine: stage all, compare every digest, write in place
    receiver.verify_values().require()          # the engine's bytes, now: digests, version, addresses

`manifest` is what both ends compare; `masters` is the trainer's end; `files` takes its updates to another process, in a
folder of `transfer`; `receiver` is the engine's end, over the `WeightStore` (`store`) that an engine integration
provides; `sleeping` keeps both honest over an engine's sleep.  No engine is imported here.  docs/sync.md has the
protocol and its reasons.
"""

from __future__ import annotations

from jetgraph.sync.files import StoredUpdate, write_update
from jetgraph.sync.manifest import Manifest, SyncRefused, TensorSpec, WeightsLost
from jetgraph.sync.masters import Source, Update, publish, send
from jetgraph.sync.receiver import Receiver, Transaction
from jetgraph.sync.sleeping import SleepGuard
from jetgraph.sync.store import CommitReport, Slot, ValueReport, WeightStore
from jetgraph.sync.transfer import remove_orphans, transfer_folder

__all__ = [
    "CommitReport",
    "Manifest",
    "Receiver",
    "SleepGuard",
    "Slot",
    "Source",
    "StoredUpdate",
    "SyncRefused",
    "TensorSpec",
    "Transaction",
    "Update",
    "ValueReport",
    "WeightStore",
    "WeightsLost",
    "publish",
    "remove_orphans",
    "send",
    "transfer_folder",
    "write_update",
]

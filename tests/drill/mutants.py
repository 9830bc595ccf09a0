"""Faults put into acpfs on purpose, so that it can be seen that the checker finds them.

Installed like fault points, by ACPFS_MUTANT.

Each breaks one promise: order, whole files, what reached stable storage, what was acknowledged,
what is cleaned up.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from acpfs.backing.directory import BackingDirectory
from acpfs.filesystem.closes import Closes
from acpfs.filesystem.syncing import Syncing
from acpfs.writeback.guard.guard import Guard
from acpfs.writeback.log.log import OperationLog
from acpfs.writeback.order.order import Order


def _unordered() -> None:
    """Commits in any order in which they can be carried out at all."""
    plain = Order.group
    chooser = random.Random(1)

    def group(self: Order, now: float) -> tuple[list[Any], float]:
        ops, due = plain(self, now)
        stores = [op for op in ops if op.version is not None]
        return ([chooser.choice(stores)] if stores else ops[:1]), due

    Order.group = group  # type: ignore[method-assign]


def _overtaken() -> None:
    """What is staged is committed although something earlier is still being copied."""
    plain = Order.group

    def group(self: Order, now: float) -> tuple[list[Any], float]:
        ops, due = plain(self, now)
        ready = [
            op for op in self._candidates() if op.version is not None and self.is_ready(op, now)
        ]
        return ops or ready[-1:], due

    Order.group = group  # type: ignore[method-assign]


def _torn() -> None:
    """The second half of some writes is never made."""
    plain = BackingDirectory.write
    chooser = random.Random(2)

    def write(self: BackingDirectory, fd: int, data: memoryview, offset: int) -> int:
        if len(data) > 1 and chooser.random() < 0.3:
            zeros = memoryview(bytes(data[: len(data) // 2]) + bytes(len(data) - len(data) // 2))
            return plain(self, fd, zeros, offset)
        return plain(self, fd, data, offset)

    BackingDirectory.write = write  # type: ignore[method-assign]


def _no_fsync() -> None:
    """Staging files are not flushed before they are renamed into place."""
    BackingDirectory.sync = lambda _self, _fd: None  # type: ignore[method-assign, assignment]


def _no_directory_fsync() -> None:
    """Names are not flushed before they count as persisted."""
    BackingDirectory.sync_directory = lambda _self, _path: None  # type: ignore[method-assign, assignment]


def _forgets() -> None:
    """Some operations are dropped instead of being carried out."""
    plain = OperationLog.append
    chooser = random.Random(3)

    def append(self: OperationLog, *arguments: Any, **words: Any) -> Any:
        op = plain(self, *arguments, **words)
        if op.version is not None and chooser.random() < 0.2:
            self.leave_out([op])
        return op

    OperationLog.append = append  # type: ignore[method-assign]


def _leaks() -> None:
    """Staging files that nobody needs are left."""
    BackingDirectory.remove_staging = lambda _self, _name: None  # type: ignore[method-assign, assignment]


def _amnesia() -> None:
    """A new worker knows nothing of the log that the last one left."""
    OperationLog._load = lambda _self: None  # type: ignore[method-assign, assignment]


def _unguarded() -> None:
    """Deletions of checkpoints are carried out in their turn."""
    Guard.concerns = lambda _self, _op: False  # type: ignore[method-assign, assignment]


def _takeover() -> None:
    """What a new worker finds being written is published as it is, as if it had been waiting for
    long.
    """
    plain = Syncing.freeze_older_than

    def freeze_older_than(self: Syncing, age_s: float) -> int:
        if self not in looked:
            looked.add(self)
            return self._freeze(self._changed())
        return plain(self, age_s)

    looked: WeakSet[Syncing] = WeakSet()
    Syncing.freeze_older_than = freeze_older_than  # type: ignore[method-assign]


def _killed() -> None:
    """A process that is killed publishes what it had begun."""
    Closes.is_log = lambda _self, _node: True  # type: ignore[method-assign, assignment]


MUTANTS: dict[str, Callable[[], None]] = {
    "unordered": _unordered,
    "overtaken": _overtaken,
    "torn": _torn,
    "no_fsync": _no_fsync,
    "no_directory_fsync": _no_directory_fsync,
    "forgets": _forgets,
    "leaks": _leaks,
    "amnesia": _amnesia,
    "unguarded": _unguarded,
    "takeover": _takeover,
    "killed": _killed,
}


def install(name: str) -> None:
    """Break what the name says."""
    MUTANTS[name]()

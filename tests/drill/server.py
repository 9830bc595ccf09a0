"""The backing server fails, hangs, loses answers, or is killed and comes back: the application
notices nothing, and nothing is lost.

Two kinds of stand: over the tests' faulty file system, whose faults are orders, and over
distributed file systems whose servers are real processes (`tests/rig/storage`; only by hand).
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tests.drill import verdict
from tests.drill.faults import Outcome, let_work, nothing_noticed
from tests.drill.stand import FaultyStand, Stand
from tests.rig.faultfs import FaultFs
from tests.rig.storage import open_storage
from tests.rig.storage.servers import Storage, kill, stopped, until

AWAY_S_MAX = 0.8
CHANGES = [
    "write",
    "fsync",
    "create",
    "rename",
    "unlink",
    "mkdir",
    "rmdir",
    "link",
    "symlink",
    "fsyncdir",
    "setattr",
    "setxattr",
]
NAMES = ["rename", "unlink", "mkdir", "rmdir", "link", "symlink"]


class ServerStand(FaultyStand):
    """The backing directory lies on the faulty file system."""

    def make_backing(self) -> Path:
        self.storage = FaultFs(self.base / "disk", self.base / "backing", watchdog_s=3600.0)
        self.storage.__enter__()
        return self.base / "backing"

    @property
    def shown(self) -> Path:
        return self.base / "disk"


def server_fails(stand: Stand) -> Outcome:
    """Errors of many kinds, torn writes, and calls that were carried out although the answer is an
    error.
    """
    assert isinstance(stand, ServerStand)
    storage = stand.storage
    chooser = stand.random
    stand.go()
    let_work(chooser.random() * 0.2)
    for error in ("EIO", "ENOSPC", "ESTALE", "ENOTCONN", "ETIMEDOUT"):
        ops = [
            op for op in CHANGES if (op, error) != ("setxattr", "ENOSPC")
        ]  # that means: no room for an attribute so large
        storage.fail(
            error,
            ops,
            probability=chooser.choice((0.05, 0.5)),
            seed=chooser.randrange(1 << 30),
            times=30,
        )
    storage.rule("lose", ops=NAMES, probability=0.3, seed=chooser.randrange(1 << 30), times=30)
    storage.rule("tear", ops=["write"], probability=0.3, seed=chooser.randrange(1 << 30), times=30)
    let_work(chooser.random() * AWAY_S_MAX)
    storage.clear()
    return Outcome(nothing_noticed(stand), ["all calls for a while"])


def server_hangs(stand: Stand) -> Outcome:
    """No call returns for a while."""
    assert isinstance(stand, ServerStand)
    stand.go()
    let_work(stand.random.random() * 0.2)
    stand.storage.freeze(["writes"] if stand.random.random() < 0.5 else None)
    let_work(stand.random.random() * AWAY_S_MAX)
    stand.storage.thaw()
    return Outcome(nothing_noticed(stand), ["all calls for a while"])


class StorageStand(Stand):
    """A stand over a distributed file system of this machine; which, the kinds below say."""

    kind: str
    storage: Storage

    def make_backing(self) -> Path:
        self.storage = open_storage(self.kind, self.base / "storage").__enter__()
        return self.storage.client("client")

    def __exit__(self, *error: object) -> None:
        if self.application is not None:
            self.application.kill()
            self.application = None
        self.mount.abort()
        self.storage.__exit__()
        super().__exit__(*error)

    def check_checksums(self) -> list[str]:
        return verdict.check_checksums(self.shown)


class GlusterStand(StorageStand):
    """Three bricks with the same bytes."""

    kind = "glusterfs"


class MooseStand(StorageStand):
    """Two chunk servers with the same bytes."""

    kind = "moosefs"


def kill_storage(stand: Stand) -> Outcome:
    """kill -9 of one server process, or of all; they are started again."""
    assert isinstance(stand, StorageStand)
    stand.go()
    let_work(stand.random.random() * AWAY_S_MAX)
    victims = _victims(stand)
    kill(victims)
    let_work(0.3 + stand.random.random())
    stand.storage.restart()
    until(
        lambda: _answers(stand.shown), "the client has found its servers again"
    )  # the checker reads through the same one
    return Outcome(nothing_noticed(stand), _told(stand, victims))


def storage_hangs(stand: Stand) -> Outcome:
    """SIGSTOP of one server process, or of all; they go on later."""
    assert isinstance(stand, StorageStand)
    stand.go()
    let_work(stand.random.random() * AWAY_S_MAX)
    victims = _victims(stand)
    with stopped(victims):
        let_work(0.3 + stand.random.random())
    return Outcome(nothing_noticed(stand), _told(stand, victims))


def _answers(volume: Path) -> bool:
    try:
        os.listdir(volume)
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise
        return False
    return True


def _victims(stand: StorageStand) -> list[int]:
    pids = stand.storage.servers_of_data()
    return pids if stand.random.random() < 0.5 else pids[:1]


def _told(stand: StorageStand, victims: list[int]) -> list[str]:
    return [f"{len(victims)} of {stand.storage.data_servers} servers"] * len(victims)

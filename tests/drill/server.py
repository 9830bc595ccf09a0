"""The backing server fails, hangs, loses answers, or is killed and comes back: the application notices nothing, and nothing is lost.

Two kinds of stand: over the tests' faulty file system, whose faults are orders, and over a GlusterFS volume, whose bricks are real
processes (only by hand: one glusterd per machine).
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from bench import gluster
from tests.drill import verdict
from tests.drill.faults import Outcome, let_work, nothing_noticed
from tests.drill.stand import Stand
from tests.rig.faultfs import FaultFs

AWAY_S_MAX = 0.8
CHANGES = ["write", "fsync", "create", "rename", "unlink", "mkdir", "rmdir", "link", "symlink", "fsyncdir", "setattr", "setxattr"]
NAMES = ["rename", "unlink", "mkdir", "rmdir", "link", "symlink"]


class ServerStand(Stand):
    """A stand over the faulty file system."""

    storage: FaultFs

    def make_backing(self) -> Path:
        self.storage = FaultFs(self.base / "disk", self.base / "backing", watchdog_s=3600.0)
        self.storage.__enter__()
        return self.base / "backing"

    @property
    def shown(self) -> Path:
        return self.base / "disk"

    def __exit__(self, *error: object) -> None:
        if self.application is not None:
            self.application.kill()
            self.application = None
        self.storage.clear()
        self.mount.abort()
        self.storage.stop()
        super().__exit__(*error)


def server_fails(stand: Stand) -> Outcome:
    """Errors of many kinds, torn writes, and calls that were carried out although the answer is an error."""
    assert isinstance(stand, ServerStand)
    storage, chooser = stand.storage, stand.random
    stand.go()
    let_work(chooser.random() * 0.2)
    for error in ("EIO", "ENOSPC", "ESTALE", "ENOTCONN", "ETIMEDOUT"):
        ops = [op for op in CHANGES if (op, error) != ("setxattr", "ENOSPC")]  # that means: no room for an attribute so large
        storage.fail(error, ops, probability=chooser.choice((0.05, 0.5)), seed=chooser.randrange(1 << 30), times=30)
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


class GlusterStand(Stand):
    """A stand over a replicated GlusterFS volume of this machine."""

    def make_backing(self) -> Path:
        self._closing = contextlib.ExitStack()
        return self._closing.enter_context(gluster.volume(self.base / "gluster"))

    def __exit__(self, *error: object) -> None:
        if self.application is not None:
            self.application.kill()
            self.application = None
        self.mount.abort()
        self._closing.close()
        super().__exit__(*error)

    def bricks(self) -> list[int]:
        """Process numbers of the brick servers."""
        files = Path("/var/run/gluster/vols").glob(f"{gluster.name()}/*.pid")
        return [int(file.read_text()) for file in files if file.read_text().strip()]

    def check_checksums(self) -> list[str]:
        return verdict.check_checksums(self.shown)


def kill_bricks(stand: Stand) -> Outcome:
    """kill -9 of one server process, or of all; they are started again."""
    assert isinstance(stand, GlusterStand)
    stand.go()
    let_work(stand.random.random() * AWAY_S_MAX)
    bricks = stand.bricks()
    victims = bricks if stand.random.random() < 0.5 else bricks[:1]
    for pid in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    let_work(0.3 + stand.random.random())
    gluster.restart_bricks()
    return Outcome(nothing_noticed(stand), [f"{len(victims)} of {len(bricks)} bricks"] * len(victims))

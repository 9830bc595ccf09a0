"""Power loss: everything dies, RAM is empty, and the backing file system keeps what it was told to
keep, and as much more as it likes.

The stand's backing directory is the tests' pass-through file system with a log of every call.
Besides the one loss that is carried out, many instants of the same log are looked at: what would
have been left then?
"""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.drill import verdict
from tests.drill.faults import AT_RANDOM, WORK_S_MAX, Outcome, drain, let_work
from tests.drill.history import History
from tests.drill.spec import HIDDEN, Tree, digest
from tests.drill.stand import Stand
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import mounts_below
from tests.rig.power import BEGIN, Disk, read_log, restore

INSTANTS = 40
"""Of each run; about 10 ms each."""
Left = dict[str, tuple[str, Any, dict[str, bytes]]]


class PowerStand(Stand):
    """A stand over a file system that can lose its power."""

    storage: FaultFs
    _losses = 0

    def __init__(
        self, base: Path, workload: str, transport: str, seed: int, **options: Any
    ) -> None:
        """The node id is given: one that acpfs makes up is gone with the node's RAM."""
        super().__init__(base, workload, transport, seed, **{"node_id": "drill", **options})

    def make_backing(self) -> Path:
        self._disk().mkdir()
        self._power_up()
        return self.base / "backing"

    def _disk(self) -> Path:
        return self.base / f"disk{self._losses}"

    def _log(self) -> Path:
        return self.base / f"power{self._losses}.log"

    def _power_up(self) -> None:
        self.storage = FaultFs(
            self._disk(), self.base / "backing", power=self._log(), watchdog_s=3600.0
        )
        self.storage.__enter__()

    @property
    def shown(self) -> Path:
        return self._disk()

    def __exit__(self, *error: object) -> None:
        if self.application is not None:
            self.application.kill()
            self.application = None
        self.mount.abort()
        self.storage.stop()
        super().__exit__(*error)

    def check_checksums(self) -> list[str]:
        """The manifest may be older than the power loss: each file's own note counts."""
        return verdict.check_notes(self.shown)

    def lose_power(self) -> list[tuple[Any, ...]]:
        """Everything dies and RAM is empty; returns the log of the storage."""
        self.kill_all()  # first: the end of an application closes its files
        self.kill_application()
        self.mount.detach()
        self.storage.abort()
        for mounted in mounts_below(self.mount.runtime_dir):
            subprocess.run(["umount", "-l", str(mounted)], check=False, timeout=60)
        shutil.rmtree(self.mount.runtime_dir, ignore_errors=True)
        return read_log(self._log())

    def power_up(self, left: Left) -> None:
        """The storage is there again, with what is left."""
        shutil.rmtree(self._disk())
        self._log().unlink()
        self._losses += 1
        restore(left, self._disk())
        self._power_up()


def visible(left: Left) -> Tree:
    """What is left, as a tree without acpfs' own."""
    tree: Tree = {}
    for path, (kind, what, _xattrs) in left.items():
        if path != HIDDEN and not path.startswith(HIDDEN + "/"):
            tree[path] = ("file", digest(what)) if kind == "file" else (kind, what)
    return tree


def instants(
    history: History, records: list[tuple[Any, ...]], chooser: random.Random, count: int
) -> list[str]:
    """What would have been left at so many instants of the log."""
    begin = next(number for number, record in enumerate(records) if record[1] == BEGIN)
    chosen = set(chooser.sample(range(begin, len(records)), min(count, len(records) - begin)))
    disk = Disk()
    losses = []
    for number, record in enumerate(records):
        disk.apply(record)
        if number in chosen:
            losses += check_left(
                history,
                visible(disk.crash(chooser.randrange(1 << 30))),
                record[0],
                f"power loss after call {number}",
            )
    return losses


def check_left(history: History, tree: Tree, at_s: float, when: str) -> list[str]:
    """Like any look at the backing directory, but that each instant stands for itself: what another
    one showed does not bind it.
    """
    before = history.seen_at
    history.seen_at = 0
    try:
        return verdict.check_published(history, tree, at_s, when)
    finally:
        history.seen_at = before


def lose_power(stand: Stand) -> Outcome:
    """The power goes during work; afterwards everything goes on from what is left, without a
    human.
    """
    assert isinstance(stand, PowerStand)
    stand.go()
    let_work(0.1 + stand.random.random() * 2 * WORK_S_MAX)
    stand.under_way.note()
    records = stand.lose_power()
    stand.history = stand.history.possible()
    losses = instants(stand.history, records, stand.random, INSTANTS)
    disk = Disk()
    for record in records:
        disk.apply(record)
    left = disk.crash(stand.random.randrange(1 << 30))
    tree = visible(left)
    losses += check_left(stand.history, tree, records[-1][0], "after the power loss")
    stand.power_up(left)
    stand.mount.start()
    seen, _contents = stand.read_mount()
    losses += verdict.check_equal(seen, tree, "mount after the power loss")
    stand.begin()
    return Outcome(losses + drain(stand), [AT_RANDOM], INSTANTS)

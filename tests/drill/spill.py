"""Stands with a spill tier: little RAM and a slow drain, so that files really move; with a mirror,
the node is rebooted, too.

A reboot takes all processes and all that lies in memory. What comes back is decided by the
application's own journal: a state that it had, none earlier than the backing directory showed, or
than the moment at which `status` said that everything was mirrored (S152).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, ClassVar

from acpfs.errors import AcpfsError
from tests.drill import points, verdict
from tests.drill.faults import (
    AT_RANDOM,
    IN_A_ROW,
    WORK_S_MAX,
    Outcome,
    die_somewhere,
    drain,
    let_work,
    nothing_noticed,
)
from tests.drill.history import differences
from tests.drill.spec import Tree
from tests.drill.stand import FaultyStand, Stand
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import CommandError, mounts_below

RAM = "2M"
"""Some saves of the workloads are larger: they outgrow RAM while older files move."""
BANDWIDTHS = ("1M", "3M", "0")
"""A drain slower than the application, about as fast, and as fast as it goes."""
MIRRORED_WAIT_S = 10.0
DISK_AWAY_S_MAX = 0.6


class SpillStand(Stand):
    """What both modes have in common; `copies` are told from outside, by the files in the spill
    directory.
    """

    mode: ClassVar[str]
    death_points = sorted([*points.PLAIN_POINTS, *points.SPILL_POINTS * 4])
    """Those of the spill tier more often: most of them are passed less often."""

    def __init__(
        self, base: Path, workload: str, transport: str, seed: int, **options: Any
    ) -> None:
        self.spill = base / "spill"
        super().__init__(
            base,
            workload,
            transport,
            seed,
            **{"ram": RAM, "spill": self.spill, "spill_mode": self.mode, **options},
        )
        self.make_spill()

    def make_spill(self) -> None:
        """Where the spill directory is to be."""
        self.spill.mkdir()

    @property
    def spill_shown(self) -> Path:
        """Where its files can be seen."""
        return self.spill

    def copies(self) -> list[Path]:
        """Files that are in the spill directory now."""
        return list(self.spill_shown.glob("acpfs-[!n]*/[0-9]*"))

    def set_bandwidth(self, value: str) -> None:
        """How fast the drain may be."""
        with contextlib.suppress(AcpfsError):  # nobody serves the mount just now
            self.mount.ask("set", key="bandwidth", value=value)

    def go(self) -> None:
        self.set_bandwidth(self.random.choice(BANDWIDTHS))
        super().go()

    def check_reads(self) -> list[str]:
        """The first looks at the mount are while files are spilled."""
        losses = verdict.check_equal(
            self.read_mount()[0], self.history.now(), "mount with files in the spill directory"
        )
        self.set_bandwidth("0")
        return losses + super().check_reads()

    def check_drained(self) -> list[str]:
        self.set_bandwidth("0")
        return super().check_drained()

    def left_over(self, status: dict[str, Any]) -> list[str]:
        """Copies, too."""
        return super().left_over(status) + [
            f"left in the spill directory: {path.name}" for path in self.copies()
        ]


class MoveStand(SpillStand):
    """Complete files move when RAM is short."""

    mode = "move"


class FailingStand(FaultyStand, MoveStand):
    """The spill directory's disk is one that can fail."""

    def make_spill(self) -> None:
        self.storage = FaultFs(self.spill_shown, self.spill, watchdog_s=3600.0)
        self.storage.__enter__()

    @property
    def spill_shown(self) -> Path:
        return self.base / "spill.disk"


class MirrorStand(SpillStand):
    """Everything that is complete is copied, and so is the log."""

    mode = "mirror"
    death_points = sorted([*points.PLAIN_POINTS, *(points.SPILL_POINTS + points.MIRROR_POINTS) * 4])
    _rebooted = False

    def check_checksums(self) -> list[str]:
        """After a reboot, the manifest may be older than that: each file's own note counts."""
        return verdict.check_notes(self.shown) if self._rebooted else super().check_checksums()

    def is_mirrored(self) -> bool:
        """Whether `status` says that a reboot now would lose nothing that is complete."""
        try:
            spill = self.mount.status()["spill"]
        except (AcpfsError, OSError):
            return False
        mirror = spill["mirror"]
        return bool(
            mirror["state"] == "on" and not mirror["behind_files"] and not mirror["pending"]
        )

    def lose_ram(self) -> None:
        """All processes, and what lies in memory: RAM tier, runtime directory, node id."""
        self.kill_all()  # first: the end of an application closes its files
        if self.application is not None:
            self.kill_application()
        self.mount.detach()
        for mounted in mounts_below(self.mount.runtime_dir):
            subprocess.run(["umount", "-l", str(mounted)], check=False, timeout=60)
        shutil.rmtree(self.mount.runtime_dir, ignore_errors=True)
        self._rebooted = True


def spill_fails(stand: Stand) -> Outcome:
    """No room, or errors, while copies are made: it costs nothing but room, and what has moved can
    be read.
    """
    assert isinstance(stand, FailingStand)
    stand.go()
    let_work(stand.random.random() * WORK_S_MAX)
    for error in ("EIO", "ENOSPC"):
        stand.storage.fail(
            error,
            ["write", "fsync", "create"],
            probability=0.3,
            seed=stand.random.randrange(1 << 30),
        )
    let_work(stand.random.random() * DISK_AWAY_S_MAX)
    stand.storage.clear()
    copies = len(stand.copies())
    return Outcome(nothing_noticed(stand), ["its calls for a while"], copies=copies)


def reboot(stand: Stand) -> Outcome:
    """The node is rebooted during work, perhaps again while it goes on from the mirror: what comes
    back is a moment of the history.
    """
    assert isinstance(stand, MirrorStand)
    stand.go()
    mirrored_s, where = _work_and_look(stand)
    copies = len(stand.copies())
    stand.lose_ram()
    stand.history = stand.history.possible()
    promised = stand.history.state_at(mirrored_s)
    losses = stand.check_backing("after the reboot")
    outcome = Outcome(losses, [where], copies=copies)
    tree = _come_back(stand, outcome, promised)
    while not outcome.losses and stand.random.random() < IN_A_ROW:
        if stand.random.random() < 0.5:
            let_work(stand.random.random() * WORK_S_MAX)
        stand.lose_ram()
        outcome.killed.append("again after the reboot")
        again = _come_back(stand, outcome, promised)
        outcome.losses += verdict.check_equal(again, tree, "mount after another reboot")
    if outcome.losses:
        return outcome
    stand.begin()
    outcome.losses += drain(stand)
    return outcome


def _work_and_look(stand: MirrorStand) -> tuple[float, str]:
    """Let the application work, and perhaps the worker die; returns when everything answered before
    was mirrored, and where it ends.
    """
    how = stand.random.random()
    mirrored_s = 0.0
    until_s = time.monotonic() + stand.random.random() * 2 * WORK_S_MAX
    if how < 0.4:
        return mirrored_s, die_somewhere(stand)
    wait_s = 0.0
    if how > 0.7:
        let_work(stand.random.random() * WORK_S_MAX)
        stand.stop()
        wait_s = MIRRORED_WAIT_S
    while (now_s := time.monotonic()) < until_s or (not mirrored_s and now_s < until_s + wait_s):
        if stand.is_mirrored():
            mirrored_s = now_s
        let_work(0.01)
    return mirrored_s, "all was mirrored" if wait_s and mirrored_s else AT_RANDOM


def _come_back(stand: MirrorStand, outcome: Outcome, promised: int) -> Tree:
    """Mount again, perhaps dying on the way, and hold what is there against the journal."""
    if stand.random.random() < 0.4:
        number = stand.random.choice(points.SALVAGE_POINTS)
        stand.charge(number, 1)
        with contextlib.suppress(CommandError):
            stand.mount.start()
        if stand.withdraw():
            outcome.killed.append(points.label(number))
        stand.kill_all()
        stand.mount.detach()
        if os.path.ismount(stand.mount.path):
            raise RuntimeError("the mount is still there")
    stand.mount.start()
    seen, _contents = stand.read_mount()
    history = stand.history
    if history.find(seen, promised) is None:
        nearest, lines = history.nearest(seen)
        known = next(
            (index for index, state in enumerate(history.states) if state.allows(seen)), None
        )
        what = (
            f"state {known}"
            if known is not None
            else f"what the application never had, nearest {nearest}: {'; '.join(lines)}"
        )
        outcome.losses.append(
            f"after the reboot the mount shows {what}; seen on the backing directory was "
            f"{history.seen_at}, mirrored {promised}, "
            f"of {len(history.states)}; missing of the mirrored one: "
            f"{'; '.join(differences(seen, history.states[promised].tree)[:4])}"
        )
    return seen

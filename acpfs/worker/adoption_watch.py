"""Adopts what this member holds of a node that is silent, where the storage makes that safe.

A clock only says when it is begun. That nothing of the silent node comes late is due to these, in
this order, and it holds for one that lives:

    its record did not change for the member time-out, it said nothing, and does not answer
    the session is closed: it is told nothing more to be held, so it begins nothing more that a
        fence does not stop
    its journal has nothing of that kind that was begun (`adopting.under_way`)
    its log is claimed, and earlier terms are fenced (`backing.terms`): the mark is fixed from then
        on, as it is written through the staging directory, and is read then
    the journal is read again

The last two are the adopting mount's (`--adopts-alone`). Where one of them fails, it waits for
`acpfs-ctl adopt`, and `status` says why. In a thread of its own, as all of it may hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import Protocol

from acpfs.backing.late_calls import NOTED_AT
from acpfs.backing.lower import Lower
from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.config import Adopt, Settings
from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from acpfs.exchange.beside import Exchange
from acpfs.exchange.exchange_records import MemberAddress
from acpfs.logger import get_logger
from acpfs.runtime.given import Runtime
from acpfs.runtime.threads import Event
from acpfs.writeback.adopting.states import HolderState, may_claim, may_claim_closed
from acpfs.writeback.adopting.under_way import not_fenced, sentence
from acpfs.writeback.copies import on_disk
from acpfs.writeback.copies.held_copies import HeldCopies
from acpfs.writeback.copies.journal_frames import DamagedFrameError
from acpfs.writeback.copies.journal_marks import read_mark
from acpfs.writeback.copies.member_journals import ON_STORAGE
from acpfs.writeback.members.cluster import Cluster

LOOK_S = 1.0
AGAIN_S = 30.0
"""After an adoption that was refused or failed."""
WAIT_S = 0.2
"""Between two looks whether the command has ended."""
END_WAIT_S = 5.0
UNPROVEN = (
    "`acpfs doctor BACKING --second DIR` has not shown that this storage refuses late calls: "
    "`acpfs-ctl adopt` goes on when the machine is off"
)
"""`adopt` = auto, and nobody knows that it is safe."""
NOT_COUNTED = "nothing that is held of it here counts"
ASKED = "adopt = asked: `acpfs-ctl adopt` goes on when the machine is off"

log = get_logger(__name__)


class Silence(Protocol):
    """What is known of a node that may be lost."""

    def record(self, node: str) -> NodeRecord | None:
        """Its last one; None: there is none."""
        ...

    def is_silent(self, node: str) -> bool:
        """Whether its record did not change for the member time-out, and ours is fresh."""
        ...

    def answers(self, node: str) -> bool:
        """Ask it; may wait for that."""
        ...


class SilentNodes:
    """See `Silence`: by the cluster's records, and the exchange."""

    def __init__(
        self, cluster: Cluster, exchange: Exchange | None, lock: RLock, settings: Settings
    ) -> None:
        self._cluster = cluster
        self._exchange = exchange
        self._lock = lock
        self._timeout_s = settings.node_timeout_s

    def record(self, node: str) -> NodeRecord | None:
        """See `Silence`."""
        with self._lock:
            peers = self._cluster.statistics().peers
        return next((one.record for one in peers if one.node == node), None)

    def is_silent(self, node: str) -> bool:
        """See `Silence`. Our own record: else it may be our storage that shows nothing new."""
        with self._lock:
            found = self._cluster.statistics()
        age_s = found.published_age_s
        missing = {one.node for one in found.peers if one.missing}
        return age_s is not None and age_s < self._timeout_s and node in missing

    def answers(self, node: str) -> bool:
        """See `Silence`. Whatever it says, it lives."""
        record = self.record(node)
        if record is None or self._exchange is None or not record.addresses:
            return False
        address = MemberAddress(node, tuple(record.addresses), record.port, record.key)
        with contextlib.suppress(OSError):
            self._exchange.hold(address, {"what": "lives"})
            return True
        return False


class AdoptionWatch:
    """Of one worker."""

    def __init__(
        self,
        settings: Settings,
        node: str,
        holding: HeldCopies,
        lower: Lower,
        silence: Silence,
        adopt: Callable[[str, Event], str],
        runtime: Runtime,
    ) -> None:
        """`node`: this one. `adopt`: drains what is held of a node, until that is done or the event
        is set; what it returns says why it is not, "": it is.
        """
        self._settings = settings
        self._node = node
        self._holding = holding
        self._lower = lower
        self._silence = silence
        self._adopt = adopt
        self._threads = runtime.threads
        self._now = runtime.clock.now
        self._stopping = runtime.threads.event()
        self._told: dict[str, str] = {}
        self._rest_until: dict[str, float] = {}

    def begin(self) -> None:
        """Look from now on."""
        self._threads.start("adoption", self._run)

    def close(self) -> None:
        """The mount ends; what is being adopted is gone on with by the next one."""
        self._stopping.set()

    def told(self, node: str) -> str:
        """What `status` says of it; thread-safe."""
        return self._told.get(node, "")

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            origins = sorted({one.origin for one in self._holding.statistics()})
            for node in {*self._told} - {*origins}:
                del self._told[node]
            for node in origins:
                if not self._stopping.is_set():
                    self.look(node)

    def look(self, node: str) -> None:
        """Adopt its log, if that may be."""
        is_claimed = bool(self._holding.claimed(node))
        silent_s = min(
            (one.silent_s for one in self._holding.statistics() if one.origin == node), default=0.0
        )
        record = self._silence.record(node)
        has_left = record is not None and record.state is NodeState.LEFT
        if is_claimed and has_left:  # drained, and whoever did so died before it said that
            self._holding.adopted(node)
            return
        is_silent = silent_s > self._settings.node_timeout_s and self._silence.is_silent(node)
        if not is_claimed and not may_claim(
            HolderState.HOLDING, silent=is_silent, answers=False, has_left=has_left
        ):
            self._told.pop(node, None)
            return
        if self._now() < self._rest_until.get(node, 0.0):
            return
        # asked last: it may take seconds
        if not is_claimed and self._silence.answers(node):
            self._told.pop(node, None)
            return
        self._told[node] = "its log is being adopted"
        why = self._why_not(node)
        if not why:
            log.warning("a node is silent: what is held of it is adopted", node=node)
            why = self._adopt(node, self._stopping)
        if why:
            if self._told.get(node) != why:
                log.warning("a node that is silent is not adopted", node=node, why=why)
            self._told[node] = why
            self._rest_until[node] = self._now() + min(AGAIN_S, self._settings.node_timeout_s)

    def _why_not(self, node: str) -> str:
        """Why its log is not claimed; "": the session is closed, and it may be."""
        if self._settings.adopt is not Adopt.AUTO:
            return ASKED
        try:
            if not are_late_calls_refused(self._lower):
                return UNPROVEN
            mark = read_mark(self._lower, node)
        except (OSError, ValueError) as error:
            return f"the mark of what it has copied cannot be read: {error}"
        if self._holding.claimed(node):  # by an earlier worker, or a person
            # who goes on with it looks again; where the mark names another one, that one may
            is_other = mark is not None and mark.get("holder", self._node) != self._node
            return NOT_COUNTED if is_other else ""
        if mark is None or mark.get("holder") != self._node:
            return NOT_COUNTED
        if mark.get("fenced") != "1":
            return "its acpfs is older than adoption without being asked"
        return self._close(node, mark)

    def _close(self, node: str, mark: dict[str, str]) -> str:
        """Take nothing more, and look what was begun. From here on it begins nothing that the
        journal does not have.
        """
        session = str(mark.get("session", ""))
        try:
            # who dies before the adopter is begun has claimed nothing: it is open again then
            place = self._holding.shut(node, session)
        except KeyError:
            return NOT_COUNTED
        why = self._under_way(place, node, mark)
        is_mark_same = True
        with contextlib.suppress(OSError, ValueError):  # the adopter reads it again
            is_mark_same = read_mark(self._lower, node) == mark
        if not why and not is_mark_same:
            why = "its mark on the storage has changed: it lives"
        if not may_claim_closed(is_mark_same=is_mark_same, why=why):
            self._holding.unclaim(node)
        return why

    def _under_way(self, place: Path, node: str, mark: dict[str, str]) -> str:
        if mark.get("journal") == ON_STORAGE:
            return ""  # it may be written to until the fence: who adopts looks at it after that
        files_at = next(place.glob(f"acpfs-*-{node}"), place)
        try:
            with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
                on_disk.read_into(files_at, mark.get("token", ""), db)
                found = not_fenced(db)
        except (OSError, sqlite3.Error, DamagedFrameError) as error:
            return f"its journal cannot be read: {error}"
        return sentence(found) if found else ""


def are_late_calls_refused(lower: Lower) -> bool:
    """Whether `acpfs doctor` has seen that of this storage.

    Raises:
        OSError: that cannot be read now.
    """
    with contextlib.suppress(FileNotFoundError, ValueError):
        found = json.loads(lower.read_own((NOTED_AT,)))
        return isinstance(found, dict) and found.get("refused") is True
    return False


def adopted_by_command(mountpoint: Path, runtime: Path, node: str, stopping: Event) -> str:
    """Have `acpfs-ctl adopt` drain it; "": done, else what it says."""
    command = [
        *(sys.executable, "-m", "acpfs.cli.ctl"),
        *(os.fspath(mountpoint), "adopt", node, "--alone"),
    ]
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd="/",
        env={**os.environ, ENVIRONMENT_VARIABLE: os.fspath(runtime)},
    )
    with child:
        while child.poll() is None:
            if stopping.wait(WAIT_S):
                child.terminate()  # what it has mounted goes on, and the next mount with it
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(END_WAIT_S)
                child.kill()
        said = child.stderr.read() if child.stderr is not None else ""
    return "" if child.returncode == 0 else said.strip() or "acpfs-ctl adopt failed"

"""Adopts what this member holds of a node that is silent, where the storage makes that safe.

A clock only says when it is begun. That nothing of the silent node comes late is due to these, in
this order, and it holds for one that lives:

    its record says that it lives, and did not change for the member time-out; it said nothing, and
        does not answer
    the session is closed: it is told nothing more to be held, so it begins nothing more that a
        fence does not stop
    its journal has nothing of that kind that was begun (`adopting.under_way`)
    the mark names this session, and its log is claimed, and earlier terms are fenced
        (`backing.terms`): the mark is fixed from then on, as it is written through the staging
        directory, and is read then
    the journal is read again

The last two are the adopting mount's (`--adopts-alone`). All of it is asked again each time, until
the newest claim on the storage is this member's: then the node is shut out, and what was begun is
gone on with. What failed before that opens the session again, after it waits for `acpfs-ctl adopt`;
`status` says why. Each node has a thread of its own, as all of it may hang.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from threading import RLock
from typing import NamedTuple, Protocol

from acpfs.backing.late_calls import NOTED_AT, Storage, is_refusal_noted
from acpfs.backing.lower import Lower
from acpfs.backing.member_records import NodeRecord, NodeState
from acpfs.backing.terms import TermClaim
from acpfs.config import Adopt, Settings
from acpfs.control.registry import adopting_lock
from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from acpfs.exchange.beside import Exchange
from acpfs.exchange.exchange_records import MemberAddress
from acpfs.logger import get_logger
from acpfs.runtime.file_locks import locked
from acpfs.runtime.given import Runtime
from acpfs.runtime.threads import Event
from acpfs.writeback.adopting.states import HolderState, may_claim, may_claim_closed
from acpfs.writeback.adopting.under_way import not_fenced, sentence
from acpfs.writeback.copies import on_disk
from acpfs.writeback.copies.held_copies import HeldCopies, HeldStatistics
from acpfs.writeback.copies.journal_frames import DamagedFrameError
from acpfs.writeback.copies.journal_marks import read_mark
from acpfs.writeback.copies.member_journals import ON_STORAGE
from acpfs.writeback.members.cluster import Cluster

LOOK_S = 1.0
AGAIN_S = 30.0
"""After an adoption that was refused or failed; twice as long after each further one …"""
AGAIN_MAX_S = 600.0
"""… up to this: what is in the way is a person's to mend, and each time the journal is read."""
WAIT_S = 0.2
"""Between two looks whether the command has ended."""
END_WAIT_S = 5.0
UNPROVEN = (
    "`acpfs doctor BACKING --second DIR` has not shown that this storage, as it is mounted here, "
    "refuses late calls: `acpfs-ctl adopt` goes on when the machine is off"
)
"""`adopt` = auto, and nobody knows that it is safe."""
NOT_COUNTED = "nothing that is held of it here counts"
OLDER = "its acpfs is older than adoption without being asked: `acpfs-ctl adopt` goes on"
CHANGED = "its mark on the storage has changed: it lives"
ASKED = "adopt = asked: `acpfs-ctl adopt` goes on when the machine is off"
UNDER_WAY = "its log is being adopted"

log = get_logger(__name__)


class NodesSeen(NamedTuple):
    """Of other members, at one moment."""

    records: Mapping[str, NodeRecord]
    """The last one of each that has one."""
    silent: frozenset[str]
    """Whose record did not change for the member time-out; none, where ours is not fresh."""


class Silence(Protocol):
    """What is known of nodes that may be lost."""

    def seen(self) -> NodesSeen:
        """Now; costs time with the number of nodes."""
        ...

    def answers(self, record: NodeRecord) -> bool:
        """Ask that node; may wait for that."""
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

    def seen(self) -> NodesSeen:
        """See `Silence`. Our own record: else it may be our storage that shows nothing new."""
        with self._lock:
            found = self._cluster.statistics()
        age_s = found.published_age_s
        is_fresh = age_s is not None and age_s < self._timeout_s
        records = {one.node: one.record for one in found.peers if one.record is not None}
        return NodesSeen(
            records, frozenset(one.node for one in found.peers if one.missing and is_fresh)
        )

    def answers(self, record: NodeRecord) -> bool:
        """See `Silence`. Whatever it says, it lives."""
        if self._exchange is None or not record.addresses:
            return False
        address = MemberAddress(record.node, tuple(record.addresses), record.port, record.key)
        with contextlib.suppress(OSError):
            self._exchange.hold(address, {"what": "lives"})
            return True
        return False


class AdoptionStorage:
    """What is asked of the backing directory. Everything may hang with it, and raise OSError."""

    def __init__(
        self,
        lower: Lower,
        newest_claim: Callable[[bytes], TermClaim | None],
        read_record: Callable[[str], NodeRecord | None],
        storage: Callable[[], Storage],
    ) -> None:
        """`storage`: which one it is."""
        self._lower = lower
        self.record = read_record
        """As it is there now; None: there is none."""
        self._newest_claim = newest_claim
        self._storage = storage

    def claimed_by(self, node: str) -> str:
        """The member that has the newest claim of a node's log; "": nobody."""
        claim = self._newest_claim(node.encode())
        return "" if claim is None else claim.by

    def refuses_late_calls(self) -> bool:
        """Whether `acpfs doctor` has seen that."""
        try:
            noted = self._lower.read_own((NOTED_AT,))
        except FileNotFoundError:
            return False
        return is_refusal_noted(noted, self._storage())

    def mark(self, node: str) -> dict[str, str]:
        """Which copies of a node count, and where they are; {}: none.

        Raises:
            OSError: or that cannot be told, as it is damaged.
        """
        try:
            return read_mark(self._lower, node) or {}
        except ValueError as error:
            raise OSError(f"the mark of what it has copied is damaged: {error}") from error


class Command(Protocol):
    """Has a node's log adopted."""

    def drain(self, node: str, stopping: Event) -> str:
        """Until that is done, or the event is set; what it returns says why it is not; "": it
        is.

        Raises:
            OSError: it could not be begun.
        """
        ...

    def locked(self, node: str) -> contextlib.AbstractContextManager[bool]:
        """Whether nobody else has that node adopted here, a person neither; nobody may meanwhile.

        Raises:
            OSError: the run directory's.
        """
        ...


class AdoptCommand:
    """See `Command`: `acpfs-ctl adopt`."""

    def __init__(self, mountpoint: Path, runtime: Path) -> None:
        self._mountpoint = mountpoint
        self._runtime = runtime

    def locked(self, node: str) -> contextlib.AbstractContextManager[bool]:
        """See `Command`."""
        return locked(adopting_lock(self._runtime, node), may_wait=False)

    def drain(self, node: str, stopping: Event) -> str:
        """See `Command`."""
        command = [
            *(sys.executable, "-m", "acpfs.cli.ctl"),
            *(os.fspath(self._mountpoint), "adopt", node, "--alone"),
        ]
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd="/",
            env={**os.environ, ENVIRONMENT_VARIABLE: os.fspath(self._runtime)},
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


class _Rest(NamedTuple):
    """After an attempt."""

    until: float
    length_s: float
    why: str


class AdoptionWatch:
    """Of one worker."""

    def __init__(
        self,
        settings: Settings,
        node: str,
        holding: HeldCopies,
        storage: AdoptionStorage,
        silence: Silence,
        command: Command,
        runtime: Runtime,
    ) -> None:
        """`node`: this one."""
        self._settings = settings
        self._node = node
        self._holding = holding
        self._storage = storage
        self._silence = silence
        self._command = command
        self._threads = runtime.threads
        self._now = runtime.clock.now
        self._stopping = runtime.threads.event()
        self._told: dict[str, str] = {}
        self._rests: dict[str, _Rest] = {}
        self._busy: set[str] = set()
        """Nodes that have a thread now; changed by one call, so without a lock."""

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
            for node in self.look():
                self._busy.add(node)  # one that hangs holds up no other one
                self._threads.start(f"adoption of {node}", self._attempt_apart, node)

    def _attempt_apart(self, node: str) -> None:
        try:
            self.attempt(node)
        finally:
            self._busy.discard(node)

    def look(self) -> Iterator[str]:
        """Nodes for which `attempt` has something to do; asks memory alone."""
        held: dict[str, list[HeldStatistics]] = defaultdict(list)
        for one in self._holding.statistics():
            held[one.origin].append(one)
        for node in {*self._told, *self._rests} - {*held}:
            self._forget(node)
        quiet = {
            node: any(one.is_frozen for one in ones)
            for node, ones in held.items()
            if any(one.is_frozen for one in ones) or self._is_quiet(ones)
        }
        for node in {*self._told} - {*quiet} - self._busy:
            self._forget(node)
        if not quiet:
            return  # what follows costs time with the number of nodes
        seen = self._silence.seen()
        for node, is_claimed in quiet.items():
            if node in self._busy:
                continue
            record = seen.records.get(node)
            if not is_claimed and not (node in seen.silent and _may_claim(record)):
                self._forget(node)
            elif self._settings.adopt is not Adopt.AUTO:
                # a person who adopts it needs no word about it
                self._told.pop(node, None)
                if not is_claimed:
                    self._told[node] = ASKED
            elif node not in self._rests or self._now() >= self._rests[node].until:
                yield node

    def _is_quiet(self, ones: list[HeldStatistics]) -> bool:
        return min(one.silent_s for one in ones) > self._settings.node_timeout_s

    def _forget(self, node: str) -> None:
        self._told.pop(node, None)
        self._rests.pop(node, None)

    def attempt(self, node: str) -> None:
        """Adopt a node's log, if that may be; says why not."""
        try:
            why = self._adopted(node)
        except (OSError, ValueError) as error:
            why = f"it cannot be adopted now: {getattr(error, 'strerror', None) or error}"
        if not why:
            self._forget(node)
            return
        before = self._rests.get(node)
        first_s = min(AGAIN_S, self._settings.node_timeout_s)
        length_s = first_s if before is None else min(AGAIN_MAX_S, 2 * before.length_s)
        if why not in (UNDER_WAY, "" if before is None else before.why):  # once, not each time
            log.warning("a node that is silent is not adopted", node=node, why=why)
        self._rests[node] = _Rest(self._now() + length_s, length_s, why)
        self._told[node] = why

    def _adopted(self, node: str) -> str:
        """Why it is not; "": it is, or is not to be."""
        with self._command.locked(node) as is_alone:
            if not is_alone:
                return UNDER_WAY
        record = self._storage.record(node)
        is_ours = self._storage.claimed_by(node) == self._node
        if self._holding.claimed(node):
            has_left = record is not None and record.state is NodeState.LEFT
            if has_left and record is not None and not record.withheld:
                # drained, and whoever did so died before it said that
                self._holding.adopted(node)
                return ""
            if not is_ours:  # by an attempt that came to nothing; all is asked at the next look
                return self._opened_again(node)
        if not self._storage.refuses_late_calls():
            return UNPROVEN
        if not is_ours:
            # asked last: it may take seconds
            if not _may_claim(record) or record is None or self._silence.answers(record):
                return ""
            if why := self._closed(node):
                return why
        self._told[node] = UNDER_WAY
        if node not in self._rests:
            log.warning("a node is silent: what is held of it is adopted", node=node)
        try:
            why = self._command.drain(node, self._stopping)
        finally:
            self._holding.unshut(node)  # what the command has claimed stays closed
        if why and not self._stopping.is_set():
            self._opened_again(node)  # if it came to nothing before the log was claimed
        return why

    def _opened_again(self, node: str) -> str:
        """Why a session that was closed for an adoption is not; "": it is."""
        with self._command.locked(node) as is_alone:
            is_open = is_alone and self._holding.unclaim(
                node, lambda: self._storage.claimed_by(node) == self._node
            )
        return "" if is_open else UNDER_WAY

    def _closed(self, node: str) -> str:
        """Why its log is not claimed; "": it may be. Then the session takes nothing more, and the
        node begins nothing from here on that the journal does not have.
        """
        mark = self._storage.mark(node)
        if mark.get("holder") != self._node:
            return NOT_COUNTED
        if mark.get("fenced") != "1":
            return OLDER
        try:
            # who dies before the adopter is begun has claimed nothing: it is open again then
            place = self._holding.shut(node, str(mark.get("session", "")))
        except KeyError:
            return NOT_COUNTED
        may = False
        try:
            why = self._under_way(place, node, mark)
            is_mark_same = self._storage.mark(node) == mark
            may = may_claim_closed(is_mark_same=is_mark_same, why=why)
        finally:
            if not may:
                self._holding.unshut(node)
        return "" if may else why or CHANGED

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


def _may_claim(record: NodeRecord | None) -> bool:
    """Of a node that is silent: one that was unmounted comes back, with what it has in RAM."""
    is_live = record is not None and record.state is NodeState.LIVE
    return may_claim(HolderState.HOLDING, silent=True, answers=False, has_left=not is_live)

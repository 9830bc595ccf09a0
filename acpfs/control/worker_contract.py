"""What `acpfs.control.verbs` needs of a running worker; `acpfs.worker.subject` implements it, tests
have a double.

Every method that is not async returns at once: nothing here may call the backing directory, so that
control answers while it hangs.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from acpfs.control.reports import (
    CheckpointFile,
    CheckpointReport,
    FileState,
    OpenWriter,
    Remaining,
    Status,
)
from acpfs.control.socket_messages import Json
from acpfs.drain_records import GuardedReport, QueueEntry, Verification
from acpfs.runtime.clock import Clock

Report = Callable[[Json], Awaitable[None]]
"""Sends one event to the client."""


class Incomplete(NamedTuple):
    """A file of which what it has now is nowhere but in RAM."""

    number: int
    """Of the file, whatever its name is."""
    path: str
    is_half: bool
    """Its writer was lost, or a write failed; else somebody writes it."""
    is_stored_log: bool
    """It only grows, and what it had is stored now and then."""
    versions: int
    """How often its content was fixed for good."""
    writers: tuple[OpenWriter, ...] = ()
    """Who is in the middle of it, as far as that is known."""


class Unseen(NamedTuple):
    """A file that may have been changed through a mapping, which nobody can tell."""

    path: str
    why: str


class Subject(Protocol):
    """A mount, as control sees it."""

    @property
    def clock(self) -> Clock:
        """By which handlers measure."""
        ...

    def status(self) -> Status: ...

    async def problem(self) -> str:
        """What is wrong with what lies at the backing directory's path now (gone, another volume),
        in words; "" for nothing.
        """
        ...

    def trouble(self) -> str:
        """What may keep the drain from its end: that problem, or calls that do not return or fail;
        "" for nothing.
        """
        ...

    def configuration(self) -> Json:
        """Effective settings."""
        ...

    def files(self, prefix: bytes) -> list[FileState]:
        """Files at and below a path that the upper layer knows."""
        ...

    async def follow(self, path: bytes) -> list[bytes]:
        """What makes up a path: each symlink on the way, and at last the path that they lead to.

        Raises:
            OSError: ENOENT, there is nothing; EXDEV, it leads out of the mount; EIO, the backing
                directory does not answer.
        """
        ...

    async def complete_until(self, paths: Sequence[bytes], timeout_s: float | None = None) -> int:
        """Newest log number that covers these paths (all paths when empty) as they are now.

        Waits for as long as a file's last close is under way, at most `timeout_s`.
        """
        ...

    def incomplete(self, paths: Sequence[bytes]) -> list[Incomplete]:
        """Files at and below the paths that are being written, or are halves."""
        ...

    async def written_back(self, paths: Sequence[bytes]) -> list[Unseen]:
        """Hear what was changed through mappings of files at and below the paths; those of which
        that cannot be heard.

        Takes as long as its caller has patience.
        """
        ...

    def remaining(self, until: int, paths: Sequence[bytes] = ()) -> Remaining:
        """What is left up to that number; with paths, without what is parked elsewhere."""
        ...

    def copied(self, until: int) -> Future[None]:
        """Done when another member has everything up to that number; perhaps never. Whoever waits
        cancels it.
        """
        ...

    def left(self, until: int) -> list[QueueEntry]:
        """What is left up to that number, oldest first; the first ones of many."""
        ...

    async def persisted(self, until: int) -> bool:
        """Wait until everything up to that number is persisted; False: some of it is parked."""
        ...

    async def decided(self) -> None:
        """Wait until it is known which deletions may be carried out now, and which stay held
        back.
        """
        ...

    async def nodes_seen(self) -> None:
        """Wait until the nodes that pointer files wait for have been looked at anew."""
        ...

    async def recorded(self) -> None:
        """Wait until the written manifest has what is persisted now, or cannot be written."""
        ...

    def records(self, path: bytes) -> bool:
        """Whether a checksum was recorded for anything at or below a path, there or not."""
        ...

    async def verify(
        self, paths: Sequence[bytes], tell: Callable[[Verification], Awaitable[None]]
    ) -> None:
        """Read back from the backing directory and compare with the manifest."""
        ...

    async def restore(self, verdict: Verification) -> int | str:
        """Store what RAM has of a bad file once more, if it has what was recorded; its log number,
        or in words why not.
        """
        ...

    def retry(self, path: bytes) -> int:
        """Try failed operations at and below a path again, now, and store interrupted files as they
        are; how many.
        """
        ...

    def discard(self, path: bytes) -> tuple[int, list[bytes]]:
        """Give parked operations and interrupted files at and below a path up, with their data; how
        many, and which stay, being open.
        """
        ...

    def guarded(self) -> list[GuardedReport]:
        """Deleted checkpoints whose deletion is held back."""
        ...

    def release(self, path: bytes) -> int:
        """Carry out held deletions at and below a path; of how many checkpoints."""
        ...

    async def change(self, key: str, value: str) -> Json:
        """Change a setting in use; its new value.

        Raises:
            ConfigError: not changeable, or nonsense.
        """
        ...

    async def checkpoints(self, path: bytes) -> list[CheckpointReport]:
        """Checkpoints at and below a path, or the one that it lies in."""
        ...

    def moments(self, report: CheckpointReport) -> tuple[float, float]:
        """When a checkpoint was closed last, and persisted last, by its clock; 0.0: before this
        boot, or not known.
        """
        ...

    def checkpoint_files(self, report: CheckpointReport) -> list[CheckpointFile]:
        """Files of a checkpoint."""
        ...

    def persisted_files(self, path: bytes) -> tuple[int, int]:
        """(persisted, all) files at and below a path."""
        ...

    def settlements(self) -> int:
        """Changes when a checkpoint came to be persisted."""
        ...

    def interrupted(self) -> list[QueueEntry]:
        """Files whose writer was lost with an earlier daemon."""
        ...

    async def unmount(self, *, leave: bool, patience_s: float = math.inf) -> None:
        """Take the mount away; from then on nothing new can come in.

        With `leave`, nothing more is drained.

        `patience_s`: how long it waits for others who may have the mount only for a moment, before
        it is taken away and afterwards.

        Raises:
            RefusedError: somebody uses it; it stays, unless the message says otherwise.
        """
        ...

    def reload(self) -> None:
        """Restart the worker with the installed code, as soon as that is loaded.

        Raises:
            RefusedError: this mount cannot be taken over.
        """
        ...

    async def bypass(self, reason: str) -> None:
        """Take the mount away from over the backing directory: new opens are native, what is open
        goes on.

        Raises:
            RefusedError: nothing lies beneath.
        """
        ...

    async def finished(self) -> list[QueueEntry]:
        """Wait for the end after `unmount`; what stays in the RAM tier."""
        ...

    def metrics(self) -> str:
        """Prometheus text format."""
        ...

"""What the verbs need of a running worker; `acpfs.supervisor` implements it, tests have a double.

Every method that is not async returns at once: nothing here may call the backing directory, so that control answers while it hangs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from acpfs.control.protocol import Json
from acpfs.control.reports import FileState, QueueEntry, Remaining, Status, Verdict

Report = Callable[[Json], Awaitable[None]]
"""Sends one event to the client."""


class Subject(Protocol):
    """A mount, as control sees it."""

    def status(self) -> Status: ...

    def configuration(self) -> Json:
        """Effective settings."""
        ...

    def files(self, prefix: bytes) -> list[FileState]:
        """Files at and below a path that the upper layer knows."""
        ...

    def complete_until(self, paths: Sequence[bytes]) -> int:
        """Newest log number that covers these paths (all paths when empty) as they are now.

        Raises:
            OSError: ENOENT, no such path is known.
        """
        ...

    def remaining(self, until: int, paths: Sequence[bytes] = ()) -> Remaining:
        """What is left up to that number; with paths, without what is parked elsewhere."""
        ...

    def left(self, until: int) -> list[QueueEntry]:
        """What is left up to that number, oldest first; the first ones of many."""
        ...

    async def persisted(self, until: int) -> bool:
        """Wait until everything up to that number is persisted; False: some of it is parked."""
        ...

    async def recorded(self) -> None:
        """Wait until the written manifest has what is persisted now, or cannot be written."""
        ...

    async def verify(self, paths: Sequence[bytes], tell: Callable[[Verdict], Awaitable[None]]) -> None:
        """Read back from the backing directory and compare with the manifest."""
        ...

    async def restore(self, verdict: Verdict) -> int | str:
        """Store what RAM has of a bad file once more, if it has what was recorded; its log number, or in words why not."""
        ...

    def retry(self, path: bytes) -> int:
        """Try failed operations at and below a path again, now, and store interrupted files as they are; how many."""
        ...

    def discard(self, path: bytes) -> int:
        """Give parked operations and interrupted files at and below a path up, with their data; how many."""
        ...

    async def change(self, key: str, value: str) -> Json:
        """Change a setting in use; its new value.

        Raises:
            ConfigError: not changeable, or nonsense.
        """
        ...

    def interrupted(self) -> list[QueueEntry]:
        """Files whose writer was lost with an earlier daemon."""
        ...

    async def unmount(self, *, leave: bool) -> None:
        """Take the mount away; from then on nothing new can come in. With `leave`, nothing more is drained.

        Raises:
            RefusedError: somebody uses it.
        """
        ...

    def reload(self) -> None:
        """Have a worker of the code as it is installed now take over, as soon as that is loaded.

        Raises:
            RefusedError: this mount cannot be taken over.
        """
        ...

    async def bypass(self, reason: str) -> None:
        """Take the mount away from over the backing directory: new opens are native, what is open goes on.

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

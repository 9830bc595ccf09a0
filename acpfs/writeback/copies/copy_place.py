"""Where copies of versions are kept: what `sources.spill` asks of a local disk, or of another
member.

All calls may hang with that, and are made in threads of a pool, never under the file system's lock,
but for `where`, `new_name`, `is_broken` and `is_too_small`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from acpfs.types import VersionId


class CopyFile(Protocol):
    """A copy that is being made, from its first byte to its last."""

    def buffer(self, size: int) -> memoryview:
        """Where the next piece, of so many bytes at most, may be put for `write`."""
        ...

    def write(self, piece: bytes | memoryview, position: int) -> None:
        """A piece; it may be kept in the buffer and written later, up to `finish`."""
        ...

    def clear(self) -> None:
        """Begin anew: what was written is not needed."""
        ...

    def finish(self, size: int) -> None:
        """All of it is there, and is as safe as this place can make it."""
        ...

    def close(self) -> None:
        """It is done, or given up."""
        ...


class CopyPlace(Protocol):
    """See above."""

    frees_ram: bool
    """Whether what has a copy there may leave RAM."""
    piece_bytes: int
    """What is written there at a time, at most."""
    lacks: bool
    """Whether it lacks something that an earlier place of the copies had, and that is needed."""

    @property
    def where(self) -> str:
        """For people."""
        ...

    @property
    def recorded(self) -> str:
        """For the next worker: where the copies are; "": not known yet."""
        ...

    @property
    def is_broken(self) -> bool:
        """What was there does not count any more: the copies are made again, somewhere else."""
        ...

    def begin(self) -> None:
        """Find the place, before anything else is asked of it, and again when it is broken."""
        ...

    def settled(self) -> None:
        """What is there is known, and `lacks` says whether something is missing; under the lock."""
        ...

    def is_too_small(self, size: int) -> None:
        """All that is to be there, so many bytes, finds no room: look for another place, if there
        is one. Does not wait.
        """
        ...

    def names(self) -> list[str]:
        """Of all that is there."""
        ...

    def free_bytes(self) -> int:
        """What it still takes."""
        ...

    def new_name(self, vid: VersionId) -> str:
        """Never used before."""
        ...

    def new_copy(self, name: str) -> CopyFile:
        """A new file."""
        ...

    def open(self, name: str) -> int:
        """An existing one, for reading; the caller closes the descriptor."""
        ...

    def gather(self) -> None:
        """Wait as long as pays until more names come that are to be removed."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """Delete files, those that are there."""
        ...

    def tell_clock(self, clock: float) -> None:
        """All that was closed here before then is there, by our clock."""
        ...

    def sync_names(self) -> None:
        """Have the names that were made as safe as the bytes."""
        ...

    def give_up(self) -> None:
        """Remove everything."""
        ...

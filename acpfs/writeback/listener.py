"""What the write-back engine tells the layer above.

Every call is made under the file system's lock, in log order.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from acpfs.backing.lower import LowerPath, LowerStat
from acpfs.types import Ino
from acpfs.writeback.log.lower_tree import Place
from acpfs.writeback.log.ops import Op, Version


class Listener(Protocol):
    """Implemented by the file system."""

    def persisted(self, op: Op, stat: LowerStat | None) -> None:
        """`op` is on stable storage and was removed from the log; the committed tree has been
        changed accordingly.

        `stat`: the node's entry on the backing directory as it is now (None for removals). A
        STORE's version is finished.
        """
        ...

    def dropped(self, op: Op) -> None:
        """`op` was removed from the log without being carried out (elided, or discarded by an
        operator). A STORE's version is finished.
        """
        ...

    def superseded(self, op: Op, given_up: list[Op], former: Place | None) -> None:
        """Before `dropped`, of a pointer that another member has replaced since: its name leads to
        that one's.

        `given_up`: with what was stored for it alone. `former`: where the file lies that was to get
        the name; it goes from there, as it would have gone by the rename.
        """
        ...

    def set_aside(self, op: Op) -> None:
        """A deletion is held back. What its file has under other names is as persisted as it
        was.
        """
        ...

    def directory_times(self, ino: Ino) -> tuple[int, int] | None:
        """(atime_ns, mtime_ns) that the mount shows for a directory; None: leave.

        Set on the backing directory when the directory's last operation is committed.
        """
        ...

    def permissions_of(self, directory: Ino) -> int | None:
        """The permission bits that the mount shows of a directory; None: it is not known."""
        ...

    def only_appended(self, version: Version) -> bool:
        """Whether what may be written to its file unseen is appended: if its bytes are the same in
        the end, they are the version.
        """
        ...

    def directory_settled(self, ino: Ino, stat: LowerStat) -> None:
        """A directory was given its times: `stat` is its entry on the backing directory as acpfs
        left it.
        """
        ...

    def display_path(self, op: Op) -> bytes:
        """The path below the mount point by which a user knows the operation, e.g.
        b"run1/ck100/model.pt".
        """
        ...

    def still_frozen(self, version: Version) -> bool:
        """Whether the version's bytes are what they were when the version was made, or last asked
        about.

        Asked after a stream has read them. False where the kernel wrote to the tier file unseen:
        then `size` and `renewals` have changed, and the version is streamed anew.
        """
        ...

    def is_changing(self, version: Version) -> bool:
        """Whether a write to its file is under way, so that no copy that is begun now is the
        version, as `still_frozen` would say in the end. An application may hold that up for ever.
        """
        ...

    def when_still(self, version: Version) -> Future[Any] | None:
        """Done when the write is over that `is_changing` tells of; None: none is under way."""
        ...

    def held_up_by(self, version: Version) -> int | None:
        """Who has a write to its file under way: a thread that opened it to write, 0 where that is
        not known; None: nobody has.
        """
        ...

    def may_have_changed(self, version: Version) -> bool:
        """Whether its bytes may have changed without a trace, through a mapping or by programs of
        an earlier mount: what an earlier stream read is no proof of what they are.
        """
        ...

    def restaged(self, version: Version, before: str) -> None:
        """The bytes are in another staging file now, `version.staging_name`, and the one called
        `before` goes. Under the lock.
        """
        ...

    def unstaged(self, version: Version) -> None:
        """Its staging file is gone, and RAM or the spill directory still has the bytes. Under the
        lock.
        """
        ...

    def left_as(self, ino: Ino) -> tuple[int, int, int, int] | None:
        """`LowerStat.identity()` of the node's entry on the backing directory when acpfs last knew
        it; None: not known.
        """
        ...

    def keeps_staging(self, version: Version) -> bool:
        """Whether the version's staging file is all that there is of a file which has no name any
        more and is still open.

        Asked where the version is given up: then the staging file stays, and is the file system's.
        Under the lock.
        """
        ...

    def staging_in_use(self) -> set[str]:
        """Names of staging files that hold the content of files that did not fit into RAM."""
        ...

    def idle_s(self) -> float:
        """Seconds since the last request of an application."""
        ...

    def is_writing(self) -> bool:
        """Whether some file is open for writing. Asked without the lock."""
        ...

    def version_of_open_file(self, version: Version) -> bool:
        """Whether somebody still has the version's file open for writing (used to order streams:
        closed files first).
        """
        ...

    def is_interrupted(self, ino: Ino) -> bool:
        """Whether a file is a half, and nobody has decided about it."""

    def is_directory(self, ino: Ino) -> bool:
        """Whether the node is a directory."""
        ...

    def directory_of(self, ino: Ino) -> Ino:
        """The directory in which a node lies by its first name; NO_INO: in none, and above the
        root.
        """
        ...

    def path_of(self, ino: Ino) -> bytes:
        """The path of a directory below the mount point."""
        ...

    def is_settled(self, path: LowerPath) -> bool:
        """Whether nothing at and below a path is open for writing, or waits to be persisted."""
        ...

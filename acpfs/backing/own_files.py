"""acpfs' own files in the backing directory, below `.acpfs` at the top and in staging areas.

Every method may block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections import Counter

from acpfs.backing.areas import OWN, encode
from acpfs.backing.entries import Entries
from acpfs.backing.health import current_call_goes_on
from acpfs.backing.lower import LowerPath
from acpfs.backing.quirks import NO_DIRECTORY_SYNC, Features
from acpfs.backing.terms import (
    CLAIMS,
    TermClaim,
    newest_claim,
    node_and_term,
    registered_areas,
)
from acpfs.runtime.given import Runtime


class StrangeFileError(OSError, ValueError):
    """What lies under a name of acpfs' own was not written by acpfs."""


class OwnFiles:
    """Reads, writes and lists them."""

    def __init__(self, root_fd: int, node_id: str, runtime: Runtime, by: str = "") -> None:
        """`root_fd`: of the backing directory; `by`: see `Entries`."""
        self.node_id = node_id
        self.chance = runtime.chance
        """Of new names."""
        self.clock = runtime.clock
        self._entries = Entries(root_fd, node_id, runtime, by)
        self._features = Features()
        self._is_fenced = False
        self._calls: Counter[str] = Counter()
        self._calls_lock = threading.Lock()

    def _count(self, label: str, times: int = 1) -> None:
        """Also tells the health check that a long call of many steps goes on."""
        current_call_goes_on()
        with self._calls_lock:
            self._calls[label] += times

    def fence_own_files(self) -> None:
        """From now on what is written here comes through the staging directory, so that it is
        refused, however late it comes, when somebody has taken the log over (`backing.terms`).
        """
        self._is_fenced = True

    # -- staging areas

    def areas_of(self, node: bytes) -> set[LowerPath]:
        """Roots of the areas that a node has made; not those that are not there, as what they were
        mounted on may be without them now.
        """
        self._count("read own")
        registered = registered_areas(self._entries.opener, node)
        return {root for root in registered if self._entries.areas.is_area(root)}

    def newest_claim(self, node: bytes) -> TermClaim | None:
        """Who has claimed the log of a node last; None: it was never claimed."""
        self._count("listdir own")
        return newest_claim(self._entries.opener, node)

    def remove_claims(self, node: bytes) -> None:
        """Of a node whose log is no more."""
        for name in self.list_own((CLAIMS,)):
            if node_and_term(name)[0] == node:
                self.remove_own((CLAIMS, name))

    def _register(self, roots: set[LowerPath]) -> None:
        self.write_own(
            (b"areas", self.node_id.encode()),
            "".join(f"{encode(root)}\n" for root in sorted(roots)).encode(),
        )

    # -- files

    def read_own(self, names: LowerPath) -> bytes:
        self._count("read own")
        fd = self._entries.open((OWN, *names), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, own=True)
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # a FIFO would keep the reader for ever
            os.close(fd)
            raise StrangeFileError(
                errno.EINVAL, "not a regular file", os.fsdecode(b"/".join((OWN, *names)))
            )
        with open(fd, "rb", closefd=True) as file:
            return file.read()

    def write_own(self, names: LowerPath, content: bytes) -> None:
        self._count("write own")
        try:
            self._write_own((OWN, *names), content)
        except FileNotFoundError:
            self._entries.make_own()
            self._write_own((OWN, *names), content)

    def _write_own(self, path: LowerPath, content: bytes) -> None:
        temporary = b".%s.%s" % (path[-1], self.chance.token(4).encode())
        with self._entries.parent(path, own=True) as (dir_fd, name):
            fd = os.open(
                temporary,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o644,
                dir_fd=dir_fd,
            )
            try:
                with open(fd, "wb", closefd=True) as file:
                    file.write(content)
                    file.flush()
                    os.fsync(fd)
                self._put_own(temporary, name, dir_fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=dir_fd)
                raise
        if self._features.fsync_directory:
            self._sync_own(path[:-1])

    def _put_own(self, temporary: bytes, name: bytes, dir_fd: int) -> None:
        if not self._is_fenced:
            os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            return
        # both calls name the staging directory, which a later term removes
        with self._entries.parent((*self._entries.staging, temporary)) as (staging_fd, _name):
            os.rename(temporary, temporary, src_dir_fd=dir_fd, dst_dir_fd=staging_fd)
            try:
                os.rename(temporary, name, src_dir_fd=staging_fd, dst_dir_fd=dir_fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=staging_fd)
                raise

    def overwrite_own(self, names: LowerPath, content: bytes) -> bool:
        """Write over a text in place, where it is there and large enough, filled up with blanks:
        that takes no room, and no call of it names the staging directory.
        """
        self._count("write own")
        if self._is_fenced:  # so whoever has the log is looked for before
            self._entries.terms.look()
        try:
            fd = self._entries.open((OWN, *names), os.O_WRONLY, own=True)
        except FileNotFoundError:
            return False
        try:
            size = os.fstat(fd).st_size
            text = content.rstrip()
            if size <= len(text) or os.pwrite(fd, text.ljust(size - 1) + b"\n", 0) != size:
                return False
            os.fsync(fd)
        finally:
            os.close(fd)
        return True

    def rename_own(self, names: LowerPath, new_names: LowerPath) -> None:
        """Rename a file below `.acpfs`."""
        self._count("rename own")
        with (
            self._entries.parent((OWN, *names), own=True) as (dir_fd, name),
            self._entries.parent((OWN, *new_names), own=True) as (to_fd, to),
        ):
            os.rename(name, to, src_dir_fd=dir_fd, dst_dir_fd=to_fd)

    def _sync_own(self, path: LowerPath) -> None:
        fd = self._entries.open(path, os.O_RDONLY | os.O_DIRECTORY, own=True)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(fd)

    def create_own(self, names: LowerPath, content: bytes) -> bool:
        """Write `.acpfs/<names…>` only if it is not there; False when it was.

        Never seen half-written where hard links exist.
        """
        self._count("write own")
        temporary = (OWN, *names[:-1], b".%s.%s" % (names[-1], self.chance.token(4).encode()))
        self._write_own(temporary, content)
        with self._entries.parent((OWN, *names), own=True) as (dir_fd, name):
            try:
                os.link(temporary[-1], name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            except FileExistsError:
                return False
            except OSError:
                return self._create_exclusive(dir_fd, name, content)
            finally:
                os.unlink(temporary[-1], dir_fd=dir_fd)
        return True

    @staticmethod
    def _create_exclusive(dir_fd: int, name: bytes, content: bytes) -> bool:
        try:
            fd = os.open(
                name,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o644,
                dir_fd=dir_fd,
            )
        except FileExistsError:
            return False
        with open(fd, "wb", closefd=True) as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        return True

    def remove_own(self, names: LowerPath, area: LowerPath = ()) -> None:
        """`area`: below the `.acpfs` of that staging area."""
        self._count("unlink own")
        with (
            self._entries.parent((*area, OWN, *names), own=True) as (dir_fd, name),
            contextlib.suppress(FileNotFoundError),
        ):
            os.unlink(name, dir_fd=dir_fd)

    def remove_own_directory(self, names: LowerPath, area: LowerPath = ()) -> None:
        """An empty one below `.acpfs`; nothing when it is not there."""
        self._count("rmdir own")
        with (
            self._entries.parent((*area, OWN, *names), own=True) as (dir_fd, name),
            contextlib.suppress(FileNotFoundError),
        ):
            os.rmdir(name, dir_fd=dir_fd)

    def list_own(self, names: LowerPath, area: LowerPath = ()) -> list[bytes]:
        self._count("listdir own")
        try:
            fd = self._entries.open((*area, OWN, *names), os.O_RDONLY | os.O_DIRECTORY, own=True)
        except FileNotFoundError:
            return []
        try:
            return sorted(os.fsencode(name) for name in os.listdir(fd))
        finally:
            os.close(fd)

    def list_own_files(self, names: LowerPath) -> list[bytes]:
        """As `list_own`, regular files only: acpfs makes no others, whoever did."""
        self._count("listdir own")
        try:
            fd = self._entries.open((OWN, *names), os.O_RDONLY | os.O_DIRECTORY, own=True)
        except FileNotFoundError:
            return []
        try:
            with os.scandir(fd) as entries:
                return sorted(
                    os.fsencode(entry.name)
                    for entry in entries
                    if entry.is_file(follow_symlinks=False)
                )
        finally:
            os.close(fd)

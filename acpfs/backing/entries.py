"""Reaching entries of the backing directory: a path of names → descriptor of the directory that
holds it, and its name there.

Every step goes by name beneath a directory descriptor (`syscalls.Opener`), so neither a symlink nor
`..` nor a rename by others leads outside. Of `.acpfs`, at the top and in staging areas, only this
node's directories for staging files and for what the guard keeps can be reached by path. Does not
know what is done with an entry. Thread-safe; every method may block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator

from acpfs.backing.areas import OWN, Areas, make_private, staged_in
from acpfs.backing.lower import LowerPath
from acpfs.backing.syscalls import Opener
from acpfs.runtime.given import Runtime

_SPECIAL = frozenset((b"", b".", b"..", OWN))


class Entries:
    """All entries, by path."""

    def __init__(self, root_fd: int, node_id: str, runtime: Runtime) -> None:
        """`root_fd`: of the backing directory, open for as long as this is used; `node_id`: whose
        staging directory may be reached.
        """
        self.root_fd = root_fd
        self.opener = Opener(root_fd)
        self.staging: LowerPath = (OWN, b"staging", node_id.encode())
        self.kept: LowerPath = (OWN, b"kept", node_id.encode())
        self.areas = Areas(self.opener, node_id, runtime)
        self._chance = runtime.chance
        self._staging_fd = -1
        self._staging_lock = threading.Lock()
        self._here = threading.local()

    def staged(self, name: str) -> LowerPath:
        """Where a staging file lies."""
        root, leaf = staged_in(name)
        return (*root, *self.staging, leaf)

    def make_own(self) -> None:
        """Make `.acpfs/{staging/<node>,kept/<node>,areas,manifest,nodes}`, as far as it is not
        there.

        Raises:
            OSError: EPERM where somebody else has made what is to be this node's alone.
        """
        for path, mode in (
            ((OWN,), 0o755),
            ((OWN, b"areas"), 0o755),
            ((OWN, b"manifest"), 0o755),
            ((OWN, b"mirrors"), 0o755),
            ((OWN, b"nodes"), 0o755),
        ):
            with (
                self.parent(path, own=True) as (dir_fd, name),
                contextlib.suppress(FileExistsError),
            ):
                os.mkdir(name, mode, dir_fd=dir_fd)
        for _own, kind, node in (self.staging, self.kept):
            make_private(self.opener, (OWN,), kind, node, self._chance)
        with self._staging_lock:
            self._staging_fd = -1  # an old one is left open: another thread may be using it

    def reopened(self, fd: int) -> None:
        """The same directory by another mount: the numbers of the descriptors stay, so that calls
        under way never see a closed one.
        """
        os.dup2(fd, self.root_fd, inheritable=False)
        with contextlib.suppress(OSError), self._staging_lock:
            if self._staging_fd >= 0:
                staging = self.opener.open_directory(self.staging)
                os.dup2(staging, self._staging_fd, inheritable=False)
                os.close(staging)

    def disconnect(self) -> None:
        """Close what was opened here, and is not the caller's; nothing else may be called
        afterwards.
        """
        with self._staging_lock:
            if self._staging_fd >= 0:
                os.close(self._staging_fd)

    def _check(self, path: LowerPath) -> None:
        for name in path:
            if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
                raise OSError(errno.EINVAL, "not a name of a directory entry")
        for at in (depth for depth, name in enumerate(path) if name == OWN):
            if path[at : at + 3] not in (self.staging, self.kept) and (
                not at or self.areas.is_own(path[:at])
            ):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    @contextlib.contextmanager
    def parent(self, path: LowerPath, *, own: bool = False) -> Iterator[tuple[int, bytes]]:
        """Descriptor of the directory that holds an entry, and the entry's name.

        `own`: all of `.acpfs` can be reached.

        Raises:
            OSError: EBUSY for the backing directory itself, EINVAL for what is no name, and what
                opening directories raises.
        """
        if not own:
            self._check(path)
        if not path:
            raise OSError(errno.EBUSY, "the backing directory itself")
        if len(path) == 1:
            yield self.root_fd, path[0]
            return
        if path[:-1] == self.staging:
            yield self._staging_directory(), path[-1]
            return
        kept: dict[LowerPath, int] | None = getattr(self._here, "kept", None)
        if kept is not None:
            if path[:-1] not in kept:
                kept[path[:-1]] = self.opener.open_directory(path[:-1])
            yield kept[path[:-1]], path[-1]
            return
        fd = self.opener.open_directory(path[:-1])
        try:
            yield fd, path[-1]
        finally:
            os.close(fd)

    def check_name(self, directory: LowerPath, name: bytes) -> None:
        """As for the path of a name, where the directory's has been looked at."""
        if name in _SPECIAL or b"/" in name or b"\0" in name:
            self._check((*directory, name))

    @contextlib.contextmanager
    def directory(self, path: LowerPath) -> Iterator[int]:
        """Descriptor of a directory, to reach several of its entries by name, each past
        `check_name`.
        """
        self._check(path)
        if not path:
            yield self.root_fd
            return
        fd = self.opener.open_directory(path)
        try:
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def keeping_directories(self) -> Iterator[None]:
        """Within, this thread opens each directory once; at the end each must still lie where it
        was found.

        Raises:
            OSError: ESTALE when one does not, and what opening directories raises.
        """
        kept: dict[LowerPath, int] = {}
        self._here.kept = kept
        try:
            yield
            self._here.kept = None
            for path, fd in kept.items():
                self._check_same(path, fd)
        finally:
            self._here.kept = None
            for fd in kept.values():
                os.close(fd)

    def _check_same(self, path: LowerPath, fd: int) -> None:
        again = self.opener.open_directory(path)
        try:
            same = os.path.sameopenfile(again, fd)
        finally:
            os.close(again)
        if not same:
            raise OSError(errno.ESTALE, "a directory was moved away meanwhile")

    def _staging_directory(self) -> int:
        """Kept open: every stored file passes through it, and three names to look up cost a network
        file system three questions.
        """
        with self._staging_lock:
            fd = self._staging_fd
        if fd < 0:
            fd = self.opener.open_directory(self.staging)
            with self._staging_lock:
                if self._staging_fd < 0:
                    self._staging_fd = fd
                else:
                    os.close(fd)
                fd = self._staging_fd
        return fd

    def open(self, path: LowerPath, flags: int, *, own: bool = False) -> int:
        """A descriptor of the entry; the caller closes it."""
        if not own:
            self._check(path)
        return self.opener.open(path, flags)

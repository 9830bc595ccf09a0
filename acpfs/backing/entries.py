"""Reaching entries of the backing directory: a path of names → descriptor of the directory that
holds it, and its name there.

Every step goes by name beneath a directory descriptor (`syscalls.Opener`), so neither a symlink nor
`..` nor a rename by others leads outside. Of `.acpfs`, at the top and in staging areas, only this
node's directories for staging files and for what the guard keeps can be reached by path. The path
of a staging file has the node's id in every term; what the directory is called now, `terms` says.
Does not know what is done with an entry. Thread-safe; every method may block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack

from acpfs.backing.areas import OWN, Areas, make_private, staged_in
from acpfs.backing.lower import LowerPath
from acpfs.backing.syscalls import Opener
from acpfs.backing.terms import NodeTerms
from acpfs.runtime.given import Runtime

_SPECIAL = frozenset((b"", b".", b"..", OWN))


class Entries:
    """All entries, by path."""

    def __init__(self, root_fd: int, node_id: str, runtime: Runtime, by: str = "") -> None:
        """`root_fd`: of the backing directory, open for as long as this is used; `node_id`: whose
        staging directory may be reached; `by`: who owns its terms, where that is another member.
        """
        self.root_fd = root_fd
        self.opener = Opener(root_fd)
        self.staging: LowerPath = (OWN, b"staging", node_id.encode())
        self.kept: LowerPath = (OWN, b"kept", node_id.encode())
        self.terms = NodeTerms(self.opener, node_id, runtime, by)
        self.areas = Areas(self.opener, node_id, runtime, self.terms)
        self._chance = runtime.chance
        self._staging_fd = -1
        self._staging_name = b""
        self._staging_lock = runtime.threads.lock()
        self._here = threading.local()

    def staged(self, name: str) -> LowerPath:
        """Where a staging file lies, in whatever term."""
        root, leaf = staged_in(name)
        return (*root, *self.staging, leaf)

    def make_own(self) -> None:
        """Make `.acpfs/{kept/<node>,areas,journals,manifest,mirrors,nodes}`, as far as it is not
        there; the staging directory is made by `terms` alone.

        Raises:
            OSError: EPERM where somebody else has made what is to be this node's alone.
        """
        for path, mode in (
            ((OWN,), 0o755),
            ((OWN, b"areas"), 0o755),
            ((OWN, b"journals"), 0o700),  # of all names, also in directories that are private
            ((OWN, b"manifest"), 0o755),
            ((OWN, b"mirrors"), 0o755),
            ((OWN, b"nodes"), 0o755),
        ):
            with (
                self.parent(path, own=True) as (dir_fd, name),
                contextlib.suppress(FileExistsError),
            ):
                os.mkdir(name, mode, dir_fd=dir_fd)
        make_private(self.opener, *self._kept_parts(), self._chance)

    def _kept_parts(self) -> tuple[LowerPath, bytes, bytes]:
        own, kind, node = self.kept
        return (own,), kind, node

    def reopened(self, fd: int) -> None:
        """The same directory by another mount: the numbers of the descriptors stay, so that calls
        under way never see a closed one.
        """
        os.dup2(fd, self.root_fd, inheritable=False)
        with contextlib.suppress(OSError), self._staging_lock:
            if self._staging_fd >= 0:
                staging = self.opener.open_directory((OWN, b"staging", self._staging_name))
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
        if OWN in path:  # it seldom is
            self._check_own(path)

    def _check_own(self, path: LowerPath) -> None:
        for at, name in enumerate(path):
            if (
                name == OWN
                and path[at : at + 3] not in (self.staging, self.kept)
                and (not at or self.areas.is_own(path[:at]))
            ):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    def parent(
        self, path: LowerPath, *, own: bool = False, looks: bool = False
    ) -> AbstractContextManager[tuple[int, bytes]]:
        """Descriptor of the directory that holds an entry, and the entry's name.

        `own`: all of `.acpfs` can be reached. `looks`: it is only looked whether a staging file is
        still there: after each rename it is not, and that must cost no further question. Who takes
        that for a loss lists the directory first (`check_term`).

        Raises:
            OSError: EBUSY for the backing directory itself, EINVAL for what is no name, and what
                opening directories raises.
        """
        if not own:
            self._check(path)
        if not path:
            raise OSError(errno.EBUSY, "the backing directory itself")
        if len(path) == 1:
            return contextlib.nullcontext((self.root_fd, path[0]))
        at = -1 if own or OWN not in path else self._staging_at(path)
        return self._in_directory(path) if at < 0 else self._in_staging(path, at, looks=looks)

    @contextlib.contextmanager
    def _in_directory(self, path: LowerPath) -> Iterator[tuple[int, bytes]]:
        """As `parent`, of one that lies in none of acpfs' own."""
        with self._opened(path[:-1]) as fd:
            yield fd, path[-1]

    @contextlib.contextmanager
    def _opened(self, directory: LowerPath) -> Iterator[int]:
        kept: dict[LowerPath, int] | None = getattr(self._here, "kept", None)
        if kept is not None:
            if directory not in kept:
                kept[directory] = self.opener.open_directory(directory)
            yield kept[directory]
            return
        fd = self.opener.open_directory(directory)
        try:
            yield fd
        finally:
            os.close(fd)

    # -- staging files

    def _staging_at(self, path: LowerPath) -> int:
        """Depth of the area's root, where an entry of the staging directory is meant; else -1."""
        if OWN not in path:
            return -1
        at = path.index(OWN)
        return at if path[at : at + 3] == self.staging and len(path) > at + 3 else -1

    @contextlib.contextmanager
    def _in_staging(
        self, path: LowerPath, at: int, *, looks: bool = False
    ) -> Iterator[tuple[int, bytes]]:
        """As `parent`. An entry that is missing is missing only where the directory is there."""
        name = self.terms.name()
        try:
            if at == 0 and len(path) == 4:
                yield self._staging_directory(name), path[-1]
            else:
                with ExitStack() as opened:
                    with _bar_is_nothing():
                        directory = (*path[: at + 2], name, *path[at + 3 : -1])
                        fd = opened.enter_context(self._opened(directory))
                    yield fd, path[-1]
        except FileNotFoundError:
            if not looks:
                self._check_staging(path, at, name)
            raise
        except OSError as error:
            if error.errno == errno.ESTALE:
                self._check_staging(path, at, name)
            raise

    def check_term(self, directory: LowerPath) -> None:
        """After a listing: what is not in a staging directory is missing only if nobody takes the
        log over, and the term is still the one that was listed.

        Raises:
            OSError: as `NodeTerms.look`; ESTALE: another term has begun.
        """
        if directory[-3:] == self.staging:
            name = self.terms.name()
            self.terms.look()
            if self.terms.name() != name:
                raise OSError(errno.ESTALE, "the staging directory was moved")

    def _check_staging(self, path: LowerPath, at: int, name: bytes) -> None:
        """Something was not found in the staging directory: somebody may be taking the log over,
        and moves what is staged, or has. Claims are listed before it is missing. If nobody is, and
        the directory is gone, a next term has begun when this returns.

        Raises:
            OSError: ESTALE: the entry is in that of the next term, so it is not missing; and what
                `NodeTerms.look` and `NodeTerms.lost` raise.
        """
        root = path[:at]
        if root and not self._is_there(root):
            return  # it is the area that is gone
        if self._is_there((*root, OWN, b"staging", name), os.O_DIRECTORY):
            with self._staging_lock:
                self._staging_fd = -1  # perhaps stale; left open: another thread may be using it
            self.terms.look()
        elif not root or self.areas.had_staging(root, name):
            self.terms.lost(name)
        moved = self.terms.name()
        if moved != name and self._is_there((*path[: at + 2], moved, *path[at + 3 :])):
            raise OSError(errno.ESTALE, "the staging directory was moved")

    def _is_there(self, path: LowerPath, flags: int = 0) -> bool:
        try:
            os.close(self.opener.open(path, os.O_PATH | flags))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def physical(self, path: LowerPath) -> LowerPath:
        """What a path below the staging directory is called in this term."""
        if OWN not in path:
            return path
        at = path.index(OWN)
        if path[at : at + 3] != self.staging:
            return path
        return (*path[: at + 2], self.terms.name(), *path[at + 3 :])

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

    def _staging_directory(self, name: bytes) -> int:
        """Kept open: every stored file passes through it, and three names to look up cost a network
        file system three questions.
        """
        with self._staging_lock:
            fd = self._staging_fd if self._staging_name == name else -1
        if fd < 0:
            with _bar_is_nothing():
                fd = self.opener.open_directory((OWN, b"staging", name))
            with self._staging_lock:
                if self._staging_fd < 0 or self._staging_name != name:
                    # that of an earlier term is left open: another thread may be using it
                    self._staging_fd = fd
                    self._staging_name = name
                else:
                    os.close(fd)
                fd = self._staging_fd
        return fd

    def open(self, path: LowerPath, flags: int, *, own: bool = False) -> int:
        """A descriptor of the entry; the caller closes it."""
        if own:
            return self.opener.open(path, flags)
        self._check(path)
        if OWN not in path:
            return self.opener.open(path, flags)
        at = self._staging_at(path)
        if at < 0:
            return self.opener.open(self.physical(path), flags)
        with self._in_staging(path, at) as (dir_fd, name):
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)


@contextlib.contextmanager
def _bar_is_nothing() -> Iterator[None]:
    """A file where the first term had its directory keeps that from being made again."""
    try:
        yield
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error

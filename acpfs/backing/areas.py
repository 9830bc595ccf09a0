"""Staging areas: a rename works within one file system only, and a backing directory can have
several in it.

Mounts, bind mounts, subvolumes and project quotas below the backing directory answer EXDEV to what
comes from the staging directory at its top. For each of them there is an area: a directory `.acpfs`
at its root, found by walking up as long as it is the same file system, with this node's directories
for staging files and for what the guard keeps. `.acpfs/area` marks it: it is hidden from the mount,
whichever node made it. `.acpfs/areas/<node>` at the top names a node's areas before they are made,
so that what lies there can be found again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, Protocol
from urllib.parse import quote_from_bytes, unquote_to_bytes

from acpfs.backing.lower import ASIDE_PREFIX, LowerPath
from acpfs.backing.posix_acl import DEFAULT
from acpfs.backing.syscalls import Opener
from acpfs.logger import shown
from acpfs.runtime.chance import Chance
from acpfs.runtime.given import Runtime

OWN = b".acpfs"
"""The name at the top, and in each area, that is acpfs' own."""
MARK = b"area"
VOLUME = b"volume"
"""What the `.acpfs` at a backing directory's top has."""
KNOWN_S = 5.0
"""How long it is known on which file system a directory lies: mounts come and go."""
KNOWN_DIRECTORIES_MAX = 4096
_SEPARATOR = "@"
_FSGETXATTR = 0x801C581F
_FSXATTR = struct.Struct("IIIII8x")
_PROJECT_IS_INHERITED = 0x200
_NOBODY = -1


class CurrentStaging(Protocol):
    """Which staging directory is the node's, as `backing.terms.NodeTerms` knows it."""

    def name(self) -> bytes: ...
    def look(self) -> None: ...
    def lost(self, name: bytes) -> None: ...


class Kind(NamedTuple):
    """What names can be moved within: equal means that they can, as far as one can see."""

    device: int
    mount: str
    """A bind mount has the device of what it shows, and is another mount."""
    project: int


def staged_in(name: str) -> tuple[LowerPath, bytes]:
    """The area of a staging name, () for the top, and what the file is called there."""
    leaf, found, root = name.partition(_SEPARATOR)
    return (decode(root) if found else ()), leaf.encode()


def staging_name(name: str, root: LowerPath) -> str:
    """A staging name in an area; the part that `name` has of an area is replaced."""
    leaf = name.partition(_SEPARATOR)[0]
    return f"{leaf}{_SEPARATOR}{encode(root)}" if root else leaf


def encode(root: LowerPath) -> str:
    """A path as text without blanks."""
    return quote_from_bytes(b"/".join(root), safe="/")


def decode(text: str) -> LowerPath:
    """Inverse of `encode`; () for what is no path below the top."""
    path = tuple(unquote_to_bytes(text).split(b"/"))
    return () if any(name in (b"", b".", b"..") for name in path) else path


def project_of(fd: int) -> int:
    """Number of the quota project that new entries of a directory belong to; 0: none, or not to be
    had.
    """
    with suppress(OSError):
        readable_fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
        try:
            answer = bytearray(_FSXATTR.size)
            fcntl.ioctl(readable_fd, _FSGETXATTR, answer)
        finally:
            os.close(readable_fd)
        flags, _extent, _extents, project, _cow = _FSXATTR.unpack(answer)
        return project if flags & _PROJECT_IS_INHERITED else 0
    return 0


class Areas:
    """Finds and makes them. Thread-safe; every method but `known_root` and `known` may block."""

    def __init__(
        self,
        opener: Opener,
        node_id: str,
        runtime: Runtime,
        staging: CurrentStaging,
        project: Callable[[int], int] = project_of,
    ) -> None:
        self._opener = opener
        self._staging = staging
        self._project = project
        self._lock_kept = runtime.threads.lock
        self._now = runtime.clock.now
        self._chance = runtime.chance
        self._node = node_id.encode()
        self._lock = threading.Lock()
        self._registering = runtime.threads.lock()
        self._making: dict[LowerPath, threading.Lock] = {}
        """By root: where one hangs, the others do not."""
        self._known: set[LowerPath] = set()
        self._roots: dict[LowerPath, tuple[float, LowerPath]] = {}
        self._own: set[LowerPath] = set()
        """Directories that take no names from where they seem to belong to: each has an area of its
        own.
        """
        self._made: set[LowerPath] = set()
        self._begun: tuple[bytes, set[LowerPath]] = (b"", set())
        """Name of the staging directories of a term, and the areas that had none when it began."""

    # -- what is known, without a look

    def known(self) -> set[LowerPath]:
        """Roots of this node's areas, as far as they were made or learned."""
        with self._lock:
            return set(self._known)

    def learn(self, roots: set[LowerPath]) -> None:
        """Of an earlier mount of this node."""
        with self._lock:
            self._known |= roots

    def known_root(self, path: LowerPath) -> LowerPath:
        """Of the nearest area above a path; () for the top."""
        with self._lock:
            return next(
                (
                    path[:depth]
                    for depth in range(len(path) - 1, 0, -1)
                    if path[:depth] in self._known
                ),
                (),
            )

    # -- looking

    def root_of(self, directory: LowerPath) -> LowerPath:
        """Where the staging directory for a directory has to be: at its file system's root; () for
        the top.

        For one that is missing: that of the nearest above.
        """
        now = self._now()
        with self._lock:
            since, root = self._roots.get(directory, (-KNOWN_S, ()))
            for depth in range(len(directory), 0, -1):
                if directory[:depth] in self._own:
                    return directory[:depth]
        if now - since < KNOWN_S:
            return root
        root = self._look(directory)
        with self._lock:
            if len(self._roots) >= KNOWN_DIRECTORIES_MAX:
                self._roots.clear()
            self._roots[directory] = (now, root)
        return root

    def _look(self, directory: LowerPath) -> LowerPath:
        top = self._kind(())
        kind = None
        while directory and kind is None:
            try:
                kind = self._kind(directory)
            except (FileNotFoundError, NotADirectoryError, PermissionError):
                # One that may not be entered now is opened for the commit alone. Where it is a file
                # system of its own, that says EXDEV, and what is staged is brought near it then.
                directory = directory[:-1]
        if kind is None or kind == top:
            return ()
        while len(directory) > 1 and self._kind(directory[:-1]) == kind:
            directory = directory[:-1]
        return directory

    def _kind(self, directory: LowerPath) -> Kind:
        fd = self._opener.open_directory(directory)
        try:
            return Kind(os.fstat(fd).st_dev, _mount_of(fd), self._project(fd))
        finally:
            os.close(fd)

    def can_enter(self, root: LowerPath) -> bool:
        """Whether the daemon may enter it now, and all above it."""
        try:
            os.close(self._opener.open((*root, OWN), os.O_PATH))
        except PermissionError:
            return False
        except (FileNotFoundError, NotADirectoryError):
            return True
        return True

    def is_area(self, directory: LowerPath) -> bool:
        """Whether the `.acpfs` in a directory is a staging area, of whichever node."""
        return self._has(directory, MARK)

    def is_own(self, directory: LowerPath) -> bool:
        """Whether it is acpfs' own: a staging area, or that of another backing directory, which
        lies in this one.
        """
        return self.is_area(directory) or self.is_volume(directory)

    def is_volume(self, directory: LowerPath) -> bool:
        """Whether another backing directory has its top there."""
        return self._has(directory, VOLUME)

    def _has(self, directory: LowerPath, name: bytes) -> bool:
        try:
            os.close(self._opener.open((*directory, OWN, name), os.O_PATH))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    # -- making

    def give_own(self, directory: LowerPath) -> None:
        """It said EXDEV to a name from the area that it seems to belong to: a rule that cannot be
        seen from here.
        """
        with self._lock:
            self._own.add(directory)

    def make(self, root: LowerPath, register: Callable[[set[LowerPath]], None]) -> None:
        """Make an area, as far as it is not there.

        `register`: keeps the roots of all areas where the next mount finds them.

        Raises:
            OSError: EXDEV where a `.acpfs` is in the way that is none of ours; EPERM for one that
                others could read or change.
        """
        with self._making_of(root):
            with self._lock:
                if root in self._made:
                    return
            with self._registering:
                if root not in self.known():
                    register(self.known() | {root})
                    with self._lock:
                        self._known.add(root)
                        self._begun[1].add(root)
            self._make(root)
            with self._lock:
                self._made.add(root)

    def _making_of(self, root: LowerPath) -> threading.Lock:
        with self._lock:
            return self._making.setdefault(root, self._lock_kept())

    def had_staging(self, root: LowerPath, name: bytes) -> bool:
        """Whether a staging directory of that name was made in an area, as far as is known here: if
        it is gone, it may not be made anew.
        """
        with self._lock:
            if self._begun[0] != name:
                first = not self._begun[0]
                self._begun = (name, self._begun[1] if first else set(self._known))
                self._made.clear()
            return root not in self._begun[1]

    def forget(self) -> None:
        """Something is not as it was: look, and make, anew."""
        with self._lock:
            self._roots.clear()
            self._made.clear()

    def _make(self, root: LowerPath) -> None:
        own = (*root, OWN)
        holder = self._opener.open_directory(root)
        try:
            with suppress(FileExistsError):
                os.mkdir(OWN, 0o755, dir_fd=holder)
        finally:
            os.close(holder)
        fd = self._opener.open_directory(own)
        try:
            if not self._is_marked(fd):
                self._mark(fd, own)
        finally:
            os.close(fd)
        make_private(self._opener, own, b"kept", self._node, self._chance)
        self._make_staging(root)

    def _make_staging(self, root: LowerPath) -> None:
        """Once in a term; and claims are listed before it is used (`backing.terms`)."""
        name = self._staging.name()
        if self.had_staging(root, name):
            try:
                os.close(self._opener.open_directory((*root, OWN, b"staging", name)))
            except FileNotFoundError:
                self._staging.lost(name)
                name = self._staging.name()
                self.had_staging(root, name)
        make_private(self._opener, (*root, OWN), b"staging", name, self._chance)
        self._staging.look()
        with self._lock:
            self._begun[1].discard(root)

    @staticmethod
    def _is_marked(fd: int) -> bool:
        with suppress(FileNotFoundError):
            os.stat(MARK, dir_fd=fd, follow_symlinks=False)
            return True
        return False

    def _mark(self, fd: int, own: LowerPath) -> None:
        """What a user made of that name is the user's; the top of another backing directory is ours
        to share.
        """
        readable_fd = self._opener.open(own, os.O_RDONLY | os.O_DIRECTORY)
        try:
            names = os.listdir(readable_fd)
        finally:
            os.close(readable_fd)
        if names and VOLUME.decode() not in names:
            raise OSError(
                errno.EXDEV,
                f"another file system, and {shown(own)} there was not made by acpfs: it cannot "
                "stage files there",
            )
        with suppress(FileExistsError):
            os.close(
                os.open(
                    MARK,
                    os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
                    0o644,
                    dir_fd=fd,
                )
            )

    def unmake(self, root: LowerPath) -> bool:
        """Remove an area in which nothing lies that is nowhere else, so that its directory can go;
        whether it is gone.

        This node's staging files are streamed again: what comes after the directory's removal must
        not keep it from being removed.
        """
        own = (*root, OWN)
        with self._making_of(root):
            with self._lock:
                self._made.discard(root)
            try:
                self._remove_in(
                    (*own, b"staging", self._staging.name()),
                    os.unlink,
                    lambda name: not name.startswith(ASIDE_PREFIX),
                )
                for kind in (b"staging", b"kept"):
                    self._remove_in((*own, kind), os.rmdir)
                self._remove_in(own, os.rmdir, lambda name: name.encode() != MARK)
                self._remove_in(own, os.unlink)
                self._remove_in(root, os.rmdir, lambda name: name.encode() == OWN)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                    return False
                raise
        with self._lock:
            self._own.discard(root)
        return True

    def _remove_in(
        self,
        directory: LowerPath,
        remove: Callable[..., None],
        which: Callable[[str], bool] = lambda _name: True,
    ) -> None:
        try:
            fd = self._opener.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            return
        try:
            for name in filter(which, os.listdir(fd)):
                remove(name, dir_fd=fd)
        finally:
            os.close(fd)


def make_private(opener: Opener, own: LowerPath, kind: bytes, node: bytes, chance: Chance) -> None:
    """Make `<own>/<kind>/<node>`, mode 0700, and see that it is ours alone: what lies there is
    everybody's secrets.

    Raises:
        OSError: EPERM when somebody else made it, as anybody can where others may write to the
            directory above.
    """
    _make_in(opener, own, kind, 0o755)
    is_new = _make_in(opener, (*own, kind), node, 0o700)
    fd = opener.open((*own, kind, node), os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # none, mostly
            os.removexattr(fd, DEFAULT)  # inherited from above, it would go to each staging file
        if is_new:
            return
        found = os.fstat(fd)
        if found.st_uid != os.geteuid() and found.st_uid != _who_we_are(fd, chance):
            raise OSError(
                errno.EPERM,
                f"{shown((*own, kind, node))} belongs to user {found.st_uid}: acpfs keeps no "
                "files there",
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(fd, 0o700)
    finally:
        os.close(fd)


def _make_in(opener: Opener, directory: LowerPath, name: bytes, mode: int) -> bool:
    fd = opener.open_directory(directory)
    try:
        os.mkdir(name, mode, dir_fd=fd)
    except FileExistsError:
        return False
    finally:
        os.close(fd)
    return True


def _who_we_are(fd: int, chance: Chance) -> int:
    """The user to whom belongs what this process makes in a directory: another one than here, where
    root is squashed.
    """
    try:
        return look_made(fd, chance).st_uid
    except PermissionError:
        return _NOBODY


def look_made(fd: int, chance: Chance) -> os.stat_result:
    """What a directory looks like that we make there now: some file systems have owners and modes
    of their own (root squash, CIFS).
    """
    name = b".look." + chance.token(6).encode()
    os.mkdir(name, 0o755, dir_fd=fd)
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    finally:
        os.rmdir(name, dir_fd=fd)


def _mount_of(fd: int) -> str:
    """No call on the file system: the kernel knows by which mount a descriptor was reached."""
    info = os.open(f"/proc/self/fdinfo/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        lines = os.read(info, 4096).decode("ascii", "replace").splitlines()
    finally:
        os.close(info)
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("mnt_id:")), ""
    )

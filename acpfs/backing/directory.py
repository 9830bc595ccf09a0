"""The backing directory by descriptor: the one implementation of `Lower` that makes system calls.

What each call does to an entry, and nothing of why; how an entry is reached without leaving the
backing directory is `entries`' business. Thread-safe; every method may block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import xxhash

from acpfs.backing import crossing, filling, posix_acl
from acpfs.backing.areas import OWN, staged_in, staging_name
from acpfs.backing.attributes import (
    DIGEST_XATTR,
    FSYNC_XATTR,
    OWN_XATTR_PREFIX,
    AttributeSetter,
    lower_stat,
    signed_ino,
)
from acpfs.backing.lower import (
    ASIDE_PREFIX,
    UNREACHABLE,
    LowerEntry,
    LowerPath,
    LowerStat,
    NewAttributes,
    Note,
    SpaceInfo,
)
from acpfs.backing.own_files import OwnFiles
from acpfs.backing.quirks import (
    CANNOT,
    NAME_BYTES_MAX,
    NO_DIRECTORY_SYNC,
    NO_EXCHANGE,
    Features,
    top_exists,
)
from acpfs.backing.syscalls import allocate, rename_exchange, sync_file_system
from acpfs.backing.terms import SupersededError
from acpfs.errors import FULL_ERRNOS, MachineError, RefusedError
from acpfs.runtime.given import Runtime

_NOT_EMPTY = frozenset({errno.ENOTEMPTY, errno.EEXIST})
NESTED_TOP = "it is the backing directory of other acpfs mounts, whose .acpfs lies in it"
_COUNTED_TOGETHER = 32
"""So many looks at names are counted at once: each count also says that the call goes on."""
_TERMS_IN_A_ROW = 2
"""In an area the next term may begin, and the area's directory be made in it."""
_UNKNOWN_SPACE = SpaceInfo(4096, 1 << 38, 1 << 38, 1 << 38, 0, 0, NAME_BYTES_MAX)
"""Of a small FUSE server that does not say: 1 PiB, for with none programs would not begin to
write.
"""


class BackingDirectory(OwnFiles):
    """Implements `Lower`; see there."""

    def __init__(
        self,
        path: Path,
        node_id: str,
        runtime: Runtime,
        *,
        kept_fd: int = -1,
        by: str = "",
    ) -> None:
        """Open it, make `.acpfs/{manifest,nodes…}`, and begin the node's term or go on in it.

        `kept_fd`: its descriptor, from an earlier worker that did so; then no system call is made,
        and none can hang. `by`: who commits the log, where that is another member (`NodeTerms`).

        Raises:
            MachineError: missing, not a directory, not writable.
            RefusedError: another member has taken over what this node id left.
        """
        self.path = path
        try:
            self._root_fd = (
                kept_fd
                if kept_fd >= 0
                else os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            )
        except OSError as error:
            raise MachineError(f"backing directory {path}: {error.strerror}") from error
        super().__init__(self._root_fd, node_id, runtime, by)
        self._setter = AttributeSetter()
        self._nested: set[LowerPath] = set()
        self._direct = False
        if kept_fd >= 0:
            return
        try:
            self._entries.make_own()
            self._entries.terms.begin()
        except SupersededError as error:
            if by in ("", node_id):
                os.close(self._root_fd)
                raise RefusedError(
                    f"{error.strerror}: choose another --node-id, or wait until it has drained"
                ) from error
            # another adopter has, and may have found that it holds nothing that counts: whoever
            # adopts asks that before it takes over, and uses no staging file until then
        except OSError as error:
            os.close(self._root_fd)
            raise MachineError(
                f"backing directory {path} is not writable: {error.strerror} (at .acpfs)"
            ) from error

    def take_over(self) -> None:
        """Claim the log of another member, which is silent: see `NodeTerms.take_over`."""
        self._entries.terms.take_over()

    @property
    def taken_over_by(self) -> str:
        """The member that has claimed the log of this one, as far as a call has found that out; "":
        none.
        """
        return self._entries.terms.taken_over_by

    @property
    def descriptor(self) -> int:
        """Of the top, to be kept for the next worker."""
        return self._root_fd

    def reopened(self, fd: int) -> None:
        """The same directory by another mount."""
        self._entries.reopened(fd)

    def disconnect(self) -> None:
        """Close the descriptors; nothing else may be called afterwards."""
        self._entries.disconnect()
        os.close(self._root_fd)

    # -- features and numbers

    @property
    def features(self) -> Features:
        """As probed; all good before `adapt`."""
        return self._features

    def adapt(self, features: Features) -> None:
        """Take over what `backing.probe` found.

        No system call: a later worker does so while the backing directory may hang.
        """
        self._features = features
        self._direct = features.direct_io and features.direct_writes
        self._setter.xattrs_work = features.xattrs
        self._setter.acls_work = features.acls

    def calls(self) -> dict[str, int]:
        """How many operations of each kind were started on the backing directory so far."""
        with self._calls_lock:
            return dict(self._calls)

    def refused_attributes(self) -> dict[str, int]:
        """How often an attribute could not be kept on the backing file system, by kind."""
        return self._setter.refused()

    def keeping_directories(self) -> AbstractContextManager[None]:
        return self._entries.keeping_directories()

    # -- looking

    def lstat(self, path: LowerPath) -> LowerStat:
        self._count("lstat")
        if not path:
            with top_exists():
                return lower_stat(os.fstat(self._root_fd))
        with self._entries.parent(path, looks=True) as (dir_fd, name):
            return lower_stat(os.stat(name, dir_fd=dir_fd, follow_symlinks=False))

    def lstat_many(self, directory: LowerPath, names: Sequence[bytes]) -> list[LowerStat | None]:
        found: list[LowerStat | None] = []
        try:
            with self._entries.directory(directory) as dir_fd:
                for name in names:
                    if not len(found) % _COUNTED_TOGETHER:
                        self._count("lstat", min(_COUNTED_TOGETHER, len(names) - len(found)))
                    found.append(self._lstat_in(directory, dir_fd, name))
        except (FileNotFoundError, NotADirectoryError):
            return [None] * len(names)
        return found

    def _lstat_in(self, directory: LowerPath, dir_fd: int, name: bytes) -> LowerStat | None:
        try:
            self._entries.check_name(directory, name)
            return lower_stat(os.stat(name, dir_fd=dir_fd, follow_symlinks=False))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def listdir(self, path: LowerPath) -> list[LowerEntry]:
        self._count("listdir")
        if path:
            found = self._list(path)
            self._entries.check_term(path)
            has_own = any(entry.name == OWN for entry in found) and self._is_own(path)
            return [entry for entry in found if entry.name != OWN] if has_own else found
        with top_exists():
            return [entry for entry in self._list(path) if entry.name != OWN]

    def _is_own(self, path: LowerPath) -> bool:
        if self._entries.areas.is_volume(path):
            self._nested.add(path)
            return True
        return self._entries.areas.is_area(path)

    def nested(self) -> list[LowerPath]:
        """Tops of other backing directories that were seen in this one."""
        return sorted(self._nested.copy())

    def _list(self, path: LowerPath) -> list[LowerEntry]:
        fd = self._entries.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(fd) as entries:
                return [
                    LowerEntry(
                        os.fsencode(entry.name), signed_ino(entry.inode()), _type_bits(entry)
                    )
                    for entry in entries
                ]
        finally:
            os.close(fd)

    def open_read(self, path: LowerPath) -> int:
        """O_NONBLOCK: a fifo that took the name must not hang the thread."""
        self._count("open")
        fd = self._entries.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            os.close(fd)
            number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(number, os.strerror(number))
        with contextlib.suppress(OSError):
            os.posix_fadvise(
                fd, 0, 0, os.POSIX_FADV_SEQUENTIAL
            )  # twice the read-ahead: a cold read of 512 MiB 0.31 s instead of 0.35 s
        return fd

    def open_uncached(self, path: LowerPath) -> int:
        fd = self.open_read(path)
        filling.forget_pages(fd)
        if self._features.direct_io:
            filling.go_direct(fd)
        return fd

    def readlink(self, path: LowerPath) -> bytes:
        self._count("readlink")
        with self._entries.parent(path) as (dir_fd, name):
            return os.readlink(name, dir_fd=dir_fd)

    def xattrs(self, path: LowerPath) -> dict[bytes, bytes]:
        self._count("xattrs")
        if not (self._features.xattrs or self._features.acls):
            return {}
        fd = self._entries.open(path, os.O_PATH)
        try:
            if stat.S_ISLNK(os.fstat(fd).st_mode):
                return {}
            return _xattrs(f"/proc/self/fd/{fd}", self._features)
        finally:
            os.close(fd)

    def digest(self, path: LowerPath) -> str:
        note = self.note(path)
        return "" if note is None else note.digest

    def note(self, path: LowerPath) -> Note | None:
        self._count("xattrs")
        fd = self._entries.open(path, os.O_PATH)
        try:
            return _note(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)

    def noted(self, fd: int) -> Note | None:
        self._count("xattrs")
        return _note(fd) if self._features.xattrs else None

    def space(self) -> SpaceInfo:
        self._count("statfs")
        try:
            st = os.statvfs(self._root_fd)
        except OSError as error:
            if error.errno not in CANNOT:
                raise
            return _UNKNOWN_SPACE
        return SpaceInfo(
            st.f_frsize, st.f_blocks, st.f_bfree, st.f_bavail, st.f_files, st.f_ffree, st.f_namemax
        )

    # -- changing names

    def mkdir(self, path: LowerPath) -> None:
        self._count("mkdir")
        with self._entries.parent(path) as (dir_fd, name):
            os.mkdir(name, 0o700, dir_fd=dir_fd)

    def rmdir(self, path: LowerPath) -> None:
        self._count("rmdir")
        with self._entries.parent(path) as (dir_fd, name):
            try:
                os.rmdir(name, dir_fd=dir_fd)
            except OSError as error:
                if error.errno not in _NOT_EMPTY:
                    raise
                if self._entries.areas.is_volume(path):
                    raise OSError(error.errno, NESTED_TOP) from error
                if not (self._entries.areas.is_area(path) and self._entries.areas.unmake(path)):
                    raise
                os.rmdir(name, dir_fd=dir_fd)

    def unlink(self, path: LowerPath) -> None:
        self._count("unlink")
        with self._entries.parent(path) as (dir_fd, name):
            os.unlink(name, dir_fd=dir_fd)

    def rename(self, source: LowerPath, target: LowerPath) -> None:
        self._count("rename")
        try:
            self._rename(source, target)
        except OSError as error:
            if error.errno != errno.EXDEV or OWN in source:
                raise
            self._put(target, lambda name: self._copy_to(source, name))
            self.unlink(source)

    def _rename(self, source: LowerPath, target: LowerPath) -> None:
        with (
            self._entries.parent(source) as (source_fd, name),
            self._entries.parent(target) as (target_fd, new_name),
        ):
            os.rename(name, new_name, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def _put(self, target: LowerPath, make: Callable[[str], None]) -> None:
        """Make a staging file where it can be renamed to `target`, and do that."""
        name = self.stage_near(f"copy-{self.chance.token(8)}", target[:-1])
        try:
            make(name)
            self._rename(self.staging_path(name), target)
        except OSError as error:
            self.remove_staging(name)
            if error.errno != errno.EXDEV or not target[:-1] or staged_in(name)[0] == target[:-1]:
                raise
        else:
            return
        self._entries.areas.give_own(target[:-1])
        self._put(target, make)

    def _copy_to(self, source: LowerPath, name: str) -> None:
        """A staging file or symlink that is like `source`."""
        mode = self.lstat(source).mode
        if stat.S_ISLNK(mode):
            self.remove_staging(name)
            return self.symlink(self.readlink(source), self.staging_path(name))
        if not stat.S_ISREG(mode):
            raise OSError(
                errno.EXDEV, "another file system: only files can be moved to it, copy it there"
            )
        read_fd = self.open_read(source)
        try:
            write_fd = self.create_staging(name)
            try:
                crossing.copy(read_fd, write_fd, self._count)
            finally:
                os.close(write_fd)
        finally:
            os.close(read_fd)
        return None

    def exchange(self, a: LowerPath, b: LowerPath) -> None:
        self._count("exchange")
        if self._features.rename_exchange:
            with (
                self._entries.parent(a) as (fd_a, name_a),
                self._entries.parent(b) as (fd_b, name_b),
            ):
                try:
                    return rename_exchange(fd_a, name_a, fd_b, name_b)
                except OSError as error:
                    if error.errno not in NO_EXCHANGE:
                        raise
        return self._exchange_by_renames(a, b)

    def _exchange_by_renames(self, a: LowerPath, b: LowerPath) -> None:
        """a → aside, b → a, aside → b; goes on where an earlier attempt was cut off, which it knows
        by what lies aside.
        """
        aside = self.exchange_aside(a, b)
        if not self._exists(aside):
            self.rename(a, aside)
        if not self._exists(a):
            self.rename(b, a)
        self.rename(aside, b)

    def exchange_aside(self, a: LowerPath, b: LowerPath) -> LowerPath:
        pair = xxhash.xxh3_64_hexdigest(
            b"\0".join((*a, b"", *b))
        )  # another pair must not take up what this one has left
        return self.staging_path(self.stage_near(ASIDE_PREFIX + pair, a[:-1]))

    def _exists(self, path: LowerPath) -> bool:
        try:
            self.lstat(path)
        except FileNotFoundError:
            return False
        return True

    def link(self, source: LowerPath, target: LowerPath) -> None:
        self._count("link")
        if not self._features.hard_links:
            return self._copy(source, target)
        try:
            with (
                self._entries.parent(source) as (source_fd, name),
                self._entries.parent(target) as (target_fd, new_name),
            ):
                return os.link(
                    name,
                    new_name,
                    src_dir_fd=source_fd,
                    dst_dir_fd=target_fd,
                    follow_symlinks=False,
                )
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
        return self._copy(source, target)

    def _copy(self, source: LowerPath, target: LowerPath) -> None:
        """In place of a hard link: the next best thing where there can be none."""
        if self._exists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        self._put(target, lambda name: self._copy_to(source, name))

    def symlink(self, target: bytes, path: LowerPath) -> None:
        self._count("symlink")
        with self._entries.parent(path) as (dir_fd, name):
            os.symlink(target, name, dir_fd=dir_fd)

    def mknod(self, path: LowerPath, mode: int, rdev: int) -> None:
        self._count("mknod")
        with self._entries.parent(path) as (dir_fd, name):
            os.mknod(name, mode, rdev, dir_fd=dir_fd)

    # -- changing attributes

    def set_times(self, path: LowerPath, atime_ns: int, mtime_ns: int) -> None:
        self._count("utimens")
        times = (atime_ns, mtime_ns)
        if not path:
            return self._setter.set_times(lambda: os.utime(self._root_fd, ns=times))
        with self._entries.parent(path) as (dir_fd, name):
            return self._setter.set_times(
                lambda: os.utime(name, ns=times, dir_fd=dir_fd, follow_symlinks=False)
            )

    def apply(self, path: LowerPath, attributes: NewAttributes) -> None:
        self._count("setattr")
        if not path:
            return self._setter.apply_at(self._root_fd, b".", attributes)
        with self._entries.parent(path) as (dir_fd, name):
            return self._setter.apply_at(dir_fd, name, attributes)

    def apply_fd(self, fd: int, attributes: NewAttributes) -> None:
        self._count("setattr")
        self._setter.apply_fd(fd, attributes)

    # -- stable storage

    def sync_directory(self, path: LowerPath) -> None:
        if self._features.fsync_directory:
            self._count("fsync directory")
            self._sync(path, os.O_DIRECTORY)

    def sync_entry(self, path: LowerPath) -> None:
        self._count("fsync entry")
        mode = self.lstat(path).mode
        if stat.S_ISREG(mode) or (stat.S_ISDIR(mode) and self._features.fsync_directory):
            self._sync(path, 0)

    def _sync(self, path: LowerPath, flags: int) -> None:
        try:
            fd = self._entries.open(path, os.O_RDONLY | os.O_NONBLOCK | flags)
        except PermissionError:
            if self._may_read(path):
                raise  # it may pass, like that of an expired ticket
            self.sync_file_systems([path])
            return
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(fd)

    def _may_read(self, path: LowerPath) -> bool:
        """By its mode, and without privilege."""
        st = self.lstat(path)
        if st.uid == os.geteuid():
            return bool(st.mode & stat.S_IRUSR)
        return bool(
            st.mode & (stat.S_IRGRP if st.gid in {os.getegid(), *os.getgroups()} else stat.S_IROTH)
        )

    def sync_file_systems(self, paths: Iterable[LowerPath]) -> None:
        flushed = set()
        for directory in {path[:-1] for path in paths}:
            fd = self._open_nearest(directory)
            try:
                device = os.fstat(fd).st_dev
                if device not in flushed:
                    self._count("sync file system")
                    is_top = (
                        device == os.fstat(self._root_fd).st_dev
                    )  # that descriptor knows what others were told since the start
                    sync_file_system(self._root_fd if is_top else fd)
                    flushed.add(device)
            finally:
                os.close(fd)

    def _open_nearest(self, directory: LowerPath) -> int:
        for depth in range(len(directory), 0, -1):
            try:
                return self._entries.open(directory[:depth], os.O_RDONLY | os.O_DIRECTORY)
            except OSError as error:
                if error.errno not in {*UNREACHABLE, errno.ENOENT}:
                    raise
        return os.dup(self._root_fd)

    # -- staging

    def is_staging_area(self, path: LowerPath) -> bool:
        return self._entries.areas.is_own(path)

    def stage_near(self, name: str, directory: LowerPath) -> str:
        root = self._entries.areas.root_of(directory)
        if root and not self._entries.areas.can_enter(root):
            # Below what may not be entered now. The commit opens that, and finds another file
            # system.
            return staging_name(name, ())
        return self._stage_in(root, name, directory)

    def _stage_in(self, root: LowerPath, name: str, directory: LowerPath) -> str:
        areas = self._entries.areas
        if not root:
            return staging_name(name, ())
        try:
            areas.make(root, self._register)
        except OSError:
            if root == directory:
                raise
            areas.make(
                directory, self._register
            )  # the file system's root is not ours to make directories in
            areas.give_own(directory)
            root = directory
        return staging_name(name, root)

    def bring_near(self, name: str, target: LowerPath) -> str:
        areas = self._entries.areas
        directory = target[:-1]
        areas.forget()
        if staged_in(name)[0] == areas.root_of(directory):
            if not directory or staged_in(name)[0] == directory:
                raise OSError(
                    errno.EXDEV,
                    "another file system than the staging directory beside it: it cannot be "
                    "renamed there",
                )
            areas.give_own(directory)
        near = self._stage_in(areas.root_of(directory), name, directory)
        self._copy_to(self.staging_path(name), near)
        return near

    def create_staging(self, name: str) -> int:
        self._count("create")
        root = staged_in(name)[0]
        for _again in range(_TERMS_IN_A_ROW):
            try:
                return self._create_staging(name)
            except FileNotFoundError:  # the next term has begun, if somebody removed the directory
                if root:
                    self._entries.areas.forget()
                    self._entries.areas.make(root, self._register)
        return self._create_staging(name)

    def _create_staging(self, name: str) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._entries.parent(self.staging_path(name)) as (dir_fd, leaf):
            try:
                return os.open(leaf, flags, 0o600, dir_fd=dir_fd)
            except FileExistsError:
                os.unlink(leaf, dir_fd=dir_fd)
                return os.open(leaf, flags, 0o600, dir_fd=dir_fd)

    def open_staging(self, name: str) -> int:
        self._count("open")
        with self._entries.parent(self.staging_path(name)) as (dir_fd, leaf):
            return os.open(leaf, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)

    def staging_path(self, name: str) -> LowerPath:
        return self._entries.staged(name)

    def staging_directory(self) -> LowerPath:
        """What it is called in this term, below the top. May block."""
        return self._entries.physical(self._entries.staging)

    def is_staged(self, name: str) -> bool:
        """Whether a staging file is there. That it is not is true, unlike what `lstat` says of it:
        nobody is taking the log over.

        Raises:
            OSError: SupersededError, or ESTALE: it has been moved.
        """
        self._count("lstat")
        try:
            with self._entries.parent(self.staging_path(name)) as (dir_fd, leaf):
                os.stat(leaf, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def kept_path(self, path: LowerPath = ()) -> LowerPath:
        return (*self._entries.areas.known_root(path), *self._entries.kept)

    def remove_staging(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.unlink(self.staging_path(name))

    def list_kept(self) -> list[LowerPath]:
        found: list[LowerPath] = []
        for root in [(), *sorted(self._entries.areas.known())]:
            directory = (*root, *self._entries.kept)
            try:
                found += sorted((*directory, entry.name) for entry in self.listdir(directory))
            except FileNotFoundError:
                if not root:
                    self._entries.make_own()  # a worker of an earlier acpfs did not
        return found

    def list_staging(self) -> list[str]:
        self._entries.areas.learn(self.areas_of(self.node_id.encode()))
        found: list[str] = []
        for root in [(), *sorted(self._entries.areas.known())]:
            with contextlib.suppress(FileNotFoundError):
                listed = self._list((*root, *self._entries.staging))
                found += [staging_name(os.fsdecode(entry.name), root) for entry in listed]
        return found

    # -- descriptors

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._count("read")
        return filling.read(fd, buffer, offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._count("write")
        return filling.write(fd, data, offset)

    def make_room(self, fd: int, size: int) -> bool:
        self._count("fallocate")
        try:
            allocate(fd, size)
        except OSError as error:
            if error.errno in FULL_ERRNOS:
                raise
            return False  # whatever it is: only the bytes themselves can tell then
        return True

    def expect_bulk(self, fd: int) -> None:
        if self._direct:
            filling.go_direct(fd)

    def cached_bytes(self, fd: int) -> int | None:
        return filling.cached_bytes(fd)

    def begin_write_out(self, fd: int, offset: int, count: int) -> None:
        filling.begin_write_out(fd, offset, count)

    def truncate(self, fd: int, size: int) -> None:
        self._count("truncate")
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        self._count("fsync")
        os.fsync(fd)

    def forget_pages(self, fd: int) -> None:
        filling.forget_pages(fd)

    def stat_fd(self, fd: int) -> LowerStat:
        self._count("fstat")
        return lower_stat(os.fstat(fd))

    def close(self, fd: int) -> None:
        self._count("close")
        os.close(fd)


def _type_bits(entry: os.DirEntry[str]) -> int:
    """Type bits as far as the listing tells them without a call per entry."""
    if entry.is_symlink():
        return stat.S_IFLNK
    if entry.is_dir(follow_symlinks=False):
        return stat.S_IFDIR
    return stat.S_IFREG if entry.is_file(follow_symlinks=False) else 0


def _note(target: int | str) -> Note | None:
    try:
        return Note.decode(os.getxattr(target, DIGEST_XATTR))
    except OSError as error:
        if error.errno in CANNOT or error.errno == errno.ENODATA:
            return None
        raise


def _xattrs(target: str, features: Features) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    try:
        names = [os.fsencode(name) for name in os.listxattr(target)]
    except OSError as error:
        if error.errno in CANNOT:
            return found
        raise
    for name in names:
        if name in posix_acl.NAMES:
            if features.acls:
                found.update(_acl(target, name))
        elif features.xattrs and (name == FSYNC_XATTR or not name.startswith(OWN_XATTR_PREFIX)):
            with contextlib.suppress(OSError):  # removed meanwhile, or not readable for us
                found[name] = os.getxattr(target, name)
    return found


def _acl(target: str, name: bytes) -> dict[bytes, bytes]:
    """One that cannot be read is an error: without it the mode would say more than is so."""
    try:
        return {name: os.getxattr(target, name)}
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        return {}

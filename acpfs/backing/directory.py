"""The backing directory by descriptor: the one implementation of `Lower` that makes system calls.

What each call does to an entry, and nothing of why; how an entry is reached without leaving the backing directory is `entries`' business.
Thread-safe; every method may block.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import xxhash

from acpfs.backing import filling
from acpfs.backing.attributes import DIGEST_XATTR, FSYNC_XATTR, OWN_XATTR_PREFIX, AttributeSetter, lower_stat, signed_ino
from acpfs.backing.entries import OWN, Entries
from acpfs.backing.health import current_call
from acpfs.backing.lower import ASIDE_PREFIX, CANNOT, Attributes, Features, LowerEntry, LowerPath, LowerStat, Note, SpaceInfo
from acpfs.backing.syscalls import rename_exchange
from acpfs.errors import MachineError

_COPY_BYTES = 4 << 20
_NO_EXCHANGE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_NO_DIRECTORY_SYNC = CANNOT | {errno.EINVAL, errno.EBADF, errno.EACCES}
_UNKNOWN_SPACE = SpaceInfo(4096, 1 << 38, 1 << 38, 1 << 38, 0, 0, 255)
"""Of a small FUSE server that does not say: 1 PiB, for with none programs would not begin to write."""


class StrangeFileError(OSError, ValueError):
    """What lies under a name of acpfs' own was not written by acpfs."""


class BackingDirectory:
    """Implements `Lower`; see there."""

    def __init__(self, path: Path, node_id: str, *, kept_fd: int = -1) -> None:
        """Open it and make `.acpfs/{staging/<node>,manifest,nodes}`.

        `kept_fd`: its descriptor, from an earlier worker that did so; then no system call is made, and none can hang.

        Raises:
            MachineError: missing, not a directory, not writable.
        """
        self.path = path
        self.node_id = node_id
        try:
            self._root_fd = kept_fd if kept_fd >= 0 else os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise MachineError(f"backing directory {path}: {error.strerror}") from error
        self._entries = Entries(self._root_fd, node_id)
        self._setter = AttributeSetter()
        self._features = Features()
        self._direct = False
        self._calls: Counter[str] = Counter()
        self._calls_lock = threading.Lock()
        if kept_fd >= 0:
            return
        try:
            self._entries.make_own()
        except OSError as error:
            os.close(self._root_fd)
            raise MachineError(f"backing directory {path} is not writable: {error.strerror} (at .acpfs)") from error

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
        """Take over what `backing.probe` found. No system call: a later worker does so while the backing directory may hang."""
        self._features = features
        self._direct = features.direct_io and features.direct_writes
        self._setter.xattrs_work = features.xattrs

    def calls(self) -> dict[str, int]:
        """How many operations of each kind were started on the backing directory so far."""
        with self._calls_lock:
            return dict(self._calls)

    def refused_attributes(self) -> dict[str, int]:
        """How often an attribute could not be kept on the backing file system, by kind."""
        return self._setter.refused()

    def _count(self, label: str) -> None:
        """Also tells the health check that a long call of many steps goes on."""
        call = current_call()
        if call is not None:
            call.progress()
        with self._calls_lock:
            self._calls[label] += 1

    # -- looking

    def lstat(self, path: LowerPath) -> LowerStat:
        self._count("lstat")
        if not path:
            with _top_exists():
                return lower_stat(os.fstat(self._root_fd))
        with self._entries.parent(path) as (dir_fd, name):
            return lower_stat(os.stat(name, dir_fd=dir_fd, follow_symlinks=False))

    def listdir(self, path: LowerPath) -> list[LowerEntry]:
        self._count("listdir")
        if path:
            return self._list(path)
        with _top_exists():
            return [entry for entry in self._list(path) if entry.name != OWN]

    def _list(self, path: LowerPath) -> list[LowerEntry]:
        fd = self._entries.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(fd) as entries:
                return [LowerEntry(os.fsencode(entry.name), signed_ino(entry.inode()), _type_bits(entry)) for entry in entries]
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
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)  # twice the read-ahead: a cold read of 512 MiB 0.31 s instead of 0.35 s
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
        if not self._features.xattrs:
            return {}
        fd = self._entries.open(path, os.O_PATH)
        try:
            if stat.S_ISLNK(os.fstat(fd).st_mode):
                return {}
            return _xattrs(f"/proc/self/fd/{fd}")
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
        return SpaceInfo(st.f_frsize, st.f_blocks, st.f_bfree, st.f_bavail, st.f_files, st.f_ffree, st.f_namemax)

    # -- changing names

    def mkdir(self, path: LowerPath) -> None:
        self._count("mkdir")
        with self._entries.parent(path) as (dir_fd, name):
            os.mkdir(name, 0o700, dir_fd=dir_fd)

    def rmdir(self, path: LowerPath) -> None:
        self._count("rmdir")
        with self._entries.parent(path) as (dir_fd, name):
            os.rmdir(name, dir_fd=dir_fd)

    def unlink(self, path: LowerPath) -> None:
        self._count("unlink")
        with self._entries.parent(path) as (dir_fd, name):
            os.unlink(name, dir_fd=dir_fd)

    def rename(self, source: LowerPath, target: LowerPath) -> None:
        self._count("rename")
        with self._entries.parent(source) as (source_fd, name), self._entries.parent(target) as (target_fd, new_name):
            os.rename(name, new_name, src_dir_fd=source_fd, dst_dir_fd=target_fd)

    def exchange(self, a: LowerPath, b: LowerPath) -> None:
        self._count("exchange")
        if self._features.rename_exchange:
            with self._entries.parent(a) as (fd_a, name_a), self._entries.parent(b) as (fd_b, name_b):
                try:
                    return rename_exchange(fd_a, name_a, fd_b, name_b)
                except OSError as error:
                    if error.errno not in _NO_EXCHANGE:
                        raise
        return self._exchange_by_renames(a, b)

    def _exchange_by_renames(self, a: LowerPath, b: LowerPath) -> None:
        """a → aside, b → a, aside → b; goes on where an earlier attempt was cut off, which it knows by what lies aside."""
        pair = xxhash.xxh3_64_hexdigest(b"\0".join((*a, b"", *b)))  # another pair must not take up what this one has left
        aside = self.staging_path(ASIDE_PREFIX + pair)
        if not self._exists(aside):
            self.rename(a, aside)
        if not self._exists(a):
            self.rename(b, a)
        self.rename(aside, b)

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
        with self._entries.parent(source) as (source_fd, name), self._entries.parent(target) as (target_fd, new_name):
            return os.link(name, new_name, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)

    def _copy(self, source: LowerPath, target: LowerPath) -> None:
        """In place of a hard link: the next best thing on a file system without them."""
        if self._exists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        name = f"copy-{secrets.token_hex(8)}"
        read_fd = self.open_read(source)
        try:
            write_fd = self.create_staging(name)
            try:
                while data := os.read(read_fd, _COPY_BYTES):
                    while data:
                        data = data[os.write(write_fd, data) :]
                st = os.fstat(read_fd)
                os.fchmod(write_fd, stat.S_IMODE(st.st_mode))
                os.utime(write_fd, ns=(st.st_atime_ns, st.st_mtime_ns))
                os.fsync(write_fd)
            finally:
                os.close(write_fd)
        finally:
            os.close(read_fd)
        self.rename(self.staging_path(name), target)

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
            return self._setter.set_times(lambda: os.utime(name, ns=times, dir_fd=dir_fd, follow_symlinks=False))

    def apply(self, path: LowerPath, attributes: Attributes) -> None:
        self._count("setattr")
        if not path:
            return self._setter.apply_at(self._root_fd, b".", attributes)
        with self._entries.parent(path) as (dir_fd, name):
            return self._setter.apply_at(dir_fd, name, attributes)

    def apply_fd(self, fd: int, attributes: Attributes) -> None:
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
            return  # not ours to open (mode 0 and no privilege): its directory's fsync has to do
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(fd)

    # -- staging

    def create_staging(self, name: str) -> int:
        self._count("create")
        try:
            return self._create_staging(name.encode())
        except FileNotFoundError:
            self._entries.make_own()  # somebody removed .acpfs or a part of it
            return self._create_staging(name.encode())

    def _create_staging(self, name: bytes) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._entries.parent((*self._entries.staging, name)) as (dir_fd, _name):
            try:
                return os.open(name, flags, 0o600, dir_fd=dir_fd)
            except FileExistsError:
                os.unlink(name, dir_fd=dir_fd)
                return os.open(name, flags, 0o600, dir_fd=dir_fd)

    def open_staging(self, name: str) -> int:
        self._count("open")
        with self._entries.parent((*self._entries.staging, name.encode())) as (dir_fd, encoded):
            return os.open(encoded, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=dir_fd)

    def staging_path(self, name: str) -> LowerPath:
        return (*self._entries.staging, name.encode())

    def kept_path(self) -> LowerPath:
        return self._entries.kept

    def remove_staging(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.unlink(self.staging_path(name))

    def list_kept(self) -> list[bytes]:
        try:
            return sorted(entry.name for entry in self.listdir(self._entries.kept))
        except FileNotFoundError:
            self._entries.make_own()  # a worker of an earlier acpfs did not
            return []

    def list_staging(self) -> list[str]:
        try:
            return [os.fsdecode(entry.name) for entry in self.listdir(self._entries.staging)]
        except FileNotFoundError:
            return []

    # -- descriptors

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        self._count("read")
        return filling.read(fd, buffer, offset)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._count("write")
        return filling.write(fd, data, offset)

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

    # -- own files

    def read_own(self, names: LowerPath) -> bytes:
        self._count("read own")
        fd = self._entries.open((OWN, *names), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY, own=True)
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # a FIFO would keep the reader for ever
            os.close(fd)
            raise StrangeFileError(errno.EINVAL, "not a regular file", os.fsdecode(b"/".join((OWN, *names))))
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
        temporary = b".%s.%s" % (path[-1], secrets.token_hex(4).encode())
        with self._entries.parent(path, own=True) as (dir_fd, name):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=dir_fd)
            try:
                with open(fd, "wb", closefd=True) as file:
                    file.write(content)
                    file.flush()
                    os.fsync(fd)
                os.rename(temporary, name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=dir_fd)
                raise
        if self._features.fsync_directory:
            self._sync_own(path[:-1])

    def overwrite_own(self, names: LowerPath, content: bytes) -> bool:
        """Write over a text in place, where it is there and large enough, filled up with blanks: that takes no room."""
        self._count("write own")
        try:
            fd = self._entries.open((OWN, *names), os.O_WRONLY, own=True)
        except FileNotFoundError:
            return False
        try:
            size, text = os.fstat(fd).st_size, content.rstrip()
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
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise
        finally:
            os.close(fd)

    def create_own(self, names: LowerPath, content: bytes) -> bool:
        """Write `.acpfs/<names…>` only if it is not there; False when it was. Never seen half-written where hard links exist."""
        self._count("write own")
        temporary = (OWN, *names[:-1], b".%s.%s" % (names[-1], secrets.token_hex(4).encode()))
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
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644, dir_fd=dir_fd)
        except FileExistsError:
            return False
        with open(fd, "wb", closefd=True) as file:
            file.write(content)
            file.flush()
            os.fsync(fd)
        return True

    def remove_own(self, names: LowerPath) -> None:
        self._count("unlink own")
        with self._entries.parent((OWN, *names), own=True) as (dir_fd, name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=dir_fd)

    def remove_own_directory(self, names: LowerPath) -> None:
        """An empty one below `.acpfs`; nothing when it is not there."""
        self._count("rmdir own")
        with self._entries.parent((OWN, *names), own=True) as (dir_fd, name), contextlib.suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=dir_fd)

    def list_own(self, names: LowerPath) -> list[bytes]:
        self._count("listdir own")
        try:
            fd = self._entries.open((OWN, *names), os.O_RDONLY | os.O_DIRECTORY, own=True)
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
                return sorted(os.fsencode(entry.name) for entry in entries if entry.is_file(follow_symlinks=False))
        finally:
            os.close(fd)


@contextlib.contextmanager
def _top_exists() -> Iterator[None]:
    """A top that is said to be missing is trouble (ESTALE), no answer: an evicted client of CephFS says so of what it has open."""
    try:
        yield
    except FileNotFoundError as error:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE)) from error


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


def _xattrs(target: str) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    try:
        names = [os.fsencode(name) for name in os.listxattr(target)]
    except OSError as error:
        if error.errno in CANNOT:
            return found
        raise
    for name in names:
        if name == FSYNC_XATTR or not name.startswith(OWN_XATTR_PREFIX):
            with contextlib.suppress(OSError):  # removed meanwhile, or not readable for us
                found[name] = os.getxattr(target, name)
    return found

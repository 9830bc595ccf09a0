"""What the backing file system can do, tried out at mount in this node's staging directory.

The mount's own semantics do not depend on the outcome; it says how to reach them, and what `status` tells.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from acpfs.backing import filling
from acpfs.backing.areas import OWN
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import Features, LowerPath
from acpfs.backing.syscalls import Opener, rename_exchange
from acpfs.errors import MachineError

_STAMP_NS = 1_000_000_000_123_456_789
_NOBODY = 65534


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Outcome of `probe`."""

    features: Features
    notes: tuple[str, ...]
    """One sentence per thing that the backing file system lacks, for `status`."""


def probe(directory: BackingDirectory) -> ProbeReport:
    """Try everything and adapt `directory` to the outcome.

    Raises:
        MachineError: a file cannot be made, written, flushed and renamed there.
    """
    name = f"probe-{secrets.token_hex(6)}"
    try:
        with contextlib.closing(_Probe(directory, name)) as tried:
            features = Features(
                xattrs=tried.works(tried.xattr),
                hard_links=tried.works(tried.hard_link),
                symlinks=tried.works(tried.symlink),
                chown=tried.works(tried.chown),
                fsync_directory=tried.works(tried.sync_directory),
                rename_exchange=tried.works(tried.exchange),
                direct_io=tried.works(tried.direct_io),
                direct_writes=filling.wants_direct(directory.descriptor),
                page_cache=tried.page_cache(),
                time_granularity_ns=tried.time_granularity_ns(),
                name_bytes_max=directory.space().name_bytes_max or 255,
            )
    except OSError as error:
        raise MachineError(f"backing directory {directory.path} cannot be written to: {error.strerror}") from error
    directory.adapt(features)
    return ProbeReport(features, _notes(features, uses_openat2=Opener(0).uses_openat2))


class _Probe:
    """A staging file to try things on; whatever was made is removed at the end."""

    def __init__(self, directory: BackingDirectory, name: str) -> None:
        self._directory, self._name = directory, name.encode()
        self._path: LowerPath = (OWN, b"staging", directory.node_id.encode())
        self._file_fd = self._dir_fd = -1
        try:
            self._begin()
        except BaseException:
            self.close()
            raise

    def _begin(self) -> None:
        """What cannot be done without."""
        self._file_fd = self._directory.create_staging(self._name.decode())
        os.write(self._file_fd, b"acpfs")
        os.fsync(self._file_fd)
        root_fd = os.open(self._directory.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._dir_fd = Opener(root_fd).open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        finally:
            os.close(root_fd)
        moved = self._name + b"-moved"
        os.rename(self._name, moved, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        os.rename(moved, self._name, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)

    def close(self) -> None:
        """Remove what was made."""
        if self._dir_fd >= 0:
            for suffix in (b"", b"-a", b"-moved"):
                with contextlib.suppress(OSError):
                    os.unlink(self._name + suffix, dir_fd=self._dir_fd)
        for fd in (self._file_fd, self._dir_fd):
            if fd >= 0:
                os.close(fd)

    @staticmethod
    def works(attempt: Callable[[], None]) -> bool:
        """Whether an attempt succeeds; a full or dead file system is not an answer."""
        try:
            attempt()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE, errno.EROFS):
                raise
            return False
        return True

    def xattr(self) -> None:
        os.setxattr(self._file_fd, b"user.acpfs.probe", b"1")

    def hard_link(self) -> None:
        os.link(self._name, self._name + b"-a", src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        os.unlink(self._name + b"-a", dir_fd=self._dir_fd)

    def symlink(self) -> None:
        os.symlink(b"target", self._name + b"-a", dir_fd=self._dir_fd)
        os.unlink(self._name + b"-a", dir_fd=self._dir_fd)

    def chown(self) -> None:
        owner = os.fstat(self._file_fd)
        os.chown(self._file_fd, _NOBODY, _NOBODY)
        os.chown(self._file_fd, owner.st_uid, owner.st_gid)

    def sync_directory(self) -> None:
        os.fsync(self._dir_fd)

    def exchange(self) -> None:
        other = self._name + b"-a"
        os.close(os.open(other, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._dir_fd))
        rename_exchange(self._dir_fd, self._name, self._dir_fd, other)

    def direct_io(self) -> None:
        os.close(os.open(self._name, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC, dir_fd=self._dir_fd))

    def page_cache(self) -> bool:
        """Whether what was read is cached; where the kernel does not tell, it is."""
        os.pread(self._file_fd, 1, 0)
        return self._directory.cached_bytes(self._file_fd) != 0

    def time_granularity_ns(self) -> int:
        """By what is left of a time stamp with nine digits after the second."""
        try:
            os.utime(self._file_fd, ns=(_STAMP_NS, _STAMP_NS))
        except OSError:
            return 1_000_000_000
        found = os.fstat(self._file_fd).st_mtime_ns
        for granularity_ns in (1, 10, 100, 1_000, 1_000_000, 1_000_000_000):
            if found == _STAMP_NS - _STAMP_NS % granularity_ns:
                return granularity_ns
        return 2_000_000_000


def _notes(features: Features, *, uses_openat2: bool) -> tuple[str, ...]:
    second = 1_000_000_000
    lacking = (
        (features.xattrs, "no extended attributes: checksums only in the manifest, users' attributes only in RAM"),
        (features.hard_links, "no hard links: additional names are stored as copies"),
        (features.symlinks, "no symbolic links: they cannot be stored"),
        (features.chown, "owners cannot be set (not privileged, or root is squashed): files there belong to acpfs"),
        (features.fsync_directory, "directories cannot be flushed: renames are as durable as the file system makes them"),
        (features.rename_exchange, "no atomic exchange of names: done in three renames"),
        (features.direct_io, "no direct I/O"),
        (features.time_granularity_ns < second, f"times only to {features.time_granularity_ns // second} s"),
        (features.name_bytes_max >= 255, f"names only to {features.name_bytes_max} bytes"),
        (uses_openat2, "no openat2 on this machine: paths are walked component by component"),
    )
    return tuple(note for good, note in lacking if not good)

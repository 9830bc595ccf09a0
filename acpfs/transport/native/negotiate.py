"""INIT: what the kernel offers, what is taken, and the record of both.

Owns the choice of protocol version, request size and features, and assumes none: every feature is
taken only where it is offered. Does not read or write the device. Pure functions, any thread.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from acpfs.transport.native.protocol import (
    INIT_IN,
    INIT_IN_V7_31,
    INIT_OUT,
    MAJOR,
    MINOR_MAX,
    MINOR_MIN,
    PAGE_BYTES,
    InitFlag,
)

WANTED = (
    InitFlag.ASYNC_READ
    | InitFlag.ATOMIC_O_TRUNC
    | InitFlag.BIG_WRITES
    | InitFlag.AUTO_INVAL_DATA
    | InitFlag.DO_READDIRPLUS
    | InitFlag.READDIRPLUS_AUTO
    | InitFlag.ASYNC_DIO
    | InitFlag.PARALLEL_DIROPS
    | InitFlag.MAX_PAGES
    | InitFlag.CACHE_SYMLINKS
    | InitFlag.HANDLE_KILLPRIV_V2
    | InitFlag.SETXATTR_EXT
    | InitFlag.INIT_EXT
    | InitFlag.HAS_EXPIRE_ONLY
    | InitFlag.DIRECT_IO_ALLOW_MMAP
    | InitFlag.PASSTHROUGH
    | InitFlag.HAS_RESEND
)
"""Not WRITEBACK_CACHE (excludes passthrough, reads through write-only handles).

No lock flags: the kernel keeps locks itself, but for `WITHOUT_LOCKS`. Not CREATE_SUPP_GROUP: the
kernel already strips set-gid where the caller is not in the group. Without HANDLE_KILLPRIV_V2 every
write asks for security.capability first.
"""

WITH_ACLS = InitFlag.POSIX_ACL | InitFlag.DONT_MASK
"""Where the backing directory has ACLs: the kernel asks for them, and leaves the umask to us. It
does not count where a directory hands an ACL on, and what the kernel has masked cannot be had back.
"""

WITHOUT_LOCKS = InitFlag.POSIX_LOCKS | InitFlag.FLOCK_LOCKS
"""Where locks are refused: the kernel asks us for each one, and keeps none itself."""

MAX_PAGES_DEFAULT = 32
MAX_PAGES_OLD_KERNEL = 256
"""Limit of kernels that have MAX_PAGES but not the sysctl."""
MAX_WRITE_BYTES_MAX = 4 << 20
"""A request buffer per reader thread; larger ones leave the processor's cache and gain nothing."""
MAX_BACKGROUND = 128
CONGESTION_THRESHOLD = 96
MAX_STACK_DEPTH = 1
"""Passthrough to files on a file system that is not itself stacked: tmpfs, ext4, NFS …"""
MAX_PAGES_SYSCTL = Path("/proc/sys/fs/fuse/max_pages_limit")
ALL_FEATURES = (1 << 64) - 1


class ProtocolError(Exception):
    """The kernel said something that the protocol does not allow, or speaks a version that is too
    old.
    """


@dataclass(frozen=True, slots=True)
class Negotiated:
    """What a session agreed on; stored for the next worker, because the kernel does not say it
    again.
    """

    minor: int
    offered: int
    """Features of the kernel, after masking."""
    flags: int
    """Features taken."""
    max_write_bytes: int

    def has(self, flag: InitFlag) -> bool:
        """Whether a feature is in use."""
        return bool(self.flags & flag)

    def to_record(self) -> dict[str, int]:
        """For the state that outlives the worker."""
        return asdict(self)

    @classmethod
    def from_record(cls, record: dict[str, int]) -> Negotiated:
        """What `to_record` gave."""
        return cls(**record)


@dataclass(frozen=True, slots=True)
class InitReply:
    """Answer to an INIT request.

    `negotiated` is None while the kernel has to ask again in an older major version.
    """

    body: bytes
    negotiated: Negotiated | None


def max_pages_limit() -> int:
    """Pages per request that this kernel allows."""
    try:
        return int(MAX_PAGES_SYSCTL.read_text())
    except (OSError, ValueError):
        return MAX_PAGES_OLD_KERNEL


def answer_init(
    body: bytes,
    feature_mask: int,
    pages_limit: int,
    timeout_s: int = 0,
    *,
    also: int = 0,
) -> InitReply:
    """Choose what to take of what INIT offers.

    `feature_mask`: features that are treated as not offered are 0 here; simulates older kernels.
    `timeout_s`: after which the kernel may give up a request, instead of its default; 0: nothing is
    asked for. `also`: features that this mount wants besides `WANTED`.

    Raises:
        ProtocolError: kernel older than 7.31.
        struct.error: truncated request.
    """
    major, minor, max_readahead, flags = INIT_IN_V7_31.unpack_from(body)
    if major < MAJOR or (major == MAJOR and minor < MINOR_MIN):
        message = (
            f"the kernel speaks FUSE {major}.{minor}, {MAJOR}.{MINOR_MIN} (Linux 5.2) is needed"
        )
        raise ProtocolError(message)
    if major > MAJOR:
        return InitReply(INIT_OUT.pack(MAJOR, MINOR_MAX, *[0] * (len(_INIT_OUT_ZEROS) - 2)), None)
    if flags & InitFlag.INIT_EXT and len(body) >= INIT_IN.size:
        flags |= INIT_IN.unpack_from(body)[4] << 32
    wanted = int(WANTED) | (int(InitFlag.REQUEST_TIMEOUT) if timeout_s else 0)
    wanted |= also
    negotiated = _negotiate(minor, flags & feature_mask, pages_limit, wanted)
    taken = negotiated.flags
    out = INIT_OUT.pack(
        MAJOR,
        negotiated.minor,
        max_readahead,
        taken & 0xFFFFFFFF,
        MAX_BACKGROUND,
        CONGESTION_THRESHOLD,
        negotiated.max_write_bytes,
        1,  # time_gran: nanoseconds
        negotiated.max_write_bytes // PAGE_BYTES,
        0,
        taken >> 32,
        MAX_STACK_DEPTH if taken & InitFlag.PASSTHROUGH else 0,
        timeout_s if taken & InitFlag.REQUEST_TIMEOUT else 0,
        *[0] * 11,
    )
    return InitReply(out, negotiated)


_INIT_OUT_ZEROS = INIT_OUT.unpack(bytes(INIT_OUT.size))


def _negotiate(minor: int, offered: int, pages_limit: int, wanted: int) -> Negotiated:
    taken = wanted & offered
    if not offered & InitFlag.INIT_EXT:
        taken &= 0xFFFFFFFF
    pages = (
        min(pages_limit, MAX_WRITE_BYTES_MAX // PAGE_BYTES)
        if taken & InitFlag.MAX_PAGES
        else MAX_PAGES_DEFAULT
    )
    return Negotiated(min(minor, MINOR_MAX), offered, taken, pages * PAGE_BYTES)

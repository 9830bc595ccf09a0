"""What transports hand in and get back. Plain records; the names and units of stat(2).

Those that are made for nearly every request are named tuples: a frozen dataclass of eleven fields
takes 2 us to make, these 0.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from acpfs.types import HandleId, Ino


class Caller(NamedTuple):
    """Who makes the call.

    `umask` counts where the directory hands no ACL on; with libfuse the kernel has applied it to
    modes already, in any case.
    """

    uid: int
    gid: int
    pid: int
    umask: int = 0
    unique: int = 0
    """Number of the kernel's request; the same when it comes again after a takeover.

    0: it never does.
    """


class Attributes(NamedTuple):
    """A node as stat(2) shows it: sizes in bytes, `blocks` of 512 bytes, times in nanoseconds."""

    ino: Ino
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True, slots=True)
class AttributeChange:
    """What setattr is to change; None: leave."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class Lane(Enum):
    """How a file's bytes travel."""

    LIBFUSE = "libfuse"
    DIRECT = "direct"
    PASSTHROUGH = "passthrough"


class OpenFile(NamedTuple):
    """Answer to open and create."""

    handle: HandleId
    keep_cache: bool
    """The kernel may go on using the pages it has of this file."""
    lane: Lane = Lane.LIBFUSE
    backing_fd: int = -1
    """Passthrough lane: descriptor of the file that the kernel is to read and write; stays open
    until `release`.
    """


class DirEntry(NamedTuple):
    """One entry of readdir.

    `next_offset` resumes behind it; `attributes` only where asked for, with a kernel reference
    taken.
    """

    name: bytes
    ino: Ino
    mode: int
    next_offset: int
    attributes: Attributes | None


@dataclass(frozen=True, slots=True)
class WaitingWriter:
    """Somebody who waits for room in the RAM tier."""

    ino: Ino
    path: bytes
    pid: int
    """0: not known."""
    purpose: str
    wanted_bytes: int
    since: float
    """Wall clock, seconds."""
    reason: str


class IncompleteFile(NamedTuple):
    """A file that somebody writes, or that is a half: what it has now is nowhere but in RAM."""

    ino: Ino
    path: bytes
    is_half: bool
    """Its writer was lost, or a write failed."""
    is_stored_log: bool
    """It only grows, and what it had is stored now and then (S12)."""
    versions: int
    """How often its content was fixed for good."""
    writers: list[int]
    """Processes that are at it, as far as they are known."""


class WrittenFile(NamedTuple):
    """A file that somebody writes."""

    path: bytes
    since_s: float
    """Monotonic time of the first change that is in no version."""
    writers: list[int]
    """Processes that are at it, as far as they are known."""


@dataclass(frozen=True, slots=True)
class FileReport:
    """One row of `acpfs-ctl ls`; sizes in bytes, age in seconds."""

    path: bytes
    size: int
    lane: str
    tier: str
    """`ram`, `spill`, `backing`, or `ram+backing`."""
    state: str
    """writing, complete, streaming, staged, committed, clean, backing, parked or interrupted."""
    checksum: str
    error: str
    age_s: float
    ino: Ino
    writers: list[int]
    """Processes that are in the middle of it, as far as they are known."""

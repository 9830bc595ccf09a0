"""The record of a file's bytes in the RAM tier."""

from __future__ import annotations

import contextlib
import enum
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from acpfs.filesystem.steps import shared
from acpfs.ram.tier import HUGE_PAGE_BYTES
from acpfs.types import NO_TIER, NO_VERSION, TierId, VersionId
from acpfs.writeback.log.ops import Version

UNSEEN = (0, -1)
"""Looks like no file: every look at one finds it changed."""
OUTGROWN_PIECE_BYTES = HUGE_PAGE_BYTES
"""A tier file's hole is made of whole ones, or the kernel clears pages instead of freeing them."""


@dataclass(slots=True, eq=False)
class Outgrown:
    """Where the bytes of a file are that outgrew RAM while it was written in passthrough."""

    name: str
    """Of the staging file."""
    gone: set[int] = field(default_factory=set)
    """Pieces that are in the staging file; in the tier file they are holes, or what was written to them since."""
    fd: int = -1
    """Of the staging file, once it was needed."""
    released: Event = field(default_factory=Event)
    """The kernel does not read or write the tier file any more."""
    finished: Future[None] = field(default_factory=shared)
    """The staging file has all bytes, or will never have them."""

    def gone_text(self) -> str:
        """For the state database: runs of pieces."""
        runs: list[list[int]] = []
        for piece in sorted(self.gone):
            if runs and runs[-1][1] == piece:
                runs[-1][1] = piece + 1
            else:
                runs.append([piece, piece + 1])
        return ",".join(f"{start}-{end}" for start, end in runs)

    @classmethod
    def from_row(cls, name: str, gone: str) -> Outgrown:
        """`gone`: as `gone_text` has it."""
        pairs = [run.split("-") for run in gone.split(",") if run]
        return cls(name, {piece for start, end in pairs for piece in range(int(start), int(end))})


LOG_PIECE_BYTES_MAX = 64 << 10
"""More in one write than a log has: a pipe holds no more, and programs that print have smaller buffers."""


class Writing(enum.Enum):
    """What was done to a content since its last version, and so whether it may be published before somebody closes or syncs it."""

    APPENDING = "appending"
    """It only grew, by pieces of a log: it is good for its readers at any length."""
    WHOLE = "whole"
    """Anything else: it is good for something when it is complete, and what it was before is better than a half of it."""

    @classmethod
    def of(cls, offset: int, size: int, file_size: int, *, by_append: bool = False) -> Writing:
        """That of one write to a file; `by_append`: through a descriptor with O_APPEND."""
        return cls.APPENDING if offset == file_size and (by_append or size <= LOG_PIECE_BYTES_MAX) else cls.WHOLE


@dataclass(slots=True)
class Remainder:
    """The first `size` bytes of a file, in a tier file; see `remainder`."""

    tier_id: TierId
    size: int


COLUMNS = ("tier_id", "head", "staging", "gone", "spilled", "modified", "interrupted", "failed", "failed_at", "writing", "last_writing")
"""Of the state database. `head`: so many first bytes are all that the tier file has, the rest is on the backing directory. `staging`: a
file that has all bytes, or the pieces `gone` of a tier file. `spilled`: the version whose copy in the spill directory has all bytes."""
DDL = """tier_id INTEGER, head INTEGER NOT NULL, staging TEXT, gone TEXT NOT NULL, spilled INTEGER NOT NULL,
  modified INTEGER, interrupted INTEGER NOT NULL, failed INTEGER NOT NULL, failed_at INTEGER NOT NULL,
  writing TEXT NOT NULL, last_writing TEXT NOT NULL"""
_NO_CONTENT = (0, 0, 0, 0, Writing.APPENDING.value, Writing.APPENDING.value)


@dataclass(slots=True, eq=False)
class Content:
    """Current content of a regular file.

    All bytes of a tier file, of a staging file (`overflow`) or of a copy of a version (`spilled`), or some in a tier file (`outgrown`).
    """

    tier_id: TierId
    overflow: str = ""
    """Name of the staging file that has the bytes, because RAM had no room for them; then `tier_id` is 0."""
    spilled: VersionId = NO_VERSION
    """The version whose copy in the spill directory has the bytes; then `tier_id` is 0, and it is closed or only being read."""
    sealed: bool = False
    """A version needs the staging file as it is; it changes only after that is persisted."""
    outgrown: Outgrown | None = None
    modified: bool = False
    """Changed since the last version was frozen (or never frozen)."""
    modified_since: float = field(default_factory=time.monotonic)
    """Monotonic time, seconds, of the first such change. Of a change that an earlier worker made: when this one learned of it."""
    writing: Writing = Writing.APPENDING
    """How it was changed since then."""
    last_writing: Writing = Writing.APPENDING
    """How it had been changed when that version was frozen, should it be withdrawn."""
    interrupted: bool = False
    """Its writer was killed, or lost with an earlier daemon, or closed it although a write failed: shown, but not committed before someone
    decides, or writes to it and closes it."""
    seen: tuple[int, int] = UNSEEN
    """(mtime in ns, size) that the tier file was marked with (`kernel_writes`); differs: the kernel may have written in passthrough."""
    fd: int = -1
    """Open while the file is; -1 otherwise."""
    in_flight: int = 0
    """Reads and writes that use the descriptor without the lock: it is closed by the last of them."""
    closing: bool = False
    when_idle: Callable[[], None] | None = None
    """Called once, under the lock, by the last of them."""
    busy: Future[None] | None = None
    """A copy of its bytes is under way; changes wait for it."""
    moving: bool = False
    """That copy goes to a staging file, where the content will be."""
    failed: int = 0
    """errno of a write that failed at `failed_at`: the file is not published before those bytes are written, or truncated away."""
    failed_at: int = 0

    reserved: bool = False
    """Its user has allocated pages of it (fallocate): they stay."""

    def close(self) -> None:
        """Its descriptor is not needed any more, once nobody is at work on it."""
        if self.in_flight:
            self.closing = True
        elif self.fd >= 0:
            os.close(self.fd)
            self.fd, self.closing = -1, False

    @contextlib.contextmanager
    def kept_open(self) -> Iterator[None]:
        """Meanwhile the descriptor stays, and nobody moves the bytes elsewhere."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1
            call, self.when_idle = (None, self.when_idle) if self.in_flight else (self.when_idle, None)
            if call is not None:
                call()
            if self.closing and not self.in_flight:
                self.close()

    def frozen(self) -> None:
        """All of it is in a version now."""
        self.modified = self.interrupted = False
        self.writing, self.last_writing = Writing.APPENDING, self.writing

    def moved_from(self, other: Content) -> Content:
        """It takes the place of another content, with the same bytes."""
        self.modified, self.modified_since, self.interrupted = other.modified, other.modified_since, other.interrupted
        self.writing, self.last_writing = other.writing, other.last_writing
        self.failed, self.failed_at = other.failed, other.failed_at
        return self

    def is_on(self, version: Version) -> bool:
        """Whether its bytes are in the tier file, or in the copy, that has the version's."""
        return self.spilled == version.vid if version.spilled else self.tier_id == version.tier_id

    @property
    def in_ram(self) -> bool:
        """Whether all its bytes are in its tier file."""
        return not (self.overflow or self.spilled or self.outgrown is not None)


def to_row(content: Content | None, remainder: Remainder | None) -> tuple[object, ...]:
    """Values of `COLUMNS`."""
    if content is None:
        return (NO_TIER, 0, "", "", 0, *_NO_CONTENT) if remainder is None else (remainder.tier_id, remainder.size, "", "", 0, *_NO_CONTENT)
    outgrown = content.outgrown
    return (
        content.tier_id,
        0,
        content.overflow if outgrown is None else outgrown.name,
        "" if outgrown is None else outgrown.gone_text(),
        content.spilled,
        content.modified,
        content.interrupted,
        content.failed,
        content.failed_at,
        content.writing.value,
        content.last_writing.value,
    )


def from_row(row: tuple[Any, ...]) -> tuple[Content | None, Remainder | None]:
    """Inverse of `to_row`."""
    tier_id, head, staging, gone, spilled, modified, interrupted, failed, failed_at, writing, last_writing = row
    if head:
        return None, Remainder(TierId(tier_id), head)
    if not (tier_id or staging or spilled):
        return None, None
    content = Content(TierId(tier_id), spilled=VersionId(spilled))
    if tier_id and staging:
        content.outgrown = Outgrown.from_row(staging, gone)
    else:
        content.overflow = staging
    content.modified, content.interrupted = bool(modified), bool(interrupted)
    content.failed, content.failed_at = failed, failed_at
    content.writing, content.last_writing = Writing(writing), Writing(last_writing)
    return content, None


@dataclass(frozen=True, slots=True)
class ContentStatistics:
    """Bytes in the RAM tier by why they are there; dirty + clean = used."""

    dirty_bytes: int
    clean_bytes: int
    clean_files: int
    retained_bytes: int
    """Among the clean ones: of checkpoints that stay as long as there is room without them."""
    evicted_files: int
    evicted_bytes: int
    copied_aside_bytes: int

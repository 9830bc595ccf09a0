"""Where the bytes of a regular file are, and in which state: one `Body` for each file.

Some bytes are `here`, in a tier file in RAM, and all others at one other place, `rest`. Five verbs
change that, and nothing else does: `fetch`, `move_out`, `cut`, `rebind`, `rehouse`. A row that says
that less is here is committed before the tier file's bytes go, one that says that more is here
follows them: so a crash leaves more than the row says, never less. Knows neither nodes nor how
bytes are copied. Used under the file system's lock.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from acpfs.filesystem.content.fill import Coming
from acpfs.filesystem.content.runs import ALL, END, NOTHING, Runs
from acpfs.filesystem.steps import shared
from acpfs.ram.tier import HUGE_PAGE_BYTES
from acpfs.types import NO_TIER, NO_VERSION, TierId, VersionId
from acpfs.writeback.log.ops import Version

UNSEEN = (0, -1)
"""Looks like no file: every look at one finds it changed."""
OUTGROWN_PIECE_BYTES = HUGE_PAGE_BYTES
"""A tier file's hole is made of whole ones, or the kernel clears pages instead of freeing them."""
LOG_PIECE_BYTES_MAX = 64 << 10
"""More in one write than a log has: a pipe holds no more, and programs that print have smaller
buffers.
"""


@dataclass(frozen=True, slots=True)
class BackingFile:
    """The backing directory's file, as the node's identity says; where it is another one by now,
    nothing of this counts.
    """


@dataclass(frozen=True, slots=True)
class Staging:
    """A staging file on the backing directory, which will become the backing directory's file."""

    name: str


@dataclass(frozen=True, slots=True)
class SpillCopy:
    """The copy of a version in the spill directory."""

    version: VersionId


Place = Staging | SpillCopy | BackingFile | None
"""Where the bytes are that are not here; None: all are."""
BACKING = BackingFile()


class Writing(enum.Enum):
    """What was done to a content since its last version, and so whether it may be published before
    somebody closes or syncs it.
    """

    APPENDING = "appending"
    """It only grew, by pieces of a log: it is good for its readers at any length."""
    WHOLE = "whole"
    """Anything else: it is good for something when it is complete, and what it was before is better
    than a half of it.
    """

    @classmethod
    def of(cls, offset: int, size: int, file_size: int, *, by_append: bool = False) -> Writing:
        """That of one write to a file; `by_append`: through a descriptor with O_APPEND."""
        return (
            cls.APPENDING
            if offset == file_size and (by_append or size <= LOG_PIECE_BYTES_MAX)
            else cls.WHOLE
        )


@dataclass(slots=True, eq=False)
class MovingOut:
    """What is under way with a body whose bytes move to a staging file while the kernel writes to
    the tier file.
    """

    fd: int = -1
    """Of the staging file, once it was needed."""
    is_let_go: bool = False
    """The descriptor is closed, or about to be: the staging file is not this file's any more."""
    released: Future[None] = field(default_factory=shared)
    """The kernel does not read or write the tier file any more."""
    finished: Future[None] = field(default_factory=shared)
    """The staging file has all bytes, or will never have them."""
    sent: set[int] = field(default_factory=set)
    """Pieces that are here as well, and that the staging file has since nobody writes any more:
    flushed.
    """
    checked: set[int] = field(default_factory=set)
    """Pieces that are here and in the staging file, and were compared since nobody writes any
    more.
    """
    sends_failed: int = 0
    """So many in a row, less those that went well since."""


@dataclass(slots=True, eq=False)
class Body:
    """The bytes of a regular file.

    Those of cold files of which RAM has nothing are all the same one, `COLD`.
    """

    tier: TierId = NO_TIER
    """The tier file that has what is here; 0: nothing is."""
    here: Runs = NOTHING
    """In a body that moves out, the tier file may have newer bytes of what is not here, written
    since that went.
    """
    rest: Place = BACKING
    sealed: bool = False
    """A version needs the staging file as it is; it changes only after that is persisted."""
    moving_out: MovingOut | None = None
    coming: Coming | None = None
    """Of a cold file: a copy on its way to RAM."""
    modified: bool = False
    """Changed since the last version was frozen (or never frozen)."""
    modified_since: float = 0.0
    """Monotonic time, seconds, of the first such change.

    Of a change that an earlier worker made: when this one learned of it.
    """
    writing: Writing = Writing.APPENDING
    """How it was changed since then."""
    last_writing: Writing = Writing.APPENDING
    """How it had been changed when that version was frozen, should it be withdrawn."""
    interrupted: bool = False
    """Its writer was killed, or lost with an earlier daemon, or closed it although a write failed:
    shown, but not committed before someone decides, or writes to it and closes it.
    """
    seen: tuple[int, int] = UNSEEN
    """(mtime in ns, size) that the tier file was marked with (`kernel_writes`); differs: the kernel
    may have written in passthrough.
    """
    marking: int = 0
    """How many are having the tier file marked, and do not know yet how it looks then."""
    fd: int = -1
    """Of the tier file or the staging file that has all bytes.

    Open while the file is; -1 otherwise.
    """
    is_fd_to_read: bool = False
    """It only reads, for a moment, or as long as the machine has no other: `Contents.opened` gives
    one that writes.
    """
    in_flight: int = 0
    """Reads and writes that use the descriptor without the lock: it is closed by the last of
    them.
    """
    closing: bool = False
    staging_changes: int = 0  # begun so far
    idle_calls: tuple[Callable[[], None], ...] = ()
    busy: Future[None] | None = None
    """A copy of its bytes is under way; changes wait for it."""
    overflowing: bool = False
    """That copy goes to a staging file, where all bytes will be."""
    failed: int = 0
    """errno of a write that failed at `failed_at`: the file is not published before those bytes are
    written, or truncated away.
    """
    failed_at: int = 0
    reserved: bool = False
    """Its user has allocated pages of it (fallocate): they stay."""
    ahead_to: int = 0
    """So far pages were taken before its writer needed them (`pages_ahead`), from its start on; 0:
    none, or its user has allocated some since. What is not needed goes without a word here.
    """

    # Where the bytes are is asked some twenty times for each file that is opened, and changes with
    # the verbs alone: these say it (`_placed`).
    is_cold: bool = field(init=False)
    """Whether the backing directory has all bytes; RAM may have the first ones of them as well, to
    be read.
    """
    is_only_backing: bool = field(init=False)
    """Whether it is cold, and RAM has nothing of it."""
    is_whole_in_ram: bool = field(init=False)
    """Whether all bytes are in the tier file."""
    is_overflowed: bool = field(init=False)
    """Whether all bytes are in a staging file, as RAM had no room for them."""
    is_outgrown: bool = field(init=False)
    """Whether bytes are in the tier file and in a staging file: it outgrew RAM while the kernel
    wrote it.
    """
    is_spilled: bool = field(init=False)
    """Whether all bytes are in the spill directory; then it is closed, or only being read."""

    def __post_init__(self) -> None:
        self._placed()

    # -- where the bytes are

    def _placed(self) -> None:
        """It was made, or a verb has changed where the bytes are."""
        is_in_staging = isinstance(self.rest, Staging)
        self.is_cold = self.rest is BACKING
        self.is_only_backing = self.is_cold and not self.tier
        self.is_whole_in_ram = self.rest is None
        self.is_overflowed = is_in_staging and not self.tier
        self.is_outgrown = is_in_staging and self.tier != NO_TIER
        self.is_spilled = isinstance(self.rest, SpillCopy)

    @property
    def is_clean(self) -> bool:
        """Whether some version has, or had, exactly these bytes."""
        return not (self.modified or self.interrupted)

    @property
    def is_writable(self) -> bool:
        """Whether its bytes are where they can be changed, and may be."""
        return self.rest is None or (self.is_overflowed and not self.sealed)

    @property
    def has_local_bytes(self) -> bool:
        """Whether RAM or the spill directory has some of its bytes."""
        return self.tier != NO_TIER or self.is_spilled

    @property
    def staging(self) -> str:
        """Name of the staging file that has its bytes, or some of them; "": none."""
        return self.rest.name if isinstance(self.rest, Staging) else ""

    @property
    def spilled(self) -> VersionId:
        """The version whose copy in the spill directory has its bytes."""
        return self.rest.version if isinstance(self.rest, SpillCopy) else NO_VERSION

    @property
    def head_bytes(self) -> int:
        """Of a cold file: how many of its first bytes RAM has."""
        return self.here.size if self.is_cold else 0

    @property
    def filling(self) -> Coming | None:
        """What is on its way to RAM still, if anything is."""
        return self.coming if self.coming is not None and not self.coming.gone else None

    def is_on(self, version: Version) -> bool:
        """Whether its bytes are in the tier file, or in the copy, that has the version's."""
        return self.spilled == version.vid if version.spilled else self.tier == version.tier_id

    def wrong(self) -> str:
        """What does not hold of where the bytes are, in words; "": nothing."""
        return (
            ""
            if self._holds()
            else (
                f"its bytes are said to be in {self.tier} {self.here.pairs}, and else at "
                f"{self.rest}"
            )
        )

    def _holds(self) -> bool:
        match self.rest:
            case None:
                return self.here == ALL and self.tier != NO_TIER
            case BackingFile():
                is_head = self.tier != NO_TIER and self.here == Runs.first(self.here.size) != ALL
                return (is_head or not (self.tier or self.here)) and not self.modified
            case SpillCopy():
                return not (self.here or self.tier)
            case Staging():
                return bool(self.here) == (self.tier != NO_TIER) == (self.moving_out is not None)

    # -- the verbs

    def fetch(self, tier: TierId, start: int = 0, end: int = END) -> None:
        """The tier file has these bytes now; with all of them it needs no other place."""
        self.tier = tier
        self.here = self.here.plus(start, end)
        if end - start == END:
            self.rest = None
        self._check()

    def move_out(self, place: Staging | SpillCopy, start: int = 0, end: int = END) -> None:
        """These bytes are at that place from now on, and no longer here.

        What is no longer here at all needs no tier file.
        """
        self.rest = place
        self.here = self.here.minus(start, end)
        if not self.here:
            self.tier = NO_TIER
            self.seen = UNSEEN
            self.moving_out = None
        elif self.moving_out is None:
            self.moving_out = MovingOut()
        self._check()

    def cut(self, size: int) -> None:
        """Only the first bytes stay here: the backing directory has them all."""
        self.rest = BACKING
        self.here = Runs.first(size)
        self.writing = Writing.APPENDING
        self.last_writing = Writing.APPENDING
        self._check()

    def rehouse(self, tier: TierId) -> None:
        """What is here is in another tier file by now."""
        assert self.tier, self.rest
        self.tier = tier
        self.seen = UNSEEN

    def rebind(self, place: Staging) -> None:
        """What has the rest is another file by now."""
        assert self.is_overflowed, self.rest
        self.rest = place

    def _check(self) -> None:
        assert self is not COLD
        self._placed()
        assert not self.wrong(), self.wrong()

    # -- its descriptor

    def close(self) -> None:
        """Its descriptor is not needed any more, once nobody is at work on it."""
        if self.in_flight:
            self.closing = True
        elif self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.closing = False
            self.is_fd_to_read = False

    def call_when_idle(self, call: Callable[[], None]) -> None:
        """Instead of what was to be called so far: once, under the lock, by the last who is at work
        on the descriptor.
        """
        self.idle_calls = (call,)

    def keep_open(self) -> None:
        """The descriptor stays, and nobody moves the bytes elsewhere, until `let_go`."""
        self.in_flight += 1

    def let_go(self) -> None:
        """Whoever asked for that is done."""
        self.in_flight -= 1
        if not self.in_flight:
            calls = self.idle_calls
            self.idle_calls = ()
            for call in calls:
                call()
        if self.closing and not self.in_flight:
            self.close()

    # -- its state

    def frozen(self) -> None:
        """All of it is in a version now."""
        self.modified = False
        self.interrupted = False
        self.last_writing = self.writing
        self.writing = Writing.APPENDING

    def moved_from(self, other: Body) -> Body:
        """It takes the place of another body, with the same bytes."""
        self.modified = other.modified
        self.modified_since = other.modified_since
        self.interrupted = other.interrupted
        self.writing = other.writing
        self.last_writing = other.last_writing
        self.failed = other.failed
        self.failed_at = other.failed_at
        return self


class _Shared(Body):
    """Of many files at once: whoever would change one of them changed all."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        # the last attribute that is set when it is made
        assert not hasattr(self, "is_spilled"), name
        super(Body, self).__setattr__(name, value)


COLD: Body = _Shared()
"""Of every file of which RAM has nothing; never changed, only replaced."""


def in_ram(tier: TierId, *, modified: bool = False, fd: int = -1) -> Body:
    """All bytes are in a tier file."""
    return Body(tier, ALL, None, modified=modified, fd=fd)


def overflowed(name: str, fd: int = -1, *, sealed: bool = False) -> Body:
    """All bytes are in a staging file."""
    return Body(rest=Staging(name), fd=fd, sealed=sealed)


def head(tier: TierId, size: int) -> Body:
    """The backing directory has all bytes, and RAM the first ones too."""
    return Body(tier, Runs.first(size))


# -- rows

COLUMNS = (
    "tier_id",
    "head",
    "staging",
    "gone",
    "spilled",
    "modified",
    "interrupted",
    "failed",
    "failed_at",
    "writing",
    "last_writing",
)
"""Of the state database. `head`: so many first bytes are all that the tier file has, the rest is on
the backing directory. `staging`: a file that has all bytes, or the pieces `gone` of a tier file.
`spilled`: the version whose copy in the spill directory has all bytes.
"""
DDL = """tier_id INTEGER, head INTEGER NOT NULL, staging TEXT, gone TEXT NOT NULL,
  spilled INTEGER NOT NULL,
  modified INTEGER, interrupted INTEGER NOT NULL, failed INTEGER NOT NULL,
  failed_at INTEGER NOT NULL,
  writing TEXT NOT NULL, last_writing TEXT NOT NULL"""
_COLD_ROW = (
    NO_TIER,
    0,
    "",
    "",
    NO_VERSION,
    0,
    0,
    0,
    0,
    Writing.APPENDING.value,
    Writing.APPENDING.value,
)


def to_row(body: Body) -> tuple[object, ...]:
    """Values of `COLUMNS`."""
    if body is COLD:
        return _COLD_ROW
    elsewhere: tuple[object, ...] = (
        0,
        "",
        "",
        NO_VERSION,
    )  # of nearly all rows: the body is whole in RAM
    if body.rest is not None:
        elsewhere = (
            body.head_bytes,
            body.staging,
            _gone(body.here) if body.is_outgrown else "",
            body.spilled,
        )
    return (
        body.tier,
        *elsewhere,
        body.modified,
        body.interrupted,
        body.failed,
        body.failed_at,
        body.writing.value,
        body.last_writing.value,
    )


def _gone(here: Runs) -> str:
    """Runs of pieces that are not here."""
    return ",".join(
        f"{start // OUTGROWN_PIECE_BYTES}-{end // OUTGROWN_PIECE_BYTES}"
        for start, end in here.gaps()
    )


def from_row(row: tuple[Any, ...], now: float) -> Body:
    """`now`: monotonic, seconds: when what an earlier worker changed was learned of."""
    (
        tier_id,
        head_bytes,
        staging,
        gone,
        spilled,
        modified,
        interrupted,
        failed,
        failed_at,
        writing,
        last_writing,
    ) = row
    if head_bytes:
        return head(TierId(tier_id), head_bytes)
    if not (tier_id or staging or spilled):
        return COLD
    body = (
        in_ram(TierId(tier_id))
        if tier_id
        else overflowed(staging)
        if staging
        else Body(rest=SpillCopy(VersionId(spilled)))
    )
    if tier_id and staging:
        body.move_out(Staging(staging), 0, 0)
        for run in filter(None, gone.split(",")):
            start, end = (int(piece) * OUTGROWN_PIECE_BYTES for piece in run.split("-"))
            body.move_out(Staging(staging), start, end)
    body.modified = bool(modified)
    body.interrupted = bool(interrupted)
    body.modified_since = now
    body.failed = failed
    body.failed_at = failed_at
    body.writing = Writing(writing)
    body.last_writing = Writing(last_writing)
    return body


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

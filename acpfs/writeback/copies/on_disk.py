"""Journals in the spill directory: a copy of the state, and a file of frames that follow it.

    mirror-TOKEN.seed   a SQLite database: the state when the journal was begun
    mirror-TOKEN.log    `journal_frames`: a header that has the seed's checksum, transactions

Up to version 0.1.0 a journal was one database, `mirror-TOKEN.sqlite`; it is read still. An older
acpfs finds no such file, and refuses the mount instead of taking the seed for all there is.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from acpfs.backing.filling import begin_write_out, forget_pages, write_all
from acpfs.checksum import Checksum
from acpfs.ram.spill_directory import MIRROR_PREFIX, SpillDirectory
from acpfs.ram.state import Statement
from acpfs.types import VersionId
from acpfs.writeback.copies import journal_frames as frames
from acpfs.writeback.copies.journal_place import JournalSite

LONG_BYTES = 64 << 20
LONG_SEEDS = 4
"""A log that is longer than that, and so many times its seed, is begun anew: reading it takes as
long as writing it did, and its room is the spill directory's.
"""
_PIECE_BYTES = 1 << 20


def seed_name(token: str) -> str:
    """Of the copy of the state."""
    return f"{MIRROR_PREFIX}{token}.seed"


def log_name(token: str) -> str:
    """Of what follows it."""
    return f"{MIRROR_PREFIX}{token}.log"


def old_name(token: str) -> str:
    """Of a journal of version 0.1.0."""
    return f"{MIRROR_PREFIX}{token}.sqlite"


class DiskJournal:
    """See `journal_place.Journal`."""

    is_lazy = False

    def __init__(self, fd: int, seed_bytes: int, length: int) -> None:
        """`fd`: of the log, which has `length` bytes; closed by `close`."""
        self._fd = fd
        self._seed_bytes = seed_bytes
        self._length = length
        self._encoder = frames.Encoder()

    @property
    def is_long(self) -> bool:
        """See `journal_place.Journal`."""
        return self._length > max(LONG_BYTES, LONG_SEEDS * self._seed_bytes)

    def append(self, batch: Sequence[Sequence[Statement]]) -> None:
        """See `journal_place.Journal`."""
        data = b"".join(self._encoder.transaction(statements) for statements in batch)
        _write_all(self._fd, data)
        os.fdatasync(self._fd)
        self._length += len(data)

    def close(self) -> None:
        """See `journal_place.Journal`."""
        os.close(self._fd)


class DiskCopies:
    """See `copy_place.CopyPlace`: in a spill directory, which is there all the time."""

    frees_ram = True
    piece_bytes = 2 << 20
    is_broken = False
    lacks = False

    def __init__(self, directory: SpillDirectory) -> None:
        self._directory = directory
        self.path = directory.path

    @property
    def where(self) -> str:
        """See `copy_place.CopyPlace`."""
        return os.fspath(self.path.parent)

    @property
    def recorded(self) -> str:
        """See `copy_place.CopyPlace`."""
        return self.where

    def begin(self) -> None:
        """It is found."""

    def settled(self) -> None:
        """It always is."""

    def is_too_small(self, _size: int) -> None:
        """There is no other."""

    def names(self) -> list[str]:
        """See `copy_place.CopyPlace`."""
        return self._directory.names()

    def free_bytes(self) -> int:
        """See `copy_place.CopyPlace`."""
        return self._directory.free_bytes()

    def new_name(self, vid: VersionId) -> str:
        """See `copy_place.CopyPlace`."""
        return self._directory.new_name(vid)

    def new_copy(self, name: str) -> DiskCopy:
        """See `copy_place.CopyPlace`."""
        return DiskCopy(self._directory.create(name))

    def open(self, name: str) -> int:
        """See `copy_place.CopyPlace`."""
        return self._directory.open(name)

    def gather(self) -> None:
        """A name is a call here."""

    def remove(self, names: Sequence[str]) -> None:
        """See `copy_place.CopyPlace`. One that fails does not keep the others."""
        failed: OSError | None = None
        for name in names:
            try:
                self._directory.remove(name)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed

    def tell_clock(self, clock: float) -> None:
        """Nobody asks."""

    def sync_names(self) -> None:
        """See `copy_place.CopyPlace`."""
        self._directory.sync_names()

    def give_up(self) -> None:
        """See `copy_place.CopyPlace`."""
        self._directory.give_up()


class DiskCopy:
    """See `copy_place.CopyFile`."""

    def __init__(self, fd: int) -> None:
        """`fd`: of an empty file; closed by `close`."""
        self._fd = fd

    def buffer(self, size: int) -> memoryview:
        """See `copy_place.CopyFile`."""
        return memoryview(bytearray(size))

    def write(self, piece: bytes | memoryview, position: int) -> None:
        """See `copy_place.CopyFile`."""
        write_all(self._fd, piece, position)
        begin_write_out(self._fd, position, len(piece))

    def clear(self) -> None:
        """See `copy_place.CopyFile`."""
        os.ftruncate(self._fd, 0)

    def finish(self, size: int) -> None:
        """See `copy_place.CopyFile`."""
        os.ftruncate(self._fd, size)
        os.fdatasync(self._fd)
        forget_pages(self._fd)

    def close(self) -> None:
        """See `copy_place.CopyFile`."""
        os.close(self._fd)


class DiskPlace:
    """See `journal_place.JournalPlace`, and `JournalSite`: its only one."""

    has_copies = True
    counts_at = ""

    def __init__(self, directory: SpillDirectory) -> None:
        self._directory = directory

    @property
    def site(self) -> JournalSite:
        """See `journal_place.JournalPlace`."""
        return self

    def learn(self) -> bool:
        """See `journal_place.JournalPlace`."""
        return True

    def goes_elsewhere(self, _failed: JournalSite | None) -> bool:
        """See `journal_place.JournalPlace`: there is no other."""
        return False

    def marked(self, _token: str) -> None:
        """See `journal_place.JournalPlace`."""

    def withdrawn(self) -> None:
        """See `journal_place.JournalPlace`."""

    def begin(self, token: str, snapshot: sqlite3.Connection) -> DiskJournal:
        """See `journal_place.JournalSite`."""
        path = self._directory.path / seed_name(token)
        os.close(self._directory.create(seed_name(token)))
        with (
            contextlib.closing(snapshot),
            contextlib.closing(sqlite3.connect(path, isolation_level=None)) as seed,
        ):
            # it is flushed as a whole below: until then nobody is told of it
            seed.execute("PRAGMA synchronous=OFF")
            snapshot.backup(seed)
            seed.execute("PRAGMA journal_mode=DELETE")
        fd = self._directory.open(seed_name(token))
        try:
            os.fsync(fd)
            digest = _digest(fd)
            seed_bytes = os.fstat(fd).st_size
        finally:
            os.close(fd)
        head = frames.header({"token": token, "seed": digest})
        log = self._directory.create(log_name(token))
        try:
            _write_all(log, head)
            os.fsync(log)
            self._directory.sync_names()
        except BaseException:
            os.close(log)
            raise
        return DiskJournal(log, seed_bytes, len(head))

    def tokens(self) -> list[str]:
        """See `journal_place.JournalPlace`."""
        return sorted({token for token, _name in self._files()})

    def remove(self, token: str) -> None:
        """See `journal_place.JournalPlace`."""
        for its, name in self._files():
            if its == token:
                self._directory.remove(name)

    def _files(self) -> Iterator[tuple[str, str]]:
        """Tokens and names, those of older versions too, with what SQLite puts beside them."""
        for name in self._directory.names():
            if name.startswith(MIRROR_PREFIX):
                yield name.removeprefix(MIRROR_PREFIX).partition(".")[0], name

    def described(self, _token: str) -> dict[str, str]:
        """See `journal_place.JournalPlace`."""
        return {
            "spill": str(self._directory.path.parent),
            "directory": str(self._directory.path),
        }


def missing(directory: Path, token: str) -> Path | None:
    """The file of a journal that is not there; None: it is there, of whatever version."""
    if (directory / old_name(token)).is_file():
        return None
    files = (directory / seed_name(token), directory / log_name(token))
    return next((file for file in files if not file.is_file()), None)


def read_into(directory: Path, token: str, db: sqlite3.Connection) -> None:
    """Make `db`, which is empty, the state that the journal has.

    Raises:
        frames.DamagedFrameError: the journal is not what was written.
        OSError, sqlite3.Error: the disk's.
    """
    old = directory / old_name(token)
    if old.is_file():
        with contextlib.closing(sqlite3.connect(old)) as source:
            source.backup(db)
        return
    words, transactions = frames.read((directory / log_name(token)).read_bytes())
    with _opened(directory / seed_name(token)) as fd:
        if words.get("seed") != _digest(fd):
            msg = f"{seed_name(token)} is not what was written"
            raise frames.DamagedFrameError(msg)
    fill(db, directory / seed_name(token), transactions)


def fill(db: sqlite3.Connection, seed: Path, transactions: Iterator[list[Statement]]) -> None:
    """Make `db` what a seed is, and carry out what follows it."""
    with contextlib.closing(sqlite3.connect(seed)) as source:
        source.backup(db)
    db.execute("PRAGMA journal_mode=DELETE")
    db.execute("BEGIN")
    frames.carry_out(db, transactions)
    db.execute("COMMIT")


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        yield fd
    finally:
        os.close(fd)


def _digest(fd: int) -> str:
    checksum = Checksum()
    at = 0
    while piece := os.pread(fd, _PIECE_BYTES, at):
        checksum.update(piece)
        at += len(piece)
    return checksum.hexdigest()


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]

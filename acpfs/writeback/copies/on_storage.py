"""Journals on the backing directory, while the holder of the copies is out of reach: what it is not
told is there for whoever adopts what it holds.

    .acpfs/journals/NODE+TOKEN.seed.N   pieces of a SQLite database: the state at the beginning
    .acpfs/journals/NODE+TOKEN.log.N    `journal_frames`, cut between frames; the first piece is a
                                        header with the seed's checksum and its number of pieces

A piece is written once, whole and flushed, before the next one is begun. They are found by their
names, one after the other, not by a listing, which a client may have from before. So what is read
after a fence has all that was there before it. Every call may hang with the storage.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from acpfs.backing.leftovers import JOURNALS
from acpfs.backing.lower import Lower, LowerPath
from acpfs.checksum import Checksum
from acpfs.ram.state import Statement
from acpfs.writeback.copies import journal_frames as frames
from acpfs.writeback.copies.on_disk import LONG_BYTES, LONG_SEEDS, fill

PIECE_BYTES = 4 << 20
PIECES_MAX = 1000
"""A log of more pieces is begun anew: each is a file of its own."""


class StoredJournal:
    """See `journal_place.Journal`."""

    is_lazy = True
    """Each piece is a call on the storage, which has other work."""

    def __init__(self, lower: Lower, stem: str, seed_bytes: int) -> None:
        """`stem`: what the names of its pieces begin with."""
        self._lower = lower
        self._stem = stem
        self._seed_bytes = seed_bytes
        self._pieces = 0
        self._length = 0
        self._encoder = frames.Encoder()

    @property
    def is_long(self) -> bool:
        """See `journal_place.Journal`."""
        is_large = self._length > max(LONG_BYTES, LONG_SEEDS * self._seed_bytes)
        return is_large or self._pieces > PIECES_MAX

    def begin(self, header: bytes) -> None:
        """Its first frame: from here on the journal is there."""
        self._write(header)

    def append(self, batch: Sequence[Sequence[Statement]]) -> None:
        """See `journal_place.Journal`."""
        self._write(b"".join(self._encoder.transaction(statements) for statements in batch))

    def _write(self, data: bytes) -> None:
        self._lower.write_own(_piece(self._stem, "log", self._pieces), data)
        self._pieces += 1
        self._length += len(data)

    def close(self) -> None:
        """See `journal_place.Journal`."""


class StoredJournals:
    """Of one node."""

    def __init__(self, lower: Lower, node: str, scratch: Path) -> None:
        """`scratch`: a directory in RAM, for a seed on its way."""
        self.lower = lower
        self.node = node
        self._scratch = scratch

    def begin(self, token: str, snapshot: sqlite3.Connection) -> StoredJournal:
        """See `journal_place.JournalSite.begin`."""
        stem = f"{self.node}+{token}"
        hasher = Checksum()
        pieces = 0
        with tempfile.NamedTemporaryFile(prefix="seed-", dir=self._scratch) as file:
            with (
                contextlib.closing(snapshot),
                contextlib.closing(sqlite3.connect(file.name, isolation_level=None)) as seed,
            ):
                seed.execute("PRAGMA synchronous=OFF")
                snapshot.backup(seed)
                seed.execute("PRAGMA journal_mode=DELETE")
            size = os.fstat(file.fileno()).st_size
            for position in range(0, size, PIECE_BYTES):
                piece = os.pread(file.fileno(), PIECE_BYTES, position)
                hasher.update(piece)
                self.lower.write_own(_piece(stem, "seed", pieces), piece)
                pieces += 1
        journal = StoredJournal(self.lower, stem, size)
        words = {"token": token, "seed": hasher.hexdigest(), "pieces": pieces}
        journal.begin(frames.header(words))
        return journal

    def tokens(self) -> list[str]:
        """Of all of which something is there."""
        begins = f"{self.node}+".encode()
        found = [name for name in self.lower.list_own((JOURNALS,)) if name.startswith(begins)]
        return sorted({name[len(begins) :].split(b".")[0].decode() for name in found})

    def remove(self, token: str) -> None:
        """A journal that counts no more: the log's last piece first, so that no part of it could be
        taken for all.
        """
        begins = f"{self.node}+{token}.".encode()
        found = [name for name in self.lower.list_own((JOURNALS,)) if name.startswith(begins)]
        for name in sorted(found, key=_number, reverse=True):
            self.lower.remove_own((JOURNALS, name))


def _piece(stem: str, kind: str, number: int) -> LowerPath:
    return (JOURNALS, f"{stem}.{kind}.{number}".encode())


def _number(name: bytes) -> int:
    last = name.rpartition(b".")[2]
    return int(last) if last.isdigit() else 0


def read_into(lower: Lower, node: str, token: str, db: sqlite3.Connection, scratch: Path) -> None:
    """Make `db`, which is empty, the state that a journal on the storage has.

    Raises:
        frames.DamagedFrameError: the journal is not what was written, or not there.
        OSError, sqlite3.Error: the storage's, or that of `scratch`.
    """
    stem = f"{node}+{token}"
    words, transactions = frames.read(b"".join(_pieces(lower, stem, "log", None)))
    hasher = Checksum()
    with tempfile.NamedTemporaryFile(prefix="seed-", dir=scratch, buffering=0) as file:
        for piece in _pieces(lower, stem, "seed", int(words["pieces"])):
            hasher.update(piece)
            file.write(piece)
        if words["seed"] != hasher.hexdigest():
            msg = f"the seed of journal {token} on the storage is not what was written"
            raise frames.DamagedFrameError(msg)
        fill(db, Path(file.name), transactions)


def _pieces(lower: Lower, stem: str, kind: str, count: int | None) -> Iterator[bytes]:
    """So many, or all that there are."""
    for number in itertools.count() if count is None else range(count):
        try:
            yield lower.read_own(_piece(stem, kind, number))
        except FileNotFoundError:
            if count is not None:
                msg = f"piece {number} of {stem}.{kind} is not there"
                raise frames.DamagedFrameError(msg) from None
            return

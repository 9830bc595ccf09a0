"""Transactions of the state as bytes, one frame each: what a journal appends, and what is read of
it again.

    frame    MAGIC, length of the payload (4 bytes), its xxh3-64 (8 bytes), payload
    payload  kind (1 byte), then
             H  JSON: the format's version, and what the journal follows
             T  statements, each: number of its text; the text, where it is a new one; count of
                rows, or ALONE for one that is not `executemany`; of each row its values

All numbers are little-endian. A text is written once, and known by its number from then on. A frame
that is torn, and nothing whole behind it, is the end: its transaction was never said to be there.
One that is torn in the middle is damage, since what follows was. Pure: no calls, no clock, no lock.
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import xxhash

from acpfs.errors import unknown_version
from acpfs.ram.state import Statement, storable

FORMAT = 1
"""Of frames and values; a newer one is refused."""
MAGIC = b"\xacPJ\n"
_HEAD = struct.Struct("<4sIQ")
_COUNT = struct.Struct("<I")
_INTEGER = struct.Struct("<q")
_REAL = struct.Struct("<d")
_KIND_AND_INTEGER = struct.Struct("<cq")
_KIND_AND_COUNT = struct.Struct("<cI")
_ALONE = 0xFFFFFFFF
_HEADER = b"H"
_TRANSACTION = b"T"
_ROWS = frozenset(
    {
        sqlite3.SQLITE_INSERT,
        sqlite3.SQLITE_UPDATE,
        sqlite3.SQLITE_DELETE,
        sqlite3.SQLITE_SELECT,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_FUNCTION,
    }
)
"""What a statement of a journal may do."""


class DamagedFrameError(ValueError):
    """There are whole frames behind one that is not, or a whole one makes no sense."""


class NewerJournalError(Exception):
    """A newer acpfs wrote it; the text has both versions, and what to do."""


def header(words: Mapping[str, object]) -> bytes:
    """The first frame of a journal."""
    return _frame(_HEADER + json.dumps({**words, "format": FORMAT}).encode())


class Encoder:
    """Of one journal: it remembers which texts have been written."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def transaction(self, statements: Sequence[Statement]) -> bytes:
        """One frame.

        Raises:
            TypeError: a value is of a kind that the state does not have.
        """
        payload = [_TRANSACTION]
        for sql, values, is_many in statements:
            number = self._numbers.get(sql)
            if number is None:
                number = len(self._numbers)
                self._numbers[sql] = number
                payload.append(_COUNT.pack(number))
                _put_bytes(payload, sql.encode())
            else:
                payload.append(_COUNT.pack(number))
            payload.append(_COUNT.pack(len(values) if is_many else _ALONE))
            for row in values if is_many else (values,):
                _put_row(payload, row)
        return _frame(b"".join(payload))


def _frame(payload: bytes) -> bytes:
    return _HEAD.pack(MAGIC, len(payload), xxhash.xxh3_64_intdigest(payload)) + payload


def _put_row(payload: list[bytes], row: Sequence[object]) -> None:
    """Dozens of values are put for each small file: the usual kinds are told by their type."""
    payload.append(_COUNT.pack(len(row)))
    for value in row:
        kind = type(value)
        if kind is int:
            try:
                payload.append(_KIND_AND_INTEGER.pack(b"i", value))
            except struct.error:  # of more than 64 bits
                _put(payload, *storable([value]))
        elif kind is str:
            data = value.encode()  # type: ignore[attr-defined]
            payload.append(_KIND_AND_COUNT.pack(b"s", len(data)))
            payload.append(data)
        else:
            _put(payload, *storable([value]))


def _put(payload: list[bytes], value: object) -> None:
    if value is None:
        payload.append(b"n")
    elif isinstance(value, int):
        payload.append(b"i" + _INTEGER.pack(value))
    elif isinstance(value, float):
        payload.append(b"r" + _REAL.pack(value))
    elif isinstance(value, str):
        payload.append(b"s")
        # names of files that are no text are bytes in the state
        _put_bytes(payload, value.encode())
    elif isinstance(value, (bytes, bytearray, memoryview)):
        payload.append(b"b")
        _put_bytes(payload, bytes(value))
    else:
        msg = f"a {type(value).__name__} in the state"
        raise TypeError(msg)


def _put_bytes(payload: list[bytes], data: bytes) -> None:
    payload.append(_COUNT.pack(len(data)))
    payload.append(data)


# -- reading


def read(data: bytes) -> tuple[dict[str, Any], Iterator[list[Statement]]]:
    """What the journal follows, and its transactions, up to the first frame that never came whole.

    Raises:
        DamagedFrameError: now, or from the iterator: see the class.
        NewerJournalError: see the class.
    """
    payloads = _payloads(data)
    first = next(payloads, b"")
    if not first.startswith(_HEADER):
        msg = "it has no beginning"
        raise DamagedFrameError(msg)
    words = json.loads(first[1:])
    version = words.get("format") if isinstance(words, dict) else None
    if version is None:
        msg = "it says no version"
        raise DamagedFrameError(msg)
    way_out = "mount with the newer acpfs that wrote it"
    if why := unknown_version("its journal", version, FORMAT, way_out):
        raise NewerJournalError(why)
    return words, _transactions(payloads)


def _payloads(data: bytes) -> Iterator[bytes]:
    at = 0
    while (payload := _whole(data, at)) is not None:
        yield payload
        at += _HEAD.size + len(payload)
    behind = data.find(MAGIC, at + 1)
    while behind >= 0:
        if _whole(data, behind) is not None:
            msg = f"it is damaged at byte {at}, and goes on at {behind}"
            raise DamagedFrameError(msg)
        behind = data.find(MAGIC, behind + 1)


def _whole(data: bytes, at: int) -> bytes | None:
    """The payload of a frame that begins there; None: there is none, or not all of it."""
    if len(data) - at < _HEAD.size:
        return None
    magic, length, digest = _HEAD.unpack_from(data, at)
    payload = data[at + _HEAD.size : at + _HEAD.size + length]
    is_whole = (
        magic == MAGIC and len(payload) == length and xxhash.xxh3_64_intdigest(payload) == digest
    )
    return payload if is_whole else None


def _transactions(payloads: Iterator[bytes]) -> Iterator[list[Statement]]:
    texts = list[str]()
    for payload in payloads:
        try:
            yield list(_statements(_Reader(payload, 1), texts))
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            # its checksum is right: who wrote it is not of this format
            msg = f"a transaction cannot be read: {error}"
            raise DamagedFrameError(msg) from error


class _Reader:
    """Values of a payload, one after the other."""

    def __init__(self, payload: bytes, at: int) -> None:
        self._payload = payload
        self._at = at

    @property
    def is_at_end(self) -> bool:
        return self._at >= len(self._payload)

    def number(self, form: struct.Struct) -> Any:
        (found,) = form.unpack_from(self._payload, self._at)
        self._at += form.size
        return found

    def bytes(self) -> bytes:
        count = self.number(_COUNT)
        data = self._payload[self._at : self._at + count]
        if len(data) != count:
            msg = "bytes are missing"
            raise IndexError(msg)
        self._at += count
        return data

    def value(self) -> Any:
        kind = self._payload[self._at : self._at + 1]
        self._at += 1
        if kind == b"n":
            return None
        if kind == b"i":
            return self.number(_INTEGER)
        if kind == b"r":
            return self.number(_REAL)
        if kind == b"s":
            return self.bytes().decode()
        if kind == b"b":
            return self.bytes()
        msg = f"a value of kind {kind!r}"
        raise IndexError(msg)

    def row(self) -> list[Any]:
        return [self.value() for _value in range(self.number(_COUNT))]


def _statements(reader: _Reader, texts: list[str]) -> Iterator[Statement]:
    while not reader.is_at_end:
        number = reader.number(_COUNT)
        if number == len(texts):
            texts.append(reader.bytes().decode())
        sql = texts[number]
        count = reader.number(_COUNT)
        if count == _ALONE:
            yield sql, reader.row(), False
        else:
            yield sql, [reader.row() for _row in range(count)], True


# -- carrying out


def carry_out(db: sqlite3.Connection, transactions: Iterator[list[Statement]]) -> int:
    """Make all of them in the open transaction of `db`; how many there were.

    They change rows, and do nothing else: a journal may come from elsewhere.

    Raises:
        DamagedFrameError: as `read`.
        sqlite3.Error: one of them is refused.
    """
    count = 0
    db.set_authorizer(_judge)
    try:
        for statements in transactions:
            for sql, values, is_many in statements:
                if is_many:
                    db.executemany(sql, values)
                else:
                    db.execute(sql, values)
            count += 1
    finally:
        db.set_authorizer(_allow)  # Python 3.10 has no other way to end it
    return count


def _allow(*_what: object) -> int:
    return sqlite3.SQLITE_OK


def _judge(action: int, *_what: object) -> int:
    return sqlite3.SQLITE_OK if action in _ROWS else sqlite3.SQLITE_DENY

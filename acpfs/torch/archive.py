"""An archive as `torch.save` lays it out, whose storages are still to come: where they belong, and
where their checksums do.

Reads what torch itself has written without them (the skeleton), so that each byte between storages
is torch's. Knows zip and nothing of tensors. An archive that is not as expected raises
`UnknownLayoutError`, before anything of it was used.
"""

from __future__ import annotations

import copy
import os
import struct
import zlib
from dataclasses import dataclass, replace

END = b"PK\5\6"
"""Record at the end of the directory; torch's has no comment behind it."""
END_64 = b"PK\6\6"
LOCATOR_64 = b"PK\6\7"
ENTRY = b"PK\1\2"
DESCRIPTOR = b"PK\7\x08"
END_BYTES = 22
LOCATOR_BYTES = 20
ENTRY_BYTES = 46
LOCAL_BYTES = 30
EXTRA_64 = 1
IN_EXTRA = 0xFFFFFFFF
"""Stands for a number that is in the extra field of zip64."""
FLAG_DESCRIPTOR = 8
CRC_BYTES = 4
ID_NAME = "/.data/serialization_id"
ID_BYTES = 40
"""20 digits of the names' hash, and 20 of the checksums'."""
WORD = (1 << 64) - 1


class UnknownLayoutError(Exception):
    """This is no archive as this module knows them: let torch write it."""


@dataclass(frozen=True)
class Record:
    """A file in the archive."""

    name: str
    header_at: int
    data_at: int
    size: int
    crc: int
    crc_at: int
    """Of its checksum in the directory."""

    @property
    def end(self) -> int:
        """Behind its bytes, where the descriptor begins."""
        return self.data_at + self.size


@dataclass(frozen=True)
class Part:
    """Bytes of the archive that come from one place."""

    begin: int
    end: int
    key: str
    """Of the storage that they are; empty where they are the skeleton's."""
    text: bytearray
    """They, where they are the skeleton's."""


class Archive:
    """The skeleton in parts, in order; the last of them is `tail`: from the fingerprint to the end
    of the directory.

    Threading: parts may be read by several threads; `finish` comes behind them.
    """

    def __init__(self, fd: int, sizes: dict[str, int]) -> None:
        """`sizes`: bytes of each storage by its key, in the order of the archive.

        Raises:
            UnknownLayoutError: the skeleton has something else.
        """
        self._size = os.fstat(fd).st_size
        self._records = _records(fd, self._size)
        self._storages = self._found(sizes)
        identity = self._records[-1]
        if not identity.name.endswith(ID_NAME) or identity.size != ID_BYTES:
            raise UnknownLayoutError
        self._tail_at = identity.header_at
        self._identity = identity
        self.parts = self._parted(fd)
        self.tail = bytearray(_read(fd, self._tail_at, self._size - self._tail_at))
        behind = identity.end - self._tail_at
        if self.tail[behind : behind + len(DESCRIPTOR)] != DESCRIPTOR:
            raise UnknownLayoutError

    @property
    def tail_at(self) -> int:
        """Where the tail begins: behind all storages."""
        return self._tail_at

    def copied(self, prefix: str) -> Archive:
        """The same once more, for other storages of the same sizes, whose keys begin with
        `prefix`.
        """
        other = copy.copy(self)
        vars(other)["_storages"] = {prefix + key: one for key, one in self._storages.items()}
        other.parts = [
            replace(part, key=part.key and prefix + part.key, text=bytearray(part.text))
            for part in self.parts
        ]
        other.tail = bytearray(self.tail)
        return other

    def crc_places(self) -> dict[str, int]:
        """Where the checksum of each storage stands behind its bytes; those without bytes have
        none.
        """
        return {key: one.end + len(DESCRIPTOR) for key, one in self._storages.items() if one.size}

    def finish(self, sums: dict[str, int]) -> None:
        """Put the storages' checksums into the tail, and the fingerprint that comes of them."""
        had_right_id = self._id_of({}) == self._id()
        for key, crc in sums.items():
            self._put(self._storages[key].crc_at, crc)
        if not had_right_id:
            return  # another torch makes another one: this one is unique as well
        text = self._id_of(sums)
        at = self._identity.data_at - self._tail_at
        self.tail[at : at + ID_BYTES] = text
        crc = zlib.crc32(text)
        self._put(self._identity.end + len(DESCRIPTOR), crc)
        self._put(self._identity.crc_at, crc)

    # -- the fingerprint

    def _id(self) -> bytes:
        at = self._identity.data_at - self._tail_at
        return bytes(self.tail[at : at + ID_BYTES])

    def _id_of(self, sums: dict[str, int]) -> bytes:
        """As torch computes it: the checksums of all records so far, combined in their order."""
        crcs = {self._storages[key].name: crc for key, crc in sums.items()}
        total = 0
        for record in self._records[:-1]:
            if record.size:
                crc = crcs.get(record.name, record.crc)
                shifted = (total << 6 & WORD) + (total >> 2)
                total ^= (crc + 0x9E3779B9 + shifted) & WORD
        return self._id()[: ID_BYTES // 2] + b"%020d" % total

    def _put(self, at: int, crc: int) -> None:
        struct.pack_into("<I", self.tail, at - self._tail_at, crc)

    # -- reading the skeleton

    def _found(self, sizes: dict[str, int]) -> dict[str, Record]:
        """The storages' records: those that torch was asked for, and no others."""
        prefix = self._records[0].name.partition("/")[0] + "/data/"
        found = {
            record.name.removeprefix(prefix): record
            for record in self._records
            if record.name.startswith(prefix)
        }
        if {key: record.size for key, record in found.items()} != sizes:
            raise UnknownLayoutError
        return found

    def _parted(self, fd: int) -> list[Part]:
        parts = list[Part]()
        begin = 0
        for key, record in self._storages.items():
            if record.data_at < begin or record.end > self._tail_at:
                raise UnknownLayoutError
            if not record.size:
                continue
            parts.append(self._text(fd, begin, record.data_at, parts))
            parts.append(Part(record.data_at, record.end, key, bytearray()))
            begin = record.end
        parts.append(self._text(fd, begin, self._tail_at, parts))
        return parts

    def _text(self, fd: int, begin: int, end: int, parts: list[Part]) -> Part:
        """What the skeleton has there; behind a storage it begins with a place for its checksum."""
        text = bytearray(_read(fd, begin, end - begin))
        if parts and text[: len(DESCRIPTOR)] != DESCRIPTOR:
            raise UnknownLayoutError
        return Part(begin, end, "", text)


def _read(fd: int, at: int, length: int) -> bytes:
    """So many bytes.

    Raises:
        UnknownLayoutError: there are not.
    """
    found = b""
    while len(found) < length:
        piece = os.pread(fd, length - len(found), at + len(found))
        if not piece:
            raise UnknownLayoutError
        found += piece
    return found


def _directory(fd: int, size: int) -> tuple[bytes, int, int]:
    """(directory, where it begins, how many entries it has)."""
    if size < END_BYTES:
        raise UnknownLayoutError
    end = _read(fd, size - END_BYTES, END_BYTES)
    if end[:4] != END or end[20:] != b"\0\0":
        raise UnknownLayoutError
    entries, length, begin = struct.unpack_from("<HII", end, 10)
    before = max(size - END_BYTES - LOCATOR_BYTES, 0)
    locator = _read(fd, before, LOCATOR_BYTES)
    if locator[:4] == LOCATOR_64:
        (at,) = struct.unpack_from("<Q", locator, 8)
        end_64 = _read(fd, at, 56)
        if end_64[:4] != END_64:
            raise UnknownLayoutError
        entries, length, begin = struct.unpack_from("<QQQ", end_64, 32)
    return _read(fd, begin, length), begin, entries


def _records(fd: int, size: int) -> list[Record]:
    directory, begin, entries = _directory(fd, size)
    records = []
    at = 0
    for _ in range(entries):
        record, length = _record(fd, directory, at, begin)
        records.append(record)
        at += length
    if at != len(directory) or not records:
        raise UnknownLayoutError
    return records


def _record(fd: int, directory: bytes, at: int, begin: int) -> tuple[Record, int]:
    """(what an entry of the directory says, its bytes)."""
    entry = directory[at : at + ENTRY_BYTES]
    if len(entry) < ENTRY_BYTES or entry[:4] != ENTRY:
        raise UnknownLayoutError
    flags, method = struct.unpack_from("<HH", entry, 8)
    crc, packed, size = struct.unpack_from("<III", entry, 16)
    name_bytes, extra_bytes, comment_bytes = struct.unpack_from("<HHH", entry, 28)
    (header_at,) = struct.unpack_from("<I", entry, 42)
    names_at = at + ENTRY_BYTES
    extra = directory[names_at + name_bytes : names_at + name_bytes + extra_bytes]
    size, packed, header_at = _numbers((size, packed, header_at), extra)
    if method or packed != size or (size and not flags & FLAG_DESCRIPTOR):
        raise UnknownLayoutError
    local = _read(fd, header_at, LOCAL_BYTES)
    if local[14 : 14 + CRC_BYTES] != bytes(CRC_BYTES):
        raise UnknownLayoutError  # its checksum stands behind its bytes, and nowhere else
    name = directory[names_at : names_at + name_bytes].decode()
    data_at = header_at + LOCAL_BYTES + sum(struct.unpack_from("<HH", local, 26))
    record = Record(name, header_at, data_at, size, crc, begin + at + 16)
    return record, ENTRY_BYTES + name_bytes + extra_bytes + comment_bytes


def _numbers(given: tuple[int, ...], extra: bytes) -> list[int]:
    """Numbers of an entry; those that do not fit into 32 bits are in its extra field, in order."""
    wide = list[int]()
    at = 0
    while at + 4 <= len(extra):
        tag, length = struct.unpack_from("<HH", extra, at)
        if tag == EXTRA_64:
            wide = list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
        at += 4 + length
    if len(wide) < sum(number == IN_EXTRA for number in given):
        raise UnknownLayoutError
    return [wide.pop(0) if number == IN_EXTRA else number for number in given]

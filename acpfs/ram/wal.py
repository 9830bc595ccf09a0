"""Whether SQLite's write-ahead log of the state is whole.

SQLite itself goes by the part before the first damaged frame, and says nothing.

That would be an older state: operations that were carried out would come once more, and those
behind the damage never. A log whose end is torn is no damage: whoever is killed leaves that, and
what an earlier log had there. Damage is a frame that does not fit, with a commit behind it that
does. Format: https://www.sqlite.org/fileformat2.html#walformat. Reads only.
"""

from __future__ import annotations

import struct
from pathlib import Path

_HEADER_BYTES = 32
_FRAME_HEADER_BYTES = 24
_MAGIC = {0x377F0682: "<", 0x377F0683: ">"}
"""Byte order of the words that are summed up, by the first word."""
_MASK = 0xFFFFFFFF


def damage(path: Path) -> str:
    """What is wrong with the log, "" for nothing. One that is empty, or is not there, is whole."""
    try:
        log = path.read_bytes()
    except FileNotFoundError:
        return ""
    if not log:
        return ""
    order = _MAGIC.get(int.from_bytes(log[:4], "big"), "")
    if len(log) < _HEADER_BYTES or not order or _sum(log[:24], order, (0, 0)) != _sums(log, 24):
        return "the header of its write-ahead log is damaged"
    return _damaged_frame(log, order)


def _damaged_frame(log: bytes, order: str) -> str:
    (page_bytes,) = struct.unpack_from(">I", log, 8)
    salts = log[16:24]
    before = _sums(log, 24)
    broken = 0
    frames = range(
        _HEADER_BYTES,
        len(log) - _FRAME_HEADER_BYTES - page_bytes + 1,
        _FRAME_HEADER_BYTES + page_bytes,
    )
    for number, start in enumerate(frames, 1):
        if log[start + 8 : start + 16] != salts:
            broken = (
                broken or number
            )  # of an earlier log, as are all that follow, unless it is damaged
            before = _sums(log, start + 16)
            continue
        page = start + _FRAME_HEADER_BYTES
        found = _sum(
            log[page : page + page_bytes], order, _sum(log[start : start + 8], order, before)
        )
        noted = _sums(log, start + 16)
        is_commit = any(log[start + 4 : start + 8])
        if found != noted:
            broken = broken or number
        elif broken and is_commit:
            return f"frame {broken} of its write-ahead log is damaged"
        before = noted
    return ""


def _sums(log: bytes, at: int) -> tuple[int, int]:
    first, second = struct.unpack_from(">II", log, at)
    return first, second


def _sum(data: bytes, order: str, start: tuple[int, int]) -> tuple[int, int]:
    first, second = start
    words = iter(struct.unpack(f"{order}{len(data) // 4}I", data))
    for even, odd in zip(words, words, strict=True):
        first = (first + even + second) & _MASK
        second = (second + odd + first) & _MASK
    return first, second

"""What is staged and not persisted: how much it is, and whether small files are to wait with more
of it.

Streams run ahead of commits in many threads, commits go one after the other, and all of them share
one interpreter. Left alone the streams take nearly all of it, and the files that they stage lie
there. So while commits have work, small files are streamed only as far ahead as keeps that work
coming: `FILES_MAX` of them are staged or being staged, and it goes on at half of that. Where
commits wait for something else (a large file in front, another member, a person) nothing holds
streams up. Large files never wait: their bytes need the storage and not the interpreter. Used under
the file system's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from acpfs.types import Seq
from acpfs.writeback.log.ops import Op
from acpfs.writeback.order.order import GROUP_OPS_MAX
from acpfs.writeback.streams.streams import SMALL_BYTES_MAX

FILES_MAX = 4 * GROUP_OPS_MAX
"""Four groups: while one is flushed and half of them are left, streams have time to begin again."""


class Staged:
    """See above."""

    def __init__(self, ops: Iterable[Op], commits_have_work: Callable[[], bool]) -> None:
        """`ops`: the log as it is; `commits_have_work`: see `Order.has_work`."""
        self._commits_have_work = commits_have_work
        self._bytes: dict[Seq, int] = {}
        self._small: set[Seq] = set()
        self._is_enough = False
        for op in ops:
            if op.version is not None and op.version.is_staged:
                self.add(op)

    @property
    def bytes(self) -> int:
        return sum(self._bytes.values())

    @property
    def files(self) -> int:
        return len(self._bytes)

    def add(self, op: Op) -> None:
        """Its version is staged."""
        if op.version is not None:
            self._bytes[op.seq] = op.version.size
            if op.version.size <= SMALL_BYTES_MAX:
                self._small.add(op.seq)

    def remove(self, op: Op) -> None:
        """Not any more; it may never have been."""
        self._bytes.pop(op.seq, None)
        self._small.discard(op.seq)

    def is_enough(self, streaming: int) -> bool:
        """Whether no further small file is to be streamed now. `streaming`: how many files are."""
        enough = FILES_MAX // 2 if self._is_enough else FILES_MAX
        self._is_enough = len(self._small) + streaming >= enough and self._commits_have_work()
        return self._is_enough

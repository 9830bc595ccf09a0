"""Whether a file of which no size is known will be worth the passthrough lane: by its name, and by
what became of files like it.

Small files must not pay for what is done for large ones, and logs must stay where the daemon sees
their bytes. So a file counts as large only where something speaks for it: its name is that of a
checkpoint's state, or it lies in a checkpoint and does not have the name of a log or a description.
What was found of files like it, in the same place and with the same ending, counts more. Knows
paths and sizes, nothing else; nothing here outlives the worker. Used under the file system's lock.
"""

from __future__ import annotations

import re

from acpfs.checkpoints import Checkpoints, is_state
from acpfs.filesystem.expectations import WORTH_LEARNING_BYTES, pattern_of

KINDS_MAX = 10_000
SMALL_IN_A_ROW = 8
"""So many files of one directory and ending that were small, and no large one since: so will the
next be.
"""
_DESCRIPTION = re.compile(
    rb"(\.(json|jsonl|txt|log|out|err|md|rst|csv|tsv|ya?ml|toml|ini|cfg|conf|py|sh|lock|pid|tmp|html|xml|model|vocab|index|png|svg|[ch]|cc|cpp|js|rs|go)"
    rb"|(^|/)[^/.]*metadata|(^|/)\.[^/]*|tfevents[^/]*|(^|/)latest[^/]*)$",
    re.IGNORECASE,
)


class LikelySizes:
    """Large or small, by path."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        """`checkpoints`: which paths belong to one."""
        self._checkpoints = checkpoints
        self._small: dict[bytes, None] = {}
        """Patterns of which the last file was small."""
        self._in_a_row: dict[tuple[bytes, bytes], int] = {}
        """Directory and ending, by pattern → small files since the last large one."""

    def may_be_large(self, path: bytes) -> bool:
        """Whether a file that is about to be made is likely to be large."""
        if _DESCRIPTION.search(path) is not None or not (
            is_state(path) or self._checkpoints.of(path) is not None
        ):
            return False
        pattern = pattern_of(path)
        return pattern not in self._small and self._in_a_row.get(_kind(pattern), 0) < SMALL_IN_A_ROW

    def learn(self, path: bytes, size: int) -> None:
        """A file that was taken for a large one is complete, or one that is."""
        pattern = pattern_of(path)
        kind = _kind(pattern)
        if size >= WORTH_LEARNING_BYTES:
            self._small.pop(pattern, None)
            self._in_a_row.pop(kind, None)
            return
        if pattern in self._small:
            return
        self._small[pattern] = None
        self._in_a_row[kind] = self._in_a_row.get(kind, 0) + 1
        for known in (self._small, self._in_a_row):
            if len(known) > KINDS_MAX:
                del known[next(iter(known))]  # type: ignore[arg-type]


def _kind(pattern: bytes) -> tuple[bytes, bytes]:
    directory, _slash, name = pattern.rpartition(b"/")
    return directory, name.rpartition(b".")[2]

"""A backing directory that gives the inode number of a deleted file to the next new one, as many
file systems do, but every time.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerEntry, LowerPath, LowerStat, lstat_each
from acpfs.runtime.given import Runtime


class ReusedNumbers(BackingDirectory):
    """Shows numbers of its own making, since not every file system of a test machine reuses its
    numbers.
    """

    def __init__(self, path: Path, node_id: str, runtime: Runtime) -> None:
        super().__init__(path, node_id, runtime)
        self._top = path
        self._shown: dict[int, int] = {}
        self._free: list[int] = []
        self._next = itertools.count(1000)
        self._guard = threading.Lock()

    def number(self, name: str) -> int:
        """The number that is shown for an entry of the top."""
        return self._number(os.lstat(self._top / name).st_ino)

    def show(self, name: str, number: int) -> None:
        """An entry of the top, which nobody has looked at yet, has that number."""
        with self._guard:
            self._shown[os.lstat(self._top / name).st_ino] = number

    def take_back(self) -> None:
        """The numbers of what is gone are free.

        For moments when nobody else changes anything: what is being moved would look gone.
        """
        with self._guard:
            there = {
                entry.inode()
                for directory, _names, _files in os.walk(self._top)
                for entry in os.scandir(directory)
            }
            self._free += sorted(self._shown.pop(real) for real in self._shown.keys() - there)

    def _number(self, real: int) -> int:
        with self._guard:
            if real not in self._shown:
                self._shown[real] = self._free.pop() if self._free else next(self._next)
            return self._shown[real]

    def lstat(self, path: LowerPath) -> LowerStat:
        st = super().lstat(path)
        return st._replace(ino=self._number(st.ino))

    def lstat_many(self, directory: LowerPath, names: Sequence[bytes]) -> list[LowerStat | None]:
        return lstat_each(self.lstat, directory, names)

    def stat_fd(self, fd: int) -> LowerStat:
        st = super().stat_fd(fd)
        return st._replace(ino=self._number(st.ino))

    def listdir(self, path: LowerPath) -> list[LowerEntry]:
        return [entry._replace(ino=self._number(entry.ino)) for entry in super().listdir(path)]

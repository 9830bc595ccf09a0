"""How much RAM the files of one owner may take before the storage has them (`ram_per_user`), and
how much they take.

Charged are tier files with bytes that the backing directory has not got, and what is reserved for
writers. Whose they are, and which those are, is found out by the file system
(`filesystem.content.charges`), from state alone, whenever a number is asked for here; between that,
the tier tells of each file that becomes larger or smaller. Knows numbers: of users, files and tier
files. Used under the file system's lock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from acpfs.config import share_of
from acpfs.ram.waiting import NO_OWNER, Applicant
from acpfs.types import Ino, TierId

UNLIMITED_BYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class OwnerReport:
    """What the files of one user take; bytes."""

    uid: int
    taken_bytes: int
    """Not on the backing directory yet."""
    reserved_bytes: int
    """For writers of his files, and not written yet."""
    waiting: int
    """Writers of his files that wait since his share is used up."""


class Shares:
    """The charges, and the limit."""

    def __init__(self) -> None:
        """No limit, and nothing charged."""
        self.limit_bytes = 0
        """Of each user; 0: there is no limit, and nothing is charged."""
        self._wanted: int | str = 0
        self._told_by: list[Callable[[], None]] = []
        self._owner: dict[Ino, int] = {}
        """Of each file that is charged or that room is reserved for."""
        self._files: dict[Ino, dict[TierId, int]] = {}
        """File → its tier files that are charged, and their bytes."""
        self._file_of: dict[TierId, Ino] = {}
        self._taken: Counter[int] = Counter()
        self._reserved: dict[Ino, int] = {}
        self._reserved_of: Counter[int] = Counter()

    def asks(self, refresh: Callable[[], None]) -> None:
        """Who tells, when a number is asked for, what was not told yet."""
        self._told_by.append(refresh)

    def _refresh(self) -> None:
        for tell in self._told_by:
            tell()

    def change(self, wanted: int | str, budget_bytes: int) -> None:
        """Another limit from now on, in bytes or percent of the budget."""
        self._wanted = wanted
        self.limit_bytes = share_of(wanted, budget_bytes)

    def budget_changed(self, budget_bytes: int) -> None:
        """A share of it is another number of bytes now."""
        self.change(self._wanted, budget_bytes)

    def left_bytes(self, uid: int) -> int:
        """What a user may still take; less than nothing where he has too much."""
        if not self.limit_bytes or uid == NO_OWNER:
            return UNLIMITED_BYTES
        self._refresh()
        return self.limit_bytes - self._taken[uid] - self._reserved_of[uid]

    def short_by(self, size: int, applicant: Applicant) -> int:
        """By how many bytes the owner's share is too small for so many more, and what they make
        dirty; nothing or less: it is not.
        """
        if not self.limit_bytes or applicant.uid == NO_OWNER:
            return 0
        return size + applicant.dirties_bytes - self.left_bytes(applicant.uid)

    def is_charged(self, tier_id: TierId) -> bool:
        """Whether all that the tier file takes is charged, or need not be."""
        if not self.limit_bytes:
            return True
        self._refresh()
        return tier_id in self._file_of

    # -- what the tier tells

    def resized(self, tier_id: TierId, size: int) -> None:
        """A tier file takes so many bytes now."""
        ino = self._file_of.get(tier_id)
        if ino is not None and tier_id in self._files[ino]:
            self._taken[self._owner[ino]] += size - self._files[ino][tier_id]
            self._files[ino][tier_id] = size

    def reserve(self, applicant: Applicant, size: int) -> None:
        """Bytes of the budget are reserved for writers of a file."""
        if not self.limit_bytes or applicant.uid == NO_OWNER or not size:
            return
        self._own(applicant.ino, applicant.uid)
        self._reserved[applicant.ino] = self._reserved.get(applicant.ino, 0) + size
        self._reserved_of[applicant.uid] += size

    def release(self, ino: Ino, size: int) -> None:
        """They are not any more: written, or not wanted."""
        # what was reserved before there was a limit is not known here
        size = min(size, self._reserved.get(ino, 0))
        if not size:
            return
        self._reserved[ino] -= size
        self._reserved_of[self._owner[ino]] -= size
        if not self._reserved[ino]:
            del self._reserved[ino]
            self._forget(ino)

    # -- what the file system tells

    def charge(self, ino: Ino, uid: int, tier_files: Mapping[TierId, int]) -> None:
        """These are a file's tier files with dirty bytes, and what each takes; no others are."""
        self._own(ino, uid)  # first: it moves what is charged so far
        before = self._files.pop(ino, {})
        self._taken[uid] += sum(tier_files.values()) - sum(before.values())
        for tier_id in before:
            self._file_of.pop(tier_id, None)
        if tier_files:
            self._files[ino] = dict(tier_files)
            self._file_of.update(dict.fromkeys(tier_files, ino))
        self._forget(ino)

    def clear(self) -> None:
        """Nothing is charged: there is no limit any more, or not yet."""
        self._owner.clear()
        self._files.clear()
        self._file_of.clear()
        self._taken.clear()
        self._reserved.clear()
        self._reserved_of.clear()

    def owner(self, ino: Ino) -> int:
        """Of a file that is charged; `NO_OWNER`: none is."""
        return self._owner.get(ino, NO_OWNER)

    def _own(self, ino: Ino, uid: int) -> None:
        """The file is that user's: what is charged and reserved for it goes with it."""
        former = self._owner.get(ino, uid)
        self._owner[ino] = uid
        if former != uid:
            taken = sum(self._files.get(ino, {}).values())
            self._taken[former] -= taken
            self._taken[uid] += taken
            reserved = self._reserved.get(ino, 0)
            self._reserved_of[former] -= reserved
            self._reserved_of[uid] += reserved

    def _forget(self, ino: Ino) -> None:
        if ino in self._owner and ino not in self._files and ino not in self._reserved:
            del self._owner[ino]

    def report(self, waiting: Iterable[Applicant]) -> tuple[OwnerReport, ...]:
        """Users whose files take anything, the one with most first.

        `waiting`: those whose owner's share is too small for what they want.
        """
        if not self.limit_bytes:
            return ()
        self._refresh()
        counts = Counter(one.uid for one in waiting)
        uids = {*(+self._taken), *(+self._reserved_of), *counts}
        found = [
            OwnerReport(uid, self._taken[uid], self._reserved_of[uid], counts[uid]) for uid in uids
        ]
        return tuple(sorted(found, key=lambda one: (-one.taken_bytes, one.uid)))

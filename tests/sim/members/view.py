"""The storage as one member sees it: areas of its own, and records as its client remembers them.

A client of a network file system may answer from what it has remembered of the directory of
records: for some time, and only until it changes that directory by itself. A listing tells it which
files there are, so what it reads afterwards is no older.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from acpfs.backing.lower import LowerPath
from acpfs.backing.member_records import DIRECTORY
from tests.sim.faults import Faults
from tests.sim.life import Life, StorageCaller
from tests.sim.members.plan import MemberPlan
from tests.sim.storage import OWN, Caller, Inode, Nobody, Storage, error
from tests.sim.trace import Trace
from tests.sim.virtual import MACHINE

RECORD_CALLS = ("read own", "write own", "list own", "remove own", "rename own", "overwrite own")


class MemberStorage(Storage):
    """Shares everything with the storage that it is made of, but for who calls."""

    def __init__(self, shared: Storage, plan: MemberPlan, began_s: float) -> None:
        self.__dict__.update(shared.__dict__)
        self.node = plan.node
        self.caller: Caller = Nobody()
        self._plan = plan
        self._began_s = began_s
        self._own_fds: set[int] = set()
        self._seen: dict[bytes, bytes] = {}
        self._seen_at = -1.0
        self._has_changed = True
        self.published_s = 0.0
        """When its last record was begun."""
        self._make_own()

    def _descriptor(self, inode: Inode) -> int:
        fd = super()._descriptor(inode)
        self._own_fds.add(fd)
        return fd

    def forget_descriptors(self) -> None:
        """Those of this member: its daemon is gone."""
        for fd in self._own_fds:
            self.descriptors.pop(fd, None)
        self._own_fds.clear()

    def caller_of(self, life: Life, faults: Faults, trace: Trace) -> StorageCaller:
        """Of its next life."""
        self._has_changed = True
        return MemberCaller(life, faults, trace, self)

    def is_parted(self, label: str) -> bool:
        """Whether a call on records fails now."""
        partition = self._plan.partition
        if partition is None or label not in RECORD_CALLS:
            return False
        at_s = MACHINE.moment_s - self._began_s
        is_meant = partition.is_read or label in ("write own", "overwrite own", "rename own")
        return is_meant and partition.from_s <= at_s < partition.until_s

    # -- records

    def _look_anew(self) -> None:
        children = self._find((OWN, DIRECTORY)).children.items()
        self._seen = {name: inode.as_bytes() for name, inode in children}
        self._seen_at = MACHINE.moment_s
        self._has_changed = False

    def _is_remembered(self) -> bool:
        return MACHINE.moment_s < self._seen_at + self._plan.cached_s

    def list_own(self, names: LowerPath) -> list[bytes]:
        if names != (DIRECTORY,):
            return super().list_own(names)
        super().list_own(names)
        if self._has_changed or not self._is_remembered():
            self._look_anew()
        return sorted(self._seen)

    def read_own(self, names: LowerPath) -> bytes:
        if names[0] == DIRECTORY and self._is_remembered() and names[-1] in self._seen:
            return self._seen[names[-1]]
        return super().read_own(names)

    def write_own(self, names: LowerPath, content: bytes) -> None:
        began_s = MACHINE.moment_s
        super().write_own(names, content)
        self._changed_own(names)
        if names == (DIRECTORY, self.node.encode()):
            self.published_s = began_s

    def remove_own(self, names: LowerPath) -> None:
        super().remove_own(names)
        self._changed_own(names)

    def rename_own(self, names: LowerPath, new_names: LowerPath) -> None:
        super().rename_own(names, new_names)
        self._changed_own(names)

    def _changed_own(self, names: LowerPath) -> None:
        if names[0] == DIRECTORY:
            self._has_changed = True
            self._seen.pop(names[-1], None)


class MemberCaller(StorageCaller):
    """Calls on records fail while the member is parted from the others."""

    def __init__(self, life: Life, faults: Faults, trace: Trace, view: MemberStorage) -> None:
        super().__init__(life, faults, trace, view)
        self._view = view

    def begins(self, label: str, arguments: Sequence[object], *, changes: bool) -> bool:
        is_lost = super().begins(label, arguments, changes=changes)
        if self._view.is_parted(label):
            raise error(errno.EIO)
        return is_lost

"""Whether another mount lives under the node id that is to be taken: on another machine, or here
with another runtime directory.

Such a mount would lose its only copies: the next one of its id removes what it does not need in the
staging directory (S86). A lock tells mounts of one runtime directory apart (`identity`). All others
only show by their record: one that lives writes it again and again. So a record that does not prove
the end of its mount is watched before anything of that id is touched. Blocks as the backing
directory does.
"""

from __future__ import annotations

from collections.abc import Iterator

from acpfs.backing.leftovers import MachineId
from acpfs.backing.member_records import NodeRecord, NodeRecords, NodeState
from acpfs.errors import RefusedError

WATCH_HEARTBEATS = 4
"""Records are written every 0.75 heartbeats or sooner: five in a row would have to be missing."""
WATCH_S_MIN = 1.0
HEARTBEAT_S = 2.0
"""Of an acpfs whose record does not tell it."""
LOOKS_PER_HEARTBEAT = 2


class Rival:
    """A record under our node id whose mount may still live."""

    def __init__(self, records: NodeRecords, record: NodeRecord) -> None:
        """`record`: as it was first read."""
        self._records = records
        self._record = record
        self.heartbeat_s = record.heartbeat_s or HEARTBEAT_S

    @classmethod
    def found(cls, records: NodeRecords, node: str, machine: MachineId, lock: str) -> Rival | None:
        """None: nobody has that id, or the record proves that its mount has ended.

        `lock`: which we hold for it.
        """
        record = _read(records, node)
        return None if record is None or _has_ended(record, machine, lock) else cls(records, record)

    def look(self) -> None:
        """Read the record again.

        Raises:
            RefusedError: it is another one: its mount lives.
        """
        # a client that caches learns from a listing that the name is another file by now
        self._records.names()
        seen = self._record
        now = _read(self._records, self._record.node)
        if now is not None and (now.beat, now.incarnation) != (seen.beat, seen.incarnation):
            raise RefusedError(
                f"node id {now.node} is in use: {now.host or 'another machine'} serves "
                f"{now.mountpoint or 'a mount'} under it, "
                f"and its record is being written; choose another --node-id here, or unmount there"
            )

    def pauses(self) -> Iterator[float]:
        """Seconds to wait before each look; when they end, a mount that lives would have written.

        Waiting is the caller's.
        """
        left_s = max(WATCH_S_MIN, WATCH_HEARTBEATS * self.heartbeat_s)
        while left_s > 0:
            pause_s = min(left_s, self.heartbeat_s / LOOKS_PER_HEARTBEAT)
            yield pause_s
            left_s -= pause_s


def _read(records: NodeRecords, node: str) -> NodeRecord | None:
    try:
        return records.read(node)
    except ValueError:
        return None  # damaged: whoever lives replaces it, and will find ours


def _has_ended(record: NodeRecord, machine: MachineId, lock: str) -> bool:
    if record.state is not NodeState.LIVE:
        return True
    here = (
        record.host == machine.host
        and bool(record.hardware)
        and record.hardware == machine.hardware
    )
    if here and record.boot_id and machine.boot_id and record.boot_id != machine.boot_id:
        return True  # of an earlier boot of this machine
    return (
        bool(record.lock)
        and record.lock == lock
        and bool(record.boot_id)
        and record.boot_id == machine.boot_id
    )

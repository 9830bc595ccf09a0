"""The write-back engine (signatures first; being filled)."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from threading import RLock
from typing import Any

import trio

from acpfs.backing.calls import CallPools
from acpfs.backing.lower import Lower
from acpfs.config import Settings
from acpfs.ram.state import StateDatabase
from acpfs.ram.tier import Tier
from acpfs.types import Ino, Seq
from acpfs.writeback.listener import Listener
from acpfs.writeback.log import OperationLog
from acpfs.writeback.lower_tree import LowerTree
from acpfs.writeback.manifest import Manifest
from acpfs.writeback.records import EngineStatistics


class Engine:
    """Runs the operation log: streams ahead in parallel, commits in order. Sets `log.on_append` to `wake`."""

    def __init__(
        self,
        log: OperationLog,
        tree: LowerTree,
        tier: Tier,
        lower: Lower,
        calls: CallPools,
        manifest: Manifest,
        listener: Listener,
        lock: RLock,
        state: StateDatabase,
        settings: Settings,
    ) -> None: ...

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Remove stale staging files, then drain until cancelled. Reports started at once: nothing here waits for the backing directory."""

    def wake(self) -> None:
        """Something was appended. Thread-safe, cheap, may be called under the lock and before `run`."""

    def persisted(self, seq: Seq, node: Ino | None = None) -> Future[None]:
        """Done when every operation up to `seq` is persisted; fails with the errno of one that was parked.

        With `node`: parked operations of other nodes do not matter. Same as `log.when_done`. Thread-safe.
        """
        raise NotImplementedError

    def retry(self, seqs: Iterable[Seq] = ()) -> int:
        """Try parked operations again (all of them when none is named), and the scheduled retries now; returns how many. Thread-safe."""
        raise NotImplementedError

    def discard(self, seqs: Iterable[Seq]) -> int:
        """Give operations up, with those that need them (below a directory that will not be made); returns how many. Thread-safe."""
        raise NotImplementedError

    def drained(self) -> bool:
        """Nothing is left to do, and the manifest is written (or cannot be). Thread-safe."""
        raise NotImplementedError

    def hold(self, paused: bool) -> None:
        """Start nothing new, or go on. Thread-safe."""

    def set_bandwidth(self, bytes_per_s: int) -> None:
        """0: no limit. Takes effect within a tenth of a second. Thread-safe."""

    def set_streams(self, count: int) -> None:
        """Files copied at the same time from now on. Thread-safe."""

    def statistics(self) -> EngineStatistics:
        """What `status`, the metrics and the tests see. Thread-safe."""
        raise NotImplementedError

    _unused: Any = None

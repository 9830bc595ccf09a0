"""A double of a worker: answers from what the test has put into it."""

import errno
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

from acpfs.control.metric_table import HISTOGRAMS
from acpfs.control.registry import MountRecord, process_started
from acpfs.control.reports import (
    CheckpointFile,
    CheckpointReport,
    DurationsReport,
    FileState,
    HealthReport,
    RamReport,
    Remaining,
    Status,
    WorkerReport,
)
from acpfs.control.server import ControlServer
from acpfs.control.socket_messages import Json
from acpfs.control.worker_contract import Incomplete, Unseen
from acpfs.drain_records import GuardedReport, QueueEntry, Verification
from acpfs.errors import AcpfsError, ConfigError, RefusedError
from tests.rig.runtime import REAL


class DoubleSubject:
    """Implements `Subject`; operations are (number, path, size, parked)."""

    def __init__(self) -> None:
        self.clock = REAL.clock
        self.ops: list[tuple[int, str, int, bool]] = []
        self.file_rows: list[FileState] = []
        self.verdicts: list[Verification] = []
        self.lost: list[QueueEntry] = []
        self.guarded_rows: list[GuardedReport] = []
        self.reports: list[CheckpointReport] = []
        self.persisted_rows = (0, 0)
        self.incomplete_rows: list[Incomplete] = []
        self.unseen_rows: list[Unseen] = []
        self.when_looked_for_pages: Callable[[], None] = lambda: None
        self.holds_pages = False
        """The kernel does not come to its end with what it writes back."""
        self.when_looked: Callable[[], object] = lambda: None
        self.settled = 0
        self.busy = False
        self.unmounted = trio.Event()
        self.changed = trio.Event()
        self.when_copied: Future[None] = Future()
        """Nobody holds anything until it is done."""
        self.broken = False
        self.absent: set[bytes] = set()
        self.stuck = False
        self.withheld = False
        self.when_seen: Callable[[], object] = lambda: None
        self.when_recorded: Callable[[], object] = lambda: None
        self.gone = ""
        self.state = "serving"

    def done(self, number: int) -> None:
        self.ops = [op for op in self.ops if op[0] != number]
        self.changed.set()
        self.changed = trio.Event()

    def status(self) -> Status:
        if self.broken:
            raise ZeroDivisionError("a bug")
        return Status(
            state=self.state,
            mount="/mnt/x",
            backing="/b",
            node="n",
            volume="v",
            transport="libfuse",
            lanes={"libfuse": 1},
            fsync="ordered",
            worker=WorkerReport(1, 2.0, "0"),
            ram=RamReport(10, 4, 3, 1, 0, 1, 0, "/t", own_tmpfs=True, huge_pages="never"),
            queue=self.left(1 << 60),
            queue_length=len(self.ops),
            queue_bytes=sum(op[2] for op in self.ops),
            parked=sum(op[3] for op in self.ops),
            interrupted=len(self.lost),
            open_files=0,
            oldest_unpersisted_age_s=1.5,
            backing_health=HealthReport("ok", 0.0, 0, 0, 0.0, 0),
            features={"xattrs": True},
            counters={"retries": 7},
            guarded=self.guarded_rows,
            durations={name: DurationsReport([0.1, 1.0], [2, 0, 3], 7.5) for name in HISTOGRAMS},
        )

    async def problem(self) -> str:
        return self.gone

    def trouble(self) -> str:
        return self.gone

    def configuration(self) -> Json:
        return {"streams": 8}

    def files(self, prefix: bytes) -> list[FileState]:
        return [row for row in self.file_rows if row.path.startswith(prefix.decode())]

    async def follow(self, path: bytes) -> list[bytes]:
        if self.stuck:
            await trio.sleep_forever()
        if path in self.absent:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return [path]

    async def complete_until(self, paths: Sequence[bytes], timeout_s: float | None = None) -> int:
        numbers = [
            op[0]
            for op in self.ops
            if not paths or any(op[1].startswith(p.decode()) for p in paths)
        ]
        return max(numbers, default=0)

    def incomplete(self, paths: Sequence[bytes]) -> list[Incomplete]:
        self.when_looked()
        return [row for row in self.incomplete_rows if row.path.encode() in paths]

    async def written_back(self, paths: Sequence[bytes]) -> list[Unseen]:
        if self.holds_pages:
            await trio.sleep_forever()
        self.when_looked_for_pages()
        return [row for row in self.unseen_rows if row.path.encode() in paths]

    def copied(self, _until: int) -> Future[None]:
        return self.when_copied

    def remaining(self, until: int, paths: Sequence[bytes] = ()) -> Remaining:
        left = [op for op in self.ops if op[0] <= until]
        if paths:
            left = [
                op for op in left if not op[3] or any(op[1].startswith(p.decode()) for p in paths)
            ]
        stuck = bool(left) and all(op[3] for op in left)
        return Remaining(
            len(left), sum(op[2] for op in left), stuck=stuck, withheld=stuck and self.withheld
        )

    def left(self, until: int) -> list[QueueEntry]:
        return [
            QueueEntry(n, name, "store", size, "parked" if p else "complete", 1.0)
            for n, name, size, p in self.ops
            if n <= until
        ]

    async def persisted(self, until: int) -> bool:
        while self.remaining(until).operations:
            if any(op[3] for op in self.ops):
                return False
            await self.changed.wait()
        return True

    async def decided(self) -> None:
        return

    async def nodes_seen(self) -> None:
        self.when_seen()

    async def recorded(self) -> None:
        self.when_recorded()

    def records(self, path: bytes) -> bool:
        return any(verdict.path.startswith(path.decode()) for verdict in self.verdicts)

    async def verify(
        self, paths: Sequence[bytes], tell: Callable[[Verification], Awaitable[None]]
    ) -> None:
        for verdict in self.verdicts:
            await tell(verdict)

    async def restore(self, verdict: Verification) -> int | str:
        return "its copy has left RAM"

    def retry(self, path: bytes) -> int:
        return len(self.ops)

    def discard(self, path: bytes) -> tuple[int, list[bytes]]:
        raise AcpfsError("nothing of that name")

    async def checkpoints(self, path: bytes) -> list[CheckpointReport]:
        return self.reports

    def moments(self, report: CheckpointReport) -> tuple[float, float]:
        return report.closed_at or 0.0, report.persisted_at or 0.0

    def checkpoint_files(self, report: CheckpointReport) -> list[CheckpointFile]:
        return [
            CheckpointFile(f"{report.path}/{number}", 1, persisted=True, checksum="00")
            for number in range(report.files)
        ]

    def persisted_files(self, path: bytes) -> tuple[int, int]:
        return self.persisted_rows

    def settlements(self) -> int:
        return self.settled

    def guarded(self) -> list[GuardedReport]:
        return self.guarded_rows

    def release(self, path: bytes) -> int:
        chosen = [row for row in self.guarded_rows if row.path.startswith(path.decode())]
        self.guarded_rows = [row for row in self.guarded_rows if row not in chosen]
        return len(chosen)

    def interrupted(self) -> list[QueueEntry]:
        return self.lost

    async def change(self, key: str, value: str) -> Json:
        if key != "streams":
            raise ConfigError(f"{key} cannot be changed")
        return {"key": key, "value": int(value)}

    async def unmount(self, *, leave: bool, patience_s: float = math.inf) -> None:
        if self.busy:
            raise RefusedError("/mnt/x is in use")
        self.unmounted.set()

    def reload(self) -> None:
        raise RefusedError("it cannot be taken over")

    async def bypass(self, reason: str) -> None:
        raise RefusedError("nothing lies beneath")

    async def finished(self) -> list[QueueEntry]:
        await self.unmounted.wait()
        return self.left(1 << 60) + [
            QueueEntry(0, row.path, "delete", row.size, "guarded", 1.0) for row in self.guarded_rows
        ]

    def metrics(self) -> str:
        return "acpfs_ram_used_bytes 4\n"


@contextmanager
def socket_of(server: ControlServer) -> Iterator[MountRecord]:
    """The record by which a client finds a server in this process."""
    pid = 1
    yield MountRecord(
        "/mnt/x",
        "/b",
        "n",
        pid,
        process_started(pid),
        str(server.path),
        "0",
        str(Path(server.path).parent),
    )


def report_of(path: str, files: int, **changes: Any) -> CheckpointReport:
    """Of a checkpoint that is safe, unless `changes` say otherwise."""
    values: dict[str, Any] = dict.fromkeys(
        ("began_at", "verified_at", "save_s", "persist_s", "estimated_load_s")
    )
    values |= {
        "save_dir": "",
        "step": 1,
        "epoch": 0,
        "state": "persisted",
        "persisted_files": files,
        "bytes": 1,
        "ram_bytes": 1,
        "copied_files": 0,
        "holder": None,
    }
    values |= {"closed_at": 1e9, "persisted_at": 1e10, "loads_from": "ram", **changes}
    return CheckpointReport(path, files=files, **values)

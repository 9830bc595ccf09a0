"""A stand: one backing directory, one mount, one application in a process of its own, and the
history that its journal tells.

`faults` does something to it, `verdict` says what was lost. Independent of all other stands.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

from acpfs.descriptors import readable
from acpfs.errors import AcpfsError
from tests.drill import clock, points, verdict
from tests.drill.history import History
from tests.drill.spec import JournalReader, Tree, tree_of
from tests.drill.under_way import UnderWay
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import REPOSITORY, AcpfsMount, staging_files

ANSWER_TIMEOUT_S = 90.0
GAUGES_TIMEOUT_S = 40.0
DESCRIPTORS_MORE_MAX = 24
"""A worker keeps some for later; more than so many beyond its first drain are a leak."""
THREADS_MORE_MAX = 72
"""Pools grow to their sizes: requests 32, streams 16, syncs 16, commits and copies 4 each."""
WATCHDOG_S = 900.0
KILL_TIMEOUT_S = 60.0
NONE_LEFT_LOOKS = 2
"""One look can miss a process that is being forked, or that executes another program at that
moment: its environment is empty then.
"""
DRAIN_S_MAX = 90.0
"""A stand that lasts longer hangs, and its mount is aborted."""
READS = 3
"""Looks at the mount between two questions whether it still drains; a listing that was wrong once
in 3,000 reads was found this way.
"""
INJECT = REPOSITORY / "tests" / "drill" / "inject"
QUICK: dict[str, object] = {
    "retry_delay_min": 0.02,
    "retry_delay_max": 0.2,
    "attr_timeout": 0.1,
    "max_dirty_age": 0,
    "ram": "256M",
    "no_keep_last_persisted": True,
}


def nameless(text: str) -> str:
    """Without the places of this run, so that it can be kept."""
    return re.sub(r"/[^\s'\"]*/drill-[^/\s'\"]+", "…", text.replace(f"{REPOSITORY}/", ""))


class Application:
    """The application's process, as the drill sees it."""

    def __init__(self, stand: Stand, seed: int) -> None:
        self.journal = stand.base / f"journal.{seed}"
        self.reader = JournalReader(self.journal)
        python = (
            os.environ.get("ACPFS_TORCH_PYTHON", sys.executable) if stand.torch else sys.executable
        )
        words = [
            str(stand.mount.path),
            str(self.journal),
            str(stand.mount.runtime_dir),
            stand.workload,
            str(seed),
        ]
        with open(stand.base / "application.log", "ab") as log:
            self._process = subprocess.Popen(
                [python, "-m", "tests.drill.application", *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(stand.base)},
                cwd="/",
                start_new_session=True,
            )
        self.answer()

    @property
    def pid(self) -> int:
        return self._process.pid

    def order(self, **words: Any) -> None:
        """One line to its standard input."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words).encode() + b"\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """One line from its standard output.

        Raises:
            TimeoutError: it says nothing: it hangs in the mount.
        """
        assert self._process.stdout is not None
        if not readable(self._process.stdout, ANSWER_TIMEOUT_S):
            raise TimeoutError(
                f"the application hangs: {Path(f'/proc/{self.pid}/wchan').read_text()}"
            )
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the application ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def pause(self) -> dict[str, Any]:
        """Have it stop after its round, unless it has failed before."""
        self.order(pause=True)
        return self.answer()

    def kill(self) -> None:
        """kill -9, also of what it has started (rsync)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            while True:  # the others of its group are nobody's children; they end by themselves
                os.killpg(self.pid, 0)
                select.select([], [], [], 0.01)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


class Stand:
    """See above; a context manager."""

    death_points: ClassVar[list[int]] = points.PLAIN_POINTS
    """Where its workers may die by charge."""
    worker_deaths_max: ClassVar[int] = 3
    """So often a worker dies in one cycle."""
    writes_logs: ClassVar[bool] = True
    """What a killed application had open may be published at once, by its closes; otherwise only
    when somebody says so (S181).
    """

    def __init__(
        self,
        base: Path,
        workload: str,
        transport: str,
        seed: int,
        *,
        mutant: str = "",
        torch: bool = False,
        steps_clock: bool = False,
        watchdog_s: float = WATCHDOG_S,
        drain_s: float = DRAIN_S_MAX,
        **options: Any,
    ) -> None:
        """`drain_s`: what takes longer to be persisted counts as lost.

        `options` are those of the mount.

        `steps_clock`: acpfs' wall clock is what `self.clock` says (`tests.drill.clock`).
        """
        self.base = base
        self.workload = workload
        self.torch = torch
        self.random = random.Random(seed)
        self.charges = base / "charges"
        self.charges.mkdir(parents=True)
        self.backing = self.make_backing()
        environment = {
            points.VARIABLE: str(self.charges),
            "PYTHONPATH": f"{INJECT}:{REPOSITORY}",
            "ACPFS_EARLY_DEATHS_MAX": "1000000",
        }
        self.clock = base / "clock"
        if steps_clock:
            clock.step(self.clock, 0.0)
            environment[clock.VARIABLE] = str(self.clock)
        if mutant:
            environment["ACPFS_MUTANT"] = mutant
        self.mount = AcpfsMount(
            self.backing,
            base / "mnt",
            transport,
            environment=environment,
            watchdog_s=watchdog_s,
            **{**QUICK, **options},
        )
        self.drain_s = drain_s
        self.history = History()
        self.application: Application | None = None
        self.round = 0
        self.under_way = UnderWay()
        self._footprints: dict[int, dict[str, int]] = {}

    def make_backing(self) -> Path:
        """The backing directory; others than a plain one override this."""
        backing = self.base / "backing"
        backing.mkdir()
        return backing

    @property
    def shown(self) -> Path:
        """Where the content of the backing directory can be read without asking a server that may
        be dead.
        """
        return self.backing

    def __enter__(self) -> Stand:
        self.mount.start()
        self.begin()
        return self

    def __exit__(self, *_error: object) -> None:
        if self.application is not None:
            self.application.kill()
        self.mount.abort()
        shutil.rmtree(self.base, ignore_errors=True)

    # -- the application

    def begin(self) -> None:
        """A new history from what the mount shows now."""
        seen = tree_of(self.mount.path)
        durable = self.mount.options.get("fsync") == "durable"
        self.history = History(seen, self.contents())
        self.history.durable_fsync = durable

    def contents(self) -> dict[str, bytes]:
        """Bytes of every file in the mount, by path."""
        root = self.mount.path
        return {
            path: (root / path).read_bytes()
            for path, (kind, _what) in tree_of(root).items()
            if kind == "file"
        }

    def go(self) -> None:
        """Have the application work on from the state that it has."""
        if self.application is None:
            self.application = Application(self, self.random.randrange(1 << 30))
        now = self.history.now()
        self.application.order(
            go={path: kind == "dir" for path, (kind, _what) in now.items()}, round=self.round
        )

    def stop(self) -> dict[str, Any]:
        """Pause the application and take its journal over."""
        assert self.application is not None
        answer = self.application.pause()
        self.round = answer["round"]
        calls = self.application.reader.calls()
        self.under_way.follow(calls)
        self.history.follow(calls)
        return answer

    def kill_application(self) -> None:
        """kill -9; its journal is taken over."""
        assert self.application is not None
        self.application.kill()
        calls = self.application.reader.calls()
        self.application = None
        self.round += 1000  # names of rounds are not used again
        self.under_way.follow(calls)
        self.under_way.end()
        self.history.follow(calls)

    def wait_for_work(self) -> None:
        """Before something is killed at a random moment: until the application does what it is to
        be caught at.
        """

    # -- acpfs' processes

    def supervisors(self) -> list[int]:
        """Processes that bring workers back."""
        return [pid for pid in self.processes() if b"acpfs.supervisor.supervisor" in _words(pid)]

    def processes(self) -> list[int]:
        """Everything that the mount has started: it carries the runtime directory in its
        environment.
        """
        marker = f"ACPFS_RUNTIME_DIR={self.mount.runtime_dir}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if marker in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def wait_served(self, timeout_s: float = 60.0) -> None:
        """Wait for a worker that answers."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(AcpfsError, OSError):
                self.mount.status()
                return
            if time.monotonic() > deadline:
                raise TimeoutError("no worker answers")
            select.select([], [], [], 0.02)

    def wait_adopted(self, before: int, timeout_s: float = 60.0) -> None:
        """Wait until another supervisor than `before` has the session: with worker and supervisor
        dead at once, nobody has.
        """
        deadline = time.monotonic() + timeout_s
        while self.mount.supervisor == before:
            if time.monotonic() > deadline:
                raise TimeoutError("no other supervisor")
            select.select([], [], [], 0.02)

    def kill_all(self) -> None:
        """kill -9 of every process of the mount, whoever brings others back first.

        The dead mount stays: who works there gets errors.

        Raises:
            TimeoutError: there are always new ones, or one does not die.
        """
        deadline = time.monotonic() + KILL_TIMEOUT_S
        none_since = 0
        stopped = set[int]()
        while none_since < NONE_LEFT_LOOKS:
            living = self.processes()
            new = set(living) - stopped
            # On a busy machine one that is killed has been replaced before the next one is, by
            # supervisor or worker; what stands still replaces nobody.
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            stopped |= new
            none_since = 0 if living else none_since + 1
            if new and time.monotonic() <= deadline:
                continue
            for pid in sorted(
                stopped, key=lambda pid: b"acpfs.supervisor.supervisor" not in _words(pid)
            ):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for pid in stopped:
                _wait_dead(pid)
            stopped.clear()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    "processes of the mount are still there: "
                    f"{[(pid, _words(pid)[:4]) for pid in living]}"
                )

    def charge(self, point: int, passes: int) -> None:
        """Have the worker die there."""
        (self.charges / "fired").unlink(missing_ok=True)
        (self.charges / "next.new").write_text(json.dumps([point, passes]))
        (self.charges / "next.new").rename(self.charges / "next")

    def wait_fired(self, timeout_s: float = 60.0) -> None:
        """Wait until the worker has died by charge."""
        deadline = time.monotonic() + timeout_s
        while not (self.charges / "fired").exists():
            if time.monotonic() > deadline:
                raise TimeoutError("the point was not passed")
            select.select([], [], [], 0.02)

    def withdraw(self) -> bool:
        """No more dying by charge; whether it has happened."""
        (self.charges / "next").unlink(missing_ok=True)
        return (self.charges / "fired").exists()

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """The worker is stopped, every thread of it: SIGSTOP returns before the system calls that
        are under way have.
        """
        pid = self.mount.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            _wait_stopped(pid)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    # -- judging

    def read_mount(self, timeout_s: float = 60.0) -> tuple[Tree, dict[str, bytes]]:
        """What the mount shows, read in a thread so that a hang is an error."""
        found: Future[tuple[Tree, dict[str, bytes]]] = Future()

        def read() -> None:
            try:
                found.set_result((tree_of(self.mount.path), self.contents()))
            except BaseException as error:  # noqa: BLE001
                # whatever it was belongs to whoever waits
                found.set_exception(error)

        threading.Thread(target=read, daemon=True).start()
        return found.result(timeout_s)

    def check_backing(self, when: str) -> list[str]:
        """Prefix consistency of what the backing directory shows now."""
        moment = time.monotonic()
        return verdict.check_published(
            self.history, tree_of(self.shown), moment, f"backing directory {when}"
        )

    def check_reads(self) -> list[str]:
        """The mount shows the latest state at every moment of the drain."""
        losses: list[str] = []
        draining = True
        while draining and not losses:
            draining = self.mount.status()["queue_length"] > 0
            for _ in range(READS):
                losses += verdict.check_equal(
                    self.read_mount()[0], self.history.now(), "mount while it drains"
                )
        return losses

    def _listed(self) -> list[tuple[object, ...]]:
        items = self.mount.ask("ls", paths=[])["items"]
        return [(file["path"], file["state"], file["size"]) for file in items]

    def check_drained(self) -> list[str]:
        """Flush, then: backing directory and mount are the application's last state, checksums
        agree, nothing is left over.
        """
        self.mount.flush(timeout_s=self.drain_s)
        expected = self.history.now()
        losses = self.check_below(expected)
        losses += verdict.check_equal(self.read_mount()[0], expected, "mount after the drain")
        losses += self.check_checksums()
        losses += self._check_left()
        if losses:
            losses.append(f"acpfs-ctl ls: {self._listed()}")
        return losses

    def check_undecided(self) -> list[str]:
        """What lost its writer, before somebody decides about it."""
        return []

    def check_below(self, expected: Tree) -> list[str]:
        """What the backing directory has after a flush."""
        return verdict.check_equal(
            tree_of(self.shown), expected, "backing directory after the drain"
        )

    def check_checksums(self) -> list[str]:
        """Manifest and notes."""
        return verdict.check_checksums(self.shown)

    def left_over(self, status: dict[str, Any]) -> list[str]:
        """What should not be there any more after a drain."""
        return verdict.check_gauges(status) + [
            f"left: {path}" for path in staging_files(self.shown)
        ]

    def _check_left(self) -> list[str]:
        deadline = time.monotonic() + GAUGES_TIMEOUT_S
        while True:
            status = self.mount.status()
            left = self.left_over(status)
            if not left or time.monotonic() > deadline:
                left += [
                    f"doctor: {fault['path']}: {fault['fault']}"
                    for fault in self.mount.ask("doctor")["items"]
                ]
                return left + self._check_footprint(status["worker"]["pid"])
            select.select([], [], [], 0.05)

    def _check_footprint(self, pid: int) -> list[str]:
        now = {
            kind: len(os.listdir(f"/proc/{pid}/{where}"))
            for kind, where in (("descriptors", "fd"), ("threads", "task"))
        }
        first = self._footprints.setdefault(pid, now)
        more = {"descriptors": DESCRIPTORS_MORE_MAX, "threads": THREADS_MORE_MAX}
        return [
            f"worker has {now[kind]} {kind}, {first[kind]} at first"
            for kind in now
            if now[kind] > first[kind] + more[kind]
        ]


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _wait_stopped(pid: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while any(state not in "tTZX" for state in _states(pid)):
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} does not stop")
        select.select([], [], [], 0.002)


def _states(pid: int) -> list[str]:
    """One letter per thread."""
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return states


def _wait_dead(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            if not readable(fd, 60):
                raise TimeoutError(f"process {pid} does not die")
        finally:
            os.close(fd)


class FaultyStand(Stand):
    """Something of it lies on the faulty file system, which ends last."""

    storage: FaultFs

    def __exit__(self, *error: object) -> None:
        if self.application is not None:
            self.application.kill()
            self.application = None
        self.storage.clear()
        self.mount.abort()
        self.storage.stop()
        super().__exit__(*error)

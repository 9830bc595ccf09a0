"""A job of four ranks under `acpfs-run` that `bench.replace` does things to, and what its ranks
tell. No torch here.

Ranks append to a file who was where when; times are of the monotonic clock, which all processes of
a machine share.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from tests.rig.mounts import REPOSITORY

WORLD = 4
COPIES = 2
EVENT_TIMEOUT_S = 240.0
LOOK_AGAIN_S = 0.005
END_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Event:
    """A rank was somewhere."""

    name: str
    rank: int
    pid: int
    attempt: int
    generation: int
    number: int
    at: float

    @property
    def era(self) -> tuple[int, int]:
        """All ranks that step in one era do so together."""
        return self.attempt, self.generation


class Job:
    """One; a context manager."""

    def __init__(
        self,
        scratch: Path,
        torch_python: str,
        directory: Path,
        options: str,
        runtime_dir: Path | None = None,
        **config: Any,
    ) -> None:
        """`options`: of acpfs-run. `directory`: to save in."""
        scratch.mkdir()
        self.scratch = scratch
        self.directory = directory
        self._events = scratch / "events"
        self._offset = 0
        self.events: list[Event] = []
        (scratch / "hurt").mkdir()
        wanted = {
            "directory": str(directory),
            "events": str(self._events),
            "hurt": str(scratch / "hurt"),
            "frozen": 0,
            "snapshot": False,
        }
        wanted |= config
        self._words = [
            sys.executable,
            "-m",
            "acpfs.cli.run",
            "--nproc-per-node",
            str(WORLD),
            "--log-dir",
            str(scratch / "logs"),
            "-r",
            "3",
        ]
        self._words += [*options.split(), "-m", "bench.replace_ranks", json.dumps(wanted)]
        libraries = str(Path(xxhash.__file__).parents[1])
        self._environment = {
            **os.environ,
            "PYTHON_EXEC": torch_python,
            "PYTHONPATH": str(REPOSITORY),
            "ACPFS_BENCH_LIBRARIES": libraries,
        }
        self._environment |= {
            "ACPFS_TRAIN_COORDINATOR_PYTHON": sys.executable,
            "PYTHONWARNINGS": "ignore",
        }
        self._environment |= {ENVIRONMENT_VARIABLE: str(runtime_dir)} if runtime_dir else {}
        self._process: subprocess.Popen[str]

    def __enter__(self) -> Job:
        with open(self.scratch / "said", "w", encoding="utf-8") as said:
            self._process = subprocess.Popen(
                self._words,
                cwd=REPOSITORY,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                text=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends as the script does; who does not end is killed, with all its ranks."""
        try:
            if kind is None:
                (self.scratch / "end").touch()
                if self._process.wait(END_TIMEOUT_S):
                    raise RuntimeError(self.said())
                self._look()
        finally:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
                try:
                    self._process.wait(10)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()

    def said(self) -> str:
        """What the launcher and the ranks wrote last, for whoever has to find out what went
        wrong.
        """
        logs = sorted(
            (self.scratch / "logs").rglob("stderr.log"), key=lambda path: path.stat().st_mtime
        )
        return "\n".join(
            path.read_text(errors="replace")[-2000:]
            for path in [self.scratch / "said", *logs[-WORLD:]]
        )

    # -- what ranks tell

    def until(self, there: Callable[[], Any]) -> Any:
        """What it gives, as soon as it gives something.

        Raises:
            RuntimeError: the job has ended, or nothing came for minutes.
        """
        deadline = time.monotonic() + EVENT_TIMEOUT_S
        while True:
            self._look()
            if found := there():
                return found
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self.said())
            time.sleep(LOOK_AGAIN_S)

    def _look(self) -> None:
        with contextlib.suppress(FileNotFoundError), open(self._events, "rb") as file:
            file.seek(self._offset)
            for line in file.read().splitlines():
                name, *numbers, at = line.decode().split()
                rank, pid, attempt, generation, number = map(int, numbers)
                self.events.append(Event(name, rank, pid, attempt, generation, number, float(at)))
                self._offset += len(line) + 1

    def stepped(
        self, steps: int = 1, after: float = 0.0, since: tuple[int, int] = (-1, -1)
    ) -> tuple[int, int] | None:
        """The newest era, from this one on, in which all ranks have told so many steps in eras that
        they entered behind this moment.
        """
        found: dict[tuple[int, int], dict[int, int]] = {}
        for event in self.events:
            if event.name == "step" and event.era >= since and self._began(event.era) > after:
                ranks = found.setdefault(event.era, {})
                ranks[event.rank] = ranks.get(event.rank, 0) + 1
        whole = [
            era
            for era, ranks in found.items()
            if len(ranks) == WORLD and min(ranks.values()) >= steps
        ]
        return max(whole, default=None)

    def _began(self, era: tuple[int, int]) -> float:
        return next(
            event.at for event in self.events if event.name == "entered" and event.era == era
        )

    def last(self, name: str, era: tuple[int, int]) -> float:
        """When the last rank was there for the first time in this era."""
        firsts: dict[int, float] = {}
        for event in self.events:
            if event.name == name and event.era == era:
                firsts.setdefault(event.rank, event.at)
        return max(firsts.values())

    def numbers(self, name: str, era: tuple[int, int]) -> dict[int, int]:
        """What each rank has told in this era under this name."""
        return {
            event.rank: event.number
            for event in self.events
            if event.name == name and event.era == era
        }

    def check_digests(self, *, restarted: bool) -> None:
        """Both copies of all state were equal bit for bit in each era; `restarted`: and it was that
        of the era without a fault.

        Raises:
            RuntimeError: they were not.
        """
        found = {
            era: self.numbers("digest", era)
            for era in sorted({event.era for event in self.events if event.name == "digest"})
        }
        for era, ranks in found.items():
            if any(
                ranks[rank] != ranks.get(other, ranks[rank])
                for rank in ranks
                for other in ((rank + WORLD // COPIES) % WORLD,)
            ):
                raise RuntimeError(f"the copies of the state differ in {era}: {ranks}")
        if restarted and any(ranks != found[0, 0] for ranks in found.values()):
            raise RuntimeError(
                f"a restart from the snapshot has another state two steps later: {found}"
            )

    def pid_of(self, rank: int) -> int:
        """Of the process that is this rank now."""
        return next(
            event.pid
            for event in reversed(self.events)
            if event.rank == rank and event.name == "begun"
        )

    def await_spare(self, size: int) -> None:
        """Until one has so much memory, as `--spare-memory` gives it; where all processors have
        work, it takes its time.
        """
        ranks = {event.pid for event in self.events if event.name == "begun"}
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.until(
            lambda: any(
                resident(int(pid)) > size
                for pid in children.read_text().split()
                if int(pid) not in ranks
            )
        )

    def step_s(self) -> list[float]:
        """How long undisturbed steps took: the third of each era in each rank; the first two make
        buffers and moments.
        """
        begun = {(e.rank, e.era, e.number): e.at for e in self.events if e.name == "begun-step"}
        restored = {(e.rank, e.era): e.number for e in self.events if e.name == "restored"}
        return [
            e.at - begun[e.rank, e.era, e.number]
            for e in self.events
            if e.name == "step"
            and (e.rank, e.era, e.number) in begun
            and e.number == restored.get((e.rank, e.era), 0) + 3
        ]

    # -- its coordinators

    def coordinators(self) -> dict[int, dict[str, Any]]:
        """Number → what its file says."""
        found = {}
        for path in (self.directory / ".acpfs-job").glob("*/coordinator-*"):
            with contextlib.suppress(OSError, ValueError):
                told = json.loads(path.read_text())
                found[int(told["number"])] = told
        return found


def resident(pid: int) -> int:
    """Bytes of memory that a process has; 0: it is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def status_of(coordinator: dict[str, Any]) -> dict[str, Any]:
    """What a coordinator answers; empty: nobody is there."""
    with contextlib.suppress(OSError, ValueError), socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(1.0)
        asking.connect(f"\0{coordinator['status']}")
        data = b""
        while part := asking.recv(1 << 16):
            data += part
        found: dict[str, Any] = json.loads(data)
        return found
    return {}

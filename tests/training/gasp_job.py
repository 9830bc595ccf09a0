"""A job of plain members and coordinators, all in processes of their own, for tests and a
benchmark.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DEADLINE_S = 240.0


def until(condition: Callable[[], object], told: Callable[[], object] = lambda: None) -> None:
    """Wait for a condition; `told` is what the failure shows."""
    deadline = time.monotonic() + DEADLINE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, told()
        pause.wait(0.01)


class GaspJob:
    """Coordinators first, then members. Ends everything that it started."""

    def __init__(
        self, directory: Path, world: int, holders: Mapping[str, tuple[int, ...]], **config: Any
    ) -> None:
        """`config`: further words for `plain_members`; `coordinators`: how many, with `node_of`
        each on its node; `words`: theirs.
        """
        self.directory = directory
        self.world = world
        self.log = directory / "told"
        self.log.mkdir(parents=True)
        self.job_directory = directory / ".acpfs-job" / "job"
        self.coordinators: list[subprocess.Popen[str]] = []
        self.announced: list[dict[str, Any]] = []
        self._words: list[str] = config.pop("words", [])
        self._has_nodes = "node_of" in config
        for number in range(config.pop("coordinators", 1)):
            self.start_coordinator(number, first=number == 0)
        addresses = {one["number"]: one["address"] for one in self.announced}
        self.config = {
            "job": "job",
            "job_directory": str(self.job_directory),
            "log": str(self.log),
            "world": world,
            "holders": holders,
        }
        self.config |= {"coordinators": addresses, **config}
        self.members = self._start("tests.training.plain_members", json.dumps(self.config))
        self.pids = {int(rank): pid for rank, pid in json.loads(self._line(self.members)).items()}

    def __enter__(self) -> GaspJob:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.pids.values() if self.members.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(
                    pid, signal.SIGKILL
                )  # children of a program that still waits for them: the numbers are theirs
        for process in (self.members, *self.coordinators):
            process.kill()
            process.wait(120)
            assert process.stdout is not None
            process.stdout.close()

    def _start(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def _line(self, process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline()

    def start_coordinator(self, number: int, *, first: bool = False) -> None:
        peers = [
            f"--peer={one['number']}={one['address']}"
            for one in self.announced
            if one["number"] != number
        ]
        words = [
            str(self.directory),
            "--job",
            "job",
            "--number",
            str(number),
            "--node",
            f"node{number if self._has_nodes else 0}",
            "--settle-down",
            "0",
            *peers,
            *self._words,
        ]
        process = self._start("acpfs.training.coordinator", *words, *(["--first"] if first else []))
        self.coordinators.append(process)
        self.announced.append(json.loads(self._line(process)))

    def told(self, rank: int) -> list[dict[str, Any]]:
        """What a rank was told."""
        try:
            lines = (
                (self.log / f"rank-{rank}").read_text(encoding="utf-8").splitlines(keepends=True)
            )
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def words(self, rank: int) -> list[str]:
        return [told["what"] for told in self.told(rank)]

    def wait(self, what: str, *ranks: int) -> None:
        """Until all of these have been told."""
        until(
            lambda: all(what in self.words(rank) for rank in ranks),
            lambda: f"{what}: {self.everything()}",
        )

    def everything(self) -> dict[int, list[str]]:
        return {rank: self.words(rank) for rank in range(self.world)}

    def left(self, rank: int) -> dict[str, Any]:
        """How a rank was told to leave."""
        self.wait("Left", rank)
        return next(told for told in self.told(rank) if told["what"] == "Left")

    def published(self) -> list[dict[str, Any]]:
        return [
            json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(self.log.glob("published.*"))
        ]

    def faults(self) -> list[dict[str, Any]]:
        path = self.job_directory / "faults.jsonl"
        return (
            [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            if path.exists()
            else []
        )

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[rank], number)

    def look_again(self, number: int) -> dict[str, Any]:
        """What the newest coordinator of this number has announced."""
        self.announced[number] = json.loads(
            (self.job_directory / f"coordinator-{number}").read_text(encoding="utf-8")
        )
        return self.announced[number]

    def status(self, number: int = 0) -> dict[str, Any]:
        """What a coordinator says of itself."""
        return asked(self.announced[number]["status"])


def asked(name: str) -> dict[str, Any]:
    """What a coordinator says of itself that listens there."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(120)
        asking.connect("\0" + name)
        text = b""
        while data := asking.recv(1 << 16):
            text += data
    found: dict[str, Any] = json.loads(text)
    return found

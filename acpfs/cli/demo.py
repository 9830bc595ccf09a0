"""`acpfs demo`: what a mount does, seen on this machine in less than a minute, and gone afterwards.

A directory of its own stands for slow storage: the drain may take no more than `BANDWIDTH` to it.
Where torch is installed, a process of its own saves and loads with torch's own calls; else saves
are plain writes, so that nothing else need be installed.
Each promise that is shown is checked, and the exit code says whether all held.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_PATH
from acpfs.cli.verbs.status import PASSTHROUGH, lanes_line
from acpfs.control import client, registry
from acpfs.control.registry import MountRecord
from acpfs.control.runtime import ENVIRONMENT_VARIABLE
from acpfs.descriptors import readable
from acpfs.errors import AcpfsError, ExitCode, MachineError

BANDWIDTH = 64 << 20
"""Bytes per second."""
SECONDS = 4
"""That one save takes to the storage."""
SHARDS = 4
SHARE_OF_MEMORY = 8
BYTES_MIN = 8 << 20
MOUNT_WAIT_S = 120.0
DRAIN_WAIT_S = 300.0
LOOK_S = 0.05
JOB_WAIT_S = 300.0
"""The first import of torch reads about a gigabyte."""
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What ends it beside SIGINT, which Python makes an exception of."""


def memory_bytes() -> int:
    """That may be used, by the kernel's estimate."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    found = dict(line.split(":") for line in lines)
    return int(found["MemAvailable"].split()[0]) * 1024


class DemoSaver(Protocol):
    """Who saves: what stands for training."""

    name: str
    """Of the calls by which it saves."""

    def save(self, directory: Path, kill: int) -> float:
        """Make the directory, and a checkpoint in it; returns the seconds that took.

        `kill`: a process that is killed in the middle; 0: none.
        """

    def is_whole(self, directory: Path) -> bool:
        """Whether all is there that was saved."""

    def end(self) -> None:
        """It is not needed any more, whatever it does now."""


def shards(directory: Path) -> list[Path]:
    """Names of a checkpoint's files."""
    return [directory / f"shard-{shard}.pt" for shard in range(SHARDS)]


class PlainSaver:
    """Writes files by itself."""

    name = "plain writes"

    def __init__(self, size: int) -> None:
        """`size`: bytes of one save."""
        self._content = os.urandom(size // SHARDS)

    def save(self, directory: Path, kill: int) -> float:
        """As `DemoSaver` has it."""
        begun = time.monotonic()
        directory.mkdir()
        for shard, path in enumerate(shards(directory)):
            with open(path, "wb", buffering=0) as file:
                for number, piece in enumerate(pieces(self._content)):
                    if kill and (shard, number) == (SHARDS // 2, 1):
                        os.kill(kill, signal.SIGKILL)
                    file.write(piece)
        return time.monotonic() - begun

    def is_whole(self, directory: Path) -> bool:
        """Every byte."""
        return all(
            path.exists() and path.read_bytes() == self._content for path in shards(directory)
        )

    def end(self) -> None:
        """Nothing to do."""


class TorchSaver:
    """A process that saves and loads with torch (`acpfs.torch.demonstration`)."""

    name = "torch.save"

    def __init__(self, place: Path, size: int) -> None:
        """Begin to start it: the import of torch takes seconds.

        `place`: all that is saved or judged lies below. `size`: bytes of one save.
        """
        self._place = place
        words = (place, size, SHARDS)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "acpfs.torch.demonstration", *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def version(self) -> str:
        """Of torch, when the process is ready; "": it cannot be used."""
        words = self._line().split()
        return words[1] if words[:1] == ["ready"] else ""

    def save(self, directory: Path, kill: int) -> float:
        """As `DemoSaver` has it."""
        return float(self._ask("save", directory, str(kill)))

    def is_whole(self, directory: Path) -> bool:
        """Whether `torch.load` gives what was saved."""
        return self._ask("loads", directory) == "True"

    def end(self) -> None:
        """Kill it, so that it has nothing open any more."""
        self._process.kill()
        self._process.communicate()

    def _ask(self, verb: str, directory: Path, *more: str) -> str:
        assert self._process.stdin is not None
        try:
            words = (verb, str(directory.relative_to(self._place)), *more)
            self._process.stdin.write(" ".join(words) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its end says so
        line = self._line()
        if not line:
            raise MachineError("the process that saves with torch has failed or does not answer")
        return line.strip()

    def _line(self) -> str:
        assert self._process.stdout is not None
        if not readable(self._process.stdout, JOB_WAIT_S):
            return ""
        return self._process.stdout.readline()


@dataclass
class Demo:
    """One run, below a directory that is its own."""

    place: Path
    size: int
    """Bytes of one save."""
    uses_torch: bool
    """Where it can be imported."""
    job: DemoSaver | None = None
    """Once it was started."""
    good: bool = True
    begun: float = 0.0

    def say(self, text: str) -> None:
        """What happens, and since when."""
        click.echo(f"{time.monotonic() - self.begun:4.1f} s  {text}")

    def check(self, what: str, *, holds: bool) -> None:
        """A promise."""
        self.good = self.good and holds
        self.say(f"{'ok  ' if holds else 'NOT'} {what}")

    @property
    def mount(self) -> Path:
        return self.place / "mnt"

    @property
    def storage(self) -> Path:
        return self.place / "storage"

    def record(self) -> MountRecord:
        """Of the mount."""
        return registry.find(str(self.mount), registry.records([self.place / "run"]))

    def acpfs(self, *words: str | Path) -> None:
        """One of its commands.

        Raises:
            MachineError: it fails, with what it said.
        """
        process = subprocess.Popen(
            [sys.executable, "-m", "acpfs.cli.main", *map(str, words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, said = process.communicate(timeout=DRAIN_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        except BaseException:
            # whoever is told to end waits for a mount that is being made: else that would come
            # behind the clearing, and stay
            process.communicate(timeout=DRAIN_WAIT_S)
            raise
        if process.returncode != 0:
            raise MachineError(said.strip().removeprefix("acpfs: "))

    def save(self, job: DemoSaver, step: int, *, kill: bool = False) -> float:
        """A checkpoint of a few files and the name that says which is the newest; its seconds."""
        took_s = job.save(self.mount / f"step-{step}", self._worker() if kill else 0)
        (self.mount / "latest.tmp").write_text(f"step-{step}\n")
        (self.mount / "latest.tmp").rename(self.mount / "latest")
        return took_s

    def _worker(self) -> int:
        return int(client.request(self.record(), "status")["worker"]["pid"])

    def watch(self, job: DemoSaver, step: int) -> tuple[bool, float]:
        """Whether the storage's `latest` named only what was whole there until it named this one;
        and when that was.
        """
        known: set[str] = set()
        deadline = time.monotonic() + DRAIN_WAIT_S
        latest = self.storage / "latest"
        while time.monotonic() < deadline:
            name = latest.read_text().strip() if latest.exists() else ""
            if name and name not in known:
                known.add(name)
                if not job.is_whole(self.storage / name):
                    return False, time.monotonic()
            if name == f"step-{step}":
                return True, time.monotonic()
            time.sleep(LOOK_S)
        return False, time.monotonic()

    def _start_job(self) -> DemoSaver:
        """With torch, if that is wanted and there."""
        if self.uses_torch and importlib.util.find_spec("torch") is not None:
            # before it is asked: who ends the demo ends it, too
            job = TorchSaver(self.place, self.size)
            self.job = job
            version = job.version()
            if version:
                self.say(f"torch {version} saves, by torch.save as it is")
                return job
            job.end()
            self.say("torch is installed and cannot be imported: plain writes instead")
        elif self.uses_torch:
            self.say("torch is not installed: plain writes, of files as large")
        self.job = PlainSaver(self.size)
        return self.job

    def run(self) -> None:
        """All of it."""
        self.begun = time.monotonic()
        for directory in (self.mount, self.storage):
            directory.mkdir()
        job = self._start_job()
        words = ("--ram", 4 * self.size, "--bandwidth", BANDWIDTH)
        self.acpfs("mount", self.storage, self.mount, *map(str, words))
        status = client.request(self.record(), "status")
        native = status["transport"] != "libfuse"
        self.say(f"mounted {self.mount} over {self.storage}, which takes {show.size(BANDWIDTH)}/s")
        took_s = self.save(job, 1)
        saved_at = time.monotonic()
        self.say(f"saved {show.size(self.size)} in {took_s:.2f} s: so long would training stand")
        status = client.request(self.record(), "status")
        self.say(f"its way: {status['transport']}, {lanes_line(status)}")
        if PASSTHROUGH not in status["lane_choices"]:
            from acpfs.mounting.doctor import THROUGH_DAEMON

            self.say(f"without passthrough {THROUGH_DAEMON}: `acpfs doctor` says why")
        whole, safe_at = self.watch(job, 1)
        self.say(f"the storage had it {safe_at - saved_at:.1f} s later, in the background")
        self.check("its `latest` never named what was not whole", holds=whole)
        took_s = self.save(job, 2, kill=native)
        if native:
            self.say(f"saved again in {took_s:.2f} s; acpfs was killed (-9) in the middle")
            self.check("no error, and every byte is there", holds=self._is_in(self.mount, job, 2))
        self.acpfs("umount", self.mount)
        self.check(
            "unmounted: the storage has both, as plain files",
            holds=all(self._is_in(self.storage, job, step) for step in (1, 2)),
        )

    @staticmethod
    def _is_in(top: Path, job: DemoSaver, step: int) -> bool:
        return job.is_whole(top / f"step-{step}")

    def clear(self) -> None:
        """Nothing stays, whatever happened."""
        if self.job is not None:
            self.job.end()
        try:
            if os.path.ismount(self.mount):
                self.acpfs("umount", self.mount)
        except (AcpfsError, OSError, subprocess.TimeoutExpired):
            subprocess.run(["umount", "-l", self.mount], check=False)
        shutil.rmtree(self.place, ignore_errors=True)


def _end(number: int, _frame: object) -> NoReturn:
    """Handler of a signal that ends: in order, so that all is cleared."""
    for further in ENDING:
        signal.signal(further, signal.SIG_IGN)
    raise SystemExit(128 + number)


def pieces(content: bytes) -> Sequence[memoryview]:
    """As a program writes them."""
    view = memoryview(content)
    return [view[begin : begin + (1 << 20)] for begin in range(0, len(view), 1 << 20)]


@click.command("demo")
@click.option(
    "--directory", type=FILE_PATH, metavar="DIR", help="Where to do it; default: a temporary one."
)
@click.option("--size", type=int, metavar="BYTES", help="Of one save; default: what memory bears.")
@click.option("--torch/--no-torch", default=True, help="Save with torch, if it is installed.")
def command(directory: Path | None, size: int | None, *, torch: bool) -> int:
    """Mount, save, kill acpfs in the middle of a save, and check what the storage has.

    Takes less than a minute and leaves nothing behind. Exit code 1: a promise did not hold.
    """
    bearable = min(SECONDS * BANDWIDTH, memory_bytes() // SHARE_OF_MEMORY)
    endings = [number for number in ENDING if signal.getsignal(number) is not signal.SIG_IGN]
    for number in endings:
        signal.signal(number, _end)
    place = Path(tempfile.mkdtemp(prefix="acpfs-demo-", dir=directory))
    place.chmod(0o700)
    os.environ[ENVIRONMENT_VARIABLE] = str(place / "run")
    demo = Demo(place, max(BYTES_MIN, size or bearable), torch)
    try:
        demo.run()
    finally:
        for number in endings:
            signal.signal(number, signal.SIG_IGN)  # once is enough, and what is to go goes
        demo.clear()
    return int(ExitCode.OK if demo.good else ExitCode.FAILED)

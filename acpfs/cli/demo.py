"""`acpfs demo`: what a mount does, seen on this machine in less than a minute, and gone afterwards.

A directory of its own stands for slow storage: the drain may take no more than `BANDWIDTH` to it.
Saves are plain writes of what a training job would write, so that nothing else need be installed.
Each promise that is shown is checked, and the exit code says whether all held.
"""

from __future__ import annotations

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
from typing import NoReturn

import click

from acpfs.cli import show
from acpfs.cli.file_names import FILE_PATH
from acpfs.cli.verbs.status import PASSTHROUGH, lanes_line
from acpfs.control import client, registry
from acpfs.control.registry import MountRecord
from acpfs.control.runtime import ENVIRONMENT_VARIABLE
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
ENDING = (signal.SIGTERM, signal.SIGHUP)
"""What ends it beside SIGINT, which Python makes an exception of."""


def memory_bytes() -> int:
    """That may be used, by the kernel's estimate."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    found = dict(line.split(":") for line in lines)
    return int(found["MemAvailable"].split()[0]) * 1024


@dataclass
class Demo:
    """One run, below a directory that is its own."""

    place: Path
    size: int
    """Bytes of one save."""
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

    def save(self, step: int, content: bytes, *, kill: bool = False) -> float:
        """A checkpoint of a few files and the name that says which is the newest; its seconds."""
        begun = time.monotonic()
        directory = self.mount / f"step-{step}"
        directory.mkdir()
        for shard in range(SHARDS):
            with open(directory / f"shard-{shard}.pt", "wb", buffering=0) as file:
                for number, piece in enumerate(pieces(content)):
                    if kill and (shard, number) == (SHARDS // 2, 1):
                        os.kill(self._worker(), signal.SIGKILL)
                    file.write(piece)
        (self.mount / "latest.tmp").write_text(f"step-{step}\n")
        (self.mount / "latest.tmp").rename(self.mount / "latest")
        return time.monotonic() - begun

    def _worker(self) -> int:
        return int(client.request(self.record(), "status")["worker"]["pid"])

    def is_whole(self, top: Path, step: int, content: bytes) -> bool:
        """Whether a checkpoint has every byte."""
        shards = [top / f"step-{step}/shard-{shard}.pt" for shard in range(SHARDS)]
        return all(shard.exists() and shard.read_bytes() == content for shard in shards)

    def watch(self, content: bytes, step: int) -> tuple[bool, float]:
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
                if not self.is_whole(self.storage, int(name.rpartition("-")[2]), content):
                    return False, time.monotonic()
            if name == f"step-{step}":
                return True, time.monotonic()
            time.sleep(LOOK_S)
        return False, time.monotonic()

    def run(self) -> None:
        """All of it."""
        self.begun = time.monotonic()
        for directory in (self.mount, self.storage):
            directory.mkdir()
        words = ("--ram", 4 * self.size, "--bandwidth", BANDWIDTH)
        self.acpfs("mount", self.storage, self.mount, *map(str, words))
        status = client.request(self.record(), "status")
        native = status["transport"] != "libfuse"
        self.say(f"mounted {self.mount} over {self.storage}, which takes {show.size(BANDWIDTH)}/s")
        content = os.urandom(self.size // SHARDS)
        took_s = self.save(1, content)
        saved_at = time.monotonic()
        self.say(f"saved {show.size(self.size)} in {took_s:.2f} s: so long would training stand")
        status = client.request(self.record(), "status")
        self.say(f"its way: {status['transport']}, {lanes_line(status)}")
        if PASSTHROUGH not in status["lane_choices"]:
            from acpfs.mounting.doctor import THROUGH_DAEMON

            self.say(f"without passthrough {THROUGH_DAEMON}: `acpfs doctor` says why")
        whole, safe_at = self.watch(content, 1)
        self.say(f"the storage had it {safe_at - saved_at:.1f} s later, in the background")
        self.check("its `latest` never named what was not whole", holds=whole)
        if native:
            took_s = self.save(2, content, kill=True)
            self.say(f"saved again in {took_s:.2f} s; acpfs was killed (-9) in the middle")
            self.check(
                "no error, and every byte is there", holds=self.is_whole(self.mount, 2, content)
            )
        else:
            self.save(2, content)
        self.acpfs("umount", self.mount)
        self.check(
            "unmounted: the storage has both, as plain files",
            holds=all(self.is_whole(self.storage, step, content) for step in (1, 2)),
        )

    def clear(self) -> None:
        """Nothing stays, whatever happened."""
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
def command(directory: Path | None, size: int | None) -> int:
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
    demo = Demo(place, max(BYTES_MIN, size or bearable))
    try:
        demo.run()
    finally:
        for number in endings:
            signal.signal(number, signal.SIG_IGN)  # once is enough, and what is to go goes
        demo.clear()
    return int(ExitCode.OK if demo.good else ExitCode.FAILED)

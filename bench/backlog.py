"""A backlog of large checkpoints behind a storage that stood still: when is the first of them safe,
and when the last, alone and beside somebody else who writes to the same disk?

Usage: python -m bench.backlog [--before COMMIT] [--rounds N] [--small N]. The disk is an ext4 on a
loop device that the kernel limits to 100 MB/s. Eight checkpoints are saved while it is frozen; then
it thaws, and `cp` begins to copy eight others to it, one after the other: with an fsync of each
(`sync`), or without. In the same rounds `--small` files of 4 KiB are saved to a mount over a tmpfs,
where nothing but the interpreter takes time. `--before`: the acpfs of another commit is measured in
turn, from a work tree of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import places
from bench.disk import Disk, kept_back, limited
from bench.record import MIB, Report, lower_quartile, median, spread
from tests.rig.mounts import AcpfsMount

BYTES_PER_S = 100_000_000
CHECKPOINTS = 8
CHECKPOINT_BYTES = 48 * MIB
DISK_BYTES = 3 * CHECKPOINTS * CHECKPOINT_BYTES
KEPT_BACK_BYTES = 64 * MIB
FROZEN_S = 1.0
LOOK_AGAIN_S = 0.01
PATIENCE_S = 120.0
RAM = "768M"
SMALL = "small files"
WAYS = ("alone", "beside cp and sync", "beside cp")
FIRST_OF_CP = 1.3
BYTES_OF_CP = 0.9
OF_ALONE = 0.95
SMALL_BYTES = 4096
PER_DIRECTORY = 1000
SMALL_OF_BEFORE = 1.05
TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Found:
    """Seconds after the thaw, one for each round; the share of bytes."""

    first_s: list[float] = field(default_factory=list)
    last_s: list[float] = field(default_factory=list)
    cp_first_s: list[float] = field(default_factory=list)
    cp_last_s: list[float] = field(default_factory=list)
    bytes_of_cp: list[float] = field(default_factory=list)
    """What acpfs had written when the first of both was done, in shares of what cp had."""
    small_s: list[float] = field(default_factory=list)
    """From the first small file's create to the last one's being persisted."""
    small_us: list[float] = field(default_factory=list)
    """Processor time of the daemon, for each of them."""


@contextlib.contextmanager
def tree_of(commit: str, scratch: Path) -> Iterator[Path]:
    """A work tree of that commit."""
    tree = scratch / "before"
    here = Path(__file__).parents[1]
    add = ["git", "worktree", "add", "--detach", "--quiet", str(tree), commit]
    subprocess.run(add, cwd=here, check=True)
    try:
        yield tree
    finally:
        remove = ["git", "worktree", "remove", "--force", str(tree)]
        subprocess.run(remove, cwd=here, check=True)


class Copying(threading.Thread):
    """Copies checkpoints one after the other; when each was done."""

    def __init__(self, source: Path, target: Path, *, synced: bool) -> None:
        super().__init__(daemon=True)
        self._source = source
        self._target = target
        self._synced = synced
        self.done_at: list[float] = []
        target.mkdir()

    def run(self) -> None:
        for number in range(CHECKPOINTS):
            path = self._target / f"copy-{number}"
            subprocess.run(["cp", str(self._source), str(path)], check=True)
            if self._synced:
                subprocess.run(["sync", str(path)], check=True)
            self.done_at.append(time.monotonic())

    def written_bytes(self) -> int:
        """Until now, as far as anybody can see."""
        return sum(path.stat().st_size for path in self._target.iterdir())


def wait(condition: Callable[[], bool]) -> float:
    """When it came true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the backlog is not on the disk")
        time.sleep(LOOK_AGAIN_S)
    return time.monotonic()


def save(directory: Path, number: int, content: bytes) -> None:
    """A checkpoint of one file."""
    with open(directory / f"step-{number}", "wb", buffering=0) as file:
        file.writelines(content for _ in range(CHECKPOINT_BYTES // len(content)))


def one_round(way: str, tree: Path | None, content: bytes, found: Found) -> None:
    """On a disk of its own."""
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        memory = stack.enter_context(places.tmpfs(scratch / "tmpfs"))
        save(memory, 0, content)
        disk = stack.enter_context(Disk(scratch, DISK_BYTES))
        stack.enter_context(limited(disk, BYTES_PER_S, BYTES_PER_S))
        stack.enter_context(kept_back(disk, KEPT_BACK_BYTES))
        backing = disk.path / "acpfs"
        backing.mkdir()
        mount = stack.enter_context(_mounted(backing, scratch, tree))
        copying = Copying(memory / "step-0", disk.path / "copies", synced=way != "beside cp")
        with disk.frozen():
            begun = time.monotonic()
            for number in range(CHECKPOINTS):
                save(mount.path, number, content)
            time.sleep(max(0.0, FROZEN_S - (time.monotonic() - begun)))
        thawed = time.monotonic()
        if way != "alone":
            copying.start()
        found.first_s.append(wait((backing / "step-0").exists) - thawed)
        last = backing / f"step-{CHECKPOINTS - 1}"
        wait(lambda: last.exists() or len(copying.done_at) == CHECKPOINTS)
        if way != "alone":
            streamed = int(mount.status()["counters"]["streamed_bytes"])
            found.bytes_of_cp.append(streamed / max(1, copying.written_bytes()))
        found.last_s.append(wait(last.exists) - thawed)
        if way == "alone":
            thawed = time.monotonic()  # then cp, alone as well
            copying.start()
        copying.join(PATIENCE_S)
        found.cp_first_s.append(copying.done_at[0] - thawed)
        found.cp_last_s.append(copying.done_at[-1] - thawed)


def processor_s(pid: int) -> float:
    """What the process has used of it until now, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_S


def small_round(tree: Path | None, files: int, found: Found) -> None:
    """Small files, over a tmpfs."""
    content = os.urandom(SMALL_BYTES)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        backing = stack.enter_context(places.tmpfs(scratch / "tmpfs"))
        mount = stack.enter_context(_mounted(backing, scratch, tree))
        used_s = processor_s(mount.pid)
        begun = time.monotonic()
        for number in range(files):
            directory = mount.path / f"{number // PER_DIRECTORY}"
            if not number % PER_DIRECTORY:
                directory.mkdir()
            (directory / f"{number}").write_bytes(content)
        mount.flush(timeout_s=PATIENCE_S)
        found.small_s.append(time.monotonic() - begun)
        found.small_us.append((processor_s(mount.pid) - used_s) * 1e6 / files)


def _mounted(backing: Path, scratch: Path, tree: Path | None) -> AcpfsMount:
    elsewhere = {"PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1"} if tree else {}
    return AcpfsMount(
        backing,
        scratch / "mount",
        "auto",
        environment=elsewhere,
        ram=RAM,
        watchdog_s=places.WATCHDOG_S,
    )


def measure(before: str, rounds: int, small: int) -> Report:
    """Rounds in turn."""
    report = Report(
        "backlog",
        f"{CHECKPOINTS} checkpoints of {CHECKPOINT_BYTES // MIB} MiB saved while a disk of "
        f"{BYTES_PER_S / 1e6:.0f} MB/s stood still: after the thaw",
        ["", "acpfs", "first safe", "last safe", "cp: first", "cp: last", "bytes / cp's"],
    )
    found: dict[tuple[str, str], Found] = {}
    content = os.urandom(4 * MIB)
    load = os.getloadavg()[0]
    with contextlib.ExitStack() as stack:
        trees: dict[str, Path | None] = {}
        if before:
            scratch = stack.enter_context(places.scratch())
            trees["before"] = stack.enter_context(tree_of(before, scratch))
        trees["now"] = None
        for _round in range(rounds):
            for way in WAYS:
                for name, tree in trees.items():
                    one_round(way, tree, content, found.setdefault((way, name), Found()))
            for name, tree in trees.items():
                if small:
                    small_round(tree, small, found.setdefault((SMALL, name), Found()))
    for (way, name), one in found.items():
        if way == SMALL:
            report.notes.append(
                f"{small} files of {SMALL_BYTES} bytes over a tmpfs, acpfs {name}: "
                f"{spread(one.small_s, 's')} until all are safe, "
                f"{spread(one.small_us, 'us')} of processor time of the daemon each"
            )
            report.samples |= {f"{SMALL}, {name}, seconds": one.small_s}
            report.samples |= {f"{SMALL}, {name}, us of processor": one.small_us}
            continue
        share = spread(one.bytes_of_cp, "") if one.bytes_of_cp else "–"
        times = (one.first_s, one.last_s, one.cp_first_s, one.cp_last_s)
        report.row(way, name, *(spread(values, "s") for values in times), share)
        report.samples |= {
            f"{way}, {name}, {key}": values for key, values in vars(one).items() if values
        }
    _bars(report, found)
    report.notes.append(
        f"one-minute load {load:.1f} at the begin, {os.getloadavg()[0]:.1f} at the end"
    )
    report.notes.append(
        "alone: cp has its turn when acpfs is done; beside: both begin with the thaw; bytes: when "
        "the first of both is done with all"
    )
    return report


def _bars(report: Report, found: dict[tuple[str, str], Found]) -> None:
    alone = found["alone", "now"]
    ratio = lower_quartile(alone.cp_last_s) / lower_quartile(alone.last_s)
    promise = f"alone at least {OF_ALONE:g} of the speed of cp and sync"
    report.bar(promise, f"{ratio:.2f}", met=ratio >= OF_ALONE)
    beside = found["beside cp and sync", "now"]
    first = median(beside.first_s) / median(beside.cp_first_s)
    promise = f"beside cp and sync the first at most {FIRST_OF_CP:g} times as late as cp's first"
    report.bar(promise, f"{first:.2f}", met=first <= FIRST_OF_CP)
    share = median(beside.bytes_of_cp)
    promise = f"and at least {BYTES_OF_CP:g} of its bytes"
    report.bar(promise, f"{share:.2f}", met=share >= BYTES_OF_CP)
    if (SMALL, "before") in found:
        slower = lower_quartile(found[SMALL, "now"].small_s) / lower_quartile(
            found[SMALL, "before"].small_s
        )
        promise = f"small files at most {SMALL_OF_BEFORE:g} times as long as before"
        report.bar(promise, f"{slower:.2f}", met=slower <= SMALL_OF_BEFORE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", default="", metavar="COMMIT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--small", type=int, default=20_000, metavar="N", help="small files; 0: none"
    )
    parser.add_argument("--no-keep", action="store_true", help="a quick look")
    arguments = parser.parse_args()
    found = measure(arguments.before, arguments.rounds, arguments.small)
    sys.exit(found.finish(keep=not arguments.no_keep))

"""The demonstration that tools/quickstart runs: why one puts acpfs before slow storage, in one
table and one picture.

The same job saves straight to slow storage, to a tmpfs from which `cp` takes it there, and through
acpfs. Then the storage freezes, the daemon is killed, and power is lost, each in the middle of
saves. Everything lies in the directory that it is given, which the caller removes; only the picture
stays. Times are those of plain torch.save, torch.load and torch.distributed.checkpoint.

Usage: python tools/quickstart.py DIRECTORY [--quick]
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from rich.console import Console
from rich.table import Table

from bench import bars
from bench.copying import copy, copying
from bench.crashed import Left, checked, look
from bench.job import Job, stall_s
from bench.layout import MODEL, POINTER
from bench.places import forget_pages, tmpfs
from bench.record import median
from bench.storage import Storage, slow_storage
from tests.rig.mounts import AcpfsMount

MB = 1_000_000
MIB = 1024**2
BANDWIDTH = 300 * MB
BYTES_MAX = 512 * MIB
BYTES_MIN = 48 * MIB
SHARE_OF_MEMORY = 12
SHARE_OF_DISK = 10
"""The demonstration holds its bytes up to eight times in memory: tensors of two ranks, the tmpfs,
the RAM tier, page cache.
"""
ROOM = 8
"""On the slow storage, times what is saved at once."""
PART = 4
"""While storage freezes and power goes, saves have this part of the bytes and come one after the
other.
"""
EVERY_S = 1.5
AFTER_THE_FREEZE_S = 8.0
PROBE_BYTES = 128 * MIB
COLD = 2.0
STRAIGHT = "straight"
COPIED = "tmpfs, then cp"
ACPFS = "acpfs"
PLACES = (STRAIGHT, COPIED, ACPFS)

BEGUN = time.monotonic()
console = Console(highlight=False, width=None if sys.stdout.isatty() else 118)


@dataclass(frozen=True)
class Plan:
    """How much is done."""

    saves: int
    dcp_saves: int
    freeze_s: float
    saves_end_s: float = 50.0
    """No third save or later begins after so many seconds of the demonstration."""
    dcp_end_s: float = 70.0


FULL = Plan(4, 3, 10.0)
QUICK = Plan(2, 2, 3.0)


@dataclass
class Found:
    """Seconds by place."""

    stalls: dict[str, list[float]] = field(default_factory=lambda: {place: [] for place in PLACES})
    durable: dict[str, list[float]] = field(default_factory=lambda: {place: [] for place in PLACES})
    dcp: dict[str, list[float]] = field(default_factory=lambda: {place: [] for place in PLACES})
    loads: dict[str, float] = field(default_factory=dict)
    frozen: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Saves that were ended or begun while the storage stood still, and the longest of them."""
    killed_s: float = 0.0
    killed: str = ""
    left: dict[str, Left] = field(default_factory=dict)
    good: bool = True


def step(text: str) -> None:
    """Say what happens."""
    console.print(f"[dim]{time.monotonic() - BEGUN:3.0f} s[/] {text}")


# -- the machine


def free_memory() -> int:
    """Bytes that may be used, by the kernel's estimate and the control group's limit."""
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    found = int(lines["MemAvailable"].split()[0]) * 1024
    limit = Path("/sys/fs/cgroup/memory.max")
    used = Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        found = min(found, int(text) - int(used.read_text()))
    return found


def demonstration_bytes(directory: Path) -> int:
    """How much to save: what is asked for, else what this machine bears."""
    if "ACPFS_QUICKSTART_BYTES" in os.environ:
        return int(os.environ["ACPFS_QUICKSTART_BYTES"])
    bearable = min(
        free_memory() // SHARE_OF_MEMORY, shutil.disk_usage(directory).free // SHARE_OF_DISK
    )
    return max(BYTES_MIN, min(BYTES_MAX, bearable))


def fill(path: Path, chunk: bytes) -> float:
    """Seconds of writing PROBE_BYTES over what is there."""
    begun = time.perf_counter()
    with open(path, "r+b" if path.exists() else "wb", buffering=0) as file:
        file.writelines(chunk for _ in range(PROBE_BYTES // len(chunk)))
    return time.perf_counter() - begun


def tell_machine(memory: Path) -> None:
    """What about this machine makes the figures worse, before they are taken."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0]
    path = memory / "probe"
    chunk = bytes(MIB)
    first = fill(path, chunk)
    again = fill(path, chunk)
    path.unlink()
    step(
        f"this machine: {cores} cores, load {load:.1f}, {free_memory() / MIB / 1024:.1f} GiB of "
        "memory free"
    )
    if cores < 2:
        console.print(
            "  only one core: what acpfs does in the background takes it from the job; expect "
            "less than with two"
        )
    if load > cores / 2:
        console.print(
            "  other programs work here: the figures are worse than this machine's own, all of them"
        )
    if first > COLD * again:
        console.print(
            f"  its memory is cold: the first touch takes {first / again:.1f} times as long as "
            "the second; first saves pay for that"
        )
    else:
        console.print("  its memory is warm")


# -- how long training stands still


class Demonstration:
    """What all scenes share."""

    def __init__(
        self, plan: Plan, job: Job, storage: Storage, memory: Path, mount: AcpfsMount
    ) -> None:
        self.plan = plan
        self.job = job
        self.storage = storage
        self.memory = memory
        self.mount = mount
        self.found = Found()
        self.where = {STRAIGHT: storage.path / "straight", COPIED: memory, ACPFS: mount.path}
        self.on_storage = {
            STRAIGHT: storage.path / "straight",
            COPIED: storage.path / "copied",
            ACPFS: mount.backing,
        }

    def safe(self, place: str, number: int) -> None:
        """Return when a checkpoint is on stable storage, by what its place has for that."""
        if place == ACPFS:
            self.mount.flush(timeout_s=300)
            return
        if place == COPIED:
            copy(self.memory, self.on_storage[COPIED], f"step-{number}")
        self.storage.settle()

    def in_turn(self, number: int) -> tuple[str, ...]:
        """Another place begins each time."""
        return PLACES[number % len(PLACES) :] + PLACES[: number % len(PLACES)]

    def forget(self, keep: int = 1) -> None:
        """Older checkpoints go, as in a job; what they leave behind is no part of the next
        figure.
        """
        for path in {*self.where.values(), self.on_storage[COPIED]}:
            self.job.ask(0, "forget", path=str(path), keep=keep)
        self.mount.flush(timeout_s=300)
        self.storage.settle()

    @staticmethod
    def numbers(count: int, end_s: float) -> Iterator[int]:
        """Of the saves; two at least, no more when it is late."""
        for number in range(1, count + 1):
            if number > 2 and time.monotonic() - BEGUN > end_s:
                step("this machine is slow or busy: fewer saves")
                return
            yield number

    def saves(self) -> None:
        """torch.save by one process."""
        step(
            f"torch.save, {self.plan.saves} times to each place, {self.job.size / MIB:,.0f} MiB "
            "each; `safe` is waited for in between"
        )
        for number in self.numbers(self.plan.saves, self.plan.saves_end_s):
            for place in self.in_turn(number - 1):
                answer = self.job.ask(0, "save", path=str(self.where[place]), step=number)
                self.safe(place, number)
                self.found.stalls[place].append(stall_s(answer))
                self.found.durable[place].append(time.monotonic() - answer["begun"])
            self.forget()

    def loads(self) -> None:
        """The newest checkpoint back; the page cache has nothing of it."""
        step("torch.load of the newest one")
        newest = len(self.found.stalls[ACPFS])
        for place in PLACES:
            forget_pages(self.on_storage[STRAIGHT] / f"step-{newest}" / MODEL)
            answer = self.job.ask(0, "load", path=str(self.where[place]), step=newest)
            self.found.loads[place] = stall_s(answer)
            self.found.good &= answer["equal"]
        self.forget(0)

    def dcp(self) -> None:
        """torch.distributed.checkpoint, which calls fsync."""
        step(
            f"torch.distributed.checkpoint by two ranks, {self.plan.dcp_saves} times to each "
            "place; it calls fsync"
        )
        for number in self.numbers(self.plan.dcp_saves, self.plan.dcp_end_s):
            for place in self.in_turn(number - 1):
                answer = self.job.all("dcp", path=str(self.where[place]), step=number)
                self.safe(place, number)
                self.found.dcp[place].append(stall_s(answer))
            self.forget(0)

    # -- what goes wrong

    def kill(self) -> None:
        """kill -9 of the process that serves the mount, while a save is under way."""
        step("kill -9 of acpfs's worker in the middle of a save")
        number = 100
        path = self.mount.path / f"step-{number}"
        self.job.tell(0, "save", path=str(self.mount.path), step=number)
        wait_for((path / MODEL).exists, 20)
        self.mount.kill_worker()
        self.found.killed_s = stall_s(self.job.answer(0))
        equal = self.job.ask(0, "load", path=str(self.mount.path), step=number)["equal"]
        self.mount.flush(timeout_s=300)
        checksum = checked(self.mount.backing / f"step-{number}" / MODEL)
        self.found.killed = "whole, checksum " + checksum if equal else "NOT WHOLE"
        self.found.good &= equal and checksum == "verified"
        self.forget(0)

    def freeze_and_lose_power(self) -> None:
        """Two jobs save to the same storage, one straight and one through acpfs.

        It freezes; soon after that the power goes.
        """
        size = self.job.size // PART
        until = time.monotonic() + self.plan.freeze_s + AFTER_THE_FREEZE_S + 2 * EVERY_S
        step(
            f"saves of {size / MIB:,.0f} MiB one after the other, straight and through acpfs at "
            "once"
        )
        words: dict[str, Any] = {"first": 1, "size": size, "every_s": EVERY_S, "until": until}
        self.job.tell(0, "series", paths=[str(self.where[STRAIGHT])], **words)
        self.job.tell(1, "series", paths=[str(self.where[ACPFS]), str(self.where[COPIED])], **words)
        with copying(self.memory, self.on_storage[COPIED]):
            wait_for((self.where[STRAIGHT] / "step-2").exists, 30)
            with self.storage.frozen():
                step(f"the storage freezes for {self.plan.freeze_s:.0f} s")
                begun = time.monotonic()
                time.sleep(self.plan.freeze_s)
                ended = time.monotonic()
            if self.storage.can_lose_power:
                self._lose_power(until)
            answers = [self.job.answer(0), self.job.answer(1)]
        for save in (
            save
            for answer in answers
            for save in answer["saves"]
            if save["ended"] > begun and save["begun"] < ended
        ):
            place = next(place for place, path in self.where.items() if str(path) == save["path"])
            count, longest = self.found.frozen.get(place, (0, 0.0))
            self.found.frozen[place] = (count + 1, max(longest, stall_s(save)))
        if self.storage.can_lose_power:
            self._look()

    def _lose_power(self, until: float) -> None:
        """While acpfs drains what it took during the freeze; the node's memory is lost with the
        power.
        """
        pointers = [self.mount.backing / POINTER, self.where[STRAIGHT] / POINTER]
        before = [pointer.read_text() for pointer in pointers]

        def moved() -> bool:
            return all(
                pointer.read_text() not in ("", at)
                for pointer, at in zip(pointers, before, strict=True)
            )

        wait_for(lambda: moved() or time.monotonic() > until - 1, 60)
        step(
            "power is lost: of the node's memory nothing is left, of the storage what its "
            "journal makes of it"
        )
        self.storage.lose_power()
        self.mount.abort()

    def _look(self) -> None:
        at = self.storage.come_back(self.memory.with_name("left"))
        for place, path in self.on_storage.items():
            there = at / path.relative_to(self.storage.path)
            self.found.left[place] = look(there, lambda number: self._whole(there, number))  # noqa: B023
        mine = self.found.left[ACPFS]
        self.found.good &= mine.pointer_is_true and mine.checksums == (
            "verified" if mine.whole else "none"
        )

    def _whole(self, path: Path, number: int) -> bool:
        return bool(
            self.job.ask(0, "load", path=str(path), step=number, size=self.job.size // PART)[
                "equal"
            ]
        )


def wait_for(condition: Callable[[], bool], timeout_s: float) -> None:
    """Look again until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the demonstration did not come as far as it should")
        time.sleep(0.01)


# -- what it says


def times(found: dict[str, float]) -> str:
    """How much faster acpfs is; nothing where something was not measured."""
    return (
        f"[bold]{found[STRAIGHT] / found[ACPFS]:.1f} times[/]"
        if found[ACPFS] and found[STRAIGHT]
        else ""
    )


def show(found: Found, plan: Plan) -> None:
    """The table."""
    table = Table(title="How long training stands still, and what is left when things go wrong")
    table.add_column("")
    for name in ("straight to the storage", "to a tmpfs, then cp", "acpfs"):
        table.add_column(name, justify="right", overflow="fold")
    table.add_column("acpfs is faster by", justify="right")
    seconds: list[tuple[str, dict[str, float]]] = [
        ("torch.save, the first", {place: v[0] for place, v in found.stalls.items()})
    ]
    seconds.append(
        ("torch.save, later ones", {place: median(v[1:]) for place, v in found.stalls.items()})
    )
    seconds.append(
        ("DCP, two ranks, fsync, the first", {place: v[0] for place, v in found.dcp.items()})
    )
    seconds.append(("DCP, later ones", {place: median(v[1:]) for place, v in found.dcp.items()}))
    for name, values in seconds:
        table.add_row(name, *(f"{values[place]:.2f} s" for place in PLACES), times(values))
    durable = {place: median(values) for place, values in found.durable.items()}
    table.add_row(
        "torch.save: safe on the storage after",
        *(f"{durable[place]:.2f} s" for place in PLACES),
        "",
    )
    table.add_row(
        "torch.load, page cache gone",
        *(f"{found.loads[place]:.2f} s" for place in PLACES),
        times(found.loads),
    )
    frozen = {place: found.frozen.get(place, (0, 0.0)) for place in PLACES}
    cells = [
        f"{count} × save, longest {longest:.2f} s"
        for count, longest in (frozen[place] for place in PLACES)
    ]
    table.add_row(
        f"storage frozen for {plan.freeze_s:.0f} s meanwhile",
        *cells,
        times({place: frozen[place][1] for place in PLACES}),
    )
    table.add_row(
        "kill -9 of acpfs in the middle of a save",
        "–",
        "–",
        f"{found.killed_s:.2f} s; {found.killed}",
        "",
    )
    if found.left:
        table.add_row(
            "power lost in the middle of saves",
            *(found.left[place].words() for place in PLACES),
            "",
        )
        table.add_row(
            "checksum of the newest whole one",
            *(found.left[place].checksums for place in PLACES),
            "",
        )
    console.print(table)


def picture(found: Found, path: Path) -> None:
    """Bars: the stall of each torch.save."""
    count = len(found.stalls[ACPFS])
    groups = [
        (f"torch.save {n + 1}", {place: found.stalls[place][n] for place in PLACES})
        for n in range(count)
    ]
    groups += [
        (f"DCP {n + 1}", {place: found.dcp[place][n] for place in PLACES})
        for n in range(len(found.dcp[ACPFS]))
    ]
    if found.frozen:
        groups.append(
            (
                "storage frozen: longest",
                {place: longest for place, (_count, longest) in found.frozen.items()},
            )
        )
    console.print("\nStall of each save:")
    for line in bars.text(groups):
        console.print("  " + line)
    bars.svg("Stall of each save, seconds", groups, path)
    console.print(f"  the same as a picture: {path}")


def explain(found: Found) -> None:
    """What it means."""
    console.print(
        "\nStraight: training waits for the storage. A tmpfs, then cp: fast, but nobody orders, "
        "checks or retries the copy, and a loss of"
        " power may leave a pointer to half a checkpoint. acpfs: training waits for memory only; "
        "the copy is in order and has checksums;"
        " loads come from RAM. What neither can do: keep what was only in memory when the node "
        "loses power."
        " `acpfs-ctl MOUNTPOINT wait PATH` returns when a checkpoint is safe."
    )
    if not found.left:
        console.print("Loss of power was not shown: this machine gives no loop device.")


def demonstrate(base: Path, plan: Plan, picture_path: Path) -> bool:
    """Everything between the temporary directory's first and last moment; whether all went well."""
    size = demonstration_bytes(base)
    with contextlib.ExitStack() as stack:
        memory = stack.enter_context(tmpfs(base / "memory"))
        tell_machine(memory)
        storage = stack.enter_context(slow_storage(base, ROOM * size, BANDWIDTH))
        step(f"slow storage: {storage.how}")
        mount = AcpfsMount(
            storage.path / "checkpoints",
            base / "mnt",
            "auto",
            ram=str(6 * size + 64 * MIB),
            prefault="auto",
            watchdog_s=1200,
        )
        for path in (storage.path / "straight", storage.path / "copied", mount.backing):
            path.mkdir()
        console.print(f"  [dim]$ acpfs mount {mount.backing} {mount.path}[/]")
        job = stack.enter_context(Job(base, size))
        stack.enter_context(mount)
        shown = Demonstration(plan, job, storage, memory, mount)
        for scene in (shown.saves, shown.loads, shown.dcp, shown.kill, shown.freeze_and_lose_power):
            scene()
    show(shown.found, plan)
    picture(shown.found, picture_path)
    explain(shown.found)
    console.print(f"{time.monotonic() - BEGUN:.0f} s in all.")
    return shown.found.good


def main(base: Path, *, quick: bool) -> int:
    """Run in an empty directory; an interruption ends it in good order."""
    interrupted = False

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    picture_path = Path(
        os.environ.get(
            "ACPFS_QUICKSTART_PICTURE", Path(tempfile.gettempdir(), "acpfs-quickstart.svg")
        )
    )
    try:
        good = demonstrate(base, QUICK if quick else FULL, picture_path)
    except (Exception, KeyboardInterrupt):
        if not interrupted:  # else it may be torch's own error about the file that it could not end
            raise
        console.print("interrupted")
        return 130
    if good:
        console.print(
            "Everything was unmounted and is removed. To use it:  acpfs mount BACKING MOUNTPOINT "
            "  (README.md)"
        )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), quick="--quick" in sys.argv[2:]))

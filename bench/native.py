"""The native transport against what it stands on: tmpfs, the backing directory, pyfuse3's example,
and the libfuse transport.

Usage: python -m bench.native [--gib G] [--rounds N] [--only SECTION…]. The first round warms up,
and teaches the mount how large such files are: before that no writer is admitted to the passthrough
lane. What is read was persisted before, so that no drain disturbs it.

Each figure is the best of its rounds and their lower quartile. What disturbs a round only makes it
slower, so the fast end is what the program can do, and a quartile beside the best says that it was
no lucky one. Ratios and bars go by the quartiles.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import places
from bench.clock import span, together
from bench.record import GIB, MB, Report, lower_quartile, median
from tests.rig.mounts import AcpfsMount

FILES = 10_000
ENTRIES = 100_000
SMALL_BYTES = 4096
STREAMS = 4
CHUNK = 8 << 20
TICKS_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Samples:
    """Seconds (or what the name says) by work and place, without the warm-up."""

    found: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    warm: bool = False
    huge: Path | None = None
    """A directory on a tmpfs with huge pages."""

    def warm_memory(self, size: int) -> None:
        """Use so many bytes and free them, before a sample: a virtual machine gives pages that stay
        free for a while back to its host, and the next one to touch them pays for that with three
        times the time of the write itself, whichever file system it is.

        Bytes are written: allocating alone (posix_fallocate) takes the pages of a tmpfs and touches
        none of them.
        """
        assert self.huge is not None
        places.warm(self.huge / "warmth", size)

    def add(self, work: str, place: str, value: float) -> None:
        if self.warm:
            self.found.setdefault((work, place), []).append(value)

    def figure(self, work: str, place: str) -> Figure | None:
        values = self.found.get((work, place))
        return Figure(min(values), lower_quartile(values)) if values else None


@dataclass(frozen=True)
class Figure:
    """Seconds."""

    best: float
    quartile: float

    def __str__(self) -> str:
        return f"{self.quartile:.3f} s ({self.best:.3f})"


@dataclass(frozen=True)
class Place:
    """A directory, and the mount if it is one."""

    name: str
    directory: Path
    mount: AcpfsMount | None = None

    def settle(self) -> None:
        """Let what was written before not disturb what is measured next."""
        if self.mount is not None:
            self.mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
        os.sync()


def rounds(samples: Samples, count: int) -> Iterator[int]:
    """Numbers of rounds; the first is not recorded."""
    for number in range(count + 1):
        samples.warm = number > 0
        yield number
    samples.warm = False


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_S


def in_turn(where: list[Place], number: int) -> list[Place]:
    """The places in another order each round: whoever comes after a place that left work behind
    (the kernel frees and discards what was deleted) is slower, and that shall not always be the
    same one.
    """
    return random.Random(number).sample(where, len(where))


# -- sections: each measures its places in turn


def writes(samples: Samples, where: list[Place], size: int, count: int) -> None:
    for number in rounds(samples, count):
        for place in in_turn(where, number):
            path = place.directory / "one-1.bin"
            samples.warm_memory(size)
            samples.add("write", place.name, together("write8", [path], size))
            path.unlink()
            place.settle()


def four_writers(samples: Samples, where: list[Place], size: int, count: int) -> None:
    for number in rounds(samples, count):
        for place in in_turn(where, number):
            paths = [place.directory / f"four-{n}.bin" for n in range(STREAMS)]
            samples.warm_memory(size)
            samples.add("four", place.name, together("write8", paths, size // STREAMS))
            for path in paths:
                path.unlink()
            place.settle()


def saves(samples: Samples, where: list[Place], size: int, count: int) -> None:
    for number in rounds(samples, count):
        for place in in_turn(where, number):
            path = place.directory / "model-1.pt"
            samples.warm_memory(size)
            samples.add("save", place.name, together("save", [path], size))
            path.unlink()
            place.settle()


def reads(samples: Samples, where: list[Place], size: int, count: int) -> None:
    """Plain, mapped, torch.load, torch.load(mmap=True): one file for all rounds."""
    for place in where:
        together("save", [place.directory / "kept.pt"], size)
        place.settle()
    for number in rounds(samples, count):
        for operation in ("read", "read_mapped", "load", "load_mapped"):
            for place in in_turn(where, number):
                path = place.directory / "kept.pt"
                samples.add(operation, place.name, together(operation, [path], path.stat().st_size))
    for place in where:
        (place.directory / "kept.pt").unlink()
        place.settle()


def cold_reads(samples: Samples, mount: Place, plain: Path, size: int, count: int) -> None:
    """A file that only the backing directory has, and whose pages nobody has."""
    under = plain / "cold.bin"
    over = mount.directory / "cold.bin"
    together("write8", [under], size)
    os.sync()
    for _ in rounds(samples, count):
        for name, path in (("native", over), ("backing", under)):
            places.forget_pages(under)
            samples.add("cold", name, together("read", [path], size))
    under.unlink()


def persisted(
    samples: Samples, mount: Place, plain: Path, tmp: Path, size: int, count: int
) -> None:
    """Close to persisted, against dd conv=fsync of the same files in parallel."""
    names = [f"kept-{n}.bin" for n in range(STREAMS)]
    for name in names:
        together("write8", [tmp / name], size // STREAMS)
    for _ in rounds(samples, count):
        _start, closed = span("write8", [mount.directory / name for name in names], size // STREAMS)
        assert mount.mount is not None
        mount.mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)
        samples.add("persisted", "native", time.monotonic() - closed)
        start = time.monotonic()
        copies = [
            ["dd", f"if={tmp / n}", f"of={plain / n}.dd", "bs=8M", "conv=fsync", "status=none"]
            for n in names
        ]
        for process in [subprocess.Popen(copy) for copy in copies]:
            process.wait()
        samples.add("persisted", "dd", time.monotonic() - start)
        for name in names:
            (mount.directory / name).unlink()
            (plain / f"{name}.dd").unlink()
        mount.settle()
    for name in names:
        (tmp / name).unlink()


def processor(samples: Samples, place: Place, size: int, count: int) -> None:
    """The daemon's processor time while a file is open and written in passthrough."""
    assert place.mount is not None
    pid = place.mount.pid
    chunk = os.urandom(CHUNK)
    for _ in rounds(samples, count):
        before = cpu_s(pid)
        fd = os.open(place.directory / "one-1.bin", os.O_WRONLY | os.O_CREAT)
        for _ in range(size // CHUNK):
            os.write(fd, chunk)
        samples.add("processor", place.name, (cpu_s(pid) - before) / (size / GIB))
        os.close(fd)
        (place.directory / "one-1.bin").unlink()
        place.settle()


def names(samples: Samples, where: list[Place], count: int) -> None:
    """Small files, stat, readdir; `many` has ENTRIES files already.

    The example lists once: it asks for all attributes again at each request, which takes it 100 s
    for one listing.
    """
    for number in rounds(samples, count):
        for place in where:
            directory = place.directory / f"round-{number}"
            directory.mkdir()
            samples.add("create", place.name, timed(lambda d=directory: create(d)))  # type: ignore[misc]
            timed(lambda d=directory: stat_all(d))  # type: ignore[misc]  # fills the kernel's cache
            samples.add("stat", place.name, timed(lambda d=directory: stat_all(d)))  # type: ignore[misc]
            if place.mount is not None or number == count:
                samples.add(
                    "readdir",
                    place.name,
                    timed(lambda p=place: os.listdir(p.directory / "many")),  # type: ignore[misc]
                )
            place.settle()


def create(directory: Path) -> None:
    content = os.urandom(SMALL_BYTES)
    for number in range(FILES):
        fd = os.open(directory / f"f{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, content)
        os.close(fd)


def stat_all(directory: Path) -> None:
    for number in range(FILES):
        os.stat(directory / f"f{number}")


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# -- putting them together

BARS = [
    ("write", "tmpfs", 0.90, 0.97, "one writer, 8 MiB writes, new file, vs tmpfs huge=within_size"),
    ("write", "shm", 1.8, 2.2, "the same, vs plain /dev/shm"),
    ("read", "tmpfs", 0.90, 0.97, "one reader, warm, vs tmpfs"),
    ("read_mapped", "tmpfs", 0.90, 0.97, "mmap read of a warm file, vs tmpfs"),
    ("save", "tmpfs", 0.95, 0.99, "torch.save, vs tmpfs"),
    ("load", "tmpfs", 0.95, 0.99, "torch.load, vs tmpfs"),
    ("load_mapped", "tmpfs", 0.95, 0.99, "torch.load(mmap=True) + touch, vs tmpfs"),
    ("four", "tmpfs", 0.90, 0.97, "4 writers at once, vs 4 on tmpfs"),
    ("cold", "backing", 0.95, 1.0, "cold read, vs the backing directory"),
    ("persisted", "dd", 0.90, 1.0, "4 files, close to persisted, vs dd conv=fsync in parallel"),
    ("create", "example", 1.0, 3.0, f"{FILES:,} files of 4 KiB, vs pyfuse3's pass-through example"),
    ("stat", "example", 1.0, 3.0, f"stat of {FILES:,} warm files, vs the example"),
    ("readdir", "example", 1.0, 3.0, f"readdir of {ENTRIES:,}, vs the example"),
]
SECTIONS = ("writes", "four", "saves", "reads", "cold", "persisted", "processor", "names")


def measure(size: int, count: int, only: list[str]) -> Report:
    samples = Samples()
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        if set(only) - {"names"}:
            bytes_in_turn(samples, stack, scratch, size, count, only)
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        if "names" in only:
            names_in_turn(samples, stack, scratch, count)
    return judged(samples, size, count)


def bytes_in_turn(
    samples: Samples,
    stack: contextlib.ExitStack,
    scratch: Path,
    size: int,
    count: int,
    only: list[str],
) -> None:
    """All that moves bytes."""

    def mounted(transport: str) -> Place:
        mount = stack.enter_context(
            places.acpfs(scratch / f"backing-{transport}", scratch / transport, transport)
        )
        return Place(transport, mount.path, mount)

    shm = Path("/dev/shm") / scratch.name
    shm.mkdir()
    stack.callback(shm.rmdir)
    tmp = Place("tmpfs", stack.enter_context(places.tmpfs(scratch / "tmpfs", "within_size")))
    samples.huge = tmp.directory
    native = mounted("native")
    plain = scratch / "backing-native"
    if "writes" in only:
        writes(samples, [native, tmp, Place("shm", shm)], size, count)
        writes(samples, [mounted("native-direct"), mounted("libfuse")], size, count)
    if "four" in only:
        four_writers(samples, [native, tmp], size, count)
    if "saves" in only:
        saves(samples, [native, tmp], size, count)
    if "reads" in only:
        reads(samples, [native, tmp], size, count)
    if "cold" in only:
        cold_reads(samples, native, plain, size // 2, count)
    if "persisted" in only:
        persisted(samples, native, plain, tmp.directory, size // 2, count)
    if "processor" in only:
        processor(samples, native, size, count)
    assert native.mount is not None
    print("lanes:", native.mount.status()["lane_choices"], flush=True)


def names_in_turn(samples: Samples, stack: contextlib.ExitStack, scratch: Path, count: int) -> None:
    """All that moves names; everything on one tmpfs, which is best for the example."""
    base = stack.enter_context(places.tmpfs(scratch / "tmpfs"))
    for name in ("mirrored", "backing"):
        (base / name / "many").mkdir(parents=True)
        for number in range(ENTRIES):
            os.mknod(base / name / "many" / f"entry-{number}")
    example = stack.enter_context(
        places.served("bench.passthrough_example", base / "mirrored", scratch / "example")
    )
    mount = stack.enter_context(places.acpfs(base / "backing", scratch / "native", "native"))
    names(samples, [Place("example", example), Place("native", mount.path, mount)], count)


def judged(samples: Samples, size: int, count: int) -> Report:
    """The table and the bars.

    All samples are seconds, so a ratio of speeds is the other's seconds by ours.
    """
    report = Report(
        "native",
        "The native transport",
        ["work", "native", "compared with", "ratio", "bar", "goal"],
    )
    for work, other, bar, goal, label in BARS:
        ours = samples.figure(work, "native")
        theirs = samples.figure(work, other)
        if ours is not None and theirs is not None:
            compare(report, label, (ours, theirs), (bar, goal))
    direct = samples.figure("write", "native-direct")
    libfuse = samples.figure("write", "libfuse")
    if direct is not None and libfuse is not None:
        compare(
            report,
            "direct lane, one writer, vs the libfuse transport",
            (direct, libfuse),
            (2.0, 3.0),
        )
    spent = samples.found.get(("processor", "native"))
    if spent:
        report.row(
            "daemon's CPU seconds per GiB written in passthrough",
            f"{median(spent):.4f}",
            "",
            "",
            "≤ 0.01",
            "0",
        )
        report.bar(
            "at most 0.01 CPU seconds per GiB", f"{median(spent):.4f}", met=median(spent) <= 0.01
        )
    report.samples = {
        f"{work}_{place}_s": values for (work, place), values in samples.found.items()
    }
    if samples.found.get(("readdir", "example")):
        report.notes.append(
            f"names: the example lists {ENTRIES:,} entries once, in the last round, about 100 s"
        )
    report.notes.append(f"{size / GIB:g} GiB a file (cold and persisted: half)")
    report.notes.append(f"{count} rounds in turn after a warm-up: lower quartile (best)")
    written = {
        place: samples.figure("write", place)
        for place in ("native", "tmpfs", "shm", "native-direct", "libfuse")
    }
    speeds = ", ".join(
        f"{place} {size / one.quartile / MB:,.0f} ({size / one.best / MB:,.0f})"
        for place, one in written.items()
        if one
    )
    report.notes.append(f"one writer, MB/s: {speeds}")
    return report


def compare(
    report: Report, label: str, seconds: tuple[Figure, Figure], limits: tuple[float, float]
) -> None:
    """One row and its bar."""
    ours, theirs = seconds
    ratio = theirs.quartile / ours.quartile
    of_best = theirs.best / ours.best
    report.row(
        label, ours, theirs, f"{ratio:.2f} ({of_best:.2f})", f"{limits[0]:g}", f"{limits[1]:g}"
    )
    report.bar(f"{label}: at least {limits[0]:g}", f"{ratio:.2f}", met=ratio >= limits[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", default=list(SECTIONS), choices=SECTIONS)
    arguments = parser.parse_args()
    sys.exit(measure(int(arguments.gib * GIB), arguments.rounds, arguments.only).finish())

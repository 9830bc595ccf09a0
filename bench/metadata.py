"""Names and small files: the mount beside libfuse's `passthrough_ll`, on one tmpfs, in turns.

Usage: python -m bench.metadata [--rounds N] [--scale S] [--only ROW…]. Takes root, gcc and Debian's
libfuse3-dev, whose example (a C program that hands every call on) is built here and not kept.
`--scale 0.1` has a tenth of the files.

Each figure is the best of its rounds and their lower quartile; ratios go by the best, because
others can only disturb. The daemon's processor time stands beside it: it says more than seconds do
where others use the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import resource
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench import places
from bench.native import cpu_s, timed
from bench.record import Report, lower_quartile
from tests.rig.faultfs import is_mounted
from tests.rig.mounts import AcpfsMount

SMALL_BYTES = 4096
FILES = 10_000
MANY_FILES = 30_000
TREE_DIRECTORIES = 300
TREE_FILES = 3000
EXAMPLE = Path("/usr/share/doc/libfuse3-dev/examples/passthrough_ll.c")
DESCRIPTORS_BESIDE = 1000
"""The example has a descriptor for each name that the kernel knows, and says EBADF at a close where
it gets no more.
"""
FORGOTTEN_S = 1.2
"""After so long both file systems ask anew for what they knew: the time for which attributes hold
is a second, in either.
"""

BARS = {"create": 1.0, "stat": 1 / 0.9, "untar": 2.0, "rm -rf": 2.0}
"""Row → how many times as long as the example the mount may take."""
ROWS = ("create", "stat", "stat again", "ls -lR", "untar", "rm", "rm -rf")


@dataclass(frozen=True)
class Place:
    """A file system, its process, and its files so far."""

    name: str
    directory: Path
    pid: int
    mount: AcpfsMount | None = None

    def settle(self) -> None:
        """Nothing is under way any more."""
        if self.mount is not None:
            self.mount.flush(timeout_s=places.DRAIN_TIMEOUT_S)


@dataclass
class Samples:
    """Seconds, and the daemon's seconds of processor, by row and place; not those of the
    warm-up.
    """

    wall: dict[tuple[str, str], list[float]]
    processor: dict[tuple[str, str], list[float]]
    only: frozenset[str]
    warm: bool = False

    def take(self, row: str, place: Place, work: Callable[[], object]) -> None:
        """Do it, and note what it took; also where nobody wants to know, for later rows need its
        files.
        """
        before = cpu_s(place.pid)
        seconds = timed(work)
        if self.warm and row in self.only:
            self.wall.setdefault((row, place.name), []).append(seconds)
            self.processor.setdefault((row, place.name), []).append(cpu_s(place.pid) - before)


# -- the example


def build(directory: Path) -> Path:
    """The example as a program."""
    program = directory / "passthrough_ll"
    flags = subprocess.run(
        ["pkg-config", "fuse3", "--cflags", "--libs"], capture_output=True, text=True, check=True
    ).stdout.split()
    source = EXAMPLE if EXAMPLE.exists() else EXAMPLE.with_suffix(".c.gz")
    if not source.exists():
        raise SystemExit(f"{EXAMPLE} is not there: install libfuse3-dev, with its documentation")
    subprocess.run(
        ["gcc", "-O2", "-D_FILE_OFFSET_BITS=64", str(source), *flags, "-o", str(program)],
        check=True,
    )
    return program


@contextlib.contextmanager
def example(program: Path, source: Path, path: Path) -> Iterator[Place]:
    """A directory as the example shows it, with its defaults: several threads, names and attributes
    hold for a second.
    """
    source.mkdir()
    path.mkdir()
    process = subprocess.Popen(
        [str(program), "-f", "-o", f"source={source}", "-o", "timeout=1", str(path)]
    )
    try:
        deadline = time.monotonic() + places.START_TIMEOUT_S
        while not is_mounted(path):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("passthrough_ll did not mount")
            time.sleep(0.02)
        yield Place("passthrough_ll", path, process.pid)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=False)
        process.wait(10)


# -- what is done


def create(directory: Path, count: int) -> None:
    content = bytes(SMALL_BYTES)
    for number in range(count):
        fd = os.open(directory / f"f{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(fd, content)
        os.close(fd)


def stat_all(directory: Path, count: int) -> None:
    for number in range(count):
        os.stat(directory / f"f{number}")


def remove_all(directory: Path, count: int) -> None:
    for number in range(count):
        os.unlink(directory / f"f{number}")


def command(*words: str | Path) -> None:
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL)


def archive(path: Path, scale: float) -> None:
    """A tree like a repository's: small files, most below a few kilobytes, in nested directories.

    The same each time.
    """
    directories = max(1, int(TREE_DIRECTORIES * scale))
    with tarfile.open(path, "w") as tar:
        for number in range(max(1, int(TREE_FILES * scale))):
            place = number % directories
            size = 200 + number * 7919 % 8000
            found = tarfile.TarInfo(f"tree/package{place % 20}/module{place}/file{number}.py")
            found.size = size
            found.mtime = 1_700_000_000 + number
            tar.addfile(found, io.BytesIO(b"%d" % number * size))


def work(samples: Samples, place: Place, number: int, tar: Path, scale: float) -> None:
    """One round at one place; nothing of it is left."""
    files = int(FILES * scale)
    many = int(MANY_FILES * scale)
    home = place.directory / f"round{number}"
    small = home / "small"
    deep = home / "many"
    small.mkdir(parents=True)
    if samples.only & {"create", "stat", "stat again", "rm"}:
        samples.take("create", place, lambda: create(small, files))
        samples.take("stat", place, lambda: stat_all(small, files))
        place.settle()
        time.sleep(FORGOTTEN_S)
        samples.take("stat again", place, lambda: stat_all(small, files))
        time.sleep(FORGOTTEN_S)
        samples.take("rm", place, lambda: remove_all(small, files))
    if samples.only & {"untar", "ls -lR"}:
        samples.take("untar", place, lambda: command("tar", "-xf", tar, "-C", home))
        place.settle()
        time.sleep(FORGOTTEN_S)
        samples.take("ls -lR", place, lambda: command("ls", "-lR", home))
    if "rm -rf" in samples.only:
        deep.mkdir()
        create(deep, many)
        place.settle()
        time.sleep(FORGOTTEN_S)
        samples.take("rm -rf", place, lambda: command("rm", "-rf", deep))
    command("rm", "-rf", home)
    place.settle()


# -- putting it together


def measure(rounds: int, scale: float, only: list[str]) -> Report:
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    names = FILES + TREE_FILES + MANY_FILES
    if names * scale + DESCRIPTORS_BESIDE > descriptors:
        most = (descriptors - DESCRIPTORS_BESIDE) / names
        raise SystemExit(
            f"passthrough_ll has a descriptor for each name, and may have {descriptors} here: "
            f"--scale {most:.2f} at most"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    samples = Samples({}, {}, frozenset(only))
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(places.scratch())
        base = stack.enter_context(places.tmpfs(scratch / "tmpfs"))
        archive(base / "tree.tar", scale)
        beside = stack.enter_context(
            example(build(scratch), base / "mirrored", scratch / "example")
        )
        mount = stack.enter_context(places.acpfs(base / "backing", scratch / "mount", "native"))
        where = [beside, Place("acpfs", mount.path, mount.pid, mount)]
        for number in range(rounds + 1):
            samples.warm = number > 0
            for place in random.Random(number).sample(where, len(where)):
                work(samples, place, number, base / "tree.tar", scale)
    return _table(samples, rounds, scale)


def _table(samples: Samples, rounds: int, scale: float) -> Report:
    columns = ["row", "acpfs", "its daemon", "passthrough_ll", "its daemon", "ratio"]
    report = Report("metadata", "Names and small files beside passthrough_ll", columns)
    for row in ROWS:
        if row not in samples.only:
            continue
        cells: list[str] = []
        for name in ("acpfs", "passthrough_ll"):
            seconds = samples.wall[row, name]
            processor = samples.processor[row, name]
            cells += [
                f"{min(seconds):.3f} s ({lower_quartile(seconds):.3f})",
                f"{min(processor):.2f} s",
            ]
            report.samples[f"{row}, {name}_s"] = seconds
            report.samples[f"{row}, {name}, processor_s"] = processor
        ratio = min(samples.wall[row, "acpfs"]) / min(samples.wall[row, "passthrough_ll"])
        report.row(row, *cells, f"{ratio:.1f}")
        if row in BARS:
            report.bar(
                f"{row}: at most {BARS[row]:.2g} times passthrough_ll",
                f"{ratio:.2f}",
                met=ratio <= BARS[row],
            )
    report.notes.append(
        f"{rounds} rounds in turn after a warm-up: best and lower quartile; {scale:g} of the "
        "files; all on one tmpfs"
    )
    report.notes.append(
        f"{FILES:,} files of 4 KiB; {TREE_FILES:,} in {TREE_DIRECTORIES} directories; rm -rf of "
        f"{MANY_FILES:,}, drained"
    )
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether to save what was found",
    )
    arguments = parser.parse_args()
    sys.exit(measure(arguments.rounds, arguments.scale, arguments.only).finish(keep=arguments.keep))

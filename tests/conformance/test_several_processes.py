"""One file opened by several processes in several ways behaves as on tmpfs: random operations, each
done on the target and on a tmpfs.

Every answer must be the same: bytes, sizes, link counts, errnos. Operations of the processes
alternate, so that there is one right answer; what is open at the same time, in which mode, through
which descriptors and mappings, is random.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.rig.targets import TRANSPORTS, Target

pytestmark = pytest.mark.mount

REPOSITORY = Path(__file__).parents[2]
PROCESSES = 3
SLOTS = 3
NAMES = ("a", "b")
SIZE = 96 << 10
MAPPED = 64 << 10
OPS = 700
KEEP_SIZE = 1
PUNCH_HOLE = 2
ACCESS = {
    "mixed": (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY, os.O_RDWR),
    "one-way": (os.O_RDONLY, os.O_WRONLY),
    "both-ways": (os.O_RDWR, os.O_RDWR, os.O_RDONLY),
}
"""What files are opened for: the native transport sends those that are not read and written at once
another way.
"""
FLAGS = (
    0,
    0,
    os.O_CREAT,
    os.O_CREAT | os.O_APPEND,
    os.O_TRUNC | os.O_CREAT,
    os.O_DIRECT,
    os.O_DSYNC,
)


class Opener:
    """A process with open files."""

    def __init__(self, directory: Path, reference: Path) -> None:
        self.files: set[int] = set()
        self.maps: set[int] = set()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.rig.opener", str(directory), str(reference)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
        )

    def ask(self, operation: list[Any]) -> list[Any]:
        """What the operation's outcome was on the target, and on the tmpfs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(operation) + "\n")
        self._process.stdin.flush()
        answer: list[Any] = json.loads(self._process.stdout.readline())
        return answer

    def note(self, operation: list[Any]) -> None:
        """The operation succeeded: what is open and mapped now."""
        name, *arguments = operation
        changes = {
            "open": (self.files.add, 0),
            "close": (self.files.discard, 0),
            "duplicate": (self.files.add, 1),
        }
        changes |= {"map": (self.maps.add, 1), "unmap": (self.maps.discard, 0)}
        if name in changes:
            change, position = changes[name]
            change(arguments[position])

    def end(self) -> None:
        """By end of input: what is open and mapped is closed by the kernel."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            # it hangs in the mount, which is this test's failure and must not become that of
            # another one
            self._process.kill()
            self._process.wait(120)
            raise
        finally:
            self._process.stdout.close()


class Script:
    """Makes up operations.

    Files are not made shorter than a mapping of them is, which would be a SIGBUS.
    """

    def __init__(self, seed: int, target: Target, access: tuple[int, ...]) -> None:
        self.random = random.Random(seed)
        self._target = target
        self._access = access

    def next(self, opener: Opener, *, mapped: bool) -> list[Any]:
        r = self.random
        used = sorted(opener.files) * 4
        slot, other, free = (r.choice([*used, r.randrange(SLOTS)]) for _ in range(3))
        name = r.choice(NAMES)
        seed = r.randrange(10_000)
        size = r.choice((1, 100, 4096, 5000, r.randrange(1, SIZE // 2)))
        offset = r.randrange(SIZE)
        low = MAPPED if mapped else 0
        choices: list[tuple[int, list[Any]]] = [
            (
                10,
                [
                    "open",
                    r.randrange(SLOTS),
                    name,
                    r.choice(self._access) | self._flags(truncating=not mapped),
                ],
            ),
            (4, ["close", slot]),
            (1, ["duplicate", slot, free]),
            (6, ["write", slot, seed, size]),
            (10, ["pwrite", slot, seed, size, offset]),
            (4, ["read", slot, size]),
            (10, ["pread", slot, size, offset]),
            (2, ["seek", slot, offset, r.choice((os.SEEK_SET, os.SEEK_END))]),
            (3, ["ftruncate", slot, r.randrange(low, SIZE)]),
            (1, ["truncate", name, r.randrange(low, SIZE)]),
            (4, ["fstat", slot]),
            (4, ["stat", name]),
            (2, ["fsync", slot]),
            (2, ["copy", slot, offset, other, r.randrange(SIZE), size]),
            (4, ["map", slot, slot, MAPPED, r.random() < 0.8, r.random() < 0.6]),
            (2, ["unmap", slot]),
            (1, ["unlink", name]),
            (1, ["rename", name, r.choice(NAMES)]),
            (1, ["link", name, r.choice(NAMES)]),
        ]
        if opener.maps:
            held = r.choice(sorted(opener.maps))
            within = r.randrange(MAPPED - 8192)
            choices += [
                (8, ["store", held, seed, min(size, 8192), within]),
                (8, ["load", held, min(size, 8192), within]),
            ]
        if self._target.can("fallocate"):
            choices.append(
                (
                    2,
                    [
                        "fallocate",
                        slot,
                        r.choice((0, KEEP_SIZE, KEEP_SIZE | PUNCH_HOLE)),
                        offset,
                        size,
                    ],
                )
            )
        operation: list[Any] = r.choices([o for _w, o in choices], [w for w, _o in choices])[0]
        return operation

    def _flags(self, *, truncating: bool) -> int:
        flags = self.random.choice(FLAGS)
        return flags if truncating else flags & ~os.O_TRUNC


@pytest.fixture
def reference() -> Iterator[Path]:
    """A directory on a tmpfs, whatever the target is."""
    path = Path(tempfile.mkdtemp(prefix="acpfs-reference-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.mark.clause("S13", "S34", "S39", "S44", "S49")
@pytest.mark.parametrize("access", list(ACCESS))
def test_one_file_opened_by_several_processes_in_several_ways(
    target: Target, d: Path, reference: Path, seed: int, access: str, request: pytest.FixtureRequest
) -> None:
    if target.name not in TRANSPORTS:
        pytest.skip("only mounts are compared with a tmpfs")
    script = Script(seed, target, ACCESS[access])
    done = []
    for directory in (d, reference):
        for name in NAMES:
            (directory / name).write_bytes(b"\1" * SIZE)
    with ExitStack() as stack:
        openers = [Opener(d, reference) for _ in range(PROCESSES)]
        for opener in openers:
            stack.callback(opener.end)
        for number in range(request.config.getoption("--ops") or OPS):
            who = script.random.randrange(PROCESSES)
            opener = openers[who]
            operation = script.next(opener, mapped=any(o.maps for o in openers))
            ours, theirs = opener.ask(operation)
            done.append(f"{number}: process {who} {operation} → {ours} {theirs}")
            assert ours == theirs, "\n".join(done[-60:])
            if ours is None:
                opener.note(operation)
    assert {p.name: p.read_bytes() for p in d.iterdir()} == {
        p.name: p.read_bytes() for p in reference.iterdir()
    }
    if target.mount is not None and target.backing is not None:
        target.mount.flush()
        lower = target.backing / d.name
        assert {p.name: p.read_bytes() for p in lower.iterdir()} == {
            p.name: p.read_bytes() for p in reference.iterdir()
        }

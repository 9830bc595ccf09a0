"""The RAM tier's account agrees with its tmpfs, to the byte, after random operations and kills, in
every lane.

A failure prints the seed and the operations; `--seed` runs them again, `--ops` says how many.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from acpfs.errors import AcpfsError
from tests.rig.mounts import AcpfsMount
from tests.rig.syscalls import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, fallocate

pytestmark = [
    pytest.mark.mount,
    pytest.mark.clause("S131", "S234"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]

MIB = 1 << 20
OPS = 90
CHECK_EVERY = 15
KILL_EVERY = 45
BUDGET = 48 * MIB
GRANT = BUDGET // 8
"""A passthrough writer that was held goes on with so much room, which is its own until it has
written it or closes (`Hold`).
"""
SLOTS = 5
BLOCK = os.urandom(4 * MIB)
NAMES = [f"f{n}" for n in range(6)]
SHORT = {errno.ENOSPC, errno.EOPNOTSUPP, errno.EBUSY, errno.ENOENT, errno.ETXTBSY}
"""What an operation may answer here; the account has to be right all the same."""


class Player:
    """Random operations on one mount; every method is one of them."""

    def __init__(self, mount: AcpfsMount, seed: int) -> None:
        self._mount = mount
        self._chance = random.Random(seed)
        self._open: dict[int, int] = {}
        self.done: list[str] = []

    def play(self) -> None:
        """One operation."""
        operation: Callable[[], str] = self._chance.choices(*zip(*WEIGHTS, strict=True))[0].__get__(
            self
        )
        try:
            what = operation()
        except OSError as error:
            if error.errno not in SHORT:
                raise
            what = errno.errorcode[error.errno or 0]
        self.done.append(f"{operation.__name__} {what}")

    def _path(self) -> Path:
        return self._mount.path / self._chance.choice(NAMES)

    def _offset(self) -> int:
        return self._chance.choice(
            [0, self._chance.randrange(2 * MIB), self._chance.randrange(24 * MIB)]
        )

    def _size(self) -> int:
        return self._chance.choice(
            [1, 4096, self._chance.randrange(1, 100_000), self._chance.randrange(1, len(BLOCK))]
        )

    def _slot(self) -> int | None:
        return self._chance.choice(list(self._open.values())) if self._open else None

    def open(self) -> str:
        slot = self._chance.randrange(SLOTS)
        path = self._path()
        flags = self._chance.choice([os.O_WRONLY, os.O_WRONLY, os.O_RDWR, os.O_RDONLY]) | os.O_CREAT
        flags |= self._chance.choice([0, os.O_TRUNC, os.O_APPEND]) if flags & os.O_ACCMODE else 0
        if slot in self._open:
            os.close(self._open.pop(slot))
        self._open[slot] = os.open(path, flags, 0o644)
        return f"{slot} {path.name} {flags:o}"

    def close(self) -> str:
        if self._open:
            os.close(self._open.pop(self._chance.choice(list(self._open))))
        return ""

    def write(self) -> str:
        fd = self._slot()
        size = self._size()
        offset = self._offset()
        with contextlib.suppress(OSError):  # read-only ones too
            if fd is not None:
                os.pwrite(fd, BLOCK[:size], offset)
        return f"{size} at {offset}"

    def save(self) -> str:
        """A whole file at once, as most are written."""
        path = self._path()
        size = self._size() * 2
        with open(path, "wb", buffering=0) as file:
            file.write(BLOCK[: size // 2])
            file.write(BLOCK[: size // 2])
        return f"{path.name} {size}"

    def truncate(self) -> str:
        path = self._path()
        size = self._offset()
        os.truncate(path, size)
        return f"{path.name} {size}"

    def allocate(self) -> str:
        fd = self._slot()
        size = self._size()
        offset = self._offset()
        mode = self._chance.choice(
            [
                0,
                FALLOC_KEEP_SIZE,
                FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE,
                FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE,
                FALLOC_ZERO_RANGE,
            ]
        )
        if fd is not None:
            with contextlib.suppress(OSError):
                fallocate(fd, mode, offset, size)
        return f"{mode} {size} at {offset}"

    def read_mapped(self) -> str:
        """A hole that is read through a mapping takes pages, and leaves no trace but those."""
        path = self._path()
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size:
                with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapping:
                    return f"{path.name} {sum(mapping[at] for at in range(0, size, 4096))}"
        return path.name

    def fsync(self) -> str:
        fd = self._slot()
        if fd is not None:
            os.fsync(fd)
        return ""

    def unlink(self) -> str:
        path = self._path()
        path.unlink()
        return path.name

    def rename(self) -> str:
        old = self._path()
        new = self._path()
        old.rename(new)
        return f"{old.name} {new.name}"

    def evict(self) -> str:
        with contextlib.suppress(AcpfsError):  # not there
            self._mount.ask("evict", paths=[self._chance.choice(NAMES)])
        return ""

    def close_all(self) -> None:
        """Nothing is open any more."""
        for fd in self._open.values():
            with contextlib.suppress(OSError):  # of a session that is gone
                os.close(fd)
        self._open.clear()


WEIGHTS = [
    (Player.open, 8),
    (Player.close, 5),
    (Player.write, 14),
    (Player.save, 8),
    (Player.truncate, 5),
    (Player.allocate, 6),
    (Player.read_mapped, 3),
    (Player.fsync, 2),
    (Player.unlink, 4),
    (Player.rename, 4),
    (Player.evict, 3),
]


def agree(mount: AcpfsMount) -> None:
    """Once nothing is under way (a close is noted in the background, and passthrough writers are
    looked at now and then).
    """
    mount.wait_status(
        lambda status: is_right(
            status["ram"], granted=mount.transport == "native-passthrough" and status["open_files"]
        )
    )
    assert mount.ask("doctor") == {"items": []}


def is_right(ram: dict[str, int], *, granted: int = 0) -> bool:
    """Whether account and tmpfs say the same.

    `granted`: how many files may still have room that they were given when they were held.
    """
    return (
        ram["used_bytes"] == ram["tmpfs_used_bytes"] == ram["dirty_bytes"] + ram["clean_bytes"]
        and 0 <= ram["reserved_bytes"] <= granted * GRANT
        and ram["leaving_bytes"] == 0
        and ram["used_bytes"] <= ram["budget_bytes"]
    )


@pytest.mark.transports("libfuse", "native-direct", "native-passthrough")
def test_the_account_is_what_the_tmpfs_says(
    tmp_path: Path, transport: str, pytestconfig: pytest.Config
) -> None:
    seed = pytestconfig.getoption("--seed") or random.randrange(1 << 32)
    (tmp_path / "backing").mkdir()
    with AcpfsMount(
        tmp_path / "backing",
        tmp_path / "mnt",
        transport,
        ram=BUDGET,
        bandwidth="200M",
        attr_timeout=0.1,
    ) as mount:
        player = Player(mount, seed)
        try:
            for number in range(1, (pytestconfig.getoption("--ops") or OPS) + 1):
                player.play()
                if number % KILL_EVERY == 0:
                    kill(mount, player)
                if number % CHECK_EVERY == 0:
                    agree(mount)
            player.close_all()
            for name in os.listdir(mount.path):
                os.unlink(mount.path / name)
            mount.wait_status(
                lambda status: (
                    is_right(status["ram"])
                    and status["ram"]["used_bytes"] == status["ram"]["files"] == 0
                )
            )
        except BaseException:
            print(f"seed {seed}", *player.done, sep="\n")
            raise
        finally:
            player.close_all()


@pytest.mark.transports("native-direct", "native-passthrough")
def test_a_hole_that_is_read_through_a_mapping_counts_with_its_pages(
    tmp_path: Path, transport: str
) -> None:
    """The passthrough lane's kernel gives it pages, unseen; also beyond the budget, for which what
    is clean leaves.
    """
    (tmp_path / "backing").mkdir()
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, ram=BUDGET) as mount:
        for number in range(4):
            path = mount.path / f"sparse{number}"
            with open(path, "wb") as file:
                file.seek(BUDGET // 3)
                file.write(b"x")
            mount.flush()
            if number == 2:
                mount.kill_worker()
            with (
                open(path, "rb") as reader,
                mmap.mmap(reader.fileno(), 0, prot=mmap.PROT_READ) as mapping,
            ):
                assert sum(mapping[at] for at in range(0, len(mapping), 4096)) == ord("x") * (
                    BUDGET // 3 % 4096 == 0
                )
            agree(mount)


def kill(mount: AcpfsMount, player: Player) -> None:
    """The worker, over a session that goes on; with libfuse everything, and a new mount over what
    is left.
    """
    if mount.transport == "libfuse":
        player.close_all()
        mount.kill()
        mount.start()
        mount.ask("retry", paths=[""])  # files whose writers are gone
    else:
        before = mount.kill_worker()
        mount.wait_status(lambda status: status["worker"]["pid"] != before)

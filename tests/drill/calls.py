"""System calls that are journaled before they are made and after they have returned.

Part of the application's process: standard library only, knows the mount point and the journal's
file, nothing of the checker.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from acpfs.control import client, registry
from tests.drill.spec import JournalWriter, bytes_of
from tests.rig.syscalls import RENAME_EXCHANGE, rename2

LABELS = 100
FLUSH_TIMEOUT_S = 60.0


class CallError(Exception):
    """A call failed; the application stops there."""


class Calls:
    """Makes calls below a mount point; `paths` is what it knows to be there: path → is a
    directory.
    """

    def __init__(self, root: Path, journal: JournalWriter, runtime_dir: Path) -> None:
        self.root = root
        self._journal = journal
        self._runtime_dir = runtime_dir
        self.paths: dict[str, bool] = {}
        self.sizes: dict[int, int] = {}
        self._fds: dict[int, int] = {}

    def _do(self, function: Callable[[], Any], *words: Any) -> Any:
        self._journal.begin(*words)
        try:
            answer = function()
        except (OSError, RuntimeError) as error:  # what torch's own writer raises knows no errno
            self._journal.end(getattr(error, "errno", None) or -1)
            raise CallError(f"{words[:3]}: {error}") from error
        self._journal.end()
        return answer

    # -- descriptors

    def open(self, path: str, *, truncate: bool = True, sync: bool = False) -> int:
        """A label for the journal, which must name the descriptor before it is there.

        Labels and descriptors have the same order.
        """
        label = next(number for number in range(LABELS) if number not in self.sizes)
        flags = (
            os.O_CREAT | os.O_WRONLY | (os.O_TRUNC if truncate else 0) | (os.O_SYNC if sync else 0)
        )

        def open_it() -> None:
            self._fds[label] = os.open(self.root / path, flags, 0o644)
            self.sizes[label] = os.fstat(self._fds[label]).st_size

        self._do(open_it, "open", path, label, truncate)
        self.paths[path] = False
        return label

    def write(self, fd: int, seed: int, size: int, offset: int | None = None) -> None:
        """Bytes by description; at the end where no offset is given."""
        at = self.sizes[fd] if offset is None else offset
        data = bytes_of(seed, size)

        def write_all() -> None:
            done = 0
            while done < size:
                done += os.pwrite(self._fds[fd], data[done:], at + done)

        self._do(write_all, "write", fd, at, seed, size)
        self.sizes[fd] = max(self.sizes[fd], at + size)

    def fsync(self, fd: int) -> None:
        self._do(lambda: os.fsync(self._fds[fd]), "fsync", fd)

    def close(self, fd: int) -> None:
        self._do(lambda: os.close(self._fds.pop(fd)), "close", fd)
        del self.sizes[fd]

    def drop_all(self) -> None:
        """After the daemon's death: nothing can be hoped for from these."""
        while self._fds:
            try:
                os.close(self._fds.popitem()[1])
            except OSError:
                continue
        self.sizes.clear()

    # -- names

    def mkdir(self, path: str) -> None:
        self._do(lambda: os.mkdir(self.root / path), "mkdir", path)
        self.paths[path] = True

    def rmdir(self, path: str) -> None:
        self._do(lambda: os.rmdir(self.root / path), "rmdir", path)
        del self.paths[path]

    def unlink(self, path: str) -> None:
        self._do(lambda: os.unlink(self.root / path), "unlink", path)
        del self.paths[path]

    def rename(self, old: str, new: str) -> None:
        self._do(lambda: os.rename(self.root / old, self.root / new), "rename", old, new)
        self._move(old, new)

    def _move(self, old: str, new: str) -> None:
        moved = {p: d for p, d in self.paths.items() if p == old or p.startswith(old + "/")}
        self.paths = {
            p: d
            for p, d in self.paths.items()
            if p not in moved and p != new and not p.startswith(new + "/")
        }
        self.paths |= {new + p[len(old) :]: d for p, d in moved.items()}

    def exchange(self, one: str, other: str) -> None:
        self._do(
            lambda: rename2(self.root / one, self.root / other, RENAME_EXCHANGE),
            "exchange",
            one,
            other,
        )

    def link(self, old: str, new: str) -> None:
        self._do(lambda: os.link(self.root / old, self.root / new), "link", old, new)
        self.paths[new] = False

    def symlink(self, target: str, path: str) -> None:
        self._do(lambda: os.symlink(target, self.root / path), "symlink", target, path)
        self.paths[path] = False

    # -- more than one call

    def store(self, path: str, whole: str, write: Callable[[Path], None]) -> None:
        """A library writes a file by itself; its digest is known before."""
        self._do(lambda: write(self.root / path), "store", path, whole)
        self.paths[path] = False

    def sync(self, source: Path, below: str, files: dict[str, str], directories: list[str]) -> None:
        """rsync SOURCE/ to a directory of the mount."""

        def run() -> None:
            command = ["rsync", "-rlt", f"{source}/", f"{self.root / below}/"]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, check=False
            )
            if done.returncode:
                raise OSError(5, done.stderr.decode(errors="replace")[-300:])

        self._do(run, "sync", below, files, directories)
        self.paths |= {f"{below}/{name}".rstrip("/"): True for name in directories} | {
            f"{below}/{name}": False for name in files
        }

    def flush(self) -> None:
        """What `acpfs-ctl flush` does."""

        def ask() -> None:
            record = registry.find(
                registry.normalised(str(self.root)), registry.records([self._runtime_dir])
            )
            try:
                client.request(record, "flush", {"paths": [], "timeout_s": FLUSH_TIMEOUT_S})
            except Exception as error:
                raise OSError(107, f"flush: {error}") from error

        self._do(ask, "flush")

    def save(self, path: str, seed: int, size: int, *, pieces: int = 1, sync: bool = False) -> None:
        """open, write, perhaps fsync, close."""
        fd = self.open(path)
        step = max(1, -(-size // pieces))
        for number, at in enumerate(range(0, size, step)):
            self.write(fd, seed + number, min(step, size - at))
        if sync:
            self.fsync(fd)
        self.close(fd)

    def remove_tree(self, path: str) -> None:
        """rm -r, one call after the other."""
        for below in sorted((p for p in self.paths if p.startswith(path + "/")), reverse=True):
            (self.rmdir if self.paths[below] else self.unlink)(below)
        self.rmdir(path)

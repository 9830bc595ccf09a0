"""A training job on several nodes, as far as its checkpoints go, and what is true of the
checkpoints that a pointer names.

A save is what Megatron and DCP do: every node writes its shard, all wait for all (here: by
returning), then node 0 writes `.metadata` (temporary name and rename), which lists all shards with
their checksums, and then the tracker in place. `ranks.py` has the same with real frameworks.
Neither torch nor acpfs is needed here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
SHARD_BYTES = (1 << 12, 1 << 18)


class Job:
    """Writes checkpoints; `paths` are the mount points (or one directory, for all)."""

    def __init__(
        self,
        paths: Sequence[Path],
        seed: int,
        *,
        shard_bytes: tuple[int, int] = SHARD_BYTES,
        keep: int = 0,
    ) -> None:
        """`keep`: delete all but so many, `.metadata` first, then every node its shard; 0: delete
        nothing.
        """
        self._keep = keep
        self._mountpoints = list(paths)
        self.paths = list(paths)
        self._entered: list[int] = []
        self._random = random.Random(seed)
        self._shard_bytes = shard_bytes
        self.iteration = 0
        self._pool = ThreadPoolExecutor(len(self.paths))

    def enter(self) -> None:
        """From now on work in what is mounted now, as processes of those nodes would: when it is
        gone, not in what lies beneath.
        """
        self.close()
        self._entered = [os.open(path, os.O_PATH | os.O_DIRECTORY) for path in self._mountpoints]
        self.paths = [Path(f"/proc/self/fd/{fd}") for fd in self._entered]

    def close(self) -> None:
        """Keep no mount busy."""
        for fd in self._entered:
            os.close(fd)
        self._entered = []
        self.paths = self._mountpoints

    def save(self) -> None:
        """One checkpoint; returns when node 0 has closed the tracker.

        Raises:
            OSError: a node cannot write.
        """
        self.iteration += 1
        seeds = [self._random.randrange(1 << 60) for _ in self.paths]
        shards = dict(list(self._pool.map(self._shard, range(len(self.paths)), seeds)))
        top = self.paths[0]
        temporary = top / self.name / ".metadata.tmp"
        temporary.write_text(json.dumps(shards), encoding="ascii")
        temporary.replace(top / self.name / ".metadata")
        (top / TRACKER).write_text(str(self.iteration), encoding="ascii")
        if self._keep and self.iteration > self._keep:
            self._delete(f"iter_{self.iteration - self._keep:07d}")

    def _delete(self, name: str) -> None:
        (self.paths[0] / name / ".metadata").unlink(
            missing_ok=True
        )  # a save that was given up has none
        list(
            self._pool.map(
                lambda number: (self.paths[number] / name / f"shard{number}.bin").unlink(
                    missing_ok=True
                ),
                range(len(self.paths)),
            )
        )

    @property
    def name(self) -> str:
        """Directory of the newest checkpoint."""
        return f"iter_{self.iteration:07d}"

    def _shard(self, number: int, seed: int) -> tuple[str, str]:
        chooser = random.Random(seed)
        content = chooser.randbytes(chooser.randrange(*self._shard_bytes))
        directory = self.paths[number] / self.name
        directory.mkdir(exist_ok=True)
        with open(directory / f"shard{number}.bin", "wb") as file:
            file.write(content)
        return f"shard{number}.bin", _digest(content)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def looks_right(backing: Path, pointed: str) -> str:
    """What is wrong with a checkpoint that a pointer names; "" when nothing is."""
    directory = backing / pointed
    try:
        shards = json.loads((directory / ".metadata").read_bytes())
    except FileNotFoundError:
        return f"{pointed}: no .metadata"
    except ValueError:
        return f"{pointed}: .metadata is torn"
    for name, digest in shards.items():
        try:
            content = (directory / name).read_bytes()
        except FileNotFoundError:
            return f"{pointed}: {name} is missing"
        if _digest(content) != digest:
            return f"{pointed}: {name} is wrong ({len(content)} bytes)"
    return ""


def tracked(backing: Path) -> str:
    """The checkpoint that the tracker names; "" when it names none."""
    with contextlib.suppress(FileNotFoundError):
        if tracker := (backing / TRACKER).read_text(encoding="ascii"):
            return f"iter_{int(tracker):07d}"
    return ""


def pointed_at(backing: Path, known: set[str]) -> list[str]:
    """Checkpoints that some pointer names; with `known`, only the tracker's and those that were not
    seen whole already.
    """
    named = [name] if (name := tracked(backing)) else []
    directories = [
        name for name in os.listdir(backing) if name.startswith("iter_") and name not in known
    ]
    return named + [name for name in directories if (backing / name / ".metadata").exists()]

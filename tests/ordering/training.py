"""The workload of the ordering test: what training jobs do to a checkpoint directory, at random, as
one application.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.ordering.history import Application

SHARD_BYTES_MAX = 150_000
LARGE_BYTES = 3_000_000
KEPT = 3


class TrainingRun:
    """Rounds of saves with trackers, retention, logs and mishaps."""

    def __init__(self, application: Application, seed: int, *, exchange: bool = True) -> None:
        """`exchange`: of two names; where the backing file system cannot it is not one step there
        (S27).
        """
        self.application = application
        self._exchanges = exchange
        self._random = random.Random(seed)
        self._iteration = 0
        self._kept: list[str] = []

    def round(self) -> None:
        """One checkpoint and what goes on around it."""
        self._iteration += 1
        style = self._random.choice((self._plain, self._by_directory_rename, self._by_file_rename))
        self._kept.append(style(f"iter_{self._iteration:04d}"))
        self._tracker(self._kept[-1])
        for incident in self._random.sample(self._incidents(), self._random.randrange(4)):
            incident()
        while len(self._kept) > KEPT:
            self.application.remove_tree(self._kept.pop(0))

    def _data(self) -> bytes:
        size = (
            LARGE_BYTES if self._random.random() < 0.03 else self._random.randrange(SHARD_BYTES_MAX)
        )
        return self._random.randbytes(size)

    def _shards(self, directory: str) -> list[str]:
        return [f"{directory}/shard_{number}.pt" for number in range(self._random.randrange(1, 6))]

    def _plain(self, name: str) -> str:
        app = self.application
        app.mkdir(name)
        for path in self._shards(name):
            app.save(
                path,
                self._data(),
                pieces=self._random.randrange(1, 4),
                sync=self._random.random() < 0.3,
            )
        return name

    def _by_directory_rename(self, name: str) -> str:
        app = self.application
        app.mkdir(name + ".tmp")
        app.mkdir(name + ".tmp/mp_rank_00")
        for path in self._shards(name + ".tmp/mp_rank_00"):
            app.save(path, self._data())
        app.rename(name + ".tmp", name)
        return name

    def _by_file_rename(self, name: str) -> str:
        """As safetensors does: the rename comes while the file is still open."""
        app = self.application
        app.mkdir(name)
        for path in self._shards(name):
            opened = app.open(path + ".tmp")
            app.write(opened, self._data())
            app.rename(path + ".tmp", path)
            app.close(opened)
        return name

    def _tracker(self, name: str) -> None:
        app = self.application
        if self._random.random() < 0.5:
            app.save("latest", name.encode())
        else:
            app.save("latest.tmp", name.encode(), sync=True)
            app.rename("latest.tmp", "latest")

    def _incidents(self) -> list[Callable[[], None]]:
        return [
            self._log,
            self._rewrite,
            self._passing_file,
            self._best,
            self._symlink,
            *([self._exchange] if self._exchanges else []),
            self._log,
            self._patch,
            self._passing_directory,
        ]

    def _log(self) -> None:
        self.application.append("train.log", b"step %d\n" % self._iteration * 50)

    def _rewrite(self) -> None:
        """A shard is written again, perhaps while it streams."""
        path = self._kept[-1] + "/rewritten.pt"
        for _ in range(self._random.randrange(1, 4)):
            self.application.save(path, self._data())

    def _patch(self) -> None:
        """Bytes inside a file are changed: neither truncated nor appended."""
        app = self.application
        path = self._kept[-1] + "/patched.pt"
        app.save(path, self._data() + bytes(5_000))
        opened = app.open(path, truncate=False)
        app.write(opened, b"patch" * 100, offset=self._random.randrange(4_000))
        app.close(opened)

    def _passing_file(self) -> None:
        self.application.save("passing.tmp", self._data())
        self.application.unlink("passing.tmp")

    def _passing_directory(self) -> None:
        app = self.application
        app.mkdir("scratch")
        app.save("scratch/a", self._data())
        app.save("scratch/b", self._data())
        app.remove_tree("scratch")

    def _best(self) -> None:
        app = self.application
        app.save(self._kept[-1] + "/best.pt", self._data())
        if "best.pt" in app.nodes:
            app.unlink("best.pt")
        app.link(self._kept[-1] + "/best.pt", "best.pt")

    def _symlink(self) -> None:
        app = self.application
        app.symlink(self._kept[-1], "last.tmp")
        app.rename("last.tmp", "last")

    def _exchange(self) -> None:
        app = self.application
        for name in ("left", "right"):
            app.save(name, self._data())
        app.exchange("left", "right")

"""What the application does, by name: rounds of journaled calls, at random from a seed, that may
begin over any tree.

Part of the application's process: standard library only (and torch, where the interpreter has it).
"""

from __future__ import annotations

import importlib
import io
import random
import select
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.drill.calls import Calls
from tests.drill.spec import digest

KEPT = 3
SHARD_BYTES_MAX = 120_000
LARGE_BYTES = 2_500_000
"""Some files are larger than what one thread copies in one go, and than the small-file path of the
engine.
"""
_DATE = (2024, 1, 1, 0, 0, 0)


class Workload:
    """Rounds of one kind; names carry the round's number, so that nothing depends on what was there
    before.
    """

    def __init__(self, calls: Calls, seed: int) -> None:
        self.calls = calls
        self.random = random.Random(seed)
        self.number = 0

    def round(self) -> None:
        """Do something; overridden."""
        raise NotImplementedError

    def data(self) -> tuple[int, int]:
        """(seed, size) of some bytes."""
        large = self.random.random() < 0.02
        return self.random.randrange(1 << 48), LARGE_BYTES if large else self.random.randrange(
            SHARD_BYTES_MAX
        )

    def retain(self, prefix: str, kept: int = KEPT) -> None:
        """rm -r of the oldest checkpoints."""
        tops = sorted(
            path
            for path, is_dir in self.calls.paths.items()
            if is_dir and "/" not in path and path.startswith(prefix)
        )
        for path in tops[: max(0, len(tops) - kept)]:
            self.calls.remove_tree(path)

    def tracker(self, text: str) -> None:
        """The file that points at the newest checkpoint."""
        body = text.encode()
        self.calls.store(
            "latest_checkpointed_iteration.txt", digest(body), lambda path: _write(path, body)
        )


def _write(path: Path, body: bytes) -> None:
    path.write_bytes(body)


class TorchSave(Workload):
    """torch.save of a few shards, or a zip file written the same way where there is no torch; then
    the tracker.
    """

    def __init__(self, calls: Calls, seed: int) -> None:
        super().__init__(calls, seed)
        self._torch = (
            importlib.import_module("torch") if importlib.util.find_spec("torch") else None  # type: ignore[attr-defined]
        )
        self._scratch = Path(tempfile.mkdtemp(prefix="drill-"))

    def round(self) -> None:
        name = f"iter_{self.number:07d}"
        self.calls.mkdir(name)
        for rank in range(self.random.randrange(1, 4)):
            self._save(f"{name}/model_{rank}.pt")
        if self.random.random() < 0.15:
            self.calls.flush()
        self.tracker(str(self.number))
        self.retain("iter_")

    def _save(self, path: str) -> None:
        """The digest is that of the same save made elsewhere: the archive names its members after
        the file.
        """
        state = self.random.randrange(1 << 30)
        write = self._write_torch if self._torch else self._write_zip
        beside = self._scratch / Path(path).name
        write(beside, state)
        self.calls.store(path, digest(beside.read_bytes()), lambda target: write(target, state))

    def _write_torch(self, path: Path, state: int) -> None:
        assert self._torch is not None
        generator = self._torch.Generator().manual_seed(state)
        self._torch.save(
            {
                f"layer.{n}": self._torch.rand(state % 9000 + n, generator=generator)
                for n in range(3)
            },
            path,
        )

    def _write_zip(self, path: Path, state: int) -> None:
        chooser = random.Random(state)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            for number in range(4):
                entry = zipfile.ZipInfo(f"{path.stem}/data/{number}", _DATE)
                archive.writestr(
                    entry, io.BytesIO(chooser.randbytes(chooser.randrange(40_000))).getvalue()
                )

    def __del__(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)


class Overwrite(Workload):
    """Files are written again, whole or in the middle, while they may be streaming."""

    def round(self) -> None:
        calls = self.calls
        path = f"state_{self.random.randrange(4)}.bin"
        seed, size = self.data()
        calls.save(
            path,
            seed,
            size + 9_000,
            pieces=self.random.randrange(1, 4),
            sync=self.random.random() < 0.2,
        )
        for _ in range(self.random.randrange(3)):
            fd = calls.open(path, truncate=False)
            calls.write(
                fd,
                self.random.randrange(1 << 30),
                self.random.randrange(1, 4_000),
                offset=self.random.randrange(5_000),
            )
            if self.random.random() < 0.2:
                calls.fsync(fd)
            calls.close(fd)
        if self.random.random() < 0.05:
            calls.flush()


class RenameDance(Workload):
    """Write beside, rename into place: files (also while they are open), directories, links,
    exchanges.
    """

    def round(self) -> None:
        calls = self.calls
        name = f"ckpt_{self.number:07d}"
        calls.mkdir(name + ".tmp")
        calls.mkdir(name + ".tmp/rank_0")
        for number in range(self.random.randrange(1, 4)):
            calls.save(f"{name}.tmp/rank_0/shard_{number}", *self.data())
        calls.rename(name + ".tmp", name)
        fd = calls.open(name + "/config.tmp")
        calls.write(fd, self.number, 3_000)
        calls.rename(name + "/config.tmp", name + "/config.json")
        calls.close(fd)
        calls.save("latest.tmp", self.number, 40, sync=True)
        calls.rename("latest.tmp", "latest")
        self.random.choice((self._best, self._last, self._swap, self._nothing))(name)
        if self.random.random() < 0.1:
            calls.flush()
        self.retain("ckpt_")

    def _nothing(self, _name: str) -> None:
        """Some rounds end here."""

    def _best(self, name: str) -> None:
        if "best" in self.calls.paths:
            self.calls.unlink("best")
        self.calls.link(f"{name}/config.json", "best")

    def _last(self, name: str) -> None:
        if "last.tmp" in self.calls.paths:
            self.calls.unlink("last.tmp")
        self.calls.symlink(name, "last.tmp")
        self.calls.rename("last.tmp", "last")

    def _swap(self, _name: str) -> None:
        for side in ("left", "right"):
            self.calls.save(side, *self.data())
        self.calls.exchange("left", "right")


class ManyFiles(Workload):
    """Many small files in many directories, some of them gone at once."""

    def round(self) -> None:
        calls = self.calls
        name = f"shards_{self.number:07d}"
        calls.mkdir(name)
        for part in range(2):
            calls.mkdir(f"{name}/{part}")
            for number in range(self.random.randrange(5, 25)):
                calls.save(
                    f"{name}/{part}/{number:04d}",
                    self.random.randrange(1 << 30),
                    self.random.randrange(0, 3_000),
                )
        calls.save("passing", 1, 100)
        calls.unlink("passing")
        self.tracker(name)
        if self.random.random() < 0.1:
            calls.flush()
        self.retain("shards_", 2)


class AppendLog(Workload):
    """A log that is opened anew, and one that stays open over a round; metrics beside them."""

    def round(self) -> None:
        calls = self.calls
        for path in ("train.log", f"events.{self.number // 5}"):
            fd = calls.open(path, truncate=False)
            for _ in range(self.random.randrange(1, 6)):
                calls.write(fd, self.random.randrange(1 << 30), self.random.randrange(20, 400))
                if self.random.random() < 0.2:
                    calls.fsync(fd)
            if self.random.random() < 0.05:
                calls.flush()
            calls.close(fd)
        for path in sorted(p for p in calls.paths if p.startswith("events."))[:-3]:
            calls.unlink(path)


class Rsync(Workload):
    """rsync of a directory that changes a little from round to round, then a pointer to it."""

    def __init__(self, calls: Calls, seed: int) -> None:
        super().__init__(calls, seed)
        self._source = Path(tempfile.mkdtemp(prefix="drill-"))

    def round(self) -> None:
        for number in range(self.random.randrange(2, 6)):
            file = self._source / f"part_{number % 2}" / f"file_{self.random.randrange(8)}"
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(self.random.randbytes(self.random.randrange(60_000)))
        for path in [p for p in self.calls.paths if "/." in p]:
            self.calls.unlink(path)  # what a killed rsync left behind
        files = {
            str(p.relative_to(self._source)): digest(p.read_bytes())
            for p in self._source.rglob("*")
            if p.is_file()
        }
        directories = [
            "",
            *(str(p.relative_to(self._source)) for p in self._source.rglob("*") if p.is_dir()),
        ]
        self.calls.sync(self._source, "copy", files, directories)
        self.tracker(f"copy {self.number}")

    def __del__(self) -> None:
        shutil.rmtree(self._source, ignore_errors=True)


WORKLOADS: dict[str, Callable[[Calls, int], Workload]] = {
    "torch.save": TorchSave,
    "overwrite": Overwrite,
    "rename": RenameDance,
    "many files": ManyFiles,
    "append log": AppendLog,
    "rsync": Rsync,
}


GUARDED_FILES = ("model.safetensors", "optimizer.pt", "rng.pth")
GUARDED_BYTES = 30_000
"""Of each file: all checkpoints are as whole as each other for the guard, whatever it makes of
sizes.
"""


def is_guarded(top: str) -> bool:
    """Whether an entry of the mount's top directory is a checkpoint of the workloads below."""
    return top.startswith("checkpoint") or (top.startswith("net-") and top.endswith(".ckpt"))


class DeletesFirst(Workload):
    """accelerate with total_limit=1: mkdir, rm -r of all old ones, and only then the files."""

    def round(self) -> None:
        name = f"checkpoint_{self.number:07d}"
        self.calls.mkdir(name)
        for old in sorted(
            path
            for path, is_dir in self.calls.paths.items()
            if is_dir and is_guarded(path) and path != name
        ):
            self.calls.remove_tree(old)
        self._fill(name)

    def _fill(self, name: str) -> None:
        for file in GUARDED_FILES:
            self.calls.save(
                f"{name}/{file}",
                self.random.randrange(1 << 48),
                GUARDED_BYTES,
                pieces=self.random.randrange(1, 4),
            )
        if self.random.random() < 0.2:
            self.calls.flush()
        self.tracker(f"{name} {self.number}")


class SameName(DeletesFirst):
    """The newest checkpoint is always called the same, removed and made anew."""

    def round(self) -> None:
        if "checkpoint-1" in self.calls.paths:
            self.calls.remove_tree("checkpoint-1")
        self.calls.mkdir("checkpoint-1")
        self._fill("checkpoint-1")


class UnlinksFirst(Workload):
    """MindSpore with keep_checkpoint_max=1: the old file goes, then the new one is written under a
    temporary name.
    """

    def round(self) -> None:
        for old in sorted(path for path in self.calls.paths if path.startswith("net-")):
            self.calls.unlink(old)
        name = f"net-1_{self.number}.ckpt"
        size = len(GUARDED_FILES) * GUARDED_BYTES
        self.calls.save(
            name + ".tmp", self.random.randrange(1 << 48), size, pieces=self.random.randrange(1, 5)
        )
        self.calls.rename(name + ".tmp", name)
        if self.random.random() < 0.2:
            self.calls.flush()
        self.tracker(name)


GUARDED: dict[str, Callable[[Calls, int], Workload]] = {
    "deletes first": DeletesFirst,
    "same name": SameName,
    "unlinks first": UnlinksFirst,
}
"""Applications that have no checkpoint for a moment; for mounts with the guard."""


class Large(Workload):
    """Files of 1 to 60 MB, one or two at a time, in pieces, some of them slowly: nearly always
    something is being written.
    """

    BYTES_MIN = 1_000_000
    BYTES_MAX = 60_000_000
    SECONDS = (0.0, 0.5, 2.5)
    """So long a file is written to at least; a new worker has committed what it finds due in less
    than the last of them.
    """
    SYNCED_MAX = 16 << 20
    """A longer one is not written to after an fsync: what appears may have some of that in
    passthrough (exception X11).
    """

    def round(self) -> None:
        names = self.random.sample(range(3), self.random.randrange(1, 3))
        writers = [self._write(number) for number in names]
        while writers:
            chosen = self.random.choice(writers)
            if next(chosen, None) is None:
                writers.remove(chosen)
        if self.random.random() < 0.1:
            self.calls.flush()

    def _write(self, number: int) -> Iterator[float]:
        raise NotImplementedError

    def _fill(self, path: str, *, truncate: bool = True) -> Iterator[float]:
        """Piece by piece, each a good deal larger than a log's."""
        size = round(self.BYTES_MIN * (self.BYTES_MAX / self.BYTES_MIN) ** self.random.random())
        pieces = self.random.randrange(3, 13)
        pause_s = self.random.choice(self.SECONDS)
        step = -(-size // pieces)
        sync_at = self.random.randrange(60)
        fd = self.calls.open(path, truncate=truncate)
        for piece, at in enumerate(range(0, size, step)):
            self.calls.write(fd, self.random.randrange(1 << 48), min(step, size - at), offset=at)
            is_last = at + step >= size
            if piece == sync_at and (is_last or (truncate and at + step <= self.SYNCED_MAX)):
                self.calls.fsync(fd)
            select.select([], [], [], pause_s / pieces)
            yield pause_s
        self.calls.close(fd)


class LargeInPlace(Large):
    """The same names again and again: truncated and written, or overwritten as they are."""

    def _write(self, number: int) -> Iterator[float]:
        yield from self._fill(f"state_{number}.bin", truncate=self.random.random() < 0.7)


class LargeBeside(Large):
    """Written beside, then renamed into place: over the older file, or to a new name, after which
    the oldest go.
    """

    def _write(self, number: int) -> Iterator[float]:
        path = f"state_{number}.bin"
        yield from self._fill(path + ".tmp")
        if self.random.random() < 0.5:
            self.calls.rename(path + ".tmp", path)
            return
        name = f"net-{self.number:07d}_{number}.ckpt"
        self.calls.rename(path + ".tmp", name)
        self.tracker(name)
        for old in sorted(path for path in self.calls.paths if path.startswith("net-"))[:-2]:
            self.calls.unlink(old)


LARGE: dict[str, Callable[[Calls, int], Workload]] = {
    "large in place": LargeInPlace,
    "large beside": LargeBeside,
}

"""Does one thing to files after the other, as it is asked: for `bench.limits`, in the interpreter
that has torch.

Reads lines `ROW DIRECTORY`; `ROW -` asks whether the row can be done here. What a row needs to be
there (a file to read, a tree to copy) is made before the clock runs: `prepared` is said then, and a
line is awaited. The answer is the seconds that it took. Imports nothing of acpfs.
"""

from __future__ import annotations

import importlib.util
import mmap
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.formats_writer import (
    MIB,
    PIECE,
    mapped,
    tensors,
    with_safetensors,
    with_torch,
    written,
)

SMALL_PIECE = 4096
SMALL_SHARE = 8
"""Writes of 4 KiB are for a file of so small a share of the size: at some places they take long."""
FILES = 1000
SMALL_BYTES = 4096
TREE = Path(os.__file__).parent / "json"
TREE_COPIES = 50
"""What is unpacked, copied and removed: so many copies of a small package of Python's own."""


def nothing(_directory: Path) -> None:
    """Nothing has to be there."""


@dataclass(frozen=True)
class Row:
    """What is measured, and what has to be there."""

    work: Callable[[Path], object]
    prepare: Callable[[Path], object] = nothing


class Bytes:
    """Rows that move `size` bytes."""

    def __init__(self, size: int, source: Path) -> None:
        self._size = size
        self._content = os.urandom(PIECE) * (size // PIECE)
        self._source = source
        """A file of as many bytes on a tmpfs."""
        source.write_bytes(self._content)

    def rows(self) -> dict[str, Row]:
        return {
            "write 8 MiB": Row(self.write),
            "write 8 MiB, O_RDWR": Row(self.write_both_ways),
            "write 4 KiB": Row(self.write_small),
            "write through a mapping": Row(self.write_mapped),
            "write O_DIRECT": Row(self.write_direct),
            "sendfile": Row(self.send),
            "copy_file_range": Row(self.copy_range, self.write),
            "2 writers": Row(lambda directory: self.several(directory, 2)),
            "4 writers": Row(lambda directory: self.several(directory, 4)),
            "read 8 MiB": Row(self.read, self.write),
            "read a mapping": Row(self.read_mapped, self.write),
        }

    def write(self, directory: Path) -> None:
        written(os.O_WRONLY, str(directory / "plain"), self._content)

    def write_both_ways(self, directory: Path) -> None:
        written(os.O_RDWR, str(directory / "both"), self._content)

    def write_small(self, directory: Path) -> None:
        fd = os.open(directory / "small", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        piece = self._content[:SMALL_PIECE]
        for _ in range(self._size // SMALL_SHARE // SMALL_PIECE):
            os.write(fd, piece)
        os.close(fd)

    def write_mapped(self, directory: Path) -> None:
        mapped(str(directory / "mapped"), self._content)

    def write_direct(self, directory: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT
        with mmap.mmap(-1, PIECE) as aligned:
            aligned.write(self._content[:PIECE])
            fd = os.open(directory / "direct", flags, 0o644)
            for _ in range(self._size // PIECE):
                os.write(fd, aligned)
            os.close(fd)

    def send(self, directory: Path) -> None:
        source = os.open(self._source, os.O_RDONLY)
        target = os.open(directory / "sent", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        done = 0
        while done < self._size:
            done += os.sendfile(target, source, done, self._size - done)
        os.close(target)
        os.close(source)

    def copy_range(self, directory: Path) -> None:
        source = os.open(directory / "plain", os.O_RDONLY)
        target = os.open(directory / "copy", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        while os.copy_file_range(source, target, self._size):
            pass
        os.close(target)
        os.close(source)

    def several(self, directory: Path, count: int) -> None:
        """Processes that write a share each, all at once."""
        share = self._content[: self._size // count]
        children = []
        for number in range(count):
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    written(os.O_WRONLY, str(directory / f"share-{number}"), share)
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        ended = [os.waitpid(child, 0)[1] for child in children]
        if any(ended):
            raise RuntimeError("a writer failed")

    def read(self, directory: Path) -> None:
        buffer = bytearray(PIECE)
        with open(directory / "plain", "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    def read_mapped(self, directory: Path) -> None:
        buffer = bytearray(PIECE)
        with (
            open(directory / "plain", "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping,
            memoryview(mapping) as view,
        ):
            for start in range(0, self._size, PIECE):
                with view[start : start + PIECE] as part:
                    buffer[: len(part)] = part


def of_frameworks(size: int) -> dict[str, Row]:
    """Those that are installed."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    state = tensors(size)

    def save(directory: Path) -> None:
        with_torch(state, str(directory / "model.pt"))

    def save_safetensors(directory: Path) -> None:
        with_safetensors(state, str(directory / "model.safetensors"))

    rows = {
        "torch.save": Row(save),
        "torch.load": Row(lambda directory: torch.load(directory / "model.pt"), save),
    }
    if importlib.util.find_spec("safetensors") is not None:
        rows["safetensors save_file"] = Row(save_safetensors)
    return rows


class Names:
    """Rows that make, find and remove names."""

    def __init__(self, archive: Path) -> None:
        self._archive = archive
        with tarfile.open(archive, "w") as tar:
            for number in range(TREE_COPIES):
                tar.add(TREE, f"tree/{number}", filter=_without_bytecode)

    def rows(self) -> dict[str, Row]:
        return {
            f"create {FILES:,} of 4 KiB": Row(self.create),
            f"stat {FILES:,}": Row(self.stat, self.create),
            f"rename {FILES:,}": Row(self.rename, self.create),
            f"unlink {FILES:,}": Row(self.unlink, self.create),
            "untar": Row(self.unpack),
            "cp -r": Row(self.copy, self.unpack),
            "rm -rf": Row(self.remove, self.unpack),
        }

    def create(self, directory: Path) -> None:
        content = bytes(SMALL_BYTES)
        for number in range(FILES):
            fd = os.open(directory / f"f{number}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            os.write(fd, content)
            os.close(fd)

    def stat(self, directory: Path) -> None:
        for number in range(FILES):
            os.stat(directory / f"f{number}")

    def rename(self, directory: Path) -> None:
        for number in range(FILES):
            os.rename(directory / f"f{number}", directory / f"g{number}")

    def unlink(self, directory: Path) -> None:
        for number in range(FILES):
            os.unlink(directory / f"f{number}")

    def unpack(self, directory: Path) -> None:
        subprocess.run(["tar", "-xf", str(self._archive), "-C", str(directory)], check=True)

    def copy(self, directory: Path) -> None:
        subprocess.run(["cp", "-r", str(directory / "tree"), str(directory / "copy")], check=True)

    def remove(self, directory: Path) -> None:
        subprocess.run(["rm", "-rf", str(directory / "tree")], check=True)


def _without_bytecode(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if "__pycache__" in member.name else member


def ready() -> None:
    """What was prepared may come to rest: no drain shall run beside the work."""
    print("prepared", flush=True)
    sys.stdin.readline()


def measured(row: Row, directory: Path) -> float:
    """Seconds of the work; nothing of it is left."""
    directory.mkdir()
    row.prepare(directory)
    ready()
    began = time.perf_counter()
    row.work(directory)
    took = time.perf_counter() - began
    shutil.rmtree(directory)
    return took


def main() -> None:
    size = int(sys.argv[1]) * MIB
    scratch = Path(sys.argv[2])
    rows = Bytes(size, scratch / "source").rows()
    rows |= of_frameworks(size)
    rows |= Names(scratch / "tree.tar").rows()
    for line in iter(sys.stdin.readline, ""):
        name, directory = line.rstrip("\n").split("\t")
        if directory == "-":
            print(int(name in rows), flush=True)
        else:
            print(measured(rows[name], Path(directory) / "measured"), flush=True)


if __name__ == "__main__":
    main()

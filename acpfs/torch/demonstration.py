"""The training job of `acpfs demo`: a process that saves and loads with torch's own calls.

    python -m acpfs.torch.demonstration TOP BYTES SHARDS

It says `ready TORCH-VERSION`, or `not EXCEPTION` where torch cannot be imported, and then answers
each line with one. `save DIRECTORY PID` saves into a new directory below TOP, and kills that one
(0: none) in the middle; the answer is the seconds that it took. `loads DIRECTORY` says whether
`torch.load` of its files gives what was saved, `True` or `False`. It ends with its standard input.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

FLOAT_BYTES = 4


class KillingFile:
    """A file as torch writes to one, which kills a process on the way."""

    def __init__(self, file: BinaryIO, pid: int, at: int) -> None:
        """`at`: before the write of that byte."""
        self._file = file
        self._pid = pid
        self._left = at

    def write(self, data: bytes) -> int:
        """One of torch's writes."""
        if 0 <= self._left < len(data):
            os.kill(self._pid, signal.SIGKILL)
        self._left -= len(data)
        return self._file.write(data)

    def flush(self) -> None:
        """As torch asks for it."""
        self._file.flush()


def say(line: str) -> None:
    """One line to whoever asks."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def shards(directory: Path, count: int) -> list[Path]:
    """Names of a checkpoint's files."""
    return [directory / f"shard-{number}.pt" for number in range(count)]


class SavingJob:
    """Its state, and what is done with it."""

    def __init__(self, torch: Any, size: int, count: int) -> None:
        """`size`: bytes of one save, in `count` files."""
        self._torch = torch
        self._count = count
        self._bytes = max(FLOAT_BYTES, size // count)
        """Of the tensor in each file, which is longer than that."""
        self._state = {"weights": torch.rand(self._bytes // FLOAT_BYTES), "step": 0}

    def save(self, directory: Path, kill: int) -> float:
        """Seconds for which training stood; `kill`: a pid, or 0."""
        begun = time.monotonic()
        directory.mkdir()
        for number, path in enumerate(shards(directory, self._count)):
            if kill and number == self._count // 2:
                with open(path, "wb", buffering=0) as file:
                    self._torch.save(self._state, KillingFile(file, kill, self._bytes // 2))
            else:
                self._torch.save(self._state, path)
        return time.monotonic() - begun

    def loads(self, directory: Path) -> bool:
        """Whether each file is there and holds what was saved."""
        for path in shards(directory, self._count):
            try:
                loaded = self._torch.load(path, weights_only=True)
            except Exception:  # noqa: BLE001 - torch says in many ways that a file is not whole
                return False
            if not self._torch.equal(loaded["weights"], self._state["weights"]):
                return False
        return True


def main() -> None:
    """See above."""
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken installation fails in any way
        say(f"not {type(error).__name__}")
        return
    top = Path(sys.argv[1])
    job = SavingJob(torch, int(sys.argv[2]), int(sys.argv[3]))
    say(f"ready {torch.__version__}")
    for line in sys.stdin:
        verb, name, *kill = line.split()
        directory = top / name
        say(str(job.save(directory, int(kill[0])) if verb == "save" else job.loads(directory)))


if __name__ == "__main__":
    main()

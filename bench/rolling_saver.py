"""A training process for `bench.rolling`: saves with torch when it is told to, and a thread looks
how long a small write takes.

    python -m bench.rolling_saver DIRECTORY MIB

A line `save` on standard input begins a save; a line of JSON says that it has ended, {"save": n,
"s": seconds, "longest_s": seconds}. Any other line ends the process, with the checksum of each file
as it ought to be. In a process (and a container) of its own, with torch's interpreter.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

FILES = 2
TICK_S = 0.001
PIECE = b"t" * 512


def sum_of(path: Path) -> str:
    """Checksum of a file."""
    total = hashlib.blake2b()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            total.update(piece)
    return total.hexdigest()


class Ticker:
    """Writes a little all the time: what a job sees of a pause."""

    def __init__(self, path: Path) -> None:
        self.longest_s = 0.0
        self.written = 0
        self._stop = threading.Event()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT)
        self._thread = threading.Thread(target=self._tick, name="ticker")
        self._thread.start()

    def _tick(self) -> None:
        while not self._stop.wait(TICK_S):
            begun = time.monotonic()
            self.written += os.write(self._fd, PIECE)
            self.longest_s = max(self.longest_s, time.monotonic() - begun)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        os.close(self._fd)


def main(directory: Path, mib: int) -> None:
    """Until another line comes."""
    import torch  # bench.rolling imports this module without it

    weights = torch.arange(mib << 18, dtype=torch.float32)
    ticker = Ticker(directory / "ticks")
    number = 0
    while sys.stdin.readline().strip() == "save":
        weights[:1024] = number
        begun = time.monotonic()
        torch.save({"step": number, "weights": weights}, directory / f"step-{number % FILES}.pt")
        print(
            json.dumps(
                {"save": number, "s": time.monotonic() - begun, "longest_s": ticker.longest_s}
            ),
            flush=True,
        )
        ticker.longest_s = 0.0
        number += 1
    ticker.end()
    right = True
    sums = {}
    for path in sorted(directory.glob("step-*.pt")):
        state = torch.load(path)
        weights[:1024] = state["step"]
        right = (
            right
            and number - FILES <= state["step"] < number
            and torch.equal(state["weights"], weights)
        )
        sums[path.name] = sum_of(path)
    print(
        json.dumps({"right": right, "sums": sums, "ticks": ticker.written, "saves": number}),
        flush=True,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

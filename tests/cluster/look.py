"""Looks at a shared directory, without acpfs, while a training job saves to it on several nodes; a
program.

Usage: python -m tests.cluster.look WORKLOAD NODES DIRECTORY STOP RESULT VIOLATED. Until the file
STOP is there it reads pointers and what they name, over and over, and looks again before it
complains, since a reader needs time and files go; when it does, it makes the file VIOLATED. A
thread of its own notes when the last shard of a checkpoint came, and when its pointer did. RESULT
is JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.cluster.training import looks_right, pointed_at, tracked

BETWEEN_LOOKS_S = 0.01
NEWEST = 40
"""So many checkpoints are watched for their pointers; who saves is not further ahead of the slowest
node.
"""
VIOLATIONS_MAX = 100


class Arrivals:
    """When the last shard of each checkpoint came, and when its pointer did, on this machine's
    monotonic clock.
    """

    def __init__(self, backing: Path) -> None:
        self._backing = backing
        self._shards: dict[str, tuple[int, float]] = {}
        self.seen: dict[str, tuple[float, float]] = {}

    def look(self) -> None:
        """Once."""
        names = sorted(name for name in os.listdir(self._backing) if name.startswith("iter_"))[
            -NEWEST:
        ]
        pointed = tracked(self._backing)
        for name in names:
            if name not in self.seen:
                shards, metadata = self._count(self._backing / name)
                now = time.monotonic()
                if self._shards.get(name, (0, now))[0] != shards:
                    self._shards[name] = (shards, now)
                if metadata or name == pointed:
                    self.seen[name] = (self._shards.get(name, (0, now))[1], now)

    def _count(self, directory: Path) -> tuple[int, bool]:
        """Shards, of any workload, and whether there is a `.metadata`."""
        found = os.listdir(directory)
        ranks = sum(
            (directory / name / "model_optim_rng.pt").exists()
            for name in found
            if name.startswith("mp_rank_")
        )
        return ranks + sum(name.startswith(("shard", "__")) for name in found), ".metadata" in found


def watch(arrivals: Arrivals, stop: threading.Event) -> None:
    """Until `stop`."""
    while not stop.wait(BETWEEN_LOOKS_S):
        with contextlib.suppress(OSError):  # what is deleted meanwhile, or servers that are killed
            arrivals.look()


def observe(
    backing: Path, stop: Path, result: Path, violated: Path, wrong_with: Callable[[Path, str], str]
) -> None:
    """Until the file `stop` is there; `wrong_with`: what is wrong with a checkpoint."""
    looks = 0
    violations = list[str]()
    known = set[str]()
    arrivals = Arrivals(backing)
    ended = threading.Event()
    watching = threading.Thread(target=watch, args=(arrivals, ended))
    watching.start()
    while not stop.exists():
        with contextlib.suppress(OSError):
            # servers that are killed do not answer: nothing was seen; what is not there is no error
            # here
            for name in pointed_at(backing, known):
                wrong = wrong_with(backing, name)
                if wrong and name in pointed_at(backing, known):
                    violations.append(without_places(wrong, backing))
                    violated.touch()
                elif not wrong:
                    known.add(name)
                looks += 1
    ended.set()
    watching.join()
    last = tracked(backing)
    found = {
        "looks": looks,
        "violations": violations[:VIOLATIONS_MAX],
        "count": len(violations),
        "arrivals": arrivals.seen,
    }
    found["end"] = (
        without_places(wrong_with(backing, last), backing) if last else "there is no tracker"
    )
    result.write_text(json.dumps(found), encoding="utf-8")


def without_places(said: str, backing: Path) -> str:
    """What a library said, without this machine's directories: it is kept."""
    return re.sub(r"(?<![\w.…])/(?:[^\s'\",:()/]+/)+", "…/", said.replace(f"{backing}/", ""))


def check_of(workload: str, nodes: int) -> Callable[[Path, str], str]:
    """What is wrong with a checkpoint of a workload."""
    if workload == "files":
        return looks_right
    from tests.cluster import torch_rank

    return torch_rank.check_of(workload, nodes)


if __name__ == "__main__":
    directory, until, kept, wrong = (Path(word) for word in sys.argv[3:7])
    check = check_of(sys.argv[1], int(sys.argv[2]))
    print(flush=True)  # from here on it looks
    observe(directory, until, kept, wrong, check)

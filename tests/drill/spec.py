"""What the application's journal is made of: calls, their answers, and bytes that are described
instead of kept.

Shared by the process that makes the calls and by the checker, so it knows neither of them. Standard
library only: the application may run in an interpreter that has torch and nothing of acpfs'
dependencies.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

Entry = tuple[str, str]
"""(kind, what): ("file", digest), ("dir", ""), ("symlink", target), ("other", "")."""
Tree = dict[str, Entry]
HIDDEN = ".acpfs"
DIGEST_BYTES = 16
RANDOM_BYTES_MAX = 1 << 18
"""Python makes 100 MB a second: more than that is this much again and again, with numbers
between.
"""


def bytes_of(seed: int, size: int) -> bytes:
    """The bytes that a journal describes by seed and size."""
    chooser = random.Random(seed)
    if size <= RANDOM_BYTES_MAX:
        return chooser.randbytes(size)
    block = chooser.randbytes(RANDOM_BYTES_MAX)
    return b"".join(
        number.to_bytes(8, "big") + block for number in range(size // RANDOM_BYTES_MAX + 1)
    )[:size]


def digest(data: bytes | bytearray) -> str:
    """Not the digest that acpfs uses: the checker shares nothing with what it checks."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


@dataclass(frozen=True)
class Call:
    """One call of the application: what it was, and its answer where there was one before the
    end.
    """

    number: int
    words: tuple[Any, ...]
    began_s: float
    errno: int | None = None
    """0: it succeeded; None: nobody lived to hear the answer."""
    ended_s: float = 0.0


class JournalWriter:
    """Writes each call before it is made and each answer as soon as it is there.

    What is written survives kill -9.
    """

    def __init__(self, path: Path) -> None:
        # as long as the process
        self._out: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115
        self._number = 0

    def begin(self, *words: Any) -> None:
        """A call is about to be made."""
        self._number += 1
        self._line({"n": self._number, "do": words, "t": time.monotonic()})

    def end(self, number: int = 0) -> None:
        """It returned, with this errno."""
        self._line({"n": self._number, "did": number, "t": time.monotonic()})

    def close(self) -> None:
        """No more calls."""
        self._out.close()

    def _line(self, fields: dict[str, Any]) -> None:
        self._out.write(json.dumps(fields).encode() + b"\n")


class JournalReader:
    """Reads on where it stopped, in whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def calls(self) -> list[Call]:
        """The calls since the last time; the last one may have no answer."""
        if not self._path.exists():
            return []
        with open(self._path, "rb") as stream:
            stream.seek(self._at)
            lines = stream.read().split(b"\n")
        self._at += sum(len(line) + 1 for line in lines[:-1])
        found: list[Call] = []
        for line in lines[:-1]:
            record = json.loads(line)
            if "do" in record:
                found.append(Call(record["n"], tuple(record["do"]), record["t"]))
            else:
                found[-1] = Call(
                    found[-1].number, found[-1].words, found[-1].began_s, record["did"], record["t"]
                )
        return found


def tree_of(root: Path) -> Tree:
    """Names, kinds and contents below a directory, without acpfs' own."""
    tree: Tree = {}
    for directory, names, files in os.walk(root, onerror=_complain):
        at = os.path.relpath(directory, root)
        prefix = "" if at == "." else at + "/"
        if not prefix and HIDDEN in names:
            names.remove(HIDDEN)
        for name in names + files:
            tree[prefix + name] = entry_of(Path(directory) / name)
    return tree


def _complain(error: OSError) -> None:
    raise error


def entry_of(path: Path) -> Entry:
    """Kind and content of what lies at a path."""
    mode = os.lstat(path).st_mode
    if stat.S_ISDIR(mode):
        return ("dir", "")
    if stat.S_ISLNK(mode):
        return ("symlink", os.readlink(path))
    if stat.S_ISREG(mode):
        return ("file", digest(path.read_bytes()))
    return ("other", "")

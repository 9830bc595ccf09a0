"""Power loss of a backing file system: what it had been told, call by call, and what is left when
the power goes at some instant.

`PowerLog` writes the calls; `Disk` reads them and makes what a crash leaves: names as after some
prefix of the changes of names, at least all up to the last fsync of a directory; of each file's
bytes all up to its last fsync, and what was written since then whole, torn, or not at all, by a
seed. (A journaling local disk promises that much; ext4 more.)
"""

from __future__ import annotations

import marshal
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

LENGTH_BYTES = 4
TOP = 0
BEGIN = "begin"
"""What was there at the start is complete; calls follow."""


class PowerLog:
    """Writes records; a file that is created gets a number that is never used again, unlike inode
    numbers.
    """

    def __init__(self, path: Path) -> None:
        # as long as the process
        self._out: IO[bytes] = open(path, "wb", buffering=0)  # noqa: SIM115
        self._numbers: dict[int, int] = {}
        self._last = TOP

    def write(self, op: str, *values: Any) -> None:
        """One record, whole or not at all for whoever reads after kill -9."""
        record = marshal.dumps((time.monotonic(), op, *values))
        self._out.write(len(record).to_bytes(LENGTH_BYTES, "little") + record)

    def number(self, ino: int) -> int:
        """Number of an inode."""
        return self._numbers[ino]

    def top(self, ino: int) -> None:
        """The file system's top directory has this inode number."""
        self._numbers[ino] = TOP

    def created(self, ino: int, parent: int, name: bytes, kind: str, what: str = "") -> None:
        """A new inode with its first name. kind: file, dir, symlink."""
        self._last += 1
        self._numbers[ino] = self._last
        self.write("create", self._last, self._numbers[parent], name, kind, what)

    def found(self, path: Path, ino: int, shown: Callable[[int], int]) -> None:
        """What is there at the start, all of it on stable storage.

        `shown`: the number by which the file system knows a source's inode.
        """
        for entry in sorted(os.scandir(path), key=lambda entry: entry.name):
            kind = "symlink" if entry.is_symlink() else "dir" if entry.is_dir() else "file"
            own = shown(entry.inode())
            self.created(
                own,
                ino,
                os.fsencode(entry.name),
                kind,
                os.readlink(entry.path) if kind == "symlink" else "",
            )
            if kind == "dir":
                self.found(Path(entry.path), own, shown)
            elif kind == "file":
                number = self._numbers[own]
                self.write("write", number, 0, Path(entry.path).read_bytes())
                for name in os.listxattr(entry.path):
                    self.write("xattr", number, name, os.getxattr(entry.path, name))
                self.write("fsync", number)
        if self._numbers[ino] == TOP:
            self.write("fsyncdir", TOP)
            self.write(BEGIN)


@dataclass
class _Inode:
    kind: str
    what: str = ""
    data: bytearray = field(default_factory=bytearray)
    """On stable storage."""
    pending: list[tuple[Any, ...]] = field(default_factory=list)
    xattrs: dict[str, bytes] = field(default_factory=dict)


class Disk:
    """What the log says up to an instant."""

    def __init__(self) -> None:
        self._inodes: dict[int, _Inode] = {TOP: _Inode("dir")}
        self._changes: list[tuple[Any, ...]] = []
        self._safe = 0
        """So many changes of names are on stable storage."""

    def apply(self, record: tuple[Any, ...]) -> None:
        """Take over one record."""
        op = record[1]
        values = record[2:]
        if op in ("create", "link", "unlink", "rename"):
            self._changes.append((op, *values))
            if op == "create":
                self._inodes[values[0]] = _Inode(values[3], values[4])
        elif op in ("write", "truncate"):
            self._inodes[values[0]].pending.append((op, *values[1:]))
        elif op == "xattr":
            self._inodes[values[0]].xattrs[values[1]] = values[2]
        elif op == "fsync":
            inode = self._inodes[values[0]]
            for pending in inode.pending:
                _write(inode.data, pending)
            inode.pending.clear()
        elif op == "fsyncdir":
            self._safe = len(self._changes)

    # -- the power goes

    def crash(self, seed: int) -> dict[str, tuple[str, Any, dict[str, bytes]]]:
        """Path → (kind, bytes or link target, xattrs) of what is left."""
        chooser = random.Random(seed)
        kept = chooser.choice(
            (self._safe, len(self._changes), chooser.randint(self._safe, len(self._changes)))
        )
        names: dict[int, dict[bytes, int]] = {TOP: {}}
        for change in self._changes[:kept]:
            _rename(names, change)
        contents: dict[int, bytes] = {}
        found: dict[str, tuple[str, Any, dict[str, bytes]]] = {}
        self._walk(names, TOP, "", contents, chooser, found)
        return found

    def _walk(
        self,
        names: dict[int, dict[bytes, int]],
        at: int,
        prefix: str,
        contents: dict[int, bytes],
        chooser: random.Random,
        found: dict[str, tuple[str, Any, dict[str, bytes]]],
    ) -> None:
        for name, number in names.get(at, {}).items():
            inode = self._inodes[number]
            path = prefix + os.fsdecode(name)
            if inode.kind == "file" and number not in contents:
                contents[number] = _left(inode, chooser)
            found[path] = (inode.kind, contents.get(number, inode.what), inode.xattrs)
            if inode.kind == "dir":
                self._walk(names, number, path + "/", contents, chooser, found)


def _left(inode: _Inode, chooser: random.Random) -> bytes:
    """Each write that was not flushed is there, half there, or not."""
    data = bytearray(inode.data)
    for pending in inode.pending:
        fate = chooser.choice(("whole", "torn", "nothing"))
        if fate == "torn" and pending[0] == "write":
            _write(data, (pending[0], pending[1], pending[2][: len(pending[2]) // 2]))
        elif fate != "nothing":
            _write(data, pending)
    return bytes(data)


def _write(data: bytearray, pending: tuple[Any, ...]) -> None:
    if pending[0] == "truncate":
        size = pending[1]
        data.extend(bytes(max(0, size - len(data))))
        del data[size:]
        return
    _op, offset, piece = pending
    data.extend(bytes(max(0, offset + len(piece) - len(data))))
    data[offset : offset + len(piece)] = piece


def _rename(names: dict[int, dict[bytes, int]], change: tuple[Any, ...]) -> None:
    """Carry out one change of names."""
    if change[0] in ("create", "link"):
        number, parent, name = change[1:4]
        names.setdefault(parent, {})[name] = number
    elif change[0] == "unlink":
        names[change[1]].pop(change[2], None)
    else:
        parent, name, new_parent, new_name, exchange = change[1:]
        source = names[parent]
        target = names.setdefault(new_parent, {})
        if exchange:
            source[name], target[new_name] = target[new_name], source[name]
        elif target.get(new_name) != source[name]:
            target[new_name] = source.pop(name)


def read_log(path: Path) -> list[tuple[Any, ...]]:
    """All whole records: (monotonic time, op, values…)."""
    records = []
    at = 0
    content = path.read_bytes()
    while at + LENGTH_BYTES <= len(content):
        size = int.from_bytes(content[at : at + LENGTH_BYTES], "little")
        if at + LENGTH_BYTES + size > len(content):
            break
        records.append(marshal.loads(content[at + LENGTH_BYTES : at + LENGTH_BYTES + size]))
        at += LENGTH_BYTES + size
    return records


def restore(found: dict[str, tuple[str, Any, dict[str, bytes]]], root: Path) -> None:
    """Make a directory that looks like what a crash left."""
    root.mkdir()
    for path, (kind, what, xattrs) in found.items():
        target = root / path
        if kind == "dir":
            target.mkdir()
        elif kind == "symlink":
            target.symlink_to(what)
        elif kind == "file":
            target.write_bytes(what)
            for name, value in xattrs.items():
                os.setxattr(target, name, value)

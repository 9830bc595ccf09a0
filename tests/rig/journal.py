"""Journal of what became visible in a directory, and its replay.

The faulty file system writes one JSON line per visible change, in the order of the changes;
`VisibleTree` applies them again, so that a test can look at the tree as it was at every instant.
Names below `.acpfs` are not visible. Content is a digest, taken at the moment when it became
visible; file names are text with surrogate escapes.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import xxhash

HIDDEN = ".acpfs"
Entry = tuple[str, str]
"""(kind, what): ("file", digest), ("dir", ""), ("symlink", target), ("fifo", "")."""
Tree = dict[str, Entry]

_KINDS = {
    stat.S_IFDIR: "dir",
    stat.S_IFLNK: "symlink",
    stat.S_IFREG: "file",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
}


def visible(path: str) -> bool:
    """Whether an application that looks at the backing directory may take notice of a path."""
    return path not in ("", HIDDEN) and not path.startswith(HIDDEN + "/")


def digest_of(path: str) -> str:
    """xxh3-128 of a file's bytes as they are now."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class Recorder:
    """Writes the journal. Called right after each change, before anything else can happen."""

    def __init__(self, source: str, out: IO[str]) -> None:
        self._source = source
        self._out = out
        self._number = 0

    def write(self, op: str, **fields: Any) -> None:
        """One line."""
        self._number += 1
        self._out.write(
            json.dumps({"n": self._number, "t": time.time(), "op": op, **fields}) + "\n"
        )
        self._out.flush()

    def appear(self, path: str) -> None:
        """`path` shows a node that was not visible there before; what it replaced is gone.

        Directories with all that is in them.
        """
        if not visible(path):
            return
        full = os.path.join(self._source, path)
        st = os.lstat(full)
        kind = _KINDS.get(stat.S_IFMT(st.st_mode), "device")
        what = digest_of(full) if kind == "file" else os.readlink(full) if kind == "symlink" else ""
        self.write(
            "set",
            path=path,
            kind=kind,
            what=what,
            ino=st.st_ino,
            mode=st.st_mode,
            size=st.st_size,
            mtime_ns=st.st_mtime_ns,
        )
        if kind == "dir":
            for name in sorted(os.listdir(full)):
                self.appear(f"{path}/{name}")

    def vanish(self, path: str) -> None:
        """A name is gone."""
        if visible(path):
            self.write("remove", path=path)

    def renamed(self, old: str, new: str, exchange: bool) -> None:
        """A rename has happened, across the border of what is visible or not."""
        if exchange:
            if visible(old) and visible(new):
                self.write("exchange", path=old, to=new)
            else:
                self.appear(old)
                self.appear(new)
        elif visible(old) and visible(new):
            self.write("move", path=old, to=new)
        elif visible(new):
            self.appear(new)
        else:
            self.vanish(old)

    def content(self, path: str, ino: int, full: str) -> None:
        """A visible file's bytes, to be read at `full`, were changed in place."""
        if visible(path):
            self.write("content", path=path, ino=ino, what=digest_of(full))

    def attributes(self, path: str, st: os.stat_result) -> None:
        """Mode, owner or times changed."""
        if visible(path):
            self.write(
                "attr",
                path=path,
                mode=st.st_mode,
                uid=st.st_uid,
                gid=st.st_gid,
                mtime_ns=st.st_mtime_ns,
            )


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a journal."""
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1] if line]


class VisibleTree:
    """The visible tree, brought forward record by record."""

    def __init__(self) -> None:
        self._names: dict[str, tuple[str, str, int]] = {}
        self._contents: dict[int, str] = {}

    def apply(self, record: dict[str, Any]) -> bool:
        """Carry out one record; whether names or contents changed."""
        op = record["op"]
        path = record["path"]
        if op == "set":
            self._cut(path)
            self._names[path] = (record["kind"], record["what"], record["ino"])
            if record["kind"] == "file":
                self._contents[record["ino"]] = record["what"]
        elif op == "remove":
            self._cut(path)
        elif op == "move":
            moved = self._cut(path)
            self._cut(record["to"])
            self._paste(moved, path, record["to"])
        elif op == "exchange":
            first = self._cut(path)
            second = self._cut(record["to"])
            self._paste(first, path, record["to"])
            self._paste(second, record["to"], path)
        elif op == "content":
            self._contents[record["ino"]] = record["what"]
        return bool(op != "attr")

    def tree(self) -> Tree:
        """Path → (kind, what) now."""
        return {
            p: (kind, self._contents[ino] if kind == "file" else what)
            for p, (kind, what, ino) in self._names.items()
        }

    def _cut(self, path: str) -> dict[str, tuple[str, str, int]]:
        below = path + "/"
        taken = {p: e for p, e in self._names.items() if p == path or p.startswith(below)}
        for p in taken:
            del self._names[p]
        return taken

    def _paste(self, entries: dict[str, tuple[str, str, int]], old: str, new: str) -> None:
        for p, entry in entries.items():
            self._names[new + p[len(old) :]] = entry


def replay(
    records: list[dict[str, Any]], start: Tree | None = None
) -> Iterator[tuple[dict[str, Any], Tree]]:
    """(record, visible tree after it) for every record that changed names or contents."""
    visible_tree = VisibleTree()
    for number, (path, (kind, what)) in enumerate((start or {}).items()):
        visible_tree.apply(
            {"op": "set", "path": path, "kind": kind, "what": what, "ino": -number - 1}
        )
    for record in records:
        if visible_tree.apply(record):
            yield record, visible_tree.tree()


def tree_of(root: Path) -> Tree:
    """The visible tree of a directory as it is now."""
    tree: Tree = {}
    for directory, names, files in os.walk(root):
        at = os.path.relpath(directory, root)
        prefix = "" if at == "." else at + "/"
        if prefix == "" and HIDDEN in names:
            names.remove(HIDDEN)
        for name in names + files:
            full = os.path.join(directory, name)
            kind = _KINDS.get(stat.S_IFMT(os.lstat(full).st_mode), "device")
            what = (
                digest_of(full)
                if kind == "file"
                else os.readlink(full)
                if kind == "symlink"
                else ""
            )
            tree[prefix + name] = (kind, what)
    return tree

"""An application that remembers every state it had, as the backing directory may show it.

`Application` makes calls on a mount and keeps beside them the *projection* of clause S6:
names as they are, files as of their last close (or fsync, rename, link), files never closed not at
all. After each completed call the projection is one more state of the history. `check` then holds a
journal of what became visible against the history.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from tests.rig.journal import Entry, Tree, replay
from tests.rig.moved_names import exchange, move
from tests.rig.syscalls import RENAME_EXCHANGE, rename2


@dataclass
class File:
    """A regular file: its bytes now, and the digest as of the last close (None: never closed)."""

    data: bytearray = field(default_factory=bytearray)
    closed: str | None = None

    def freeze(self) -> None:
        self.closed = xxhash.xxh3_128_hexdigest(bytes(self.data))


Node = File | Entry


@dataclass
class Open:
    """An open file of the application."""

    fd: int
    file: File
    wrote: bool = False


class Application:
    """Makes calls below `root` and remembers."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.nodes: dict[str, Node] = {}
        self.states: list[Tree] = [{}]

    def _done(self) -> None:
        state: Tree = {}
        for path, node in self.nodes.items():
            if isinstance(node, File):
                if node.closed is not None:
                    state[path] = ("file", node.closed)
            else:
                state[path] = node
        if state != self.states[-1]:
            self.states.append(state)

    # -- calls

    def open(self, path: str, *, truncate: bool = True) -> Open:
        flags = os.O_CREAT | os.O_RDWR | (os.O_TRUNC if truncate else 0)
        fd = os.open(self.root / path, flags, 0o644)
        file = self.nodes.get(path)
        if not isinstance(file, File):
            file = File()
            self.nodes[path] = file
        opened = Open(fd, file)
        if truncate:
            opened.wrote = opened.wrote or bool(file.data) or file.closed is None
            file.data.clear()
        self._done()
        return opened

    def write(self, opened: Open, data: bytes, offset: int | None = None) -> None:
        at = len(opened.file.data) if offset is None else offset
        view = memoryview(data)
        while view:
            count = os.pwrite(opened.fd, view, at)
            opened.file.data.extend(bytes(max(0, at + count - len(opened.file.data))))
            opened.file.data[at : at + count] = view[:count]
            at = at + count
            view = view[count:]
        opened.wrote = True

    def fsync(self, opened: Open) -> None:
        os.fsync(opened.fd)
        opened.file.freeze()
        self._done()

    def close(self, opened: Open) -> None:
        os.close(opened.fd)
        if opened.wrote or opened.file.closed is None:
            opened.file.freeze()
        self._done()

    def save(self, path: str, data: bytes, *, pieces: int = 1, sync: bool = False) -> None:
        opened = self.open(path)
        step = max(1, -(-len(data) // pieces))
        for at in range(0, len(data), step):
            self.write(opened, data[at : at + step])
        if sync:
            self.fsync(opened)
        self.close(opened)

    def append(self, path: str, data: bytes) -> None:
        opened = self.open(path, truncate=False)
        self.write(opened, data)
        self.close(opened)

    def mkdir(self, path: str) -> None:
        os.mkdir(self.root / path)
        self.nodes[path] = ("dir", "")
        self._done()

    def rmdir(self, path: str) -> None:
        os.rmdir(self.root / path)
        del self.nodes[path]
        self._done()

    def unlink(self, path: str) -> None:
        os.unlink(self.root / path)
        del self.nodes[path]
        self._done()

    def link(self, old: str, new: str) -> None:
        os.link(self.root / old, self.root / new)
        self._freeze_first(old)
        self.nodes[new] = self.nodes[old]
        self._done()

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, self.root / path)
        self.nodes[path] = ("symlink", target)
        self._done()

    def rename(self, old: str, new: str) -> None:
        os.rename(self.root / old, self.root / new)
        self._freeze_first(old)
        move(self.nodes, old, new)
        self._done()

    def exchange(self, one: str, other: str) -> None:
        rename2(self.root / one, self.root / other, RENAME_EXCHANGE)
        exchange(self.nodes, one, other)
        self._done()

    def remove_tree(self, path: str) -> None:
        """rm -r, one call after the other."""
        for below in sorted((p for p in self.nodes if p.startswith(path + "/")), reverse=True):
            (self.rmdir if self.nodes[below] == ("dir", "") else self.unlink)(below)
        self.rmdir(path)

    def _freeze_first(self, path: str) -> None:
        """A rename or link of a file being written fixes its content: under the old name, one step
        before the new name is there.
        """
        node = self.nodes[path]
        if isinstance(node, File):
            node.freeze()
            self._done()


def check(
    journal: Iterable[dict[str, Any]],
    states: list[Tree],
    below: str = "",
    start: Tree | None = None,
    guarded: Callable[[str], bool] | None = None,
) -> int:
    """Hold every recorded instant against the history; returns how many instants there were.

    `guarded`: paths for which S140 makes an exception: what the application had there once may stay
    longer.

    Raises:
        AssertionError: something was visible that the application never had, or had before what was
            visible already.
    """
    at = 0
    count = 0
    for record, tree in replay(list(journal), start):
        seen = _below(tree, below)
        count += 1
        found = next(
            (number for number in range(at, len(states)) if _same(seen, states, number, guarded)),
            None,
        )
        if found is None:
            raise AssertionError(_explain(record, seen, states, at))
        at = found
    return count


def _same(
    seen: Tree, states: list[Tree], number: int, guarded: Callable[[str], bool] | None
) -> bool:
    state = states[number]
    if guarded is None or seen == state:
        return seen == state
    longer = seen.keys() - state.keys()
    return (
        len(seen) - len(longer) == len(state)
        and all(seen[path] == entry for path, entry in state.items())
        and all(
            guarded(path)
            and any(earlier.get(path) == seen[path] for earlier in reversed(states[:number]))
            for path in longer
        )
    )


def _below(tree: Tree, prefix: str) -> Tree:
    return (
        {p[len(prefix) :]: e for p, e in tree.items() if p.startswith(prefix)} if prefix else tree
    )


def _explain(record: dict[str, Any], seen: Tree, states: list[Tree], at: int) -> str:
    """Which state comes nearest, and what is different from it."""
    nearest = min(range(len(states)), key=lambda number: len(seen.items() ^ states[number].items()))
    different = sorted(seen.items() ^ states[nearest].items())
    lines = [
        f"{'visible' if seen.get(path) == entry else 'application'}: {path} {entry}"
        for path, entry in different[:12]
    ]
    when = "before the instant that was visible already" if nearest < at else "not before"
    return (
        f"after {record}\nnearest is state {nearest} of {len(states)} (last seen: {at}; {when}); "
        "differs in\n" + "\n".join(lines)
    )

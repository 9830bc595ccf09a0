"""Every state that an application had, from its own journal: what the mount must show, and what the
backing directory may show.

Two trees per moment: *now* (what the application would read) and *published* (clause S6:
names as they are, files as of their last close, fsync, rename or link). Knows neither acpfs nor
where the journal comes from. A call whose answer nobody lived to hear leaves two possibilities,
which `settle` decides by what is found afterwards.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.drill.spec import Call, Entry, Tree, bytes_of, digest
from tests.rig.moved_names import exchange, move


@dataclass
class File:
    """A regular file: bytes now (None where a program wrote it whose calls were not journaled: then
    its digest), digest as published.
    """

    data: bytearray | None = field(default_factory=bytearray)
    whole: str = ""
    published: str | None = None

    def now(self) -> str:
        """Digest of what a reader finds."""
        return digest(self.data) if self.data is not None else self.whole

    def publish(self) -> None:
        """Closed, or as good as."""
        self.published = self.now()


Node = File | Entry
PUBLISHING = frozenset({"close", "fsync", "store"})
"""Calls that publish a file, and change nothing else of what the mount shows once its bytes are
there; a store ends with a close.
"""
OF_A_LIBRARY = -1
"""Stands for a descriptor that no journal names."""
COMING_MAX = 6
"""Of more files that are published in an unknown order, only the first and the last moment is known
as a tree.
"""


@dataclass
class State:
    """A published tree; `sync` stands for the states while a program (rsync) that was not journaled
    was at work.
    """

    tree: Tree
    sync: tuple[str, dict[str, str]] | None = None
    coming: Tree = field(default_factory=dict)
    """Files that are published one after the other in an order that nobody knows."""

    def allows(self, seen: Tree) -> bool:
        """Whether the backing directory may look so."""
        if self.sync is not None:
            return fits_sync(seen, self.tree, *self.sync)
        return seen == self.tree or (
            bool(self.coming)
            and all(self.has(p, seen.get(p)) for p in seen.keys() | self.tree.keys())
        )

    @property
    def trees(self) -> list[Tree]:
        """What it may look like, one after the other: with none, some or all of what is coming."""
        coming = list(self.coming.items())
        counts = range(len(coming) + 1) if len(coming) <= COMING_MAX else (0, len(coming))
        return [
            self.tree | dict(some)
            for count in counts
            for some in itertools.combinations(coming, count)
        ]

    def has(self, path: str, entry: Entry | None) -> bool:
        """Whether that, or nothing, may lie at one path."""
        return entry == self.tree.get(path) or (
            entry is not None and entry == self.coming.get(path)
        )


def fits_sync(
    seen: Tree, before: Tree, below: str, files: dict[str, str], *, torn: bool = False
) -> bool:
    """Every file below is the old or the new one, or rsync's temporary one; all else is as before.

    `torn`: temporary ones may be cut.
    """
    for path in before.keys() | seen.keys():
        old = before.get(path)
        new = seen.get(path)
        if old == new:
            continue
        if not path.startswith(below + "/") and path != below:
            return False
        if new is None or (
            new[0] == "file" and not _is_sync_file(path[len(below) + 1 :], new[1], files, torn=torn)
        ):
            return False
    return True


def _is_sync_file(name: str, what: str, files: dict[str, str], *, torn: bool) -> bool:
    if files.get(name) == what:
        return True
    directory, _slash, last = name.rpartition("/")
    temporary = re.fullmatch(r"\.(.+)\.[A-Za-z0-9]{6}", last)
    target = temporary and files.get(f"{directory}/{temporary[1]}".lstrip("/"))
    return bool(target) and (torn or target == what)


class History:
    """Follows a journal.

    `states` are the published ones in order; `seen_at` is the first that the backing directory may
    still show.
    """

    def __init__(self, start: Tree | None = None, contents: dict[str, bytes] | None = None) -> None:
        """`start`: everything in it is published; `contents`: bytes of its files, needed for those
        that will be written to.
        """
        self.nodes: dict[str, Node] = {}
        for path, entry in (start or {}).items():
            data = (contents or {}).get(path)
            is_file = entry[0] == "file"
            self.nodes[path] = (
                File(None if data is None else bytearray(data), entry[1], entry[1])
                if is_file
                else entry
            )
        self.open: dict[int, tuple[File, bool]] = {}
        """Descriptor → (file, whether it wrote)."""
        self.states: list[State] = [State(self._published())]
        self.seen_at = 0
        self.promised: list[tuple[float, int]] = []
        """(when a promise of persistence was given, which state it covers)."""
        self.moments: list[tuple[float, int]] = []
        """(when a call was answered, which state it made)."""
        self.durable_fsync = False
        self.doubt: Call | None = None
        self.unsure: Tree | None = None
        """What was published before a call that counts as carried out, although the mount looks the
        same if its file was not closed.
        """

    # -- following the journal

    def follow(self, calls: list[Call]) -> None:
        """Take over calls that have an answer; the last may lack one and is then in doubt.

        Raises:
            ValueError: the application saw an error while it should not have.
        """
        for call in calls:
            if call.errno is None or (call.errno and call is calls[-1]):
                self.doubt = call
            elif call.errno:
                raise ValueError(f"errno {call.errno} in the middle of the journal: {call.words}")
            else:
                self._carry_out(call)

    def _carry_out(self, call: Call) -> None:
        self._apply(call.words)
        self.moments.append((call.ended_s, len(self.states) - 1))
        if call.words[0] == "flush" or (call.words[0] == "fsync" and self.durable_fsync):
            self.promised.append((call.ended_s, len(self.states) - 1))

    def _apply(self, words: tuple[Any, ...]) -> None:
        action: Callable[..., None] = getattr(self, "_do_" + words[0])
        action(*words[1:])
        self._note()

    def now(self) -> Tree:
        """What the mount must show."""
        return {
            path: ("file", node.now()) if isinstance(node, File) else node
            for path, node in self.nodes.items()
        }

    def _published(self) -> Tree:
        tree: Tree = {}
        for path, node in self.nodes.items():
            if not isinstance(node, File):
                tree[path] = node
            elif node.published is not None:
                tree[path] = ("file", node.published)
        return tree

    def _note(self, sync: tuple[str, dict[str, str]] | None = None) -> None:
        tree = self._published()
        if sync is not None or self.states[-1].sync is not None or tree != self.states[-1].tree:
            self.states.append(State(tree, sync))

    # -- calls

    def _do_open(self, path: str, fd: int, truncate: bool) -> None:
        file = self.nodes.get(path)
        fresh = not isinstance(file, File)
        if not isinstance(file, File):
            file = File()
            self.nodes[path] = file
        changes = fresh or (
            truncate and (file.now() != digest(b"") if file.data is None else bool(file.data))
        )
        if truncate:
            file.data = bytearray()
        self.open[fd] = (file, changes)

    def _do_write(self, fd: int, offset: int, seed: int, size: int) -> None:
        file, _wrote = self.open[fd]
        assert file.data is not None, "files of unknown bytes are not written to"
        _overwrite(file.data, offset, bytes_of(seed, size))
        self.open[fd] = (file, True)

    def _do_fsync(self, fd: int) -> None:
        self.open[fd][0].publish()

    def _do_close(self, fd: int) -> None:
        file, wrote = self.open.pop(fd)
        if wrote:
            file.publish()

    def _do_store(self, path: str, whole: str) -> None:
        """A library opened, wrote and closed it."""
        file = self.nodes.get(path)
        if not isinstance(file, File):
            file = File()
            self.nodes[path] = file
        file.data = None
        file.whole = whole
        file.publish()

    def _do_mkdir(self, path: str) -> None:
        self.nodes[path] = ("dir", "")

    def _do_rmdir(self, path: str) -> None:
        del self.nodes[path]

    _do_unlink = _do_rmdir

    def _do_symlink(self, target: str, path: str) -> None:
        self.nodes[path] = ("symlink", target)

    def _do_link(self, old: str, new: str) -> None:
        self._publish_first(old)
        self.nodes[new] = self.nodes[old]

    def _do_rename(self, old: str, new: str) -> None:
        self._publish_first(old)
        move(self.nodes, old, new)

    def _do_exchange(self, one: str, other: str) -> None:
        exchange(self.nodes, one, other)

    def _do_sync(self, below: str, files: dict[str, str], directories: list[str]) -> None:
        """rsync of a whole directory."""
        self._note((below, files))
        for directory in directories:
            self.nodes.setdefault(f"{below}/{directory}".rstrip("/"), ("dir", ""))
        for name, whole in files.items():
            self._do_store(f"{below}/{name}", whole)

    def _do_flush(self) -> None:
        """acpfs-ctl flush changes nothing: it promises what was complete before."""

    def _publish_first(self, path: str) -> None:
        """A rename or link of a file being written fixes its content under the old name, one step
        before the new name is there.
        """
        node = self.nodes[path]
        if isinstance(node, File) and node.published != node.now():
            node.publish()
            self._note()

    def leave_open(self, path: str) -> None:
        """A library had a file open when its daemon died."""
        file = self.nodes[path]
        assert isinstance(file, File)
        self.open[OF_A_LIBRARY] = (file, True)

    # -- ends of the application

    def close_all(self) -> None:
        """The kernel closed what the application had open, lowest descriptor first."""
        for fd in sorted(self.open):
            self._do_close(fd)
            self._note()

    def lose_writers(self) -> None:
        """The daemon died: what was open is as far as it was written, and waits for somebody to
        decide.

        A new file that nothing was written to is no half, but what a log is at first: it may be
        published.
        """
        writers = [file for file, _wrote in self.open.values()]
        untouched = {
            path: ("file", node.now())
            for path, node in self.nodes.items()
            if isinstance(node, File)
            and any(node is one for one in writers)
            and node.published is None
            and node.now() == digest(b"")
        }
        self.open.clear()
        if not untouched:
            return
        before = self.states[-1].tree if self.unsure is None else self.unsure
        last = self.states[-1].tree
        unsure = {path: entry for path, entry in last.items() if entry != before.get(path)}
        self.states.append(State(before, coming=unsure | untouched))

    def publish_all(self) -> None:
        """Everything that waited is stored as it is."""
        before = self.states[-1].tree if self.unsure is None else self.unsure
        self.unsure = None
        for node in self.nodes.values():
            if isinstance(node, File):
                node.publish()
        coming = {
            path: entry for path, entry in self._published().items() if entry != before.get(path)
        }
        if len(coming) > 1:
            self.states.append(State(before, coming=coming))
        self._note()

    # -- holding something against it

    def possible(self) -> History:
        """As it is when the call in doubt was carried out; itself where there is none."""
        if self.doubt is None:
            return self
        other = copy.deepcopy(self)
        other._apply(self.doubt.words)
        if self.doubt.words[0] in PUBLISHING:
            other.unsure = self.states[-1].tree
        other.doubt = None
        return other

    def find(self, seen: Tree, at_least: int = 0) -> int | None:
        """Index of the first state from `at_least` on (and not before what was seen already) that
        allows this; None when none does.
        """
        start = max(self.seen_at, at_least)
        return next(
            (index for index in range(start, len(self.states)) if self.states[index].allows(seen)),
            None,
        )

    def nearest(self, seen: Tree) -> tuple[int, list[str]]:
        """Index of the most similar state, and what is different from it."""
        index = min(
            range(len(self.states)),
            key=lambda number: len(seen.items() ^ self.states[number].tree.items()),
        )
        return index, differences(seen, self.states[index].tree)

    def promised_until(self, moment_s: float) -> int:
        """The state that must be persisted by what was promised until then."""
        return max((index for when_s, index in self.promised if when_s <= moment_s), default=0)

    def state_at(self, moment_s: float) -> int:
        """The state that the calls made which had been answered by then."""
        return max((index for when_s, index in self.moments if when_s <= moment_s), default=0)


def overwritten(old: bytes | bytearray, offset: int, data: bytes) -> bytearray:
    """The bytes of a file after a write."""
    new = bytearray(old)
    _overwrite(new, offset, data)
    return new


def _overwrite(file: bytearray, offset: int, data: bytes) -> None:
    file.extend(bytes(max(0, offset + len(data) - len(file))))
    file[offset : offset + len(data)] = data


def is_partly_written(found: bytes, old: bytes | bytearray, offset: int, data: bytes) -> bool:
    """Whether a file is what a write leaves that was cut off somewhere."""
    count = 0
    limit = len(data)
    while count < limit:  # the longest beginning that is there
        half = (count + limit + 1) // 2
        count, limit = (
            (half, limit)
            if found[offset + count : offset + half] == data[count:half]
            else (count, half - 1)
        )
    return any(found == overwritten(old, offset, data[:done]) for done in {count, 0})


def differences(seen: Tree, expected: Tree) -> list[str]:
    """One line per path that differs, at most a dozen."""
    paths = sorted(
        path for path in seen.keys() | expected.keys() if seen.get(path) != expected.get(path)
    )
    return [
        f"{path}: found {seen.get(path, 'nothing')}, must be {expected.get(path, 'nothing')}"
        for path in paths[:12]
    ]

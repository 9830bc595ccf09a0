"""What of checkpoints lies on the backing directory: looked at for the guard, and compared.

Judges by the backing directory alone, since there other members' files appear too. A pure look:
changes nothing, knows no log; blocks as the backing directory does, so it runs on a thread and
without the lock.
"""

from __future__ import annotations

import fnmatch
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from acpfs.backing.lower import Lower, LowerPath
from acpfs.checkpoints import Checkpoint, Checkpoints, is_state
from acpfs.logger import shown
from acpfs.writeback.evidence import absence

LIKE_SHARE = 0.9
"""A checkpoint with fewer than 90 % of another's bytes is not whole yet: states of one run differ
by less, a missing shard is more.
"""
LARGE_FILE_BYTES = 64 << 20
"""A file of this size is taken for the state of a program, whatever it is called."""
_NUMBER = re.compile(rb"[0-9]+")
_CONTENT_HASH = re.compile(rb"(?<![0-9A-Za-z])[0-9A-Fa-f]{20,}(?![0-9A-Za-z])")
"""In names that are made of what the file holds (OCDBT's `d/3b7e…`): each save has others, and
another number of them.
"""
_NAMES_TOLD_MAX = 3


@dataclass(slots=True)
class Inventory:
    """One checkpoint as it lies there."""

    checkpoint: Checkpoint
    names: Counter[bytes] = field(default_factory=Counter)
    """Relative to the checkpoint, numbers alike: what the next checkpoint of the same run calls
    them too, and how many there are.

    Names that are made of the content are alike, and count once.
    """
    files: int = 0
    size_bytes: int = 0
    newest_ns: int = 0
    """Last change of any of its files' contents."""
    has_state: bool = False
    """Whether any of it looks like what a program saves of its state, by name or by size."""
    is_there: bool = False
    """Whether anything of it is, be it an empty directory."""
    roots: set[LowerPath] = field(default_factory=set)
    """The entries that it consists of, by former path."""

    def add(self, name: bytes, size: int, mtime_ns: int) -> None:
        """One more file."""
        kind, hashes = _CONTENT_HASH.subn(b"#", name)
        kind = _NUMBER.sub(b"#", kind)
        self.names[kind] = 1 if hashes else self.names[kind] + 1
        self.has_state = self.has_state or size >= LARGE_FILE_BYTES or is_state(name)
        self.files += 1
        self.size_bytes += size
        self.newest_ns = max(self.newest_ns, mtime_ns)

    def is_newer(self, than: Inventory) -> bool:
        """By when it was written: a run that begins anew counts its steps from 0."""
        return (self.newest_ns, self.checkpoint.order) > (than.newest_ns, than.checkpoint.order)

    def lacks(self, of: Inventory) -> str:
        """What it has not got of another one, in words; "": nothing."""
        missing = sorted(of.names - self.names)
        if missing:
            named = ", ".join(shown(name) for name in missing[:_NAMES_TOLD_MAX])
            named += ", …" if len(missing) > _NAMES_TOLD_MAX else ""
            return (
                f"{(of.names - self.names).total()} of {of.files} files are not there yet ({named})"
            )
        return (
            ""
            if self.has_bytes_of(of)
            else f"it has {self.size_bytes} bytes, the one before {of.size_bytes}"
        )

    def has_bytes_of(self, of: Inventory) -> bool:
        """Whether it is about as large."""
        return self.size_bytes >= LIKE_SHARE * of.size_bytes


@dataclass(frozen=True, slots=True)
class Question:
    """Which checkpoint, and where."""

    checkpoint: Checkpoint
    own: tuple[tuple[LowerPath, LowerPath], ...]
    """(path now, former path) of entries that are known to belong to it."""
    save_dir: LowerPath
    here: bool
    """What in `save_dir` has its name is it, and not a new one of that name."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The answer."""

    own: Inventory
    others: tuple[Inventory, ...]
    """Further checkpoints of the save_dir, newest first."""


def look(lower: Lower, recogniser: Checkpoints, question: Question) -> Survey:
    """Look.

    Raises:
        OSError: the backing directory does not say.
    """
    own = Inventory(question.checkpoint)
    for path, former in question.own:
        _take(lower, own, path, former)
    if not own.is_there:  # what is gone is not held back any longer, so it is asked in two ways
        listings = absence.Listings(lower)
        for path, _former in question.own:
            listings.make_sure(path)
    others: dict[Checkpoint, Inventory] = {}
    for path in _entries(lower, question.save_dir, _directories(question.checkpoint)):
        is_directory = _is_directory(lower, path)
        found = recogniser.of(b"/".join(path), directory=is_directory)
        if found is None or found.save_dir != question.checkpoint.save_dir:
            continue
        if found == question.checkpoint and question.here:
            if path not in own.roots:
                _take(lower, own, path, path)
        else:
            _take(lower, others.setdefault(found, Inventory(found)), path, path)
    return Survey(
        own, tuple(sorted(others.values(), key=lambda other: other.newest_ns, reverse=True))
    )


def _directories(checkpoint: Checkpoint) -> list[re.Pattern[bytes]]:
    """What directories between save_dir and checkpoint are called: `rank_*`."""
    above = checkpoint.name.split(b"/")[:-1]
    return [
        re.compile(
            fnmatch.translate(name.decode(errors="surrogateescape")).encode(
                errors="surrogateescape"
            )
        )
        for name in above
    ]


def _entries(
    lower: Lower, directory: LowerPath, below: list[re.Pattern[bytes]]
) -> Iterator[LowerPath]:
    for name in _names(lower, directory):
        path = (*directory, name)
        if not below:
            yield path
        elif below[0].match(name):
            yield from _entries(lower, path, below[1:])


def _names(lower: Lower, directory: LowerPath) -> Iterable[bytes]:
    try:
        return [entry.name for entry in lower.listdir(directory)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_directory(lower: Lower, path: LowerPath) -> bool:
    try:
        return stat.S_ISDIR(lower.lstat(path).mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _take(lower: Lower, into: Inventory, path: LowerPath, former: LowerPath) -> None:
    """An entry and all below it."""
    into.roots.add(former)
    parts = len([part for part in into.checkpoint.path.split(b"/") if part])
    todo = [(path, former)]
    while todo:
        path, former = todo.pop()
        try:
            st = lower.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        into.is_there = True
        if stat.S_ISDIR(st.mode):
            todo += [((*path, name), (*former, name)) for name in _names(lower, path)]
        elif stat.S_ISREG(st.mode):
            # a checkpoint that is a file, or several, is known by its own name
            name = b"/".join(
                former[parts:]
                or former[into.checkpoint.save_dir.count(b"/") + bool(into.checkpoint.save_dir) :]
            )
            into.add(name, st.size, st.mtime_ns)

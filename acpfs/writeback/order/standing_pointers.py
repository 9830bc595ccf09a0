"""What pointers on the backing directory say that are about to be changed: nobody takes what they
still name.

A removal that passes an operation without room passes the changes of pointers behind that, too, and
what passes a withheld change may move or remove what the pointer names until then. What these
pointers say is read from the backing directory, on a thread; as long as that is not known, nothing
passes that it may name. Asked under the file system's lock.
"""

from __future__ import annotations

import math
import stat
from collections.abc import Iterable

from acpfs.backing.lower import LowerPath
from acpfs.types import Ino, Seq
from acpfs.writeback.log.log import REMOVING
from acpfs.writeback.log.lower_tree import Place
from acpfs.writeback.log.ops import Op, OpKind
from acpfs.writeback.members import naming
from acpfs.writeback.members.naming import Blind, Mentions
from acpfs.writeback.members.pointers import Pointers
from acpfs.writeback.parts import DrainParts

TEXT_BYTES_MAX = 1 << 16
"""Of a pointer; a larger one may name anything."""
SAID_FOR_S = 10.0
"""What was read is read anew after so long."""


class StandingPointers:
    """Knows for a while what they say."""

    def __init__(self, parts: DrainParts) -> None:
        self._lower = parts.lower
        self._tree = parts.tree
        self._lock = parts.lock
        self._is_directory = parts.listener.is_directory
        self._said: dict[LowerPath, bytes | None] = {}
        """None: it may name anything."""
        self._known_since = (-math.inf, 0)
        self.wanted: set[LowerPath] = set()
        """Pointers to be read."""

    def places(self, ino: Ino) -> list[Place]:
        """Of a node on the backing directory."""
        return self._tree.places(ino)

    def path_at(self, place: Place) -> LowerPath | None:
        """Of a name in a directory; None: the directory is not on the backing directory."""
        return self._tree.path_at(*place)

    def renew(self, now: float, pointers_persisted: int) -> None:
        """Forget what was read long ago, or before the last change of any pointer was persisted."""
        read_at, count = self._known_since
        if now > read_at + SAID_FOR_S or count != pointers_persisted:
            self._said.clear()
            self._known_since = (now, pointers_persisted)

    def name(self, changes: Iterable[Op], removal: Op) -> bool:
        """Whether one of the pointers that these operations change may name what is to be
        removed.
        """
        removed = self._tree.path_at(removal.parent, removal.name)
        if removed is None:
            return True
        standing = {path for change in changes for path in self.changed_by(change)}
        return any(
            self._says(path, removed, naming.may_mention, naming.anything) for path in standing
        )

    def lead_to(
        self, pointers: Iterable[LowerPath], taken: LowerPath, blind: Blind, *, parts: bool
    ) -> bool:
        """Whether one of the pointers that lie there names what is moved or removed, or something
        below it.

        `blind`: whether one that cannot be read, or is too large, may do so. `parts`: whether it
        may be a part of what is named.
        """
        return any(
            self._says(pointer, taken, naming.mentions, blind, parts=parts) for pointer in pointers
        )

    def changed_by(self, change: Op) -> set[LowerPath]:
        """Where what it replaces or removes lies now."""
        return self.files_at({*change.touches(), *self._tree.places(change.ino)})

    def files_at(self, places: Iterable[Place]) -> set[LowerPath]:
        """The paths of those where something lies now that is no directory."""
        nodes = {place: self._tree.node_at(*place) for place in places}
        paths = {
            self._tree.path_at(*place)
            for place, node in nodes.items()
            if node is not None and not self._is_directory(node)
        }
        return {path for path in paths if path is not None}

    def _says(
        self,
        pointer: LowerPath,
        removed: LowerPath,
        mentions: Mentions,
        blind: Blind,
        *,
        parts: bool = True,
    ) -> bool:
        if pointer not in self._said:
            self.wanted.add(pointer)
            return True
        text = self._said[pointer]
        if text is None:
            return blind(pointer, removed)
        return naming.leads_to(text, pointer, removed, mentions, parts=parts)

    def read(self) -> None:
        """Read what is wanted. On a thread; blocks as the backing directory does."""
        with self._lock:
            wanted = list(self.wanted)
        said = self.texts(wanted)
        with self._lock:
            self.wanted.difference_update(said)
            self._said.update(said)

    def texts(self, paths: Iterable[LowerPath]) -> dict[LowerPath, bytes | None]:
        """What lies there says now; None: it cannot be read, or is too large.

        Thread-safe; blocks as the backing directory does.
        """
        return {path: self._text(path) for path in paths}

    def _text(self, path: LowerPath) -> bytes | None:
        try:
            st = self._lower.lstat(path)
            if stat.S_ISLNK(st.mode):
                return self._lower.readlink(path)
            if not stat.S_ISREG(st.mode) or st.size > TEXT_BYTES_MAX:
                return None
            return self._content(path, st.size)
        except FileNotFoundError:
            return b""
        except OSError:
            return None

    def _content(self, path: LowerPath, size: int) -> bytes:
        buffer = bytearray(size)
        fd = self._lower.open_read(path)
        try:
            return bytes(buffer[: self._lower.read(fd, memoryview(buffer), 0)])
        finally:
            self._lower.close(fd)


class Awaited:
    """Changes of pointers that wait while others pass them, and which files they are to change;
    found out when something asks.
    """

    def __init__(self, standing: StandingPointers, pointers: Pointers) -> None:
        self._standing = standing
        self._pointers = pointers
        self._new: list[Op] = []
        self._first: dict[LowerPath, Seq] = {}
        """Of each file on the backing directory that is to be changed: the number of the first
        change.
        """
        self._named: dict[Place, Seq] = {}
        self._again: dict[LowerPath, Seq] = {}
        """Names for which two changes wait, and the number of the second."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._new or self._first or self._named)

    def add(self, change: Op) -> None:
        """In the order of the log, as far as they are of one name.

        What changes no pointer is left out.
        """
        if self._pointers.makes(change) or self._pointers.takes(change):
            self._new.append(change)

    def name(self, op: Op, moved: LowerPath, *, is_directory: bool) -> bool:
        """Whether a pointer names what the operation moves, or what it removes a part of, and is to
        be changed before.

        What it says between two changes that both wait, nobody knows here; then it may name a
        directory near it. A file that gets another name waits for nothing but what is known to name
        it: most of them are temporary, and all saves would wait.
        """
        self._look()
        blind = (
            naming.lies_beside
            if op.kind in REMOVING
            else naming.are_near
            if is_directory
            else naming.nothing
        )
        standing = (path for path, seq in self._first.items() if seq < op.seq)
        removes = op.kind in REMOVING
        if self._standing.lead_to(standing, moved, blind, parts=removes):
            return True
        return (
            is_directory
            and not removes
            and any(
                seq < op.seq and naming.are_near(path, moved) for path, seq in self._again.items()
            )
        )

    def _look(self) -> None:
        while self._new:
            change = self._new.pop(0)
            places = self._pointers_of(change)
            for path in self._standing.files_at({*places, *self._stored_at(change)}):
                self._first.setdefault(path, change.seq)
            for place in places:
                path_there = self._standing.path_at(place)
                if place in self._named and path_there is not None:
                    self._again.setdefault(path_there, change.seq)
                self._named.setdefault(place, change.seq)

    def _stored_at(self, change: Op) -> list[Place]:
        """A file that is rewritten lies there, whatever it was called when it was closed."""
        return self._standing.places(change.ino) if change.kind is OpKind.STORE else []

    def _pointers_of(self, change: Op) -> tuple[Place, ...]:
        """The names that it changes: not the temporary one that is renamed to a pointer's."""
        places = change.touches()
        return places if self._pointers.takes(change) else places[-1:]

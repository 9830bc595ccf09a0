"""The manifest (signatures first; being filled)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import RLock

from acpfs.backing.lower import Lower, LowerPath
from acpfs.ram.state import StateDatabase
from acpfs.writeback.records import Verification


class Manifest:
    """path → (digest, size) of every file that this node persisted."""

    def __init__(self, state: StateDatabase, lower: Lower, lock: RLock, node_id: str) -> None:
        """Touches only the state database; `load` reads the written manifest."""

    def load(self) -> int:
        """Fill an empty table from `.acpfs/manifest/<node>.xxh128`; returns the number of lines. Blocks on the backing directory."""
        raise NotImplementedError

    def digest(self, path: LowerPath) -> str:
        """Recorded xxh3-128 of a file, "" for none. Under the lock."""
        raise NotImplementedError

    def verify(self, paths: Iterable[LowerPath] = ()) -> Iterator[Verification]:
        """Hash files on the backing directory and compare; directories stand for all below them, none for everything recorded. Blocks."""
        raise NotImplementedError

"""What kernel and supervisor are to be told, and who tells them: the transport, which comes after
the file system.

From any thread, and but for `keep` under the file system's lock; these do not wait. With nobody to
tell, nothing is told.
"""

from __future__ import annotations

from collections.abc import Callable

from acpfs.types import HandleId, Ino


class Notices:
    """Passes notices on."""

    def __init__(self) -> None:
        self._changed: list[Callable[[Ino], None]] = []
        self._lost: list[Callable[[Ino, bytes, Ino], None]] = []
        self._keep: list[Callable[[Ino, list[int]], None]] = []
        self._forgotten: list[Callable[[HandleId], None]] = []
        self._mapped: list[Callable[[HandleId, Callable[[], int]], None]] = []

    def pass_on(
        self, changed: Callable[[Ino], None], lost: Callable[[Ino, bytes, Ino], None]
    ) -> None:
        """To these, from now on."""
        self._changed.append(changed)
        self._lost.append(lost)

    def pass_on_kept(self, keep: Callable[[Ino, list[int]], None]) -> None:
        """To this one, from now on."""
        self._keep.append(keep)

    def pass_on_forgotten(self, forgotten: Callable[[HandleId], None]) -> None:
        """To this one, from now on."""
        self._forgotten.append(forgotten)

    def pass_on_mapped(self, mapped: Callable[[HandleId, Callable[[], int]], None]) -> None:
        """To this one, from now on."""
        self._mapped.append(mapped)

    @property
    def keeps(self) -> bool:
        """Whether anybody keeps descriptors for the next worker."""
        return bool(self._keep)

    def changed(self, ino: Ino) -> None:
        """Others changed a node that the kernel knows, or its bytes are not what they were."""
        for tell in self._changed:
            tell(ino)

    def lost(self, parent: Ino, name: bytes, ino: Ino) -> None:
        """Others removed a name that the kernel knows."""
        for tell in self._lost:
            tell(parent, name, ino)

    def forgotten(self, handle: HandleId) -> None:
        """An open file is given up without the kernel's RELEASE."""
        for tell in self._forgotten:
            tell(handle)

    def mapped(self, handle: HandleId, reader: Callable[[], int]) -> None:
        """The kernel has released an open file that is kept as long as its tier file may be mapped.

        It is about to be asked whether it is. `reader` opens the tier file to read alone.
        """
        for tell in self._mapped:
            tell(handle, reader)

    def keep(self, ino: Ino, fds: list[int]) -> None:
        """The supervisor is to keep descriptors of a node, instead of those that it has; may wait
        for it, so not under the lock.
        """
        for tell in self._keep:
            tell(ino, fds)

"""How the bytes of an open file travel: what the reply to OPEN and CREATE asks of the kernel.

Owns the backing ids of the passthrough lane. Translates the lane that the file system chose into
flags that this kernel understands, and chooses none itself, but for one case: where the kernel does
not take a file for passthrough, the handle goes on in the daemon's lane. Any thread.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable

from acpfs.filesystem.filesystem import FileSystem
from acpfs.filesystem.records import Lane, OpenFile
from acpfs.logger import get_logger
from acpfs.ram.kept import Kept
from acpfs.ram.mapped_records import NO_SLOT
from acpfs.transport.native.device import Device
from acpfs.transport.native.negotiate import Negotiated
from acpfs.transport.native.protocol import InitFlag, OpenFlag
from acpfs.types import HandleId, Ino

_KEEP_CACHE = int(OpenFlag.KEEP_CACHE)
_DIRECT = int(OpenFlag.DIRECT_IO | OpenFlag.PARALLEL_DIRECT_WRITES)
_PASSTHROUGH = int(OpenFlag.PASSTHROUGH)
_NUMBER = 2
"""Word of a record."""

log = get_logger(__name__)


class Backing:
    """A file that the kernel reads and writes itself, for one node."""

    __slots__ = ("handles", "is_former", "number", "released")

    def __init__(self, number: int, *, is_former: bool = False) -> None:
        """`number`: the kernel's id. `is_former`: the last worker registered it."""
        self.number = number
        self.is_former = is_former
        """It may be open to write: acpfs once registered what it had, and then counts as somebody
        who may write to the tier file.
        """
        self.handles = 0
        self.released = set[HandleId]()
        """Those that the kernel has released, and that are kept as they may be mapped."""


class KernelLanes:
    """Lane → open flags and backing id."""

    def __init__(self, fs: FileSystem, kept: Kept, device: Device, negotiated: Negotiated) -> None:
        """Tells the file system which lanes there are."""
        self._fs = fs
        self._device = device
        self._direct_mmap = negotiated.has(InitFlag.DIRECT_IO_ALLOW_MMAP)
        self._lock = threading.Lock()
        self._by_node: dict[Ino, Backing] = {}
        self._by_handle: dict[HandleId, tuple[Ino, int]] = {}
        """Node, and the slot of the record; `NO_SLOT`: there was no page for one."""
        self._kept = kept
        self.refused = 0
        """Files that the kernel did not take for passthrough."""
        self._take_over()
        fs.offer_lanes(
            Lane.DIRECT, passthrough=negotiated.has(InitFlag.PASSTHROUGH) and self._permitted()
        )

    def _take_over(self) -> None:
        """Backing files that the last worker registered: used on as long as their files are
        open.
        """
        records = sorted(self._kept.backings, key=lambda one: one[1][_NUMBER])
        newest = {Ino(ino): number for _slot, (_handle, ino, number) in records}
        for slot, (handle, ino, number) in reversed(records):
            backing = self._by_node.setdefault(Ino(ino), Backing(newest[Ino(ino)], is_former=True))
            if number != backing.number:  # it died while it exchanged them
                self._close(Backing(number))
                self._kept.backings.record(slot)[_NUMBER] = backing.number
            if HandleId(handle) in self._by_handle:
                self._kept.backings.free(slot)
                continue
            backing.handles += 1
            self._by_handle[HandleId(handle)] = (Ino(ino), slot)
        for number in [n for n in self._by_handle if not self._fs.is_open(n)]:
            self.released(number)
        self._fs.watch_forgotten(self.released)
        self._fs.watch_mapped(self.kept_mapped)

    def _close_lost(self, newest: int) -> None:
        """The backing file that the last worker registered and did not live to record, if there is
        one.

        There can be only one, because that is done under the lock, and it is the one before ours:
        the kernel gives ids in turn.
        """
        if newest - 1 not in {backing.number for backing in self._by_node.values()}:
            with contextlib.suppress(OSError):
                self._device.backing_close(newest - 1)

    def _permitted(self) -> bool:
        """Whether this process may register backing files, tried with one (CAP_SYS_ADMIN is
        needed).
        """
        fd = os.memfd_create("acpfs-passthrough-probe", os.MFD_CLOEXEC)
        try:
            number = self._device.backing_open(fd)
            self._device.backing_close(number)
            if self._kept.taken_over:
                self._close_lost(number)
        except OSError as error:
            log.warning("no passthrough: the kernel refuses backing files", error=str(error))
            return False
        finally:
            os.close(fd)
        return True

    def open_reply(self, ino: Ino, flags: int, file: OpenFile) -> tuple[int, int]:
        """(open flags, backing id) for a file opened with `flags`.

        While an inode is open in the passthrough lane, the kernel takes no open of it without a
        backing id (EIO). So a daemon's open gets the id too, and DIRECT_IO beside it, which wins
        for read and write: they come to the daemon, only mappings go to the backing file.
        """
        number = self._register(ino, file)
        if file.lane is Lane.PASSTHROUGH:
            if number:
                return _PASSTHROUGH, number
            self._fs.refuse_passthrough(file.handle)
        elif number:
            return _DIRECT | _PASSTHROUGH, number
        return self._daemon_flags(flags, file), 0

    def _daemon_flags(self, flags: int, file: OpenFile) -> int:
        """Open flags of the daemon's lane.

        Kernels before 6.6 refuse shared mappings of files opened with direct I/O (ENODEV, seen with
        safetensors): there only files that cannot be mapped at all, those opened O_WRONLY, are
        direct.
        """
        if self._direct_mmap or flags & os.O_ACCMODE == os.O_WRONLY:
            return _DIRECT
        return _KEEP_CACHE if file.keep_cache else 0

    def _register(self, ino: Ino, file: OpenFile) -> int:
        """The backing id of a node, the same for all who have it open (the kernel insists on that);
        0: none, or the kernel refuses.
        """
        if file.lane is not Lane.PASSTHROUGH and ino not in self._by_node:
            return 0
        with self._lock:
            backing = self._by_node.get(ino)
            if backing is None:
                backing = self._new_backing(file) if file.lane is Lane.PASSTHROUGH else None
                if backing is None:
                    return 0
            if file.handle not in self._by_handle:
                slot = self._record(file.handle, ino, backing.number)
                if (
                    slot == NO_SLOT and not backing.handles
                ):  # the next worker would give the kernel another file beside it
                    self._close(backing)
                    return 0
                self._by_node[ino] = backing
                backing.handles += 1
                self._by_handle[file.handle] = (ino, slot)
            return backing.number

    def _record(self, handle: HandleId, ino: Ino, number: int) -> int:
        """For the next worker; without a record, which takes a page, it learns of the backing file
        from the others who have it open.
        """
        try:
            return self._kept.backings.add(handle, ino, number)
        except OSError:
            return NO_SLOT

    def _close(self, backing: Backing) -> None:
        with contextlib.suppress(
            OSError
        ):  # ENOENT: closed by the last worker, which did not live to note it
            self._device.backing_close(backing.number)

    def _new_backing(self, file: OpenFile) -> Backing | None:
        try:
            return self._new_to_read(file.backing_fd)
        except OSError as error:
            self.refused += 1
            log.warning(
                "the kernel does not take a file for passthrough",
                error=errno.errorcode.get(error.errno or 0, str(error)),
            )
            return None

    def _new_to_read(self, fd: int) -> Backing:
        """To read alone: the kernel opens the file once more for each open file of the mount, as
        that one asks for.

        What it has itself would count as somebody who may write to the tier file
        (`Tier.has_writers`). A file of the backing directory is read-only as it is, and not opened
        here: that may hang.
        """
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            return Backing(self._device.backing_open(fd))
        reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return Backing(self._device.backing_open(reader))
        finally:
            os.close(reader)

    def released(self, handle: HandleId) -> None:
        """An open file is gone; with the last of its node the kernel's hold on the backing file
        ends.
        """
        if handle not in self._by_handle:
            return
        with self._lock:
            ino, slot = self._by_handle.pop(handle)
            backing = self._by_node[ino]
            backing.released.discard(handle)
            backing.handles -= 1
            if not backing.handles:
                del self._by_node[ino]
        if not backing.handles:
            self._close(backing)
        if slot != NO_SLOT:
            self._kept.backings.free(slot)

    def kept_mapped(self, handle: HandleId, reader: Callable[[], int]) -> None:
        """An open file that the kernel has released is kept, as its tier file may be mapped.

        What the last worker registered may count itself as one who maps it, and would do so for
        ever. As soon as the kernel has no open file any more that goes by it, another can take its
        place.
        """
        with self._lock:
            if handle not in self._by_handle:
                return
            ino, _slot = self._by_handle[handle]
            backing = self._by_node[ino]
            backing.released.add(handle)
            if backing.is_former and len(backing.released) == backing.handles:
                with contextlib.suppress(OSError):  # no descriptor, say: again in a second
                    self._exchange(ino, backing, reader())

    def _exchange(self, ino: Ino, backing: Backing, reader: int) -> None:
        """One that only reads, of the same tier file: who opens the file meanwhile is to map that.

        Both are recorded until the older one is closed: the next worker takes the newer one of two,
        and closes the other.

        Raises:
            OSError: it stays as it is.
        """
        try:
            new = Backing(self._device.backing_open(reader))
        finally:
            os.close(reader)
        slots = dict[HandleId, int]()
        try:
            for handle in backing.released:
                slots[handle] = self._kept.backings.add(handle, ino, new.number)
        except OSError:
            for slot in slots.values():
                self._kept.backings.free(slot)
            self._close(new)
            raise
        self._close(backing)
        for handle, slot in slots.items():
            _ino, older = self._by_handle[handle]
            self._by_handle[handle] = (ino, slot)
            if older != NO_SLOT:
                self._kept.backings.free(older)
        backing.number = new.number
        backing.is_former = False

    def __len__(self) -> int:
        """Open files that have a backing id."""
        return len(self._by_handle)

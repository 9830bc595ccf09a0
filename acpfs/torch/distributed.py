"""`Writer`: torch's own writer of distributed checkpoints, with several threads for each file and
the faster checksum. Its files have the bytes that torch's own have, so torch's own reader reads
them.

torch puts one archive behind the other, one for each tensor. Most tensors of a model have a few
types and shapes, so few archives are laid out by torch, and each of them is used many times.
"""

from __future__ import annotations

import contextlib
import functools
import os
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from acpfs.torch.archive import Archive
from acpfs.torch.originals import has_skeletons, is_ordinary, skips_data
from acpfs.torch.saving import emptied_where_it_fails, lies_plainly_in_mount, window_bytes
from acpfs.torch.side_by_side import side_by_side, usable_threads
from acpfs.torch.skeleton import skeleton
from acpfs.torch.storage_bytes import (
    AcceleratorCopier,
    NoWayError,
    StorageBytes,
    is_in_host_memory,
)
from acpfs.torch.windows import ArchiveWindows, write_all

NAME = "archive"
"""What torch calls an archive that it writes through a file object."""
BATCH_BYTES = 256 << 20
"""Of tensors that are held at a time: some are copies, which torch's writer makes one by one."""


class Writer(filesystem.FileSystemWriter):  # type: ignore[misc]  # torch is not there for types
    """Takes all that `FileSystemWriter` takes; what is not as usual is its work.

    `thread_count` is how many files a rank makes, as there; each is written by several threads.
    """

    def _write_data(self, planner: Any, file_queue: Any) -> Any:
        """Write all files of the queue; a future of what is where.

        Raises:
            ArchiveWriteError: a file could not be written. It is empty then.
        """
        files = list(_taken(file_queue))
        if not self._is_usual([path for path, _, _ in files]):
            for one in files:
                file_queue.put(one)
            return super()._write_data(planner, file_queue)
        known: dict[Any, Archive] = {}
        results = list[WriteResult]()
        for path, key, items in files:
            results += _File(os.fspath(path), key, planner, known).write(
                items, is_synced=self.sync_files
            )
        future: Any = Future()
        future.set_result(results)
        return future

    def _is_usual(self, paths: Sequence[Any]) -> bool:
        return (
            type(self.fs) is filesystem.FileSystem
            and not self.transforms.extensions
            and getattr(self.serialization_format, "name", "") == "TORCH_SAVE"
            and has_skeletons()
            and not skips_data()
            and is_ordinary()
            and all(lies_plainly_in_mount(os.fspath(path)) for path in paths)
        )


def _taken(files: Any) -> Iterator[tuple[Any, str, list[Any]]]:
    with contextlib.suppress(queue.Empty):
        while True:
            yield files.get_nowait()


@dataclass(frozen=True)
class Span:
    """A tensor's bytes, where it is some of its storage; as a storage has them."""

    tensor: Any

    @property
    def device(self) -> Any:
        return self.tensor.device

    def nbytes(self) -> int:
        return int(self.tensor.nbytes)

    def data_ptr(self) -> int:
        return int(self.tensor.data_ptr())


class _File:
    """One file of a checkpoint."""

    def __init__(self, path: str, key: str, planner: Any, known: dict[Any, Archive]) -> None:
        """`key`: what its checkpoint calls it. `known`: archives by type and shape."""
        self._path = path
        self._key = key
        self._planner = planner
        self._known = known
        self._end = 0
        self._results = list[WriteResult]()

    def write(self, items: Sequence[Any], *, is_synced: bool) -> list[WriteResult]:
        """All of it; what is where.

        Raises:
            ArchiveWriteError: it could not be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        fd = os.open(self._path, flags, 0o666)
        with emptied_where_it_fails(fd, self._path):
            # torch's order: what is no tensor comes first
            for item in items:
                if item.type == WriteItemType.BYTE_IO:
                    data = self._planner.resolve_data(item).getbuffer()
                    write_all(fd, [data], self._end)
                    self._add(item, len(data))
            batch = _Batch(self._known)
            for item in items:
                if item.type != WriteItemType.BYTE_IO:
                    if batch.is_full:
                        batch.write(fd)
                        batch = _Batch(self._known)
                    size = batch.add(self._planner.resolve_data(item).detach(), self._end)
                    self._add(item, size)
            batch.write(fd)
            if is_synced:
                os.fsync(fd)
        return self._results

    def _add(self, item: Any, size: int) -> None:
        where = filesystem._StorageInfo(self._key, self._end, size)  # noqa: SLF001
        self._results.append(WriteResult(index=item.index, size_in_bytes=size, storage_data=where))
        self._end += size


class _Batch:
    """Tensors whose archives follow each other, written by several threads."""

    def __init__(self, known: dict[Any, Archive]) -> None:
        self._known = known
        self._laid_out = list[tuple[Archive, int]]()
        self._storages: dict[str, Any] = {}
        self._held_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether the next one begins another batch."""
        return self._held_bytes >= BATCH_BYTES

    def add(self, tensor: Any, at: int) -> int:
        """The bytes of its archive, which begins at `at`."""
        number = len(self._laid_out)
        tensor = _brought(tensor)
        self._held_bytes += tensor.nbytes
        kind = _kind(tensor)
        if kind is None:
            with skeleton(tensor, NAME, {}) as (archive, storages):
                pass
        else:
            if kind not in self._known:
                alike = torch.empty_strided(
                    *kind[1:], dtype=kind[0], device="cpu"
                )  # which nobody touches
                with skeleton(alike, NAME, {}) as (made, _):
                    self._known[kind] = made
            archive = self._known[kind]
            whole = tensor.untyped_storage()
            storages = {"0": whole if whole.nbytes() == tensor.nbytes else Span(tensor)}
        copied = archive.copied(f"{number}/")
        self._storages.update({f"{number}/{key}": one for key, one in storages.items()})
        self._laid_out.append((copied, at))
        return copied.tail_at + len(copied.tail)

    def write(self, fd: int) -> None:
        """Into the file."""
        storages = StorageBytes(self._storages)
        window = window_bytes(storages)
        archives = [ArchiveWindows(archive, window, at) for archive, at in self._laid_out]
        jobs = list(_jobs(archives, window))
        threads = min(usable_threads(), max(1, len(jobs)))
        bringers = [storages.bringer(window) for _ in range(threads)]

        def do(bringer: Any, number: int) -> None:
            run, begin = jobs[number]
            if begin is None:
                ArchiveWindows.put_small(fd, bringer, run)
            else:
                run[0].put(fd, bringer, begin)

        side_by_side([functools.partial(do, one) for one in bringers], range(len(jobs)))
        for one in archives:
            if not one.is_small:
                one.finish(fd)


def _jobs(
    archives: Sequence[ArchiveWindows], window: int
) -> Iterator[tuple[list[ArchiveWindows], int | None]]:
    """(archives, None): small ones, which are written at once; (one, where): a window of it."""
    run = list[ArchiveWindows]()
    for one in archives:
        if run and (not one.is_small or one.at + one.size - run[0].at > window):
            yield run, None
            run = []
        if one.is_small:
            run.append(one)
        else:
            yield from (([one], begin) for begin in one.begins)
    if run:
        yield run, None


def _brought(tensor: Any) -> Any:
    """As torch's writer has it: on the host, with no more storage than it needs; what can be
    read as it is stays where it is.
    """
    if _kind(tensor) is not None:
        if is_in_host_memory(tensor):
            return tensor
        if tensor.untyped_storage().nbytes() == tensor.nbytes and _has_way(tensor.device):
            return tensor
    here = tensor.cpu()
    if here.untyped_storage().size() != here.nbytes:
        here = here.clone()
    return here


def _kind(tensor: Any) -> tuple[Any, ...] | None:
    """(type, shape, strides) of one that is nothing but its elements, one behind the other in some
    order: its archive is that of any other with the same.
    """
    if (
        type(tensor) is not torch.Tensor
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.device.type == "meta"
        or vars(tensor)
        or not _is_dense(tensor)
    ):
        return None
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def _is_dense(tensor: Any) -> bool:
    """Whether its elements lie one behind the other in some order of the dimensions: a copy by
    torch has its strides then.
    """
    if not tensor.numel():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


@functools.lru_cache(maxsize=16)
def _has_way(device: Any) -> bool:
    try:
        AcceleratorCopier(device, 1)
    except NoWayError:
        return False
    return True

"""Has torch write an archive without its storages, and takes note of them.

Pickling is torch's own, in its ordinary mode, with its own errors; only then is torch told to leave
room for the storages instead of writing them (`torch.serialization.skip_data`). The skeleton is a
file with holes in memory, as large as the pickle, in a directory that nobody else may enter. It is
called as the file will be, since that name is in each record.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch

from acpfs.torch.archive import Archive, UnknownLayoutError
from acpfs.torch.originals import original_save

IN_MEMORY = "/dev/shm"  # noqa: S108
"""A tmpfs nearly everywhere."""


class Recorder:
    """Stands for the module `pickle` in a call of `torch.save`: pickles as that does, and keeps the
    storages that are met.
    """

    __name__ = "pickle"
    """torch compares it with "dill"."""

    def __init__(self) -> None:
        self.storages: dict[str, Any] = {}
        """By torch's key, in the order of the archive."""
        self._stack = contextlib.ExitStack()
        recorder = self

        class Pickler:
            """torch derives its own from it, whose `persistent_id` knows storages."""

            def __init__(self, file: BinaryIO, protocol: int) -> None:
                self._file = file
                self._protocol = protocol

            def dump(self, value: object) -> None:
                recorder.dump(value, self._file, self._protocol, self.persistent_id)

            def persistent_id(self, value: object) -> Any:
                raise NotImplementedError

        self.Pickler = Pickler

    def dump(self, value: object, file: BinaryIO, protocol: int, identified: Any) -> None:
        """Pickle; from its end on torch leaves storages out."""
        storages = self.storages

        class Inner(pickle.Pickler):
            def persistent_id(self, one: object) -> Any:
                found = identified(one)
                if found is not None:
                    untyped = getattr(one, "_untyped_storage", one)
                    storages[found[2]] = untyped  # keeps it alive, as torch does
                return found

        Inner(file, protocol=protocol).dump(value)
        self._stack.enter_context(torch.serialization.skip_data())

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Whatever comes, torch writes storages again afterwards."""
        with self._stack:
            yield


@contextlib.contextmanager
def skeleton(value: object, name: str, options: dict[str, Any]) -> Iterator[tuple[Archive, Any]]:
    """(archive, storages by key) of what `torch.save(value, name, **options)` would write.

    Raises:
        UnknownLayoutError: this torch lays it out in another way.
        Exception: whatever pickling raises, and torch where there is no room.
    """
    base = IN_MEMORY if os.access(IN_MEMORY, os.W_OK) else None
    recorder = Recorder()
    with tempfile.TemporaryDirectory(prefix="acpfs-", dir=base) as directory:
        path = os.path.join(directory, name)
        with recorder.ending(), _ascii(directory) as called:
            original_save(
                value, os.path.join(called, name), **{**options, "pickle_module": recorder}
            )
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            sizes = {key: one.nbytes() for key, one in recorder.storages.items()}
            archive = Archive(fd, sizes)
        finally:
            os.close(fd)
        Path(path).unlink()
    yield archive, recorder.storages


@contextlib.contextmanager
def _ascii(directory: str) -> Iterator[str]:
    """A name of it in which all is ASCII: else torch calls all records "archive", whatever the
    file's name.
    """
    if directory.isascii():
        yield directory
        return
    fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


__all__ = ["UnknownLayoutError", "skeleton"]

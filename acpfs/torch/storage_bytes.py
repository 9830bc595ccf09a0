"""The bytes of storages, piece by piece, in memory that can be hashed and written.

Those of a storage in host memory are there already. Those of a device come through pinned buffers:
each thread that writes has one and a stream of its own, so that one copies while others hash and
write. Threading: a `Bringer` belongs to one thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol

import torch


class NoWayError(Exception):
    """These storages cannot be brought: let torch do it."""


class Copier(Protocol):
    """Copies from one device to host memory, for one thread."""

    def copy(self, storage: Any, start: int, target: memoryview) -> None:
        """Begin to copy from `start` bytes on as much as `target` takes."""

    def wait(self) -> None:
        """Until all that was begun is there."""

    @property
    def room(self) -> memoryview:
        """Where targets have to lie: a window."""


class AcceleratorCopier:
    """By torch's accelerator interface. Not run on a device yet."""

    def __init__(self, device: torch.device, length: int) -> None:
        """Raises: NoWayError: torch has no such interface, or not for this device."""
        found: Any = getattr(torch, "accelerator", None)
        current = found.current_accelerator() if found is not None else None
        if current is None or current.type != device.type or not hasattr(torch.Stream, "__enter__"):
            raise NoWayError
        try:
            # whatever the default device is
            self._pinned = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._stream = torch.Stream(device)
            # what the caller has queued for these tensors comes first
            self._stream.wait_stream(found.current_stream(device))
        except RuntimeError as error:  # no memory that can be pinned
            raise NoWayError from error
        self._room = memory_of(self._pinned.untyped_storage())

    @property
    def room(self) -> memoryview:
        return self._room

    def copy(self, storage: Any, start: int, target: memoryview) -> None:
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        at = _address(target) - self._pinned.data_ptr()
        with self._stream:
            self._pinned[at : at + len(target)].copy_(
                source[start : start + len(target)], non_blocking=True
            )

    def wait(self) -> None:
        self._stream.synchronize()


def memory_of(storage: Any) -> memoryview:
    """A storage's bytes, where they are in host memory; who takes this keeps the storage."""
    length = storage.nbytes()
    if not length:
        return memoryview(b"")
    return memoryview((ctypes.c_char * length).from_address(storage.data_ptr())).cast("B")


def is_in_host_memory(storage: Any) -> bool:
    """Whether the processor can read it."""
    return bool(storage.device.type == "cpu")


def _address(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


class Bringer:
    """What one thread reads storages by."""

    def __init__(
        self, storages: dict[str, Any], host: dict[str, memoryview], copiers: dict[Any, Copier]
    ) -> None:
        self._storages = storages
        self._host = host
        self._copiers = copiers

    def bring(self, key: str, start: int, length: int, at: int) -> memoryview:
        """These bytes of a storage, right after `wait`; `at` in the window."""
        if (known := self._host.get(key)) is not None:
            return known[start : start + length]
        storage = self._storages[key]
        copier = self._copiers[storage.device]
        target = copier.room[at : at + length]
        copier.copy(storage, start, target)
        return target

    def wait(self) -> None:
        for copier in self._copiers.values():
            copier.wait()


class StorageBytes:
    """All storages of a save."""

    def __init__(
        self,
        storages: dict[str, Any],
        *,
        is_host: Callable[[Any], bool] = is_in_host_memory,
        copier: Callable[[torch.device, int], Copier] = AcceleratorCopier,
    ) -> None:
        self._storages = storages
        self._copier = copier
        self._host = {key: memory_of(one) for key, one in storages.items() if is_host(one)}
        self._devices = {
            one.device for key, one in storages.items() if key not in self._host and one.nbytes()
        }

    @property
    def are_here(self) -> bool:
        """Whether no device has any of them."""
        return not self._devices

    def bringer(self, window_bytes: int) -> Bringer:
        """One for a further thread.

        Raises:
            NoWayError: a device has no way to here.
        """
        copiers = {device: self._copier(device, window_bytes) for device in self._devices}
        return Bringer(self._storages, self._host, copiers)

"""A device whose memory is lost in part: how it says so, and what its process does before and after. Only processors were tried.

A processor's memory is never lost in part: `DeviceMemoryError` is raised by tests, and by scripts that find out by themselves. The NPU's
calls are those that torch_npu documents; they run against a double, and were not run on a device.
"""

from __future__ import annotations

from typing import Any, Protocol


class DeviceMemoryError(RuntimeError):
    """What this rank's parameters and optimizer state were is gone; its process can go on."""


class Device(Protocol):
    """Of one rank."""

    def lost_memory(self, error: BaseException) -> bool:
        """Whether an exception says that memory is lost, and the process can stay."""

    def stop(self) -> None:
        """Nothing runs on it any more; out of all collectives."""

    def restart(self) -> None:
        """It works again; what was in its memory may be anything."""


class Processor:
    """The host's own."""

    def lost_memory(self, error: BaseException) -> bool:
        return isinstance(error, DeviceMemoryError)

    def stop(self) -> None:
        """Nothing to do."""

    def restart(self) -> None:
        """Nothing to do."""


class Npu:
    """An Ascend device. Not run on a device."""

    WORDS = ("UCE ERROR", "HBM MULTI BIT ECC ERROR")

    def __init__(self, calls: Any, number: int) -> None:
        """`calls`: `torch_npu.npu`."""
        self._calls, self._number = calls, number

    def lost_memory(self, error: BaseException) -> bool:
        return isinstance(error, DeviceMemoryError) or (isinstance(error, RuntimeError) and any(word in str(error) for word in self.WORDS))

    def stop(self) -> None:
        self._calls.stop_device(self._number)

    def restart(self) -> None:
        self._calls.restart_device(self._number)

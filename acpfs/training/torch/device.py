"""A device whose memory is lost in part: how it says so, and what its process does before and
after. Only processors were tried.

A processor's memory is never lost in part: `DeviceMemoryError` is raised by tests, and by scripts
that find out by themselves. The NPU's calls are those that torch_npu documents, and what CUDA says
are texts of its own errors; both run against doubles, and were not run on a device
(`tools/train-accelerator-check` is for who has one). Main thread only.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from acpfs.errors import ConfigError


class DeviceMemoryError(RuntimeError):
    """What this rank's parameters and optimizer state were is gone; its process can go on."""


class Device(Protocol):
    """Of one rank."""

    def lost_memory(self, error: BaseException) -> bool:
        """Whether an exception says that memory is lost, and the process can stay."""

    def ends_process(self, error: BaseException) -> bool:
        """Whether an exception says that nothing works on the device any more in this process:
        another one has to take its place.
        """

    def stop(self) -> None:
        """Nothing runs on it any more; out of all collectives.

        Raises:
            RuntimeError: it does not stop, and this process is of no use.
        """

    def restart(self) -> None:
        """It works again; what was in its memory may be anything."""


class Processor:
    """The host's own."""

    def lost_memory(self, error: BaseException) -> bool:
        return isinstance(error, DeviceMemoryError)

    def ends_process(self, error: BaseException) -> bool:
        return False

    def stop(self) -> None:
        """Nothing to do."""

    def restart(self) -> None:
        """Nothing to do."""


class Npu:
    """An Ascend device. Not run on a device."""

    WORDS = ("UCE ERROR", "HBM MULTI BIT ECC ERROR")

    def __init__(self, calls: Any, number: int) -> None:
        """`calls`: `torch_npu.npu`."""
        self._calls = calls
        self._number = number

    def lost_memory(self, error: BaseException) -> bool:
        return isinstance(error, DeviceMemoryError) or (
            isinstance(error, RuntimeError) and any(word in str(error) for word in self.WORDS)
        )

    def ends_process(self, error: BaseException) -> bool:
        return False

    def stop(self) -> None:
        if status := self._calls.stop_device(self._number):
            raise RuntimeError(f"stop_device({self._number}) gave {status}")

    def restart(self) -> None:
        self._calls.restart_device(self._number)


class Cuda(Processor):
    """A device of NVIDIA's. Not run on a device.

    An error of these poisons the context: every later call fails, so the process goes.
    """

    WORDS = (
        *(
            "uncorrectable ECC error",
            "uncorrectable NVLink error",
            "illegal memory access",
            "device-side assert",
            "unspecified launch failure",
        ),
        *(
            "misaligned address",
            "illegal instruction",
            "invalid program counter",
            "hardware stack error",
            "unknown error",
        ),
    )

    def ends_process(self, error: BaseException) -> bool:
        said = str(error)
        return (
            isinstance(error, RuntimeError)
            and "CUDA error" in said
            and any(word in said for word in self.WORDS)
        )


def device_named(name: str) -> Device:
    """`cpu`, `cuda`, `npu`; `auto`: CUDA where torch has a device, else the host's memory.

    The NPU is never chosen by itself.

    Raises:
        ConfigError: there is no such thing, or torch_npu is not there.
    """
    if name == "npu":
        calls = getattr(sys.modules.get("torch_npu"), "npu", None)
        if calls is None:
            raise ConfigError("device = 'npu': the script has not imported torch_npu")
        return Npu(calls, int(calls.current_device()))
    if name == "auto":
        torch: Any = sys.modules.get("torch")
        return Cuda() if torch is not None and torch.cuda.is_available() else Processor()
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device = {name!r}: auto, cpu, cuda or npu")
    return Cuda() if name == "cuda" else Processor()

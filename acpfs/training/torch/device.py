"""A device: marks on its stream, how it is brought out of collectives, and how it says that memory
is lost. Only processors were tried.

An accelerator does what was launched when it comes to it: a call that returns says nothing. What
waits for it asks an event, in Python, so that `Interrupted` reaches it.

A processor's memory is never lost in part: `DeviceMemoryError` is raised by tests, and by scripts
that find out by themselves. The NPU's calls are those that torch_npu documents, and what CUDA says
are texts of its own errors; both run against doubles, and were not run on a device
(`tools/train-accelerator-check` is for who has one). Main thread only, but for `end_collectives`,
`enter_thread` and `probe`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from acpfs.errors import ConfigError

PROBED_BYTES = 1024


class DeviceMemoryError(RuntimeError):
    """What this rank's parameters and optimizer state were is gone; its process can go on."""


class Event(Protocol):
    """A mark on a stream."""

    def query(self) -> bool:
        """Whether the device has done all that was launched before it.

        Raises:
            RuntimeError: nothing works on the device any more in this process.
        """


class Device(Protocol):
    """Of one rank."""

    is_behind: bool
    """Whether what was launched is done later, behind the host's back."""
    ends_everything: bool
    """Whether `end_collectives` ends whatever runs on the device, of all groups, once."""

    def record(self) -> Event:
        """Behind whatever this thread has launched so far on its stream."""

    def enter_thread(self) -> None:
        """Called first in a thread that is to use the device."""

    def end_collectives(self, group: Any) -> None:
        """Of one process group. What is queued behind them runs then, with whatever they left.

        Raises:
            RuntimeError: they go on.
        """

    def probe(self, value: Any) -> None:
        """All streams come to their end, and a tensor can be read. May never return.

        Raises:
            RuntimeError: nothing works on the device any more in this process.
        """

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


class _Passed:
    """The event of a device that does all at once."""

    def query(self) -> bool:
        return True


class Processor:
    """The host's own."""

    is_behind = False
    ends_everything = False

    def record(self) -> Event:
        return _Passed()

    def enter_thread(self) -> None:
        """Nothing to do."""

    def end_collectives(self, group: Any) -> None:
        """They end with their connections (`sockets`)."""

    def probe(self, value: Any) -> None:
        """Nothing to do."""

    def lost_memory(self, error: BaseException) -> bool:
        return isinstance(error, DeviceMemoryError)

    def ends_process(self, error: BaseException) -> bool:
        return False

    def stop(self) -> None:
        """Nothing to do."""

    def restart(self) -> None:
        """Nothing to do."""


class Accelerator:
    """What `torch.cuda` and `torch_npu.npu` have in common. Not run on a device."""

    is_behind = True
    ends_everything = False

    def __init__(self, calls: Any, number: int) -> None:
        """`calls`: `torch.cuda`, or `torch_npu.npu`. `number`: of the device."""
        self._calls = calls
        self._number = number

    def record(self) -> Event:
        # `blocking`: a wait for it, which nobody here does, would not spin
        event: Event = self._calls.Event(blocking=True)
        event.record()  # type: ignore[attr-defined]  # of the current stream
        return event

    def enter_thread(self) -> None:
        self._calls.set_device(self._number)  # of a new thread it is 0

    def probe(self, value: Any) -> None:
        self._calls.synchronize()
        value.detach().reshape(-1)[: max(1, PROBED_BYTES // value.element_size())].to("cpu")
        self._calls.synchronize()


class Npu(Accelerator):
    """An Ascend device. Not run on a device."""

    WORDS = ("UCE ERROR", "HBM MULTI BIT ECC ERROR")
    ends_everything = True

    def end_collectives(self, group: Any) -> None:
        self.stop()

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


class Cuda(Accelerator):
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

    def lost_memory(self, error: BaseException) -> bool:
        return isinstance(error, DeviceMemoryError)

    def end_collectives(self, group: Any) -> None:
        """The group's own call: torch's `_abort_process_group` also forgets who is who in it."""
        torch: Any = sys.modules["torch"]
        group._get_backend(torch.device("cuda")).abort()  # noqa: SLF001  # it has no public name

    def stop(self) -> None:
        """Nothing to do."""

    def restart(self) -> None:
        """Nothing to do."""

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
        return _cuda() if torch is not None and torch.cuda.is_available() else Processor()
    if name not in ("cpu", "cuda"):
        raise ConfigError(f"device = {name!r}: auto, cpu, cuda or npu")
    return _cuda() if name == "cuda" else Processor()


def _cuda() -> Cuda:
    """The device that the script has chosen; its number is asked for where there is one."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return Cuda(None, 0)
    return Cuda(torch.cuda, int(torch.cuda.current_device()))


BACKENDS: dict[str, Callable[[], Device]] = {
    "nccl": _cuda,
    "hccl": lambda: device_named("npu"),
}
"""Of process groups → the device whose collectives it does. gloo is the host's."""

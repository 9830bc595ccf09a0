"""A device whose memory is lost: what is asked of torch_npu, by a double. Nothing of this was run on a device."""

from __future__ import annotations

import pytest

from acpfs.training.torch.device import DeviceMemoryError, Npu, Processor


class DoubleOfTorchNpu:
    """Records what `torch_npu.npu` would be asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def stop_device(self, number: int) -> None:
        self.calls.append(("stop", number))

    def restart_device(self, number: int) -> None:
        self.calls.append(("restart", number))


@pytest.mark.clause("T81")
def test_the_documented_calls_in_their_order() -> None:
    calls = DoubleOfTorchNpu()
    device = Npu(calls, 3)
    device.stop()
    device.restart()
    assert calls.calls == [("stop", 3), ("restart", 3)]


@pytest.mark.clause("T81")
def test_which_errors_say_that_memory_is_lost() -> None:
    device = Npu(DoubleOfTorchNpu(), 0)
    assert device.lost_memory(RuntimeError("... UCE ERROR ..."))
    assert device.lost_memory(DeviceMemoryError("..."))
    assert not device.lost_memory(RuntimeError("Connection closed"))
    assert not device.lost_memory(ValueError("UCE ERROR"))
    assert not Processor().lost_memory(RuntimeError("UCE ERROR"))

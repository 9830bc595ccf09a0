"""A device whose memory is lost: what is asked of torch_npu, by a double.

Nothing of this was run on a device.
"""

from __future__ import annotations

import pytest

from acpfs.errors import ConfigError
from acpfs.training.torch.device import Cuda, DeviceMemoryError, Npu, Processor, device_named


class DoubleOfTorchNpu:
    """Records what `torch_npu.npu` would be asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.status = 0

    def stop_device(self, number: int) -> int:
        self.calls.append(("stop", number))
        return self.status

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


@pytest.mark.clause("T126")
def test_a_device_that_does_not_stop_ends_its_process() -> None:
    calls = DoubleOfTorchNpu()
    calls.status = 1
    with pytest.raises(RuntimeError, match="stop_device"):
        Npu(calls, 0).stop()


@pytest.mark.clause("T126")
def test_which_errors_of_cuda_poison_the_process() -> None:
    device = Cuda()
    assert device.ends_process(RuntimeError("CUDA error: uncorrectable ECC error encountered"))
    assert device.ends_process(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not device.ends_process(RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not device.ends_process(RuntimeError("Connection closed by peer"))
    assert not device.lost_memory(RuntimeError("CUDA error: uncorrectable ECC error encountered"))


@pytest.mark.clause("T126")
def test_the_npu_is_never_chosen_by_itself() -> None:
    assert isinstance(device_named("auto"), Processor)
    with pytest.raises(ConfigError, match="torch_npu"):
        device_named("npu")
    with pytest.raises(ConfigError, match="auto, cpu, cuda or npu"):
        device_named("tpu")

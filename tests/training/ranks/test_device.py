"""A device whose memory is lost: what is asked of torch_npu, by a double.

Nothing of this was run on a device.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from acpfs.errors import ConfigError
from acpfs.training.torch.device import Cuda, DeviceMemoryError, Npu, Processor, device_named
from acpfs.training.torch.groups import NCCL_SETTINGS, device_of_groups
from acpfs.training.torch.host_parts import TorchRandom


class DoubleOfTorchNpu:
    """Records what `torch_npu.npu` would be asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.status = 0
        self.done = False

    def current_device(self) -> int:
        return 3

    def set_device(self, number: int) -> None:
        self.calls.append(("set", number))

    def synchronize(self) -> None:
        self.calls.append(("synchronize", 3))

    def Event(self, *, blocking: bool) -> DoubleOfTorchNpu:  # noqa: N802  # torch's name
        assert blocking
        return self

    def record(self) -> None:
        self.calls.append(("record", 3))

    def query(self) -> bool:
        return self.done

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
    device = Cuda(None, 0)
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


@pytest.mark.clause("T197", "T199")
@pytest.mark.parametrize("kind", [Npu, Cuda])
def test_what_is_asked_of_an_accelerator(kind: type[Npu | Cuda]) -> None:
    calls = DoubleOfTorchNpu()
    device = kind(calls, 3)
    device.enter_thread()
    event = device.record()
    assert not event.query()
    calls.done = True
    assert event.query()
    device.probe(torch.ones(8))
    assert calls.calls == [("set", 3), ("record", 3), ("synchronize", 3), ("synchronize", 3)]


@pytest.mark.clause("T200")
def test_collectives_of_an_npu_end_with_all_else() -> None:
    calls = DoubleOfTorchNpu()
    device = Npu(calls, 3)
    assert device.ends_everything
    device.end_collectives(None)
    assert calls.calls == [("stop", 3)]


@pytest.mark.clause("T200")
def test_collectives_of_cuda_end_by_the_groups_own_abort() -> None:
    aborted: list[str] = []

    class Group:
        def _get_backend(self, device: torch.device) -> Group:
            aborted.append(device.type)
            return self

        def abort(self) -> None:
            aborted.append("abort")

    Cuda(None, 0).end_collectives(Group())
    assert aborted == ["cuda", "abort"]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name, value in NCCL_SETTINGS.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.clause("T201")
def test_which_backends_are_taken(backend: pytest.MonkeyPatch) -> None:
    def of(config: str, *, untried: bool = True) -> object:
        backend.setattr(dist, "get_backend_config", lambda: config)
        return device_of_groups(untried)

    assert isinstance(of("cpu:gloo", untried=False), Processor)
    assert isinstance(of("cpu:gloo,cuda:gloo", untried=False), Processor)
    assert isinstance(of("cpu:gloo,cuda:nccl"), Cuda)
    assert isinstance(of("cuda:nccl"), Cuda)
    with pytest.raises(ConfigError, match="torch_npu"):
        of("npu:hccl")
    for config in ("cuda:nccl", "npu:hccl"):
        with pytest.raises(ConfigError, match="ACPFS_TRAIN_UNTRIED_DEVICE=1"):
            of(config, untried=False)
    for config in ("cpu:mpi", "cuda:nccl,npu:hccl"):
        with pytest.raises(ConfigError, match="gloo and one of"):
            of(config)


@pytest.mark.clause("T201")
def test_what_nccl_must_have_been_told(backend: pytest.MonkeyPatch) -> None:
    backend.setattr(dist, "get_backend_config", lambda: "cuda:nccl")
    backend.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    with pytest.raises(ConfigError, match="TORCH_NCCL_BLOCKING_WAIT"):
        device_of_groups(untried=True)
    backend.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    backend.delenv("TORCH_NCCL_ENABLE_MONITORING")
    with pytest.raises(ConfigError, match=r"export .*TORCH_NCCL_ENABLE_MONITORING=0"):
        device_of_groups(untried=True)


@pytest.mark.clause("T46")
def test_random_numbers_of_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a double of torch.cuda: nothing is asked of devices that are other ranks'."""
    asked: list[object] = []
    own = torch.arange(3, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: own)
    monkeypatch.setattr(torch.cuda, "set_rng_state", asked.append)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", asked.append)
    taken = TorchRandom().take()
    assert taken["cuda"] == [own]
    TorchRandom().give(taken)
    TorchRandom().give({"cpu": torch.get_rng_state(), "cuda": [own, own]})
    assert asked == [own, [own, own]]

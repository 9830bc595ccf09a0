"""MindSpore's own fault-tolerance callback, unmodified, with `mindio_ttp` on its path.

Usage: … rank DIRECTORY | check DIRECTORY.

Ranks have their number and the controller's address in MindSpore's own variables (MS_NODE_ID,
MS_TFT_PORT …).

There is no NPU: `DoubleOfADevice` reports the target as Ascend and two ranks that MindSpore's
collectives know nothing of, and stands for what its runtime does in graph mode: the C call at the
begin of an update, and the sum of the flag over all ranks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import RunContext
from mindspore.train.callback import TrainFaultTolerance, _train_fault_tolerance
from mindspore.train.callback._callback import InternalCallbackParam

WORLD = 2
DEATH = 4


class WithFlag(nn.SGD):  # type: ignore[misc]
    """The parameter that `OptTFTWrapper` adds."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, 0.1)
        self.tft_g_one_flag = ms.Parameter(ms.Tensor([1], dtype=ms.int32), name="tft_g_one_flag")


class DoubleOfADevice:
    """What cannot exist here."""

    def __init__(self, rank: int) -> None:
        real = ms.context.get_context
        parallel = ms.context.get_auto_parallel_context
        said = {"device_target": "Ascend", "device_id": 0}
        ms.context.get_context = lambda name: said[name] if name in said else real(name)
        ms.context.get_auto_parallel_context = lambda name: (
            "data_parallel" if name == "parallel_mode" else parallel(name)
        )
        _train_fault_tolerance.get_rank = lambda: rank
        _train_fault_tolerance.get_group_size = lambda: WORLD

    def open_libraries(self) -> None:
        """As the runtime does: by the package's place, one after the other."""
        import mindio_ttp

        place = next(iter(mindio_ttp.__path__))
        ctypes.CDLL(f"{place}/framework_ttp/libttp_framework.so", mode=os.RTLD_LAZY)
        self.begin = ctypes.CDLL(
            f"{place}/mindspore_api/libttp_c_api.so", mode=os.RTLD_LAZY
        ).MindioTtpSetOptimStatusUpdating
        self.begin.argtypes = [ctypes.c_int64]


def job() -> tuple[nn.Cell, WithFlag]:
    """The same in every rank; two dense layers."""
    ms.set_seed(1)
    net = nn.SequentialCell(nn.Dense(16, 16), nn.ReLU(), nn.Dense(16, 4))
    for number, parameter in enumerate(net.get_parameters()):
        values = np.random.default_rng(number).standard_normal(parameter.shape)
        parameter.set_data(ms.Tensor(values.astype(np.float32)))
    optimizer = WithFlag(net.trainable_params())
    return nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer), optimizer


def train_step(network: nn.Cell, step: int) -> ms.Tensor:
    values = np.random.default_rng(1000 + step)
    data, label = (
        ms.Tensor(values.standard_normal(shape).astype(np.float32)) for shape in ((8, 16), (8, 4))
    )
    return network(data, label)


def meet(directory: Path, name: str, rank: int) -> None:
    """A collective."""
    (directory / f"{name}-{rank}").touch()
    while not all((directory / f"{name}-{other}").exists() for other in range(WORLD)):
        threading.Event().wait(0.02)


def run_rank(rank: int, directory: Path) -> None:
    device = DoubleOfADevice(rank)
    network, optimizer = job()
    callback = TrainFaultTolerance(str(directory / "saves"))
    device.open_libraries()
    told = InternalCallbackParam()
    told.network = network
    told.train_network = network
    told.optimizer = optimizer
    told.batch_num = 100
    told.cur_epoch_num = 1
    told.net_outputs = None
    context = RunContext(told)
    callback.on_train_begin(context)
    for step in range(1, 10):
        meet(directory, f"gradients-{step}", rank)
        callback.on_train_step_begin(context)
        assert device.begin(-1) == 0
        if (rank, step) == (1, DEATH):
            os.kill(os.getpid(), signal.SIGKILL)
        told.cur_step_num = step
        told.net_outputs = train_step(network, step)
        optimizer.tft_g_one_flag.set_data(ms.Tensor([WORLD], dtype=ms.int32))
        callback.on_train_step_end(context)
    callback.end(context)


def check(directory: Path) -> None:
    """The state after the step in which the other rank died, bit for bit."""
    network, _ = job()
    for step in range(1, DEATH + 1):
        train_step(network, step)
    (saved,) = (directory / "saves").iterdir()
    assert saved.name == f"ttp_saved_checkpoints-step_{DEATH}", saved
    (file,) = (saved / "rank_0").iterdir()
    loaded = ms.load_checkpoint(str(file))
    assert int(loaded["step_num"].asnumpy()) == DEATH
    for parameter in network.trainable_params():
        assert np.array_equal(loaded[parameter.name].asnumpy(), parameter.asnumpy()), parameter.name


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check(Path(sys.argv[2]))
    else:
        run_rank(int(os.environ["MS_NODE_ID"]), Path(sys.argv[2]))

"""MindSpore save_checkpoint and load_checkpoint on CPU.

Usage: mindspore_checkpoint.py save|load DIRECTORY.

MindSpore writes NAME.tmp with O_APPEND, renames it and makes it read-only; an existing file it
makes write-only and unlinks first.
"""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn


def network(seed: int) -> nn.Cell:
    """Two dense layers of 4 MiB."""
    net = nn.SequentialCell(nn.Dense(1024, 1024), nn.ReLU(), nn.Dense(1024, 1024))
    values = np.random.default_rng(seed)
    for parameter in net.get_parameters():
        parameter.set_data(ms.Tensor(values.standard_normal(parameter.shape).astype(np.float32)))
    return net


def save(directory: Path) -> None:
    """Plain and over an existing file, with checksum, as safetensors, asynchronously (the thread
    ends before the process).
    """
    for seed in (1, 2):
        ms.save_checkpoint(network(seed), str(directory / "net.ckpt"))
    ms.save_checkpoint(network(3), str(directory / "crc.ckpt"), crc_check=True)
    ms.save_checkpoint(network(4), str(directory / "net.safetensors"), format="safetensors")
    ms.save_checkpoint(network(5), str(directory / "later.ckpt"), async_save="thread")


def load(directory: Path) -> None:
    """All of them, in another process."""
    same(directory / "net.ckpt", network(2))
    same(directory / "crc.ckpt", network(3), crc_check=True)
    same(directory / "net.safetensors", network(4), format="safetensors")
    same(directory / "later.ckpt", network(5))


def same(path: Path, net: nn.Cell, **options: object) -> None:
    """Fail unless the file holds the network's parameters, and loads into a network."""
    loaded = ms.load_checkpoint(str(path), **options)
    for parameter in net.get_parameters():
        assert np.array_equal(loaded[parameter.name].asnumpy(), parameter.asnumpy()), parameter.name
    missing, _ = ms.load_param_into_net(network(99), loaded)
    assert not missing, missing


if __name__ == "__main__":
    {"save": save, "load": load}[sys.argv[1]](Path(sys.argv[2]))

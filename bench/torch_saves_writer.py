"""Saves and loads one state in one way after the other, as it is asked: for `bench.torch_saves`, in
the interpreter that has torch.

Says first whether the fast checksum is there. Reads lines `WAY DIRECTORY`, and answers each with
the seconds that it took, and those of processors. Takes the tmpfs for a mount, too.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch.serialization import set_crc32_options, skip_data

import acpfs.torch
from acpfs.torch import crc, loading, saving, windows
from acpfs.torch.originals import original_load, original_save

MIB = 1 << 20
_libc = ctypes.CDLL(None)
State = dict[str, torch.Tensor]


def without_sums(state: State, path: str) -> None:
    set_crc32_options(False)
    try:
        original_save(state, path)
    finally:
        set_crc32_options(True)


def layout_alone(state: State, path: str) -> None:
    with skip_data():
        original_save(state, path)


def with_zlib(state: State, path: str) -> None:
    vars(windows)["crc32"] = zlib.crc32
    try:
        acpfs.torch.save(state, path)
    finally:
        vars(windows)["crc32"] = crc.crc32


def bytes_alone(state: State, path: str) -> None:
    """write(2) of the same bytes by one thread: what torch's own way has beneath it."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for one in state.values():
        view = memoryview(one.numpy()).cast("B")
        for start in range(0, len(view), 8 * MIB):
            os.write(fd, view[start : start + 8 * MIB])
    os.close(fd)


def with_safetensors(state: State, path: str) -> None:
    from safetensors.torch import save_file

    save_file(state, path)


def distributed(files: int, *, ours: bool = False) -> Callable[[State, str], None]:
    def saved(state: State, path: str) -> None:
        import torch.distributed.checkpoint as dcp

        made = acpfs.torch.Writer if ours else dcp.FileSystemWriter
        writer = made(f"{path}.dcp", thread_count=files)
        dcp.save(state, storage_writer=writer, no_dist=True)

    return saved


SAVES: dict[str, Callable[[State, str], None]] = {
    "torch.save": original_save,
    "acpfs.torch.save": acpfs.torch.save,
    "acpfs.torch.save, zlib": with_zlib,
    "torch.save, no checksums": without_sums,
    "layout alone": layout_alone,
    "write(2) alone": bytes_alone,
    "safetensors": with_safetensors,
    "DCP, 1 thread": distributed(1),
    "DCP, 2 threads": distributed(2),
    "DCP, acpfs.torch.Writer, 1 file": distributed(1, ours=True),
    "DCP, acpfs.torch.Writer, 2 files": distributed(2, ours=True),
}
LOADS: dict[str, Callable[[str], State]] = {
    "torch.load": original_load,
    "acpfs.torch.load": acpfs.torch.load,
    "torch.load, mapped and copied": lambda path: {
        name: one.clone() for name, one in original_load(path, mmap=True).items()
    },
}


def main() -> None:
    size = int(sys.argv[1]) * MIB
    for module in (saving, loading):
        vars(module)["lies_in_mount"] = lambda _path: True
    state = {f"w{number}": torch.randn(size // 16 // 4) for number in range(16)}
    print(int(crc.IS_FAST), flush=True)
    for line in sys.stdin:
        way, directory = line.rstrip("\n").split("\t")
        path = str(Path(directory) / "model.pt")
        if way == "torch.load":
            original_save(state, path)  # for all loads
        _libc.malloc_trim(0)  # as in a process that begins: what is loaded goes to new memory
        used = time.process_time()
        began = time.perf_counter()
        loaded = SAVES[way](state, path) if way in SAVES else LOADS[way](path)
        took = time.perf_counter() - began
        used = time.process_time() - used
        assert loaded is None or loaded["w7"][-1] == state["w7"][-1]
        del loaded
        print(took, used, flush=True)


if __name__ == "__main__":
    main()

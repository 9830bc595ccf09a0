"""Saves in one format after the other, as it is asked: for `bench.formats`, in the interpreter that
has the frameworks.

Reads lines `FORMAT DIRECTORY`, and answers each with the seconds that the save took; `FORMAT -`
with whether it is installed. Imports nothing of this project.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import mmap
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

MIB = 1 << 20
PIECE = 8 * MIB
NEEDS = {
    "torch.save": "torch",
    "safetensors save_file": "safetensors",
    "numpy.save": "numpy",
    "numpy.memmap": "numpy",
    "HDF5": "h5py",
    "zarr": "zarr",
    "Arrow IPC": "pyarrow",
    "Parquet": "pyarrow",
    "LMDB": "lmdb",
    "GGUF": "gguf",
    "tensorstore": "tensorstore",
    "orbax": "orbax",
}
PACKAGES = {"orbax": "orbax-checkpoint"}
"""Their names, where they are others than those that are imported."""
OF_TENSORS = {"torch.save", "safetensors save_file"}


def written(flags: int, path: str, content: bytes) -> None:
    fd = os.open(path, flags | os.O_CREAT | os.O_TRUNC, 0o644)
    for start in range(0, len(content), PIECE):
        os.write(fd, memoryview(content)[start : start + PIECE])
    os.close(fd)


def mapped(path: str, content: bytes) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    os.ftruncate(fd, len(content))
    with mmap.mmap(fd, len(content)) as target:
        for start in range(0, len(content), PIECE):
            target[start : start + PIECE] = content[start : start + PIECE]
    os.close(fd)


def tensors(size: int) -> dict[str, Any]:
    import torch

    return {f"w{number}": torch.randn(size // 16 // 4) for number in range(16)}


def with_torch(state: dict[str, Any], path: str) -> None:
    import torch

    torch.save(state, path)


def with_safetensors(state: dict[str, Any], path: str) -> None:
    from safetensors.torch import save_file

    save_file(state, path)


def with_numpy(array: Any, path: str) -> None:
    import numpy as np

    np.save(path, array)


def with_memmap(array: Any, path: str) -> None:
    import numpy as np

    target = np.memmap(path, dtype=array.dtype, mode="w+", shape=array.shape)
    target[:] = array
    target.flush()


def with_hdf5(array: Any, path: str) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file["w"] = array


def with_zarr(array: Any, path: str) -> None:
    import zarr

    zarr.save_array(path, array)


def with_arrow(array: Any, path: str) -> None:
    import pyarrow as pa

    table = pa.table({"w": pa.array(array)})
    with pa.OSFile(path, "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def with_parquet(array: Any, path: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {"w": pa.array(array.view("float32"))}
    )  # it has no bytes: each would take four
    pq.write_table(table, path, compression="none", use_dictionary=False)


def with_lmdb(array: Any, path: str) -> None:
    import lmdb

    with lmdb.open(path, map_size=4 * array.nbytes) as env, env.begin(write=True) as change:
        for number, start in enumerate(range(0, array.nbytes, PIECE)):
            change.put(b"%d" % number, memoryview(array)[start : start + PIECE])


def with_gguf(array: Any, path: str) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("w", array.view("float32"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def with_tensorstore(array: Any, path: str) -> None:
    import tensorstore

    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": path}}
    shape = {"create": True, "dtype": tensorstore.uint8, "shape": array.shape}
    store = tensorstore.open(
        spec, chunk_layout=tensorstore.ChunkLayout(chunk_shape=[PIECE]), **shape
    )
    store.result().write(array).result()


def with_orbax(array: Any, path: str) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, {"w": array})


def formats(size: int) -> dict[str, Callable[[str], None]]:
    """Those that are installed, by name."""
    content = os.urandom(PIECE) * (size // PIECE)
    found: dict[str, Callable[[str], None]] = {
        "write(2), O_WRONLY": lambda path: written(os.O_WRONLY, path, content),
        "write(2), O_RDWR": lambda path: written(os.O_RDWR, path, content),
        "mmap": lambda path: mapped(path, content),
    }
    given: dict[str, Callable[[Any, str], None]] = {
        "torch.save": with_torch,
        "safetensors save_file": with_safetensors,
        "numpy.save": with_numpy,
        "numpy.memmap": with_memmap,
        "HDF5": with_hdf5,
        "zarr": with_zarr,
        "Arrow IPC": with_arrow,
        "Parquet": with_parquet,
        "LMDB": with_lmdb,
        "GGUF": with_gguf,
        "tensorstore": with_tensorstore,
        "orbax": with_orbax,
    }
    there = {name for name in given if importlib.util.find_spec(NEEDS[name])}
    state = tensors(size) if OF_TENSORS & there else {}
    array: Any = None
    if there - OF_TENSORS:
        import numpy as np

        array = np.frombuffer(content, dtype=np.uint8)
    for name, save in given.items():
        if name in there:
            found[name] = partial(save, state if name in OF_TENSORS else array)
    return found


def versions() -> str:
    """Of what is installed."""
    found = sorted({name for name in NEEDS.values() if importlib.util.find_spec(name)})
    return ", ".join(
        f"{name} {importlib.metadata.version(PACKAGES.get(name, name))}" for name in found
    )


def main() -> None:
    if sys.argv[1] == "versions":
        print(versions())
        return
    known = formats(int(sys.argv[1]) * MIB)
    for line in sys.stdin:
        name, directory = line.rstrip("\n").split("\t")
        if directory == "-":
            print(int(name in known), flush=True)
            continue
        began = time.perf_counter()
        known[name](f"{directory}/model.{name.split()[0].strip(',').replace('/', '')}")
        print(time.perf_counter() - began, flush=True)


if __name__ == "__main__":
    main()

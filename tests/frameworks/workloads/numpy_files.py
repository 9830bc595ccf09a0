"""numpy save, savez, memmap and pickle. Usage: numpy_files.py DIRECTORY."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np


def arrays(directory: Path, data: np.ndarray) -> None:
    """save (with its fallocate), savez (which seeks back), savez_compressed, tofile, mapped
    reading.
    """
    np.save(directory / "a.npy", data)
    assert np.array_equal(np.load(directory / "a.npy"), data)
    assert np.array_equal(np.load(directory / "a.npy", mmap_mode="r")[5], data[5])
    np.savez(directory / "a.npz", data=data, index=np.arange(9))
    np.savez_compressed(directory / "b.npz", data=data[:10])
    with np.load(directory / "a.npz") as loaded:
        assert np.array_equal(loaded["data"], data)
        assert np.array_equal(loaded["index"], np.arange(9))
    data.tofile(directory / "a.raw")
    assert np.array_equal(np.fromfile(directory / "a.raw").reshape(data.shape), data)


def mapped(directory: Path, data: np.ndarray) -> None:
    """A shared, writable mapping, flushed, changed again and read by another mapping."""
    target = np.lib.format.open_memmap(
        directory / "m.npy", mode="w+", dtype=data.dtype, shape=data.shape
    )
    target[:] = data
    target.flush()
    target[3] = -1.0
    target.flush()
    seen = np.load(directory / "m.npy", mmap_mode="r")
    assert np.array_equal(seen[3], np.full(data.shape[1], -1.0))
    assert np.array_equal(seen[4:], data[4:])
    del target, seen


def pickled(directory: Path, data: np.ndarray) -> None:
    """pickle with protocol 5, replaced atomically by a rename."""
    for round_number in range(3):
        part = directory / "state.pkl.tmp"
        with part.open("wb") as file:
            pickle.dump({"round": round_number, "data": data}, file, protocol=5)
        part.rename(directory / "state.pkl")
    with (directory / "state.pkl").open("rb") as file:
        loaded = pickle.load(file)
    assert loaded["round"] == 2
    assert np.array_equal(loaded["data"], data)


if __name__ == "__main__":
    values = np.random.default_rng(7).standard_normal((2000, 1000))
    for work in (arrays, mapped, pickled):
        work(Path(sys.argv[1]), values)

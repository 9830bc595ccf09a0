"""`Writer`: the files of torch's writer of distributed checkpoints, byte for byte."""

from __future__ import annotations

import errno
import functools
import io
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem, SerializationFormat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from acpfs.torch import ArchiveWriteError, Writer, distributed, saving
from acpfs.torch.storage_bytes import StorageBytes
from tests.frameworks.saves.corpus import DTYPES, NAMED, Labelled, anything
from tests.frameworks.saves.test_harm import LateCopier, full
from tests.frameworks.saves.test_same_bytes import pickled, same_bytes

__all__ = ["full"]
clause = pytest.mark.clause
State = dict[str, Any]
SEEDS = 40


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that were not left to torch."""
    found = list[str]()
    write = distributed._File.write

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        found.append(Path(self._path).name)
        return write(self, *arguments, **options)

    monkeypatch.setattr(distributed._File, "write", noted)
    return found


def saved(state: State, directory: Path, made: Any, **options: Any) -> tuple[Any, Any]:
    """What is where, by torch's own metadata."""
    dcp.save(state, storage_writer=made(directory, **options), no_dist=True)
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    return metadata.state_dict_metadata, metadata.storage_data


def check(state: State, mounted: Path, plain: Path, **options: Any) -> None:
    """Both checkpoints have the same files, and ours loads."""
    ours = saved(state, mounted, Writer, **options)
    theirs = saved(state, plain, dcp.FileSystemWriter, **options)
    assert ours == theirs
    names = {path.name for path in mounted.iterdir()}
    assert names == {path.name for path in plain.iterdir()}
    for name in names - {".metadata"}:
        assert same_bytes(mounted / name, plain / name), name
    with torch.serialization.safe_globals([Labelled]):
        read = [
            pickled(dcp.state_dict_loader._load_state_dict_from_keys(checkpoint_id=str(directory)))
            for directory in (mounted, plain)
        ]
    assert read[0] == read[1]


def mixed() -> State:
    """What a checkpoint has, and what it seldom has."""
    return {
        "model": NAMED["trained"]()["model"],
        "optimizer": NAMED["trained"]()["optimizer"]["state"],
        "every type": {str(dtype): torch.ones(33).to(dtype) for dtype in DTYPES},
        "tied": NAMED["tied"](),
        "strided": NAMED["strided"](),
        "expanded": NAMED["expanded"](),
        "channels last": NAMED["channels last"](),
        "a part of them": torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)[1:2],
        "conjugated": NAMED["conjugated"](),
        "negated": NAMED["negated"](),
        "empty": NAMED["empty"](),
        "scalar": NAMED["scalar"](),
        "parameter": NAMED["parameter"](),
        "with gradient": NAMED["no gradient"](),
        "subclass": NAMED["subclass"](),
        "large": torch.randn(3 << 20),
        "its second half": torch.randn(3 << 20)[3 << 19 :],
        "text": "of a user",
        "list": [1, 2, torch.ones(5)],
        "memory": io.BytesIO(b"bytes"),
    }


FILES: list[dict[str, Any]] = [
    {},
    {"thread_count": 3},
    {"single_file_per_rank": False},
    {"sync_files": False},
]


@clause("T224")
@pytest.mark.parametrize("window", [5000, saving.WINDOW_BYTES])
@pytest.mark.parametrize("options", FILES, ids=str)
def test_tensors_of_all_kinds(
    window: int,
    options: dict[str, Any],
    mounted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = counted(monkeypatch)
    monkeypatch.setattr(saving, "WINDOW_BYTES", window)
    monkeypatch.setattr(distributed, "BATCH_BYTES", 1 << 20)
    check(mixed(), mounted, tmp_path, **options)
    assert sorted(found) == sorted(path.name for path in tmp_path.glob("*.distcp"))


@clause("T224")
@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_random_states_over_each_other(mounted: Path, tmp_path: Path) -> None:
    """Each is written over the one before, which may have been longer."""
    for seed in range(SEEDS):
        value = anything(seed)
        check({"value": value, "seed": seed, "w": torch.randn(7)}, mounted, tmp_path)


@clause("T224")
def test_of_a_sharded_tensor(mounted: Path, tmp_path: Path) -> None:
    """A rank's part of it; here it is the only one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole = torch.randn(600, 1000)
        state = {"w": distribute_tensor(whole, mesh, [Shard(0)])}
        dcp.save(state, storage_writer=Writer(mounted))
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
        for path in mounted.glob("*.distcp"):
            assert same_bytes(path, tmp_path / path.name)
        loaded = {"w": distribute_tensor(torch.zeros(600, 1000), mesh, [Shard(0)])}
        dcp.load(loaded, checkpoint_id=str(mounted))
        assert isinstance(loaded["w"], DTensor)
        assert torch.equal(loaded["w"].full_tensor(), whole)
    finally:
        dist.destroy_process_group()


@clause("T224")
def test_beside_the_loop(mounted: Path, tmp_path: Path) -> None:
    """`async_save` writes in a thread of its own, from what it has staged."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = {"model": NAMED["trained"]()["model"], "step": 7}
        dcp.async_save(state, storage_writer=Writer(mounted)).result()
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    finally:
        dist.destroy_process_group()
    (name,) = [path.name for path in mounted.glob("*.distcp")]
    assert same_bytes(mounted / name, tmp_path / name)


@clause("T224")
@pytest.mark.parametrize("window", [5000, 1 << 20])
def test_tensors_of_a_device(
    window: int, mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A double of one: nothing of it is read before it was asked for and waited for."""
    monkeypatch.setattr(saving, "DEVICE_WINDOW_BYTES", window)
    away = functools.partial(StorageBytes, is_host=lambda _one: False, copier=LateCopier)
    monkeypatch.setattr(distributed, "StorageBytes", away)
    monkeypatch.setattr(distributed, "is_in_host_memory", lambda _tensor: False)
    monkeypatch.setattr(distributed, "_has_way", lambda _device: True)
    check(mixed(), mounted, tmp_path)


class _OtherFiles(FileSystem):  # type: ignore[misc]
    """Somebody's own."""


def _with_other_files(path: Path) -> Any:
    writer = Writer(path)
    writer.fs = _OtherFiles()
    return writer


UNUSUAL: dict[str, Callable[[Path], Any]] = {
    "safetensors": lambda path: Writer(path, serialization_format=SerializationFormat.SAFETENSORS),
    "other files": _with_other_files,
}


@clause("T225")
@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_is_torchs_own_work(
    name: str, mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = counted(monkeypatch)
    dcp.save({"w": torch.ones(3)}, storage_writer=UNUSUAL[name](mounted), no_dist=True)
    assert found == []
    assert any(mounted.glob("*.distcp"))


@clause("T225")
def test_in_no_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch)
    saved({"w": torch.ones(3)}, tmp_path, Writer)
    assert found == []


@clause("T225")
def test_no_room_for_a_checkpoint(full: Path) -> None:
    """The error comes out with its number, and no reader takes what is left for whole."""
    state = {f"w{number}": torch.randn(1 << 20) for number in range(8)}
    with pytest.raises(dcp.api.CheckpointException) as caught:
        dcp.save(state, storage_writer=Writer(full / "step"), no_dist=True)
    (failure,) = [one[0] for one in caught.value.failures.values()]
    assert isinstance(failure, ArchiveWriteError)
    assert failure.errno == errno.ENOSPC
    assert [path.stat().st_size for path in (full / "step").iterdir()] == [0]
    assert not any("step" in os.readlink(name) for name in _descriptors())


def _descriptors() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        if os.path.lexists(name := f"/proc/self/fd/{number}"):
            yield name

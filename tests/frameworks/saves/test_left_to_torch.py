"""Whatever is unusual is torch's own call, before a byte was written."""

from __future__ import annotations

import io
import os
import pickle
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from acpfs.torch import load, save
from acpfs.torch.originals import original_load, original_save
from tests.frameworks.saves.test_same_bytes import counted, same_bytes

clause = pytest.mark.clause


def _to_a_file(path: Path) -> None:
    with path.open("wb") as file:
        save(torch.ones(5), file)


def _to_memory(path: Path) -> None:
    buffer = io.BytesIO()
    save(torch.ones(5), buffer)
    path.write_bytes(buffer.getvalue())


class _OwnPickler(pickle.Pickler):
    pass


def _by_another_pickler(path: Path) -> None:
    module = types.SimpleNamespace(**vars(pickle))
    module.Pickler = _OwnPickler
    module.__name__ = "pickle"
    save(torch.ones(5), path, pickle_module=module)


def _without_data(path: Path) -> None:
    with torch.serialization.skip_data():
        save(torch.ones(5), path)
    assert original_load(path).shape == (5,)
    original_save(torch.ones(5), path)


UNUSUAL: dict[str, Callable[[Path], None]] = {
    "a file": _to_a_file,
    "memory": _to_memory,
    "the old format": lambda path: save(torch.ones(5), path, _use_new_zipfile_serialization=False),
    "another pickler": _by_another_pickler,
    "no byte order": lambda path: save(torch.ones(5), path, _disable_byteorder_record=True),
    "no data": _without_data,
    "bytes as a name": lambda path: _save_to_bytes(path),
}


def _save_to_bytes(path: Path) -> None:
    with pytest.raises(AttributeError, match="expected 'f' to be"):
        save(torch.ones(5), os.fsencode(path))
    original_save(torch.ones(5), path)


@clause("T218")
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual(name: str, mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch)
    UNUSUAL[name](mounted / "model.pt")
    assert found == []
    assert load(mounted / "model.pt").tolist() == [1, 1, 1, 1, 1]


@clause("T218")
@pytest.mark.parametrize("name", ["modèle.pt", "模型.pt"])
def test_names_for_which_torch_has_another_archive(
    name: str, mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = counted(monkeypatch)
    save(torch.ones(5), mounted / name)
    original_save(torch.ones(5), tmp_path / name)
    assert found == []
    assert same_bytes(mounted / name, tmp_path / name)


@clause("T218")
def test_in_no_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch)
    save(torch.ones(5), tmp_path / "model.pt")
    assert load(tmp_path / "model.pt").tolist() == [1, 1, 1, 1, 1]
    assert found == []


@clause("T218")
def test_through_a_link_out_of_the_mount(
    mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = counted(monkeypatch)
    (mounted / "out").symlink_to(tmp_path)
    (tmp_path / "in").symlink_to(mounted)
    save(torch.ones(5), mounted / "out" / "model.pt")
    save(torch.ones(5), tmp_path / "in" / "other.pt")
    assert found == ["other.pt"]


@clause("T218")
def test_a_pipe(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = counted(monkeypatch)
    path = mounted / "pipe.pt"
    os.mkfifo(path)
    content: list[bytes] = []
    reader = threading.Thread(target=lambda: content.append(path.read_bytes()))
    reader.start()
    save(torch.ones(5), path)
    reader.join()
    assert found == []
    assert original_load(io.BytesIO(content[0])).tolist() == [1, 1, 1, 1, 1]


def errors(value: Any, path: Path) -> list[tuple[type[BaseException], str]]:
    """What torch raises, and what this raises."""
    raised = list[tuple[type[BaseException], str]]()
    for function in (original_save, save):
        with pytest.raises(Exception, match="") as caught:
            function(value, path)
        raised.append((type(caught.value), str(caught.value)))
    return raised


@clause("T218")
def test_nowhere_to_save(mounted: Path) -> None:
    ours = [errors(torch.ones(3), mounted / name) for name in ("none/model.pt", ".hidden", "")]
    assert [one[0] for one in ours] == [one[1] for one in ours]


@clause("T218")
def test_what_cannot_be_pickled(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's error, and the file as torch leaves it."""
    found = counted(monkeypatch)
    path = mounted / "model.pt"
    value = {"weight": torch.ones(1000), "lock": threading.Lock()}
    theirs, ours = errors(value, path)
    assert theirs == ours
    assert found == []


@clause("T218")
def test_two_types_for_the_same_bytes(mounted: Path) -> None:
    storage = torch.ones(4).untyped_storage()
    value = [
        torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
        for dtype in (torch.float32, torch.int32)
    ]
    theirs, ours = errors(value, mounted / "model.pt")
    assert theirs == ours


@clause("T218")
def test_fake_tensors(mounted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    found = counted(monkeypatch)
    with FakeTensorMode():
        value = torch.ones(3)
        theirs, ours = errors(value, mounted / "model.pt")
    assert theirs == ours
    assert found == []
    save(torch.ones(3), mounted / "model.pt")
    with FakeTensorMode():
        assert load(mounted / "model.pt").shape == (3,)


@clause("T218")
def test_a_torch_that_lays_archives_out_otherwise(
    mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here: one whose directory has a comment behind it."""
    from acpfs.torch import skeleton

    def other(value: Any, path: Any, **options: Any) -> None:
        original_save(value, path, **options)
        with open(path, "r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\1\0x")

    found = counted(monkeypatch)
    monkeypatch.setattr(skeleton, "original_save", other)
    save(torch.ones(3), mounted / "model.pt")
    original_save(torch.ones(3), tmp_path / "model.pt")
    assert same_bytes(mounted / "model.pt", tmp_path / "model.pt")
    assert found == []

"""`install`, and what calls `torch.save` then."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from acpfs.torch import install, load, save, uninstall
from acpfs.torch.originals import original_load, original_save
from tests.frameworks.saves.corpus import NAMED
from tests.frameworks.saves.test_same_bytes import counted, pickled, same_bytes

clause = pytest.mark.clause


@pytest.fixture
def installed() -> Iterator[None]:
    install()
    yield
    uninstall()


@clause("T223")
def test_torch_has_them_until_they_are_taken_out() -> None:
    install()
    install()
    assert (torch.save, torch.load) == (save, load)
    assert (torch.serialization.save, torch.serialization.load) == (save, load)
    for own, torchs in ((save, original_save), (load, original_load)):
        assert inspect.signature(own) == inspect.signature(torchs)
    uninstall()
    assert (torch.save, torch.load) == (original_save, original_load)
    assert (torch.serialization.save, torch.serialization.load) == (original_save, original_load)


@clause("T223")
@pytest.mark.usefixtures("installed")
def test_a_program_that_calls_torch(
    mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = counted(monkeypatch)
    value = NAMED["trained"]()
    torch.save(value, mounted / "model.pt")
    torch.save(value, tmp_path / "model.pt")
    assert found == ["model.pt"]
    assert same_bytes(mounted / "model.pt", tmp_path / "model.pt")
    assert pickled(torch.load(mounted / "model.pt")) == pickled(torch.load(tmp_path / "model.pt"))


@clause("T223")
@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("thread_count", [1, 2])
def test_a_distributed_checkpoint(thread_count: int, mounted: Path) -> None:
    """Its files are made through file objects: torch's own."""
    value = {f"w{number}": torch.randn(300, 1000) for number in range(5)}
    writer = dcp.FileSystemWriter(mounted, thread_count=thread_count, single_file_per_rank=False)
    dcp.save(value, storage_writer=writer)
    loaded = {name: torch.zeros(300, 1000) for name in value}
    dcp.load(loaded, checkpoint_id=str(mounted))
    assert all(torch.equal(loaded[name], one) for name, one in value.items())

"""What is saved has torch's bytes; what is loaded is what torch loads."""

from __future__ import annotations

import filecmp
import hashlib
import io
import itertools
import pickle
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from acpfs.torch import crc, load, loading, save, saving, skeleton
from acpfs.torch.originals import original_load, original_save
from tests.frameworks.saves.corpus import NAMED, anything

clause = pytest.mark.clause
SEEDS = 200
Options = dict[str, Any]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of files that were not left to torch."""
    found: list[str] = []

    class Counted(saving.ArchiveWriting):
        def write(self, fd: int, path: str) -> None:
            found.append(Path(path).name)
            super().write(fd, path)

    monkeypatch.setattr(saving, "ArchiveWriting", Counted)
    return found


def pickled(value: Any) -> str:
    """For a comparison: a checksum of torch's own file of what was loaded."""
    buffer = io.BytesIO()
    original_save(value, buffer)
    return hashlib.sha256(buffer.getbuffer()).hexdigest()


def same_bytes(one: Path, other: Path) -> bool:
    """Whether two files are equal; pytest would look for minutes where they are not."""
    return filecmp.cmp(one, other, shallow=False)


def check(value: Any, mounted: Path, plain: Path, **options: Any) -> None:
    """Both files have the same bytes, and load as the same."""
    ours = mounted / "model.pt"
    theirs = plain / "model.pt"
    save(value, ours, **options)
    original_save(value, theirs, **options)
    assert same_bytes(ours, theirs)
    with zipfile.ZipFile(ours) as archive:
        assert archive.testzip() is None
    expected = pickled(original_load(theirs, weights_only=False))
    assert pickled(load(ours, weights_only=False)) == expected
    assert pickled(original_load(ours, weights_only=False)) == expected
    ours_mapped, theirs_mapped = (
        pickled(original_load(str(path), weights_only=False, mmap=True)) for path in (ours, theirs)
    )
    assert ours_mapped == theirs_mapped


@clause("T216")
@clause("T217")
@pytest.mark.parametrize("name", NAMED)
def test_objects_of_all_kinds(
    name: str, mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = counted(monkeypatch)
    monkeypatch.setattr(loading, "LARGE_BYTES", 1000)
    check(NAMED[name](), mounted, tmp_path)
    assert found == ["model.pt"]


@clause("T216")
@clause("T217")
def test_random_objects_in_windows_of_all_sizes(
    mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window may end in the middle of anything, a checksum included."""
    found = counted(monkeypatch)
    monkeypatch.setattr(loading, "LARGE_BYTES", 1000)
    for seed in range(SEEDS):
        window = 61 + 7 * seed if seed % 2 else 4096
        monkeypatch.setattr(saving, "WINDOW_BYTES", window)
        monkeypatch.setattr(loading, "PIECE_BYTES", 100 + seed)
        value = anything(seed)
        check(value, mounted, tmp_path)
        expected = pickled(original_load(tmp_path / "model.pt"))
        assert pickled(load(mounted / "model.pt")) == expected, seed
    assert len(found) == SEEDS


@clause("T216")
def test_windows_in_any_order(
    mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one first: what a window needs of one before it, or leaves to one behind, is seen;
    a checksum that lies in two of them above all.
    """

    def backwards(workers: Any, pieces: Any) -> None:
        for piece in reversed(list(pieces)):
            workers[0](piece)

    monkeypatch.setattr(saving, "side_by_side", backwards)
    for seed in range(SEEDS):
        monkeypatch.setattr(saving, "WINDOW_BYTES", 61 + seed)
        check([torch.arange(seed % 9), torch.ones(3), torch.randn(40)], mounted, tmp_path)


@clause("T216")
def test_a_directory_for_temporary_files_that_is_not_ascii(
    mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no /dev/shm."""
    (other := tmp_path / "größer").mkdir()
    monkeypatch.setattr(skeleton, "IN_MEMORY", str(tmp_path / "none"))
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    check(NAMED["trained"](), mounted, tmp_path)
    assert list(other.iterdir()) == []


@clause("T216")
@pytest.mark.parametrize(
    "options",
    [
        {"pickle_protocol": 4},
        {"pickle_module": pickle},
        {"_use_new_zipfile_serialization": True},
    ],
    ids=str,
)
def test_options_that_change_nothing(
    options: Options, mounted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = counted(monkeypatch)
    check(NAMED["trained"](), mounted, tmp_path, **options)
    assert found == ["model.pt"]


@clause("T216")
def test_arguments_by_position_and_by_name(mounted: Path, tmp_path: Path) -> None:
    value = NAMED["tied"]()
    save(f=str(mounted / "model.pt"), obj=value)
    save(value, mounted / "other.pt", pickle, 3, True)
    original_save(value, tmp_path / "model.pt")
    original_save(value, tmp_path / "other.pt", pickle, 3, True)
    for name in ("model.pt", "other.pt"):
        assert same_bytes(mounted / name, tmp_path / name)


@clause("T216")
def test_what_somebody_has_told_torch_about_its_files(mounted: Path, tmp_path: Path) -> None:
    """No checksums, and another alignment: those files are torch's as well."""
    from torch.utils.serialization import config

    value = NAMED["trained"]()
    for name, changed in (("compute_crc32", False), ("storage_alignment", 4096)):
        with config.patch({f"save.{name}": changed}):
            save(value, mounted / "model.pt")
            original_save(value, tmp_path / "model.pt")
        assert same_bytes(mounted / "model.pt", tmp_path / "model.pt")


@clause("T216")
@pytest.mark.parametrize("name", ["model", "a.b.pt", "with blank.bin", "x.tar.gz"])
def test_names(name: str, mounted: Path, tmp_path: Path) -> None:
    """The name of a file is in each record of it."""
    value = NAMED["tied"]()
    save(value, mounted / name)
    original_save(value, tmp_path / name)
    assert same_bytes(mounted / name, tmp_path / name)


@clause("T216")
def test_a_file_is_replaced_in_place(mounted: Path) -> None:
    """As by torch: the same inode with its mode, through a symlink too, and no rest behind it."""
    path = mounted / "model.pt"
    save(torch.randn(1 << 20), path)
    path.chmod(0o640)
    before = path.stat()
    (mounted / "link.pt").symlink_to(path)
    save(torch.arange(3), mounted / "link.pt")
    after = path.stat()
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert original_load(path).tolist() == [0, 1, 2]


@clause("T216")
def test_what_the_storage_gets(mounted: Path) -> None:
    """Nothing takes this file away: who has made the mount compares it with the storage's."""
    save(NAMED["tied"](), mounted.parent / "kept.pt")
    assert len(load(mounted.parent / "kept.pt")) == 4


@clause("T220")
def test_a_checksum_is_zlibs_whoever_computes_it() -> None:
    content = bytes(range(256)) * 5000
    for cuts in ((0,), (1, 2, 3), (100_000,), (255, 256, 700_001)):
        edges = [0, *cuts, len(content)]
        pieces = [content[begin:end] for begin, end in itertools.pairwise(edges)]
        sums = [(crc.crc32(memoryview(piece)), len(piece)) for piece in pieces]
        assert crc.joined(sums) == zlib.crc32(content)


@clause("T217")
@pytest.mark.parametrize(
    "options",
    [
        {"map_location": "cpu"},
        {"map_location": torch.device("cpu")},
        {"map_location": {"cpu": "cpu"}},
        {"map_location": lambda storage, _location: storage},
        {"map_location": lambda _storage, _location: None},
        {"map_location": "meta"},
        {"mmap": True},
        {"mmap": False},
        {"weights_only": True},
        {"weights_only": False, "encoding": "latin1"},
        {"weights_only": False, "pickle_module": pickle},
    ],
    ids=str,
)
def test_loading_with_every_option(
    options: Options, mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "LARGE_BYTES", 1000)
    path = mounted / "model.pt"
    original_save(NAMED["trained"](), path)
    assert pickled(load(path, **options)) == pickled(original_load(path, **options))


@clause("T217")
def test_a_model_takes_what_was_loaded(mounted: Path) -> None:
    """In place, and by assignment."""
    model = torch.nn.Linear(700, 900)
    save(model.state_dict(), mounted / "model.pt")
    for assign in (False, True):
        other = torch.nn.Linear(700, 900)
        other.load_state_dict(load(mounted / "model.pt"), assign=assign)
        assert torch.equal(other.weight, model.weight)


@clause("T217")
@pytest.mark.parametrize("length", [0, 3, 100, 5000, -1])
def test_a_file_that_is_not_whole_is_refused_alike(length: int, mounted: Path) -> None:
    whole = mounted / "whole.pt"
    save(NAMED["trained"](), whole)
    path = mounted / "model.pt"
    path.write_bytes(whole.read_bytes()[:length])
    raised = []
    for function in (original_load, load):
        with pytest.raises(Exception, match="") as caught:
            function(path)
        raised.append((type(caught.value), str(caught.value).splitlines()[:1]))
    assert raised[0] == raised[1]


@clause("T217")
def test_a_class_that_may_not_be_loaded_is_refused_alike(mounted: Path) -> None:
    save(NAMED["record"](), mounted / "model.pt")
    texts = []
    for function in (original_load, load):
        with pytest.raises(pickle.UnpicklingError) as caught:
            function(mounted / "model.pt")
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


@clause("T217")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_other_files(mounted: Path) -> None:
    """The old format, and a program."""
    original_save(torch.ones(3), mounted / "old.pt", _use_new_zipfile_serialization=False)
    assert load(mounted / "old.pt").tolist() == [1, 1, 1]
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), mounted / "program.pt")
    with pytest.warns(UserWarning, match="TorchScript"):
        program = load(str(mounted / "program.pt"), weights_only=False)
    assert isinstance(program, torch.jit.ScriptModule)

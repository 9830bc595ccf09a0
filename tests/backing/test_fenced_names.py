"""Changes of names through the staging directory: whole after a kill anywhere, and nothing after a
fence.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.fenced_names import FencedNames
from acpfs.backing.lower import LowerStat
from acpfs.backing.terms import SupersededError
from tests.backing.test_terms import NODE, adopter, dies_at
from tests.rig.runtime import REAL

Change = Callable[[FencedNames], object]
Tree = dict[str, bytes | None]


def is_ours(_st: LowerStat) -> bool:
    return True


CHANGES: dict[str, tuple[Change, Tree, Tree]] = {
    "unlink": (lambda names: names.remove((b"a",), "7", is_ours), {"a": b"1"}, {}),
    "rmdir": (lambda names: names.remove_directory((b"d",), "7"), {"d": None}, {}),
    "rename": (
        lambda names: names.rename((b"a",), (b"d", b"b"), "7"),
        {"d": None, "a": b"1", "d/b": b"2"},
        {"d": None, "d/b": b"1"},
    ),
    "rename a directory": (
        lambda names: names.rename((b"d",), (b"e",), "7"),
        {"d": None, "d/x": b"1", "e": None},
        {"e": None, "e/x": b"1"},
    ),
    "exchange": (
        lambda names: names.exchange((b"a",), (b"d",), "7"),
        {"a": b"1", "d": None, "d/x": b"2"},
        {"a": None, "a/x": b"2", "d": b"1"},
    ),
}


def lay(top: Path, tree: Tree) -> None:
    top.mkdir()
    for name, content in tree.items():
        if content is None:
            (top / name).mkdir()
        else:
            (top / name).write_bytes(content)


def shown(top: Path) -> Tree:
    return {
        path.relative_to(top).as_posix(): path.read_bytes() if path.is_file() else None
        for path in top.rglob("*")
        if ".acpfs" not in path.parts
    }


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_carried_out_is_what_the_plain_call_does(tmp_path: Path, name: str) -> None:
    change, before, after = CHANGES[name]
    lay(tmp_path / "b", before)
    directory = BackingDirectory(tmp_path / "b", NODE, REAL)
    change(FencedNames(directory))
    assert shown(tmp_path / "b") == after
    directory.disconnect()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_killed_before_any_call_it_goes_on_and_is_whole(tmp_path: Path, name: str) -> None:
    """Unless it was whole already: that its caller sees, as today."""
    change, before, after = CHANGES[name]
    number = 0
    is_killed = True
    while is_killed:
        backing = tmp_path / str(number)
        lay(backing, before)
        directory = BackingDirectory(backing, NODE, REAL)
        names = FencedNames(directory)
        is_killed = dies_at(number, lambda: change(names))  # noqa: B023
        if is_killed and shown(backing) != after:
            change(names)
        assert shown(backing) == after, number
        directory.disconnect()
        number += 1
    assert number >= 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_fence_meets_halfway_goes_no_further(tmp_path: Path, name: str) -> None:
    change, before, after = CHANGES[name]
    number = 1
    while True:
        backing = tmp_path / str(number)
        lay(backing, before)
        directory = BackingDirectory(backing, NODE, REAL)
        names = FencedNames(directory)
        is_killed = dies_at(number, lambda: change(names))  # noqa: B023
        found = shown(backing)
        if found == after:
            assert number > 1 or not is_killed
            directory.disconnect()
            return
        adopter(backing).take()
        with pytest.raises(SupersededError):
            change(names)
        assert shown(backing) == found
        directory.disconnect()
        number += 1


@pytest.mark.parametrize("name", CHANGES)
def test_after_a_fence_nothing_is_changed(tmp_path: Path, name: str) -> None:
    change, before, _after = CHANGES[name]
    lay(tmp_path / "b", before)
    directory = BackingDirectory(tmp_path / "b", NODE, REAL)
    adopter(tmp_path / "b").take()
    with pytest.raises(SupersededError):
        change(FencedNames(directory))
    assert shown(tmp_path / "b") == before
    directory.disconnect()


def test_what_is_somebody_elses_is_put_back(tmp_path: Path) -> None:
    lay(tmp_path / "b", {"a": b"theirs", "d": None, "d/x": b"1"})
    directory = BackingDirectory(tmp_path / "b", NODE, REAL)
    names = FencedNames(directory)
    with pytest.raises(OSError) as refused:
        names.remove((b"a",), "7", lambda _st: False)
    assert refused.value.errno == errno.ESTALE
    with pytest.raises(OSError) as refused:
        names.remove_directory((b"d",), "8")
    assert refused.value.errno == errno.ENOTEMPTY
    with pytest.raises(IsADirectoryError):
        names.remove((b"d",), "9", is_ours)
    assert shown(tmp_path / "b") == {"a": b"theirs", "d": None, "d/x": b"1"}
    assert directory.list_staging() == []
    directory.disconnect()


def test_what_cannot_be_put_back_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay(tmp_path / "b", {"a": b"theirs"})
    directory = BackingDirectory(tmp_path / "b", NODE, REAL)

    def looks(_st: LowerStat) -> bool:
        (tmp_path / "b/a").write_bytes(b"newer")
        return False

    with pytest.raises(FileExistsError):
        FencedNames(directory).remove((b"a",), "7", looks)
    assert (tmp_path / "b/a").read_bytes() == b"newer"
    assert os.read(directory.open_staging("7"), 9) == b"theirs"
    directory.disconnect()

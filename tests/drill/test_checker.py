"""The checker itself: what it must accept, what it must find, and that it finds faults that were
put into acpfs on purpose.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.drill import verdict
from tests.drill.block import Block
from tests.drill.history import History, fits_sync, is_partly_written
from tests.drill.mutants import MUTANTS
from tests.drill.run import Drill, Plan
from tests.drill.spec import Call, Tree, bytes_of, digest
from tests.rig.faultfs import FaultFs
from tests.rig.power import Disk, read_log

mount = pytest.mark.mount


def called(*words: object, number: int = 1, errno: int | None = 0, at: float = 1.0) -> Call:
    return Call(number, words, at, errno, at)


def saved(path: str, seed: int, size: int = 100, fd: int = 0) -> list[Call]:
    return [called("open", path, fd, True), called("write", fd, 0, seed, size), called("close", fd)]


def whole(seed: int, size: int = 100) -> tuple[str, str]:
    return ("file", digest(bytes_of(seed, size)))


def losses_of(history: History, seen: Tree, at: float = 9.0) -> list[str]:
    return verdict.check_published(history, seen, at, "disk")


def test_every_moment_of_the_application_is_allowed() -> None:
    history = History()
    history.follow([*saved("shard", 1), *saved("tracker", 2)])
    for seen in ({}, {"shard": whole(1)}, {"shard": whole(1), "tracker": whole(2)}):
        assert losses_of(history, seen) == []


def test_something_later_without_something_earlier_is_found() -> None:
    history = History()
    history.follow([*saved("shard", 1), *saved("tracker", 2)])
    assert "never had" in losses_of(history, {"tracker": whole(2)})[0]


def test_a_torn_file_is_found() -> None:
    history = History()
    history.follow(saved("shard", 1))
    assert losses_of(history, {"shard": ("file", digest(bytes_of(1, 100)[:50]))})


def test_going_back_is_found() -> None:
    history = History()
    history.follow([*saved("shard", 1), *saved("shard", 2)])
    assert losses_of(history, {"shard": whole(2)}) == []
    assert losses_of(history, {"shard": whole(1)})


def test_what_was_promised_must_be_there() -> None:
    history = History()
    history.follow([*saved("shard", 1), called("flush", at=5.0)])
    assert losses_of(history, {}, at=4.0) == []
    assert "promised" in losses_of(history, {}, at=6.0)[0]


def test_durable_fsync_is_a_promise_and_ordered_fsync_is_none() -> None:
    for durable in (False, True):
        history = History()
        history.durable_fsync = durable
        history.follow(
            [called("open", "f", 0, True), called("write", 0, 0, 1, 100), called("fsync", 0)]
        )
        assert bool(losses_of(history, {})) == durable


def test_a_call_without_an_answer_may_have_happened_or_not() -> None:
    for seen in ({"a": whole(1)}, {"b": whole(1)}):
        history = History()
        history.follow([*saved("a", 1), called("rename", "a", "b", errno=None)])
        assert verdict.check_mount(history, seen, {})[1] == []
    history = History()
    history.follow([*saved("a", 1), called("rename", "a", "b", errno=None)])
    assert verdict.check_mount(history, {"a": whole(1), "b": whole(1)}, {})[1]


def test_a_write_without_an_answer_may_have_happened_in_part() -> None:
    old = bytes(100)
    new = bytes_of(7, 60)
    assert is_partly_written(new[:30] + old[30:], old, 0, new)
    assert is_partly_written(old, old, 0, new)
    assert not is_partly_written(old[:30] + new[30:] + old[60:], old, 0, new)


def test_an_acknowledged_write_must_be_in_the_mount() -> None:
    history = History()
    history.follow(
        [
            called("open", "f", 0, True),
            called("write", 0, 0, 1, 100),
            called("write", 0, 100, 2, 100),
        ]
    )
    lost = bytes_of(1, 100)
    assert verdict.check_mount(history, {"f": ("file", digest(lost))}, {"f": lost})[1]


def test_rsync_may_be_seen_at_any_step_but_not_torn() -> None:
    new = {"d/x": digest(b"new")}
    before = {"c/d/x": ("file", digest(b"old"))}
    assert fits_sync(before, before, "c", new)
    assert fits_sync({"c/d/x": ("file", digest(b"new"))}, before, "c", new)
    assert fits_sync({**before, "c/d/.x.abc123": ("file", digest(b"new"))}, before, "c", new)
    assert not fits_sync({"c/d/x": ("file", digest(b"ne"))}, before, "c", new)
    assert not fits_sync({}, before, "c", new)


def test_what_a_killed_rsync_has_made_is_there_from_then_on() -> None:
    history = History()
    history.follow(
        [called("sync", "c", {"d/x": digest(b"new"), "d/y": digest(b"y")}, ["", "d"], errno=None)]
    )
    seen: Tree = {"c": ("dir", ""), "c/d": ("dir", ""), "c/d/x": ("file", digest(b"new"))}
    for _look in range(2):
        history, losses = verdict.check_mount(history, seen, {"c/d/x": b"new"})
        assert losses == []
    assert verdict.check_equal(seen, history.now(), "after the drain") == []


def test_checksums_are_held_against_the_files(tmp_path: Path) -> None:
    (tmp_path / ".acpfs" / "manifest").mkdir(parents=True)
    (tmp_path / ".acpfs" / "manifest" / "n.xxh128").write_text(
        "06b05ab6733a618578af5f94892f3950  f\n"
    )  # of nothing at all: b"abc"
    (tmp_path / "f").write_bytes(b"abc")
    os.setxattr(tmp_path / "f", verdict.DIGEST_XATTR, b"06b05ab6733a618578af5f94892f3950")
    assert verdict.check_checksums(tmp_path) == []
    (tmp_path / "g").write_bytes(b"")
    assert verdict.check_checksums(tmp_path) == ["the manifest does not name g"]
    (tmp_path / "f").write_bytes(b"abd")
    assert "xxh128sum" in verdict.check_checksums(tmp_path)[0]


def test_what_a_disk_keeps() -> None:
    disk = Disk()
    for record in (("create", 1, 0, b"staging", "file", ""), ("write", 1, 0, b"bytes")):
        disk.apply((0.0, *record))
    lefts = [disk.crash(seed) for seed in range(40)]
    assert {str(left.get("staging", (0, None))[1]) for left in lefts} == {
        "None",
        "b''",
        "b'by'",
        "b'bytes'",
    }
    disk.apply((0.0, "fsync", 1))
    disk.apply((0.0, "rename", 0, b"staging", 0, b"final", False))
    for left in (disk.crash(seed) for seed in range(40)):
        assert {what for _kind, what, _xattrs in left.values()} <= {b"bytes"}
    disk.apply((0.0, "fsyncdir", 0))
    assert all(set(disk.crash(seed)) == {"final"} for seed in range(40))


class OneBlock(Plan):
    """A plan of the same block over and over."""

    def __init__(self, block: Block, minutes: float) -> None:
        super().__init__(1, kills=30, minutes=minutes, parallel=1)
        self.block = block
        if block.mutant == "unordered":
            # it may end in what can never be carried out: found, too, and not to take the test's
            # whole time
            self.silence_s = 30.0

    def blocks(self) -> Iterator[Block]:
        while True:
            yield self.block


FOUND_BY: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "unordered": (
        "disk",
        "rename",
        "kill application",
        {"drain_s": 20},
    ),  # it may also end in what can never be carried out
    "overtaken": ("large", "large beside", "kill worker", {"drain_s": 20}),
    "torn": ("disk", "overwrite", "kill application", {}),
    "no_fsync": ("power", "overwrite", "power loss", {}),
    "no_directory_fsync": ("power", "append log", "power loss", {"fsync": "durable"}),
    "forgets": ("disk", "overwrite", "kill application", {}),
    "leaks": ("server", "overwrite", "server fails", {}),
    "amnesia": ("disk", "overwrite", "kill daemon", {}),
    "unguarded": ("guard", "deletes first", "kill daemon", {}),
    "takeover": ("large", "large in place", "kill worker", {}),
    "killed": ("large", "large in place", "kill application", {}),
}


@mount
@mount
def test_a_storage_that_has_power_again_knows_what_was_left(tmp_path: Path) -> None:
    source = tmp_path / "disk"
    log = tmp_path / "power.log"
    (source / "directory").mkdir(parents=True)
    (source / "directory" / "file").write_bytes(b"left")
    with FaultFs(source, tmp_path / "backing", power=log) as storage:
        with open(storage.path / "directory" / "file", "ab") as file:
            file.write(b" and more")
            file.flush()
            os.fsync(file.fileno())
        (storage.path / "directory" / "new").touch()
    disk = Disk()
    for record in read_log(log):
        disk.apply(record)
    left = disk.crash(1)
    assert left["directory/file"][:2] == ("file", b"left and more")


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_put_into_acpfs_is_found(mutant: str) -> None:
    kind, workload, fault, options = FOUND_BY[mutant]
    block = Block(kind, workload, "native", 3, "", 8, mutant, only=[fault], options=options)
    drill = Drill(OneBlock(block, minutes=1.5), print, until_loss=True)
    assert drill.run().losses

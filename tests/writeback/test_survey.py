"""What counts as a checkpoint on the backing directory, and as one that is as whole as another."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from acpfs.checkpoints import Checkpoint
from acpfs.writeback.guard.survey import Inventory
from tests.writeback.conftest import Run
from tests.writeback.test_guard import guarded_world, held

_clock = itertools.count(1 << 40)


@pytest.mark.clause("S140")
@pytest.mark.parametrize(
    ("name", "size", "is_guarded"),
    [
        ("scratch.dat", 2 << 20, False),
        ("model.pt", 2 << 20, True),
        ("default/manifest.ocdbt", 2 << 20, True),
        ("weights", 64 << 20, True),
    ],
)
def test_a_directory_called_by_a_number_is_a_checkpoint_where_something_in_it_is(
    tmp_path: Path, run: Run, name: str, size: int, is_guarded: bool
) -> None:
    world = guarded_world(tmp_path)
    world.mkdir("run/9977")
    if "/" in name:
        world.mkdir("run/9977/default")
    world.store(f"run/9977/{name}", b"x" * size, mtime_ns=next(_clock))
    run(world.drain)
    world.unlink(f"run/9977/{name}")
    if "/" in name:
        world.rmdir("run/9977/default")
    world.rmdir("run/9977")
    run(world.run_for, 1.0)
    assert held(world) == ([b"run/9977"] if is_guarded else [])


@pytest.mark.clause("S140")
def test_names_that_are_made_of_content_are_alike_and_count_once() -> None:
    """OCDBT: as many files, and as they are called, as the content makes them."""

    def inventory(number: int, *hashes: str) -> Inventory:
        made = Inventory(Checkpoint(b"run", b"%d" % number, number))
        for name in (
            "default/manifest.ocdbt",
            *(f"default/ocdbt.process_0/d/{digest}" for digest in hashes),
        ):
            made.add(name.encode(), 1000, number)
        return made

    old = inventory(
        1, "3b7e9a0c41d2f6e85a7790bb13cc24df", "91a6d2c40fe8b3775a10c2d94e6f8b03", "0a" * 16
    )
    assert inventory(2, "c4d8" * 8, "77fe" * 8, "1234" * 8).lacks(old) == ""
    assert "bytes" in inventory(3, "c4d8" * 8, "77fe" * 8).lacks(old)
    assert "d/#" in inventory(4).lacks(old)
    split = inventory(5, *(f"{part:032x}" for part in range(5)))
    assert split.lacks(old) == ""

"""A server that dies between a commit and its flush forgets renames; a later flush that succeeds must not make that "persisted"."""

from __future__ import annotations

import errno

import pytest

from acpfs.backing.lower import LowerPath
from tests.writeback.conftest import Run
from tests.writeback.world import World


@pytest.mark.parametrize("lost", [(b"d", b"f"), (b"d", b"final"), (b"new",)])
def test_what_a_failed_flush_lost_is_made_again(world: World, run: Run, lost: LowerPath) -> None:
    world.mkdir("d")
    world.store("d/f", b"first")
    world.store("d/tmp", b"t")
    run(world.drain)
    world.store("d/f", b"content")
    world.rename("d/tmp", "d/final")
    world.mkdir("new")
    done = False

    def forget(label: str, _path: LowerPath) -> None:
        nonlocal done
        if label == "fsync directory" and not done and lost[-1] in world.lower._find(lost[:-1]).children:
            done = True
            directory = world.lower._find(lost[:-1]).children
            inode = directory.pop(lost[-1])
            if lost[-1] == b"final":
                directory[b"tmp"] = inode  # as before the rename
            raise OSError(errno.EIO, "the server died")

    world.lower.fault = forget
    run(world.drain)
    assert done
    assert world.lower.visible() == world.application_view()

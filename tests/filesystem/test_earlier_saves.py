"""Sizes that are learnt from what lies on the backing directory, before the first save: of which
files, how many, and that nobody waits.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import trio

from acpfs.backing.directory import BackingDirectory
from acpfs.backing.lower import LowerEntry, LowerPath
from acpfs.filesystem import earlier_saves
from acpfs.filesystem.records import Lane
from acpfs.types import ROOT, Ino
from tests.filesystem.world import CALLER, World, is_idle
from tests.filesystem.world import run as in_world

pytestmark = pytest.mark.clause("S248")

MIB = 1 << 20


run = partial(in_world, passthrough=True)


async def mkdir(w: World, name: bytes, parent: Ino = ROOT) -> Ino:
    return (await w.do(w.fs.mkdir(parent, name, 0o755, CALLER))).ino


async def looked(w: World) -> None:
    """What was begun to be looked at has been, and was learnt from."""
    pool = w.calls.requests
    with trio.fail_after(60):
        while not is_idle(pool):  # noqa: ASYNC110 - threads set no event
            await trio.sleep(0.005)


def asked(w: World) -> int:
    """How often earlier saves were looked for.

    Not the listings: look-ups, and the drain in the background, list as well.
    """
    return w.calls.requests.statistics().calls.get("earlier saves", 0)


def lay(backing: Path, **sizes: int) -> None:
    for name, size in sizes.items():
        path = backing / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(size)


def test_a_directory_s_files_are_expected_to_be_as_large_as_in_the_newest_one_before(
    tmp_path: Path,
) -> None:
    async def scenario(w: World) -> None:
        for step, size in ((9, 9), (10, 3), (2, 5)):
            lay(
                w.backing,
                **{f"step-{step}__mp_rank_00__model": size * MIB, f"step-{step}__args": 100},
            )
        (w.backing / "step-10" / "link").symlink_to("mp_rank_00")
        step = await mkdir(w, b"step-11")
        await looked(w)
        assert w.inner.expectations.expect(b"step-11/mp_rank_01/model") == 3 * MIB
        assert w.inner.expectations.expect(b"step-11/args") is None
        rank = await mkdir(w, b"mp_rank_00", step)
        opened, _attributes = await w.create(b"model", rank)
        assert opened.lane is Lane.PASSTHROUGH
        await w.close(opened)

    run(tmp_path, scenario)


def test_a_file_s_neighbours_are_looked_at(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        lay(w.backing, **{"model-1.pt": 5 * MIB, "model-10.pt": 2 * MIB, "other-11.pt": MIB})
        opened, _attributes = await w.create(b"model-11.pt")
        await w.close(opened)
        await looked(w)
        assert w.inner.expectations.expect(b"model-12.pt") == 2 * MIB
        assert w.inner.expectations.expect(b"other-1.pt") is None

    run(tmp_path, scenario)


def test_what_was_learnt_is_committed(tmp_path: Path) -> None:
    async def learns(w: World) -> None:
        lay(w.backing, **{"step-1__model": 2 * MIB})
        await mkdir(w, b"step-2")
        await looked(w)

    async def knows(w: World) -> None:
        assert w.inner.expectations.expect(b"step-3/model") == 2 * MIB

    run(tmp_path, learns)
    run(tmp_path, knows)


class Unlisted(BackingDirectory):
    """Answers listings only when it may."""

    error: OSError | None = None

    def listdir(self, path: LowerPath) -> list[LowerEntry]:
        if self.error is not None:
            raise self.error
        return super().listdir(path)


def test_one_pattern_is_asked_about_once_and_an_error_is_nobody_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier_saves, "ASKED_MAX", 2)

    async def scenario(w: World) -> None:
        assert isinstance(w.lower, Unlisted)
        w.lower.error = OSError(5, "no")
        for name in (b"step-1", b"step-2", b"plain"):
            await mkdir(w, name)
            await looked(w)
        assert asked(w) == 1
        w.lower.error = None
        for name in (b"step-3", b"a-1", b"b-1", b"step-4"):
            await mkdir(w, name)
            await looked(w)
        assert asked(w) == 1 + 3  # a-#, b-#, and step-#, which was forgotten

    run(tmp_path, scenario, make_lower=Unlisted)


def test_an_earlier_save_of_very_many_files_is_looked_at_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(earlier_saves, "FILES_MAX", 3)
    names = [chr(ord("a") + letter) for letter in range(26)]

    async def scenario(w: World) -> None:
        lay(w.backing, **{f"step-1__{name}": 2 * MIB for name in names})
        await mkdir(w, b"step-2")
        await looked(w)
        assert (
            sum(
                w.inner.expectations.expect(b"step-2/" + name.encode()) is not None
                for name in names
            )
            == 3
        )

    run(tmp_path, scenario)


def test_small_files_ask_nothing(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        await w.write(b"plain", b"x")
        for number in range(20):
            opened, _attributes = await w.create(b"%d.json" % number, flags=os.O_WRONLY)
            await w.close(opened)
        assert asked(w) == 0

    run(tmp_path, scenario)


def test_a_deep_tree_is_looked_at_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier_saves, "DEPTH_MAX", 1)

    async def scenario(w: World) -> None:
        lay(w.backing, **{"step-1__model": 2 * MIB, "step-1__deep__model": 2 * MIB})
        await mkdir(w, b"step-2")
        await looked(w)
        assert w.inner.expectations.expect(b"step-2/model") == 2 * MIB
        assert w.inner.expectations.expect(b"step-2/deep/model") is None

    run(tmp_path, scenario)

"""File systems below the backing directory: what is stored there is staged there."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from acpfs.backing import leftovers
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.leftovers import MachineId
from acpfs.backing.lower import LowerPath
from acpfs.types import ROOT, Ino
from acpfs.writeback.guard import guard
from tests.filesystem.world import CALLER, World, run
from tests.rig.runtime import REAL

clause = pytest.mark.clause("S238")
mounts = pytest.mark.mount


@contextmanager
def mounted(at: Path, *words: str | Path) -> Iterator[Path]:
    at.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", *words, at], check=True)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


@contextmanager
def tmpfs(base: Path, name: str = "ckpts") -> Iterator[Path]:
    with mounted(base / "backing" / name, "-t", "tmpfs", "-o", "size=32M", "none") as at:
        yield at


async def directory(w: World, name: bytes, parent: Ino = ROOT) -> Ino:
    return (await w.do(w.fs.lookup(parent, name))).ino


def says(error: pytest.ExceptionInfo[OSError]) -> int:
    return error.value.errno or -1


class Quota(BackingDirectory):
    """Takes no names below `quota` from elsewhere, as file systems with quotas of projects do, and
    shows nothing of that.
    """

    crossed = 0

    def _rename(self, source: LowerPath, target: LowerPath) -> None:
        if source[:1] != target[:1] and target[0] == b"quota":
            self.crossed += 1
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        super()._rename(source, target)


@clause
@mounts
@pytest.mark.parametrize("kind", ["file system", "bind mount"])
def test_what_lies_on_another_file_system_is_staged_there(tmp_path: Path, kind: str) -> None:
    (tmp_path / "source").mkdir()
    how: tuple[str | Path, ...] = (
        ("-t", "tmpfs", "none") if kind == "file system" else ("--bind", tmp_path / "source")
    )

    async def scenario(w: World) -> None:
        inner = await directory(w, b"ckpts")
        step = (await w.do(w.fs.mkdir(inner, b"step-1", 0o755, CALLER))).ino
        ino = await w.write(b"shard", b"1", step)
        await w.do(w.fs.link(ino, step, b"again"))
        await w.do(w.fs.symlink(step, b"link", b"shard", CALLER))
        await w.write(b"shard", b"2", step)
        await w.write(b"latest", b"1")
        await w.drained()
        assert (w.backing / "ckpts/step-1/again").read_bytes() == b"2"
        assert (w.backing / "latest").read_bytes() == b"1"
        assert "copy" not in w.lower.calls()
        assert w.lower.list_staging() == []
        assert await w.names(inner) == [b"step-1"]
        with pytest.raises(OSError, match="No such file") as none:
            await directory(w, b".acpfs", inner)
        assert says(none) == errno.ENOENT
        for made in (
            w.fs.mkdir(inner, b".acpfs", 0o755, CALLER),
            w.fs.create(inner, b".acpfs", 0o644, os.O_WRONLY, CALLER),
            w.fs.symlink(inner, b".acpfs", b"shard", CALLER),
            w.fs.rename(step, b"link", inner, b".acpfs", 0),
        ):
            with pytest.raises(OSError, match="not permitted"):
                await w.do(made)

    with mounted(tmp_path / "backing/ckpts", *how):
        run(tmp_path, scenario, hold=False)


@clause
@mounts
def test_a_move_to_another_file_system_is_answered_as_natively(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        inner = await directory(w, b"ckpts")
        ino = await w.write(b"f", b"1")
        new = (await w.do(w.fs.mkdir(inner, b"new", 0o755, CALLER))).ino
        await w.do(w.fs.getattr(ROOT))
        for call in (
            w.fs.rename(ROOT, b"f", new, b"f", 0),
            w.fs.link(ino, new, b"f"),
            w.fs.rename(ROOT, b"f", inner, b"new", 2),
        ):
            with pytest.raises(OSError, match="cross-device") as error:
                await w.do(call)
            assert says(error) == errno.EXDEV
        await w.drained()
        assert (w.backing / "f").read_bytes() == b"1"

    with tmpfs(tmp_path):
        run(tmp_path, scenario)


@clause
@mounts
def test_a_move_that_nobody_could_know_of_is_a_copy(tmp_path: Path) -> None:
    """To a bind mount: its device is that of the backing directory."""
    (tmp_path / "source").mkdir()

    async def scenario(w: World) -> None:
        inner = await directory(w, b"ckpts")
        ino = await w.write(b"f", b"1")
        await w.do(w.fs.setxattr(ino, b"user.x", b"y"))
        await w.write(b"g", b"2")
        await w.drained()
        before = (w.backing / "f").stat()
        await w.do(w.fs.rename(ROOT, b"f", inner, b"f", 0))
        await w.do(w.fs.link(await directory(w, b"g"), inner, b"g"))
        await w.write(b"later", b"3")
        await w.drained()
        moved = w.backing / "ckpts/f"
        assert (moved.read_bytes(), os.getxattr(moved, "user.x"), moved.stat().st_mtime_ns) == (
            b"1",
            b"y",
            before.st_mtime_ns,
        )
        assert (w.backing / "ckpts/g").read_bytes() == b"2"
        assert not (w.backing / "f").exists()
        assert w.lower.list_staging() == []

    with mounted(tmp_path / "backing/ckpts", "--bind", tmp_path / "source"):
        run(tmp_path, scenario, hold=False)


@clause
@mounts
def test_what_did_not_fit_into_ram_is_brought_to_the_other_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drain is cut off between copying and renaming: the copy is known as the version, and its
    source goes last.
    """
    data = os.urandom(3 << 20)

    async def scenario(w: World) -> None:
        rename = w.lower.rename
        failed: list[list[str]] = []

        def once(source: LowerPath, target: LowerPath) -> None:
            if target[0] == b"ckpts" and source[:2] == (b"ckpts", b".acpfs") and not failed:
                failed.append(w.lower.list_staging())
                raise OSError(errno.EIO, "cut off")
            rename(source, target)

        monkeypatch.setattr(w.lower, "rename", once)
        await w.write(b"big", data, await directory(w, b"ckpts"))
        await w.drained()
        assert (w.backing / "ckpts/big").read_bytes() == data
        assert len(failed[0]) == 2
        assert (
            await w.read(await directory(w, b"big", await directory(w, b"ckpts")), 4 << 20) == data
        )
        assert not [name for name in w.lower.list_staging() if "@" in name]
        ino = await directory(w, b"big", await directory(w, b"ckpts"))
        opened = await w.do(
            w.fs.open(ino, os.O_WRONLY, CALLER)
        )  # it does not wait for a version that is persisted already
        await w.do(w.fs.write(opened.handle, 0, b"again"))
        await w.close(opened)
        await w.drained()
        assert (w.backing / "ckpts/big").read_bytes() == b"again" + data[5:]

    with tmpfs(tmp_path):
        run(tmp_path, scenario, hold=False, budget_bytes=1 << 20)


@clause
def test_a_directory_that_takes_nothing_from_elsewhere_has_an_area_of_its_own_and_can_be_removed(
    tmp_path: Path,
) -> None:
    (tmp_path / "backing/quota/project").mkdir(parents=True)

    async def scenario(w: World) -> None:
        project = await directory(w, b"project", await directory(w, b"quota"))
        await w.write(b"a", b"1", project)
        await w.drained()
        await w.write(b"b", b"2", project)
        await w.drained()
        assert isinstance(w.lower, Quota)
        assert w.lower.crossed == 1  # found out once
        assert (w.backing / "quota/project/.acpfs").is_dir()
        for name in (b"a", b"b"):
            await w.do(w.fs.unlink(project, name))
        quota = await directory(w, b"quota")
        await w.do(w.fs.rmdir(quota, b"project"))
        again = (await w.do(w.fs.mkdir(quota, b"project", 0o755, CALLER))).ino
        await w.write(
            b"c", b"3", again
        )  # is staged in the old one, perhaps, which that must not keep
        await w.drained()
        assert sorted(os.listdir(w.backing / "quota/project")) == [".acpfs", "c"]

    run(tmp_path, scenario, hold=False, make_lower=Quota)


@clause
def test_a_project_has_its_area_at_its_root(tmp_path: Path) -> None:
    (tmp_path / "projects/one/run/step").mkdir(parents=True)
    lower = BackingDirectory(tmp_path, "n", REAL)
    lower._entries.areas._project = lambda fd: int(
        "/projects/one" in os.readlink(f"/proc/self/fd/{fd}")
    )
    assert (
        lower.stage_near("x", (b"projects", b"one", b"run", b"step", b"not-there-yet"))
        == "x@projects/one"
    )
    assert lower.stage_near("x", (b"projects",)) == "x"


@clause
@mounts
def test_what_the_guard_keeps_stays_on_its_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At its next look it would let go of the old one, as the new one is whole.
    monkeypatch.setattr(guard.Guard, "_release_in_turn", lambda *_asked: None)

    async def scenario(w: World) -> None:
        inner = await directory(w, b"ckpts")
        for content in (b"old", b"new"):
            step = (await w.do(w.fs.mkdir(inner, b"step-1", 0o755, CALLER))).ino
            await w.write(b"model.pt", content, step)
            await w.drained()
            if content == b"old":
                await w.do(w.fs.unlink(step, b"model.pt"))
                await w.do(w.fs.rmdir(inner, b"step-1"))
        assert (w.backing / "ckpts/step-1/model.pt").read_bytes() == b"new"
        kept = list((w.backing / "ckpts/.acpfs/kept/test").iterdir())
        assert [file.read_bytes() for file in kept[0].iterdir()] == [b"old"]
        assert w.lower.list_kept() == [
            (b"ckpts", b".acpfs", b"kept", b"test", os.fsencode(kept[0].name))
        ]

    with tmpfs(tmp_path):
        run(tmp_path, scenario, hold=False)


@clause
@mounts
def test_what_cannot_be_staged_there_is_named_with_the_reason(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        inner = await directory(w, b"ckpts")
        await w.write(b"shard", b"1", inner)
        await w.write(b"elsewhere", b"2")
        await w.drained()
        op = w.log.parked()[0]
        assert op.last_error == errno.EXDEV
        assert "ckpts/.acpfs there was not made by acpfs" in op.last_detail
        (w.backing / "ckpts/.acpfs").rename(w.backing / "ckpts/theirs")
        w.engine.retry()
        await w.drained()
        assert (w.backing / "ckpts/theirs/mine").read_bytes() == b""

    with tmpfs(tmp_path) as at:
        (at / ".acpfs").mkdir()
        (at / ".acpfs/mine").touch()
        run(tmp_path, scenario, hold=False)


@clause
@mounts
def test_staging_files_in_an_area_are_removed_by_the_next_mount_and_those_of_dead_nodes_by_others(
    tmp_path: Path,
) -> None:
    backing = tmp_path / "backing"

    def leave(node: str) -> None:
        lower = BackingDirectory(backing, node, REAL)
        lower.close(lower.create_staging(lower.stage_near("left", (b"ckpts",))))
        lower.disconnect()

    async def scenario(w: World) -> None:
        await w.write(b"f", b"1")
        await w.drained()
        assert w.lower.list_staging() == []

    with tmpfs(tmp_path) as at:
        here = MachineId("h", "hardware", "this boot")
        leave("test")
        leave("h-dead")
        lower = BackingDirectory(backing, "test", REAL)
        lower.write_own(
            (b"nodes", b"h-dead"), b'{"host": "h", "hardware": "hardware", "boot_id": "earlier"}'
        )
        assert len(list(at.glob(".acpfs/staging/*/left"))) == 2
        assert leftovers.clear(lower, here, REAL.clock) == []
        lower.disconnect()
        assert list(at.glob(".acpfs/staging/*/left")) == [at / ".acpfs/staging/test/left"]
        assert not (backing / ".acpfs/areas/h-dead").exists()
        run(tmp_path, scenario, hold=False)
        assert not list(at.glob(".acpfs/staging/*/left"))


@clause
@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to somebody else")
@pytest.mark.parametrize("place", ["staging/n", "kept/n"])
def test_a_directory_that_somebody_else_made_ready_is_not_used(tmp_path: Path, place: str) -> None:
    """In a directory that others may write to: they could read, and replace, what is staged."""
    (tmp_path / ".acpfs" / place).mkdir(parents=True)
    os.chown(tmp_path / ".acpfs" / place, 65534, 65534)
    with pytest.raises(Exception, match="belongs to user 65534"):
        BackingDirectory(tmp_path, "n", REAL)
    os.chown(tmp_path / ".acpfs" / place, 0, 0)
    (tmp_path / ".acpfs" / place).chmod(0o777)
    BackingDirectory(tmp_path, "n", REAL).disconnect()
    assert (tmp_path / ".acpfs" / place).stat().st_mode & 0o777 == 0o700


@clause
def test_an_area_that_hangs_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    lower = BackingDirectory(tmp_path, "n", REAL)
    areas = lower._entries.areas
    hangs = threading.Event()
    go_on = threading.Event()
    areas._project = lambda fd: len(os.readlink(f"/proc/self/fd/{fd}").removeprefix(str(tmp_path)))
    make = areas._make

    def slow(root: LowerPath) -> None:
        if root == (b"a",):
            hangs.set()
            assert go_on.wait(60)
        make(root)

    monkeypatch.setattr(areas, "_make", slow)
    thread = threading.Thread(target=lower.stage_near, args=("x", (b"a",)))
    thread.start()
    try:
        assert hangs.wait(60)
        assert lower.stage_near("x", (b"b",)) == "x@b"
    finally:
        go_on.set()
        thread.join(60)
    assert lower.areas_of(b"n") == {(b"a",), (b"b",)}

"""ACLs from the call to the storage: in order, over worlds, where the storage has none, refuses
one, or hangs.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import stat
from pathlib import Path

import pytest

from acpfs.backing import posix_acl
from acpfs.filesystem.records import AttributeChange, Caller
from acpfs.types import ROOT, Ino
from tests.filesystem.test_slow_backing import SHORT, hanging
from tests.filesystem.world import CALLER, World, run
from tests.rig.acls import DEFAULT, acl_of, encoded, set_acl, shown

clause = pytest.mark.clause
ACL = "u::rw,u:2001:rw,g::,m::rw,o::"
SHARED = "u::rwx,u:2001:rwx,g::rwx,m::rwx,o::"


@pytest.fixture(autouse=True)
def _with_acls(tmp_path: Path) -> None:
    try:
        set_acl(tmp_path, SHARED, DEFAULT)
        os.removexattr(tmp_path, DEFAULT)
    except OSError:
        pytest.skip("no ACLs there")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


async def acl_in(w: World, ino: Ino, name: bytes = posix_acl.ACCESS) -> str:
    return shown(await w.do(w.fs.getxattr(ino, name)))


async def set_in(w: World, ino: Ino, text: str, name: bytes = posix_acl.ACCESS) -> None:
    await w.do(w.fs.setxattr(ino, name, encoded(text)))


@clause("S453")
def test_an_acl_is_kept_over_workers_and_stored_with_its_file(tmp_path: Path) -> None:
    async def before(w: World) -> None:
        directory = (await w.do(w.fs.mkdir(ROOT, b"d", 0o755, CALLER))).ino
        await set_in(w, directory, SHARED, posix_acl.DEFAULT)
        ino = await w.write(b"f", b"1")
        await set_in(w, ino, ACL)

    async def after(w: World) -> None:
        found = await w.do(w.fs.lookup(ROOT, b"f"))
        assert stat.S_IMODE(found.mode) == 0o660
        assert await acl_in(w, found.ino) == ACL
        directory = (await w.do(w.fs.lookup(ROOT, b"d"))).ino
        assert await acl_in(w, directory, posix_acl.DEFAULT) == SHARED
        await w.write(b"below", b"2", directory)
        await w.drained()
        assert (acl_of(w.backing / "f"), mode_of(w.backing / "f")) == (ACL, 0o660)
        assert acl_of(w.backing / "d", DEFAULT) == SHARED
        assert acl_of(w.backing / "d/below") == "u::rw,u:2001:rwx,g::rwx,m::r,o::"

    run(tmp_path, before, after)


@clause("S453")
def test_an_acl_of_a_cold_file_is_the_storages_and_chmod_needs_no_look_at_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "backing").mkdir()
    (tmp_path / "backing/cold").write_bytes(b"cold")
    set_acl(tmp_path / "backing/cold", ACL)

    async def scenario(w: World) -> None:
        ino = (await w.do(w.fs.lookup(ROOT, b"cold"))).ino
        await w.do(w.fs.setattr(ino, AttributeChange(mode=0o640), None, CALLER))
        assert await acl_in(w, ino) == "u::rw,u:2001:rw,g::,m::r,o::"
        await w.drained()
        assert acl_of(w.backing / "cold") == "u::rw,u:2001:rw,g::,m::r,o::"
        await set_in(w, ino, "u::rw,g::r,o::r")
        with pytest.raises(OSError) as caught:
            await acl_in(w, ino)
        assert caught.value.errno == errno.ENODATA
        await w.drained()
        assert (acl_of(w.backing / "cold"), mode_of(w.backing / "cold")) == ("", 0o644)

    run(tmp_path, scenario)


@clause("S453")
def test_what_the_top_hands_on_does_not_reach_files_by_way_of_staging(tmp_path: Path) -> None:
    """`.acpfs` is made in a directory that hands an ACL on; what is saved below one that does not
    gets none.
    """
    backing = tmp_path / "backing"
    backing.mkdir()
    set_acl(backing, SHARED, DEFAULT)
    (backing / "plain").mkdir()
    os.removexattr(backing / "plain", DEFAULT)

    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.lookup(ROOT, b"plain"))).ino
        await w.write(b"f", b"1", directory)
        await w.write(b"g", b"1")
        await w.drained()
        assert (acl_of(backing / "plain/f"), mode_of(backing / "plain/f")) == ("", 0o644)
        assert acl_of(backing / "g") == "u::rw,u:2001:rwx,g::rwx,m::r,o::"

    run(tmp_path, scenario)


@clause("S453")
def test_a_directory_gets_no_acl_that_the_application_did_not_see(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        directory = (await w.do(w.fs.mkdir(ROOT, b"d", 0o755, CALLER))).ino
        await w.drained()
        await w.do(w.fs.mkdir(directory, b"sub", 0o755, CALLER))
        await w.do(w.fs.mknod(directory, b"fifo", stat.S_IFIFO | 0o644, 0, CALLER))
        set_acl(w.backing / "d", SHARED, DEFAULT)  # others, before the drain gets there
        await w.drained()
        for name in ("sub", "fifo"):
            assert acl_of(w.backing / "d" / name) == ""
            assert acl_of(w.backing / "d" / name, DEFAULT) == ""
        assert mode_of(w.backing / "d/sub") == 0o755
        assert mode_of(w.backing / "d/fifo") == 0o644

    run(tmp_path, scenario)


@clause("S452")
def test_the_umask_counts_where_nothing_is_handed_on(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        caller = Caller(0, 0, 1, umask=0o027)
        made = await w.do(w.fs.mkdir(ROOT, b"d", 0o777, caller))
        assert stat.S_IMODE(made.mode) == 0o750
        _, file = await w.do(w.fs.create(ROOT, b"f", 0o666, os.O_WRONLY, caller))
        assert stat.S_IMODE(file.mode) == 0o640
        link = await w.do(w.fs.symlink(ROOT, b"l", b"f", caller))
        assert stat.S_IMODE(link.mode) == 0o777
        await set_in(w, made.ino, SHARED, posix_acl.DEFAULT)
        _, below = await w.do(w.fs.create(made.ino, b"f", 0o666, os.O_WRONLY, caller))
        assert stat.S_IMODE(below.mode) == 0o660

    run(tmp_path, scenario)


@clause("S454")
def test_an_acl_that_the_storage_refuses_leaves_a_mode_that_gives_no_more(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"1")
        await set_in(w, ino, ACL)
        directory = (await w.do(w.fs.mkdir(ROOT, b"d", 0o755, CALLER))).ino
        await w.drained()
        w.engine.hold(True)
        w.lower._setter.acls_work = False
        await set_in(w, directory, SHARED)
        again = await w.write(b"g", b"1")
        await set_in(w, again, ACL)
        await w.drained()
        assert mode_of(w.backing / "g") == 0o600
        assert mode_of(w.backing / "d") == 0o770
        assert w.lower.refused_attributes()["xattr"] == 2

    run(tmp_path, scenario)


@clause("X5")
def test_where_the_storage_has_none_there_are_none(tmp_path: Path) -> None:
    async def scenario(w: World) -> None:
        w.lower.adapt(dataclasses.replace(w.lower.features, acls=False))
        ino = await w.write(b"f", b"1")
        calls = (
            w.fs.setxattr(ino, posix_acl.ACCESS, encoded(ACL)),
            w.fs.getxattr(ino, posix_acl.ACCESS),
            w.fs.removexattr(ino, posix_acl.DEFAULT),
        )
        for call in calls:
            with pytest.raises(OSError) as caught:
                await w.do(call)
            assert caught.value.errno == errno.EOPNOTSUPP
        assert not w.fs.has_acls

    run(tmp_path, scenario)


@clause("S455")
def test_an_acl_that_a_hung_storage_does_not_tell_lets_nobody_in_but_the_owner(
    tmp_path: Path,
) -> None:
    backing = tmp_path / "backing"
    (backing / "d").mkdir(parents=True)
    set_acl(backing / "d", SHARED, DEFAULT)

    async def scenario(w: World) -> None:
        found = await w.do(w.fs.lookup(ROOT, b"d"))
        with pytest.raises(FileNotFoundError):
            await w.do(w.fs.lookup(found.ino, b"f"))
        # all else is known by now, and had the time that it takes
        w.fs.settings.backing_timeout_s = 0.2
        with hanging(w, "xattrs"):
            assert await acl_in(w, found.ino) == "u::rwx,g::,m::,o::"
            _, made = await w.do(w.fs.create(found.ino, b"f", 0o666, os.O_WRONLY, CALLER))
            assert stat.S_IMODE(made.mode) == 0o600
            with pytest.raises(OSError) as caught:
                await set_in(w, found.ino, ACL)
            assert caught.value.errno == errno.EIO
        w.fs.settings.backing_timeout_s = SHORT["backing_timeout_s"]
        known = await w.do(w.fs.mkdir(ROOT, b"mine", 0o755, CALLER))
        with hanging(w, "xattrs"):
            _, made = await w.do(w.fs.create(known.ino, b"f", 0o644, os.O_WRONLY, CALLER))
            assert stat.S_IMODE(made.mode) == 0o644

    run(tmp_path, scenario, **SHORT)


@clause("S453", "S595")
@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to somebody else")
def test_an_acl_that_was_narrowed_for_an_older_content_is_whole_with_the_next(
    tmp_path: Path,
) -> None:
    """The file is given away behind a close that is taken back; the next content takes the ACL of
    the file that it replaces.
    """

    async def scenario(w: World) -> None:
        ino = await w.write(b"f", b"old")
        await set_in(w, ino, ACL)
        await w.drained()
        opened = await w.do(w.fs.open(ino, os.O_WRONLY, CALLER))
        await w.do(w.fs.write(opened.handle, 0, b"half"))
        w.engine.hold(True)
        await w.do(w.fs.flush(opened.handle))
        await w.do(w.fs.setattr(ino, AttributeChange(uid=12), None, CALLER))
        await w.do(w.fs.write(opened.handle, 4, b" and half"))
        await w.drained()
        assert mode_of(w.backing / "f") == 0, "neither owner may do what the other could"
        await w.close(opened)
        await w.drained()
        assert (acl_of(w.backing / "f"), mode_of(w.backing / "f")) == (ACL, 0o660)

    run(tmp_path, scenario)

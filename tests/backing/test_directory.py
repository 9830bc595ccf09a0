"""The backing directory by descriptor, on a real file system."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from acpfs.backing import quirks
from acpfs.backing.directory import BackingDirectory
from acpfs.backing.identity import claim, node_id
from acpfs.backing.lower import Lower, lstat_each
from acpfs.backing.member_records import NodeRecord, NodeRecords
from acpfs.backing.probe import probe
from acpfs.backing.quirks import Features
from acpfs.backing.syscalls import Opener
from acpfs.errors import MachineError, RefusedError
from acpfs.writeback.log.ops import Metadata
from tests.rig.processes import Child
from tests.rig.runtime import REAL


@pytest.fixture(params=["openat2", "walk"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BackingDirectory]:
    (tmp_path / "backing").mkdir()
    directory = BackingDirectory(tmp_path / "backing", "node-1", REAL)
    directory._entries.opener = Opener(directory._root_fd, openat2=request.param == "openat2")
    yield directory
    directory.disconnect()


def put(directory: BackingDirectory, path: tuple[bytes, ...], data: bytes) -> None:
    fd = directory.create_staging("put")
    directory.write(fd, memoryview(data), 0)
    directory.sync(fd)
    directory.close(fd)
    directory.rename(directory.staging_path("put"), path)


@pytest.mark.clause("S434")
def test_room_that_is_set_aside_is_no_part_of_the_file(directory: BackingDirectory) -> None:
    fd = directory.create_staging("room")
    try:
        is_set_aside = directory.make_room(fd, 1 << 20)
        st = os.fstat(fd)
        assert st.st_size == 0
        assert st.st_blocks * 512 >= (1 << 20 if is_set_aside else 0)
    finally:
        os.close(fd)


def content(directory: BackingDirectory, path: tuple[bytes, ...]) -> bytes:
    fd = directory.open_read(path)
    try:
        buffer = memoryview(bytearray(1 << 16))
        return bytes(buffer[: directory.read(fd, buffer, 0)])
    finally:
        directory.close(fd)


def refusal(call: Callable[[tuple[bytes, ...]], object], path: tuple[bytes, ...]) -> int | None:
    """errno that a call fails with."""
    try:
        call(path)
    except OSError as error:
        return error.errno
    return None


def test_is_a_lower(directory: BackingDirectory) -> None:
    lower: Lower = directory
    assert lower.features == Features()


def test_files_are_staged_and_renamed(directory: BackingDirectory) -> None:
    directory.mkdir((b"d",))
    put(directory, (b"d", b"f"), b"data")
    assert content(directory, (b"d", b"f")) == b"data"
    assert directory.lstat((b"d", b"f")).size == 4
    assert not directory.list_staging()
    directory.sync_directory((b"d",))
    directory.sync_directory(())
    assert directory.calls()["fsync directory"] == 2


@pytest.mark.clause("S24")
def test_what_may_not_be_opened_by_its_mode_is_flushed_with_its_file_system(
    directory: BackingDirectory,
) -> None:
    """A daemon without privilege may not read its own directory of mode 0, and that does not
    pass.
    """
    directory.mkdir((b"shut",))
    os.chown(directory.path / "shut", 1000, 1000)
    os.chmod(directory.path / "shut", 0)

    def flushed() -> int:
        for path in ((b"shut",), ()):
            directory.sync_directory(path)
        return directory.calls().get("sync file system", 0)

    assert Child(flushed, uid=1000, gid=1000).result() == 1
    assert flushed() == 0


@pytest.mark.clause("S24")
def test_a_refusal_that_the_mode_does_not_explain_is_an_error(
    directory: BackingDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an expired ticket: who flushes tries again, and a FUSE server, which hears nothing of
    syncfs, may still hear of it.
    """
    directory.mkdir((b"d",))
    put(directory, (b"d", b"f"), b"1")

    def refuse(*_arguments: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(directory._entries, "open", refuse)
    assert refusal(directory.sync_directory, (b"d",)) == errno.EACCES
    assert refusal(directory.sync_entry, (b"d", b"f")) == errno.EACCES
    assert "sync file system" not in directory.calls()


@pytest.mark.clause("S24")
def test_a_file_system_that_could_not_be_flushed_is_an_error(directory: BackingDirectory) -> None:
    os.close(directory._root_fd)
    try:
        with pytest.raises(OSError, match="Bad file descriptor"):
            directory.sync_file_systems([(b"gone", b"f")])
    finally:
        directory._root_fd = os.open(directory.path, os.O_RDONLY | os.O_DIRECTORY)


@pytest.mark.clause("S24")
def test_file_systems_are_flushed_once_each_by_the_descriptor_that_was_opened_first(
    directory: BackingDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer one is not told what could not be written, if somebody else was told so before: seen
    on ext4 over a device that is full.
    """
    paths = [(b"d", b"f"), (b"d", b"gone", b"g"), (b"other",), ()]
    directory.mkdir((b"d",))
    flushed: list[int] = []
    monkeypatch.setattr("acpfs.backing.directory.sync_file_system", flushed.append)
    directory.sync_file_systems(paths)
    assert flushed == [directory._root_fd]


@pytest.mark.mount
@pytest.mark.clause("S24", "S238")
def test_each_file_system_below_is_flushed(
    directory: BackingDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir((b"below",))
    below = directory.path / "below"
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", below], check=True)
    try:
        flushed: list[int] = []
        monkeypatch.setattr(
            "acpfs.backing.directory.sync_file_system",
            lambda fd: flushed.append(os.fstat(fd).st_dev),
        )
        directory.sync_file_systems([(b"below", b"f"), (b"below", b"g"), (b"f",)])
        assert sorted(flushed) == sorted({directory.path.stat().st_dev, below.stat().st_dev})
    finally:
        subprocess.run(["umount", "-l", below], check=True)


def test_own_directory_is_not_served(directory: BackingDirectory) -> None:
    assert [entry.name for entry in directory.listdir(())] == []
    for path in ((b".acpfs",), (b".acpfs", b"nodes"), (b".acpfs", b"staging", b"other", b"x")):
        for call in (
            directory.lstat,
            directory.listdir,
            directory.open_read,
            directory.mkdir,
            directory.unlink,
            directory.rmdir,
        ):
            with pytest.raises(FileNotFoundError):
                call(path)
    directory.mkdir((b"d",))
    directory.mkdir((b"d", b".acpfs"))  # only at the top


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0b"])
def test_what_is_not_a_name_is_refused(directory: BackingDirectory, name: bytes) -> None:
    for path in ((name,), (name, b"x"), (b"x", name)):
        with pytest.raises(OSError, match="not a name"):
            directory.lstat(path)


def test_symlinks_are_never_followed(directory: BackingDirectory, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_bytes(b"secret")
    directory.symlink(os.fsencode(outside), (b"link",))
    directory.symlink(os.fsencode(outside / "f"), (b"file",))
    assert stat.S_ISLNK(directory.lstat((b"link",)).mode)
    assert directory.readlink((b"file",)) == os.fsencode(outside / "f")
    for call in (directory.lstat, directory.open_read, directory.mkdir, directory.unlink):
        assert refusal(call, (b"link", b"f")) in (errno.ELOOP, errno.ENOTDIR)
    for path in ((b"link",), (b"file",)):
        assert refusal(directory.open_read, path) == errno.ELOOP
        assert refusal(directory.listdir, path) in (errno.ELOOP, errno.ENOTDIR)
    directory.apply(
        (b"file",),
        Metadata(permissions=0o777, uid=0, gid=0, mtime_ns=5, atime_ns=5, xattrs={b"user.x": b"1"}),
    )
    assert directory.lstat((b"file",)).mtime_ns == 5
    assert stat.S_IMODE((outside / "f").stat().st_mode) != 0o777
    assert (outside / "f").read_bytes() == b"secret"


def test_a_fifo_is_not_opened(directory: BackingDirectory) -> None:
    directory.mknod((b"fifo",), stat.S_IFIFO | 0o600, 0)
    assert refusal(directory.open_read, (b"fifo",)) == errno.EINVAL
    directory.mkdir((b"d",))
    assert refusal(directory.open_read, (b"d",)) == errno.EISDIR


def test_long_paths(directory: BackingDirectory) -> None:
    path: tuple[bytes, ...] = ()
    for _ in range(40):
        path = (*path, b"x" * 200)
        directory.mkdir(path)
    put(directory, (*path, b"f"), b"deep")
    assert content(directory, (*path, b"f")) == b"deep"


def test_attributes(directory: BackingDirectory) -> None:
    put(directory, (b"f",), b"1")
    meta = Metadata(
        permissions=0o4751,
        uid=1234,
        gid=4321,
        atime_ns=1_000_000_001,
        mtime_ns=2_000_000_002,
        xattrs={b"user.a": b"\0\1", b"user.gone": None},
    )
    directory.apply((b"f",), meta)
    st = directory.lstat((b"f",))
    assert (stat.S_IMODE(st.mode), st.uid, st.gid, st.atime_ns, st.mtime_ns) == (
        0o4751,
        1234,
        4321,
        1_000_000_001,
        2_000_000_002,
    )
    assert directory.xattrs((b"f",)) == {b"user.a": b"\0\1"}
    assert {what: count for what, count in directory.refused_attributes().items() if count} == {
        "xattr": 1
    }  # there was nothing to remove


def test_own_xattrs_are_hidden(directory: BackingDirectory) -> None:
    put(directory, (b"f",), b"1")
    assert directory.digest((b"f",)) == ""
    digest = "00ff" * 8
    noted: dict[bytes, bytes | None] = {b"user.acpfs.xxh3": digest.encode(), b"user.mine": b"1"}
    directory.apply((b"f",), Metadata(xattrs=noted))
    assert directory.xattrs((b"f",)) == {b"user.mine": b"1"}
    assert directory.digest((b"f",)) == digest


def test_exchange_of_a_file_and_a_directory(directory: BackingDirectory) -> None:
    for features in (Features(), Features(rename_exchange=False)):
        directory.adapt(features)
        directory.mkdir((b"d",))
        put(directory, (b"d", b"inner"), b"1")
        put(directory, (b"f",), b"2")
        directory.exchange((b"d",), (b"f",))
        assert content(directory, (b"d",)) == b"2"
        assert content(directory, (b"f", b"inner")) == b"1"
        directory.unlink((b"f", b"inner"))
        directory.rmdir((b"f",))
        directory.unlink((b"d",))


@pytest.mark.parametrize("done", [1, 2])
def test_an_exchange_cut_off_goes_on(directory: BackingDirectory, done: int) -> None:
    directory.adapt(Features(rename_exchange=False))
    put(directory, (b"a",), b"1")
    put(directory, (b"b",), b"2")
    put(directory, (b"x",), b"3")
    put(directory, (b"y",), b"4")
    directory.rename(
        (b"a",),
        directory.staging_path(f"exchange-{xxhash.xxh3_64_hexdigest(b'a' + bytes(2) + b'b')}"),
    )
    directory.exchange((b"x",), (b"y",))
    if done == 2:
        directory.rename((b"b",), (b"a",))
    directory.exchange((b"a",), (b"b",))
    assert (content(directory, (b"a",)), content(directory, (b"b",))) == (b"2", b"1")
    assert (content(directory, (b"x",)), content(directory, (b"y",))) == (b"4", b"3"), (
        "what another exchange had put aside"
    )


def test_links_become_copies_where_there_are_none(directory: BackingDirectory) -> None:
    put(directory, (b"f",), b"data")
    directory.link((b"f",), (b"linked",))
    assert directory.lstat((b"linked",)).ino == directory.lstat((b"f",)).ino
    directory.adapt(Features(hard_links=False))
    directory.link((b"f",), (b"copied",))
    assert content(directory, (b"copied",)) == b"data"
    with pytest.raises(FileExistsError):
        directory.link((b"f",), (b"copied",))


# without O_NONBLOCK the open never returns
@pytest.mark.clause("S161")
def test_what_acpfs_did_not_write_among_its_own_files_keeps_nobody(
    directory: BackingDirectory,
) -> None:
    nodes = directory.path / ".acpfs" / "nodes"
    os.mkfifo(nodes / "fifo")
    (nodes / "directory").mkdir()
    (nodes / "link").symlink_to("fifo")
    records = NodeRecords(directory)
    records.publish(NodeRecord("real", beat=1, clock=1.0, watermark=1.0))
    assert records.names() == ["real"]
    for name in ("fifo", "directory"):
        with pytest.raises(ValueError, match="not a regular file"):
            records.read(name)
    with pytest.raises(OSError):
        records.read("link")
    found = records.read("real")
    assert found is not None
    assert found.beat == 1


def test_staging_survives_the_removal_of_its_directory(directory: BackingDirectory) -> None:
    subprocess.run(["rm", "-rf", directory.path / ".acpfs"], check=True)
    put(directory, (b"f",), b"1")
    directory.write_own((b"manifest", b"m"), b"text")
    assert directory.read_own((b"manifest", b"m")) == b"text"
    subprocess.run(["rm", "-rf", directory.path / ".acpfs"], check=True)
    directory.write_own((b"manifest", b"m"), b"again")
    assert directory.list_own((b"manifest",)) == [b"m"]
    directory.remove_own((b"manifest", b"m"))
    directory.remove_own((b"manifest", b"m"))
    assert directory.list_own((b"manifest",)) == []


def test_names_that_are_not_text(directory: BackingDirectory) -> None:
    put(directory, (b"\xff\xfe",), b"1")
    assert directory.listdir(())[0].name == b"\xff\xfe"
    assert directory.listdir(())[0].mode == stat.S_IFREG


class TestRefusals:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(MachineError, match="No such file"):
            BackingDirectory(tmp_path / "missing", "n", REAL)

    def test_not_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "f").touch()
        with pytest.raises(MachineError, match="Not a directory"):
            BackingDirectory(tmp_path / "f", "n", REAL)

    @pytest.mark.mount
    def test_not_writable(self, tmp_path: Path) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", tmp_path], check=True)
        try:
            with pytest.raises(MachineError, match="not writable"):
                BackingDirectory(tmp_path, "n", REAL)
        finally:
            subprocess.run(["umount", "-l", tmp_path], check=True)


def test_probe_leaves_nothing_and_adapts(directory: BackingDirectory) -> None:
    report = probe(directory)
    assert report.features == directory.features
    assert report.features.time_granularity_ns == 1
    assert report.features.name_bytes_max == 255
    assert not directory.list_staging()


class TestIdentity:
    def test_node_id_is_stable_per_mount_point_and_unique(self, tmp_path: Path) -> None:
        ids = [node_id(tmp_path, Path(f"/mnt/{name}"), REAL.chance) for name in "aab"]
        assert ids[0] == ids[1] != ids[2]
        assert node_id(tmp_path / "elsewhere", Path("/mnt/a"), REAL.chance) != ids[0]
        assert node_id(tmp_path, Path("/mnt/a"), REAL.chance, "chosen") == "chosen"

    def test_volume_id_is_made_once(self, directory: BackingDirectory, tmp_path: Path) -> None:
        first = claim(directory, tmp_path / "run")
        first.release()
        other = BackingDirectory(directory.path, "node-2", REAL)
        second = claim(other, tmp_path / "run")
        assert first.volume_id == second.volume_id
        second.release()
        other.disconnect()

    def test_a_second_claim_of_the_same_id_is_refused(
        self, directory: BackingDirectory, tmp_path: Path
    ) -> None:
        first = claim(directory, tmp_path)
        with pytest.raises(RefusedError, match="node-1"):
            claim(directory, tmp_path)
        first.release()
        claim(directory, tmp_path).release()

    def test_a_broken_volume_file_is_refused(
        self, directory: BackingDirectory, tmp_path: Path
    ) -> None:
        directory.write_own((b"volume",), b"torn")
        with pytest.raises(RefusedError, match="volume"):
            claim(directory, tmp_path)


@pytest.mark.clause("S23")
def test_a_top_that_is_said_to_be_missing_is_trouble(
    directory: BackingDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CephFS says ENOENT of open directories to a client that it has evicted; believed, the whole
    mount would not exist.
    """

    def gone(_what: object) -> object:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    with monkeypatch.context() as evicted:
        evicted.setattr(os, "fstat", gone)
        evicted.setattr(os, "scandir", gone)
        assert refusal(directory.lstat, ()) == errno.ESTALE
        assert refusal(directory.listdir, ()) == errno.ESTALE
    assert directory.listdir(()) == []


@pytest.mark.clause("S27")
@pytest.mark.parametrize(
    "number",
    [errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM],
    ids=lambda number: errno.errorcode[number],
)
def test_what_a_file_system_cannot_do_at_all_is_no_failure(
    directory: BackingDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Small FUSE servers answer ENOSYS to whatever they were not written for."""

    def cannot(*_arguments: object, **_words: object) -> None:
        raise OSError(number, os.strerror(number))

    for name in ("link", "symlink", "chown", "setxattr", "getxattr", "listxattr", "statvfs"):
        monkeypatch.setattr(os, name, cannot)
    monkeypatch.setattr(quirks, "rename_exchange", cannot)
    put(directory, (b"file",), b"x")
    assert directory.digest((b"file",)) == ""
    assert directory.xattrs((b"file",)) == {}
    claim(directory, tmp_path / "run").release()
    features = probe(directory).features
    assert not any(
        (
            features.hard_links,
            features.symlinks,
            features.chown,
            features.xattrs,
            features.rename_exchange,
        )
    )
    assert directory.space().blocks_available > 0


def test_names_of_one_directory_are_looked_at_as_one_by_one(directory: BackingDirectory) -> None:
    directory.mkdir((b"d",))
    for parent in ((), (b"d",)):
        put(directory, (*parent, b"file"), b"bytes")
        directory.symlink(b"nowhere", (*parent, b"link"))
        directory.mkdir((*parent, b"below"))
        names = [b"file", b"missing", b"link", b".acpfs", b"below", b"x" * 200]
        assert directory.lstat_many(parent, names) == lstat_each(directory.lstat, parent, names)
        assert [st is not None for st in directory.lstat_many(parent, names)] == [
            True,
            False,
            True,
            False,
            True,
            False,
        ]
        assert directory.lstat_many(parent, []) == []
        for wrong in (b"..", b".", b"below/x", b""):
            with pytest.raises(OSError, match="not a name"):
                directory.lstat_many(parent, [b"file", wrong])
    for gone in ((b"gone",), (b"file",), (b"d", b"gone", b"deeper")):
        assert directory.lstat_many(gone, [b"a", b"b"]) == [None, None]


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 100])
def test_looks_at_many_names_are_counted_one_by_one(
    directory: BackingDirectory, count: int
) -> None:
    before = directory.calls().get("lstat", 0)
    directory.lstat_many((), [b"n%d" % number for number in range(count)])
    assert directory.calls().get("lstat", 0) - before == count


@pytest.mark.clause("S458")
def test_another_backing_directory_below_keeps_its_own_files_to_itself(
    directory: BackingDirectory, tmp_path: Path
) -> None:
    backing = tmp_path / "backing"
    (backing / "run").mkdir()
    BackingDirectory(backing / "run", "node-2", REAL).disconnect()
    assert [entry.name for entry in directory.listdir((b"run",))] == [b".acpfs"]  # a user's, yet
    (backing / "run/.acpfs/volume").write_text("0" * 32)
    (backing / "run/shard").write_bytes(b"1")
    assert [entry.name for entry in directory.listdir((b"run",))] == [b"shard"]
    assert directory.nested() == [(b"run",)]
    inside = (b"run", b".acpfs", b"nodes")
    assert refusal(directory.lstat, inside) == errno.ENOENT
    assert refusal(directory.rmdir, inside) == errno.ENOENT
    assert refusal(directory.lstat, inside[:2]) == errno.ENOENT
    (backing / "run/shard").unlink()
    with pytest.raises(OSError, match="backing directory of other acpfs mounts"):
        directory.rmdir((b"run",))
    assert (backing / "run/.acpfs/volume").exists()

"""Mounts are found by name, and a mount point is never looked at."""

import os
from pathlib import Path
from typing import Any

import pytest

from acpfs.control import registry, runtime
from acpfs.control.registry import (
    MountRecord,
    find,
    locate,
    normalised,
    process_started,
    records,
    remove,
    slug,
    write,
)
from acpfs.errors import AcpfsError, ExitCode, NotMountedError, RefusedError


def record(mountpoint: Path | str, directory: Path, *, alive: bool = True) -> MountRecord:
    pid = os.getpid() if alive else 2**22 + 1
    name = slug(str(mountpoint))
    return MountRecord(
        str(mountpoint),
        "/b",
        "n",
        pid,
        process_started(os.getpid()),
        str(directory / "sockets" / name),
        "0",
        str(directory),
    )


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = runtime.prepare(tmp_path / "run")
    monkeypatch.setenv(runtime.ENVIRONMENT_VARIABLE, str(directory))
    return directory


@pytest.fixture
def forbidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A mount point that must not be looked at."""
    point = tmp_path / "mnt"
    point.mkdir()
    real_readlink = os.readlink
    real_lstat = os.lstat
    real_stat = os.stat

    def guard(path: object) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            text = os.fsdecode(path)
            assert text != str(point), "the mount point was touched"
            assert not text.startswith(f"{point}/"), "something in the mount was touched"

    def readlink(path: Path, *args: Any, **kwargs: Any) -> object:
        guard(path)
        return real_readlink(path, *args, **kwargs)

    def lstat(path: Path, *args: Any, **kwargs: Any) -> object:
        guard(path)
        return real_lstat(path, *args, **kwargs)

    def stat(path: Path, *args: Any, **kwargs: Any) -> object:
        guard(path)
        return real_stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "readlink", readlink)
    monkeypatch.setattr(os, "lstat", lstat)
    monkeypatch.setattr(os, "stat", stat)
    return point


def test_what_is_written_is_found_and_removed(run_dir: Path) -> None:
    written = record("/mnt/a", run_dir)
    write(written)
    assert records() == [written]
    assert find("/mnt/a") == find(None) == written
    remove(written)
    remove(written)
    assert records() == []
    with pytest.raises(NotMountedError, match="no acpfs is mounted"):
        find(None)


def test_a_record_says_whether_its_daemon_lives(run_dir: Path) -> None:
    assert record("/mnt/a", run_dir).alive
    assert not record("/mnt/a", run_dir, alive=False).alive


def test_several_mounts_must_be_told_apart_and_dead_ones_do_not_count(run_dir: Path) -> None:
    write(record("/mnt/a", run_dir))
    write(record("/mnt/dead", run_dir, alive=False))
    assert find(None).mountpoint == "/mnt/a"
    write(record("/mnt/b", run_dir))
    with pytest.raises(AcpfsError, match="name one: /mnt/a, /mnt/b") as caught:
        find(None)
    assert caught.value.exit_code is ExitCode.USAGE


def test_a_mount_whose_daemon_is_gone_is_told_from_none(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is on call asks `acpfs-ctl status`, and sees the mount in findmnt."""
    registry.write(record("/mnt/dead", run_dir, alive=False))
    with pytest.raises(NotMountedError, match="no acpfs is mounted"):
        registry.find(None)
    monkeypatch.setattr(registry, "_mounted", lambda: {"/mnt/dead"})
    with pytest.raises(NotMountedError, match=r"/mnt/dead is gone: `acpfs mount .* /mnt/dead`"):
        registry.find(None)


def test_mounts_of_others_are_no_choice(run_dir: Path) -> None:
    mine = record("/mnt/mine", run_dir)
    Path(mine.socket).touch()
    write(mine)
    write(record("/mnt/others", run_dir))
    assert find(None) == mine


def test_damaged_records_are_passed_over(run_dir: Path) -> None:
    write(record("/mnt/a", run_dir))
    (run_dir / "mounts" / "x.json").write_text("{")
    (run_dir / "mounts" / "y.json").write_text("[1]")
    assert [known.mountpoint for known in records()][:1] == ["/mnt/a"]


def test_names_that_are_not_utf8_survive(run_dir: Path) -> None:
    name = os.fsdecode(b"/mnt/\xff\xfe")
    write(record(name, run_dir))
    assert find(name).mountpoint == name


@pytest.mark.parametrize(
    ("path", "rest"),
    [
        ("{m}", ""),
        ("{m}/", ""),
        ("{m}/a/b", "a/b"),
        ("{m}/a/../b", "b"),
        ("{m}//a/./b/", "a/b"),
        ("{m}/../{name}/c", "c"),
        ("{link}", ""),
        ("{link}/d", "d"),
    ],
)
def test_paths_are_followed_up_to_the_mount_and_no_further(
    run_dir: Path, forbidden: Path, tmp_path: Path, path: str, rest: str
) -> None:
    write(record(forbidden, run_dir))
    link = tmp_path / "link"
    link.symlink_to(forbidden)
    assert locate(path.format(m=forbidden, name=forbidden.name, link=link))[1] == rest


def test_a_relative_path_starts_at_the_working_directory(
    run_dir: Path, forbidden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(record(forbidden, run_dir))
    monkeypatch.chdir(tmp_path)
    assert locate("mnt/x")[1] == "x"
    assert find("./mnt").mountpoint == str(forbidden)


@pytest.mark.parametrize("path", ["{t}", "{m}/../elsewhere", "{m}x", "{loop}/a", "/"])
def test_a_path_outside_is_not_mounted(
    run_dir: Path, forbidden: Path, tmp_path: Path, path: str
) -> None:
    write(record(forbidden, run_dir))
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(NotMountedError):
        locate(path.format(t=tmp_path, m=forbidden, loop=loop))


def test_normalised_follows_the_parents_links_only(forbidden: Path, tmp_path: Path) -> None:
    (tmp_path / "via").symlink_to(tmp_path)
    assert normalised(f"{tmp_path}/via/mnt") == str(forbidden)


def test_a_runtime_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "run"
    bad.mkdir()
    bad.chmod(0o777)
    with pytest.raises(RefusedError):
        runtime.prepare(bad)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(RefusedError):
        runtime.prepare(tmp_path / "link")


@pytest.mark.clause("S85")
def test_a_runtime_directory_that_others_could_have_made_is_not_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/tmp/acpfs-UID, made by whoever came first: a socket there could say that all is verified."""
    monkeypatch.delenv(runtime.ENVIRONMENT_VARIABLE, raising=False)
    monkeypatch.setattr(runtime, "ROOT_RUNTIME_DIR", tmp_path / "none")
    mine = tmp_path / "acpfs-1"
    monkeypatch.setattr(runtime, "runtime_dir", lambda: mine)
    (mine / "mounts").mkdir(parents=True)
    mine.chmod(0o700)
    write(record("/mnt/a", mine))
    assert [known.mountpoint for known in records()] == ["/mnt/a"]
    mine.chmod(0o777)
    assert records() == []
    mine.chmod(0o700)
    mine.rename(tmp_path / "elsewhere")
    mine.symlink_to(tmp_path / "elsewhere")
    assert records() == []
    mine.unlink()
    (tmp_path / "elsewhere").rename(mine)
    monkeypatch.setattr(os, "getuid", lambda: mine.stat().st_uid + 1000)
    assert bool(records()) == (mine.stat().st_uid == 0)
    monkeypatch.setenv(runtime.ENVIRONMENT_VARIABLE, str(mine))
    mine.chmod(0o777)
    assert records()


def test_a_zombie_does_not_live() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert registry.process_started(pid) == 0
    os.waitpid(pid, 0)

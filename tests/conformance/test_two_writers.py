"""A file that several programs have open: what the first one closes is no whole file while the
others write.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.rig.mounts import AcpfsMount, MakeMount

clause = pytest.mark.clause
pytestmark = pytest.mark.every_lane
PART = 1 << 20
OLD = b"o" * 4 * PART
NEW = b"n" * 4 * PART


def mounted(transport: str, make_mount: MakeMount, tmp_path: Path, *names: str) -> AcpfsMount:
    backing = tmp_path / "backing"
    backing.mkdir()
    for name in names:
        (backing / name).write_bytes(OLD)
    return make_mount(backing, transport, max_dirty_age=0)


@contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def stored(mount: AcpfsMount, name: str) -> bytes:
    mount.flush()
    return (mount.backing / name).read_bytes()


@clause("S468")
@pytest.mark.parametrize("first", [os.O_WRONLY, os.O_RDWR], ids=["O_WRONLY", "O_RDWR"])
@pytest.mark.parametrize("second", [os.O_WRONLY, os.O_RDWR], ids=["O_WRONLY", "O_RDWR"])
def test_what_one_of_two_writers_closes_is_published_when_the_other_one_closes_it(
    transport: str, make_mount: MakeMount, tmp_path: Path, first: int, second: int
) -> None:
    mount = mounted(transport, make_mount, tmp_path, "f")
    with ExitStack() as other:
        with opened(mount.path / "f", first | os.O_TRUNC) as fd:
            rest = other.enter_context(opened(mount.path / "f", second))
            os.pwrite(fd, NEW[: 2 * PART], 0)
            os.pwrite(rest, NEW[:PART], 2 * PART)
        assert stored(mount, "f") == OLD
        done = mount.run(
            "acpfs-ctl",
            str(mount.path),
            "wait",
            str(mount.path / "f"),
            "--timeout",
            "0",
            check=False,
        )
        assert done.returncode == 4
        assert "f is being written" in done.stderr
        os.pwrite(rest, NEW[:PART], 3 * PART)
    assert stored(mount, "f") == NEW


@clause("S392", "S469")
def test_who_is_in_the_middle_of_a_file_is_named(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    """Others have closed it, and wonder why it is not published."""
    mount = mounted(transport, make_mount, tmp_path, "f")
    path = mount.path / "f"
    hold = (
        "import os,sys; fd = os.open(sys.argv[1], os.O_WRONLY); os.pwrite(fd, b'half', 0); "
        "print(); input()"
    )
    command = [sys.executable, "-c", hold, os.fspath(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline()
        with opened(path, os.O_WRONLY) as fd:
            os.pwrite(fd, NEW[:PART], PART)
        comm = Path(f"/proc/{other.pid}/comm").read_text().rstrip("\n")
        writers = [{"pid": other.pid, "command": comm}]
        done = mount.run(
            "acpfs-ctl", str(mount.path), "wait", str(path), "--timeout", "0", "--json", check=False
        )
        error = json.loads(done.stdout)["error"]
        assert f": process {other.pid} ({comm})" in error["message"]
        assert error["being_written"] == [{"path": "f", "writers": writers}]
        (row,) = mount.ctl("ls")
        assert row["writers"] == writers
        assert f"{other.pid} {comm}" in mount.run("acpfs-ctl", str(mount.path), "ls").stdout
        (written,) = mount.status()["being_written"]
        assert (written["path"], written["writers"]) == ("f", writers)
        other.communicate(b"\n")
    assert stored(mount, "f")[: 2 * PART][PART:] == NEW[:PART]
    assert mount.status()["being_written"] == []


@clause("S468", "S469", "S474")
def test_nothing_that_others_do_to_a_file_beside_a_running_save_publishes_its_half(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    mount = mounted(transport, make_mount, tmp_path, "f")
    path = mount.path / "f"
    with opened(path, os.O_WRONLY | os.O_TRUNC) as fd:
        os.pwrite(fd, NEW[:PART], 0)
        subprocess.run(["touch", path], check=True)
        subprocess.run(["sh", "-c", ': >> "$0"', path], check=True)
        path.open("r+b").close()
        os.truncate(path, 2 * PART)
        os.chmod(path, 0o600)
        assert stored(mount, "f") == OLD
        subprocess.run(["mv", path, mount.path / "g"], check=True)
        mount.flush()
        assert (mount.backing / "g").read_bytes() == OLD
        assert not (mount.backing / "f").exists()
        os.pwrite(fd, NEW[PART:], PART)
    assert stored(mount, "g") == NEW


@clause("S474", "S477")
def test_what_others_do_to_the_names_of_a_file_of_which_a_child_closed_its_copy_publishes_no_half(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    """libfuse does not tell who closes; nobody has asked yet what that close was."""
    names = ("moved", "linked")
    mount = mounted(transport, make_mount, tmp_path, *names)
    with ExitStack() as stack:
        fds = {}
        for name in names:
            fds[name] = os.open(mount.path / name, os.O_WRONLY | os.O_TRUNC)
            stack.callback(os.close, fds[name])
            os.pwrite(fds[name], NEW[:PART], 0)
        subprocess.run(["true"], check=True)
        subprocess.run(["mv", mount.path / "moved", mount.path / "there"], check=True)
        subprocess.run(["ln", mount.path / "linked", mount.path / "also"], check=True)
        mount.flush()
        for name in ("there", "linked", "also"):
            assert (mount.backing / name).read_bytes() == OLD, name
        for name in names:
            os.pwrite(fds[name], NEW[PART:], PART)
    for name in ("there", "linked", "also"):
        assert stored(mount, name) == NEW, name


@clause("S469")
def test_who_has_a_file_open_and_writes_nothing_keeps_nothing_back(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    mount = mounted(transport, make_mount, tmp_path, "f")
    with opened(mount.path / "f", os.O_RDWR):
        with opened(mount.path / "f", os.O_WRONLY | os.O_TRUNC) as fd:
            os.write(fd, NEW)
        assert stored(mount, "f") == NEW
        os.truncate(mount.path / "f", PART)
        assert stored(mount, "f") == NEW[:PART]


@clause("S468", "S469")
@pytest.mark.parametrize("closes_first", [0, 1])
def test_two_who_write_through_mappings_publish_the_file_together(
    transport: str, make_mount: MakeMount, tmp_path: Path, closes_first: int
) -> None:
    """The kernel writes both's pages back through one of the two descriptors."""
    mount = mounted(transport, make_mount, tmp_path, "f")
    path = mount.path / "f"
    files = [path.open("r+b"), path.open("r+b")]
    maps = [mmap.mmap(file.fileno(), 0) for file in files]
    maps[0][:PART] = NEW[:PART]
    maps[1][PART : 2 * PART] = NEW[:PART]
    maps[closes_first].close()
    files[closes_first].close()
    assert stored(mount, "f") == OLD
    left = 1 - closes_first
    maps[left][2 * PART :] = NEW[2 * PART :]
    maps[left].close()
    files[left].close()
    assert stored(mount, "f") == NEW


@clause("S81", "S468")
def test_the_next_worker_knows_who_is_not_done(
    transport: str, make_mount: MakeMount, tmp_path: Path
) -> None:
    if transport == "libfuse":
        pytest.skip("what is open is lost there")
    mount = mounted(transport, make_mount, tmp_path, "f")
    with ExitStack() as other:
        with opened(mount.path / "f", os.O_RDWR) as fd:
            rest = other.enter_context(opened(mount.path / "f", os.O_RDWR))
            os.pwrite(fd, NEW[: 2 * PART], 0)
            os.pwrite(rest, NEW[:PART], 2 * PART)
            mount.kill_worker()
        assert stored(mount, "f") == OLD
        mount.kill_worker()
        os.pwrite(rest, NEW[:PART], 3 * PART)
    assert stored(mount, "f") == NEW

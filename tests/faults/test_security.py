"""What a hostile local user can reach, as a real other user, and what the daemon itself may do:
docs/OPERATIONS.md, Security.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from acpfs.supervisor.privileges import kept_mask
from tests.rig.mounts import AcpfsMount, wait_gone
from tests.rig.processes import NOBODY, errno_as, in_child

clause = pytest.mark.clause
pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else"),
]
SECRET = b"weights that nobody else may see " * 1000
DAC_READ_SEARCH = 1 << 2


@pytest.fixture
def mount(tmp_path: Path, transport: str) -> Iterator[AcpfsMount]:
    """With a private file, closed but still dirty, and one that is being written; reachable for
    everybody as a path in /mnt would be.
    """
    backing = tmp_path / "backing"
    backing.mkdir()
    for directory in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        directory.chmod(0o755)
    with AcpfsMount(backing, tmp_path / "mnt", transport, bandwidth=1, allow_other=True) as mounted:
        yield mounted
        mounted.ctl("set", "bandwidth=0")


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def is_confined(pid: int) -> bool:
    """Whether it has no capability beyond those that are needed, and none to come."""
    status = status_of(pid)
    masks = {
        name: int(status[name], 16) for name in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb")
    }
    return (
        masks["CapPrm"] == masks["CapEff"] != 0
        and not (masks["CapPrm"] | masks["CapBnd"]) & ~kept_mask()
        and masks["CapInh"] == masks["CapAmb"] == 0
        and status["NoNewPrivs"] == "1"
    )


def unconfined(mount: AcpfsMount) -> list[int]:
    """Processes that may do too much; those that have just ended may nothing."""
    found = []
    for pid in mount.living():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += [] if is_confined(pid) else [pid]
    return found


@clause("S84")
def test_every_process_keeps_only_the_capabilities_that_it_needs(mount: AcpfsMount) -> None:
    assert not is_confined(os.getpid())  # the mounting user's shell: nothing is inherited from it
    first = mount.living()
    assert mount.supervisor in first
    assert mount.pid in first
    assert len(first) >= 3  # and the template
    assert unconfined(mount) == []


@clause("S84")
@pytest.mark.transports("native")
def test_a_worker_that_took_over_is_confined_too(mount: AcpfsMount) -> None:
    wait_gone(mount.kill_worker())
    assert is_confined(mount.pid)
    wait_gone_supervisor(mount)
    assert unconfined(mount) == []


def wait_gone_supervisor(mount: AcpfsMount) -> None:
    """Kill it, and wait until the worker's new one is known."""
    before = mount.supervisor
    os.kill(before, 9)
    wait_gone(before)
    mount.wait_status(lambda _status: mount.supervisor != before)


def reads(path: Path) -> Callable[[], bytes]:
    return lambda: path.read_bytes()


def lists(path: Path) -> Callable[[], list[str]]:
    return lambda: os.listdir(path)


def tier_of(mount: AcpfsMount) -> Path:
    return Path(mount.status()["ram"]["directory"])


@clause("S85")
def test_nobody_else_reads_what_is_in_ram(mount: AcpfsMount) -> None:
    secret = mount.path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    tier = tier_of(mount)
    files = [file for file in (tier / "data").iterdir() if file.is_file()]
    assert any(file.read_bytes() == SECRET for file in files)
    found = {
        path: errno_as(NOBODY, reads(path))
        for path in (*files, tier / "state.sqlite", tier / "meta.json", secret)
    }
    found |= {path: errno_as(NOBODY, lists(path)) for path in (tier, tier / "data", tier.parent)}
    assert set(found.values()) == {errno.EACCES}, found


@clause("S85")
def test_nobody_else_reaches_a_process_through_proc(mount: AcpfsMount) -> None:
    (mount.path / "secret").write_bytes(SECRET)
    answers: dict[str, int] = {}
    for pid in mount.living():
        proc = Path(f"/proc/{pid}")
        answers |= {
            f"{pid}/{name}": errno_as(NOBODY, lists(proc / name))
            for name in ("fd", "root", "cwd", "map_files")
        }
        answers |= {
            f"{pid}/{name}": errno_as(NOBODY, reads(proc / name))
            for name in ("mem", "environ", "auxv", "stack")
        }
        numbers = os.listdir(proc / "fd")
        answers |= {
            f"{pid}/fd/{number}": errno_as(NOBODY, reads(proc / "fd" / number))
            for number in numbers
        }
    assert set(answers.values()) <= {errno.EACCES, errno.EPERM}, answers


@clause("S85")
def test_nobody_else_orders_the_daemon_about(mount: AcpfsMount) -> None:
    sockets = [path for path in mount.runtime_dir.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
    assert sockets
    assert [stat.S_IMODE(path.stat().st_mode) & 0o077 for path in sockets] == [0] * len(sockets)
    writable = [
        p
        for p in [mount.runtime_dir, *mount.runtime_dir.rglob("*")]
        if not p.is_symlink() and p.stat().st_mode & 0o022
    ]
    assert writable == []
    signals = [errno_as(NOBODY, partial(os.kill, pid, 15)) for pid in mount.living()]
    assert set(signals) == {errno.EPERM}


@clause("S85")
def test_nothing_readable_is_left_by_a_crash_nor_by_umount(mount: AcpfsMount) -> None:
    (mount.path / "secret").write_bytes(SECRET)
    tier = tier_of(mount)
    mount.kill()
    assert any(
        file.read_bytes() == SECRET for file in (tier / "data").iterdir() if file.is_file()
    )  # it is kept …
    assert errno_as(NOBODY, lists(tier)) == errno.EACCES  # … and not for everybody
    mount.start(bandwidth=0)
    mount.umount()
    assert not tier.exists()
    mount.start()


@clause("S85")
def test_staging_can_be_neither_read_nor_planted_by_others(mount: AcpfsMount) -> None:
    mount.backing.chmod(0o777)  # a scratch directory that everybody may write to
    (mount.path / "secret").write_bytes(SECRET)
    own = mount.backing / ".acpfs"
    staging = next((own / "staging").iterdir())
    assert stat.S_IMODE(staging.stat().st_mode) == 0o700
    assert errno_as(NOBODY, lists(staging)) == errno.EACCES
    assert errno_as(NOBODY, (staging / "x").touch) == errno.EACCES
    assert errno_as(NOBODY, (own / "x").touch) == errno.EACCES
    assert errno_as(NOBODY, (own / "staging" / "other").mkdir) == errno.EACCES


@clause("S85")
def test_the_mount_hides_its_own_directory(mount: AcpfsMount) -> None:
    assert errno_as(0, lists(mount.path / ".acpfs")) == errno.ENOENT
    assert b".acpfs" not in in_child(lambda: os.listdir(os.fsencode(mount.path)), NOBODY, NOBODY)

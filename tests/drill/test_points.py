"""Single deaths that the drill found to matter, at the fault point where they did."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.drill import points
from tests.drill.stand import Stand
from tests.rig.processes import stop_processes

pytestmark = [pytest.mark.mount]
BEFORE_COMMIT = next(
    n for n in range(len(points.POINTS)) if points.label(n).endswith("before state: commit")
)


def write(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.write(fd, b"y" * 700)


@pytest.mark.clause("S1")
def test_a_write_that_its_daemon_did_not_live_to_note_leaves_no_difference(tmp_path: Path) -> None:
    with Stand(tmp_path / "s", "overwrite", "native-direct", 1) as stand:
        file = stand.mount.path / "f"
        file.write_bytes(b"x" * 5000)
        stand.mount.flush()
        fd = os.open(file, os.O_WRONLY | os.O_APPEND)
        worker = stand.mount.pid
        # nobody brings the worker back
        stop_processes(pid for pid in stand.processes() if pid != worker)
        stand.charge(BEFORE_COMMIT, 1)
        writer = threading.Thread(target=write, args=(fd,), daemon=True)
        writer.start()
        stand.wait_fired()
        stand.kill_all()
        writer.join(60)
        with contextlib.suppress(OSError):
            os.close(fd)
        stand.mount.detach()
        stand.mount.start()
        stand.mount.ask("retry", paths=[""])
        stand.mount.flush()
        assert file.read_bytes() == (stand.shown / "f").read_bytes()
        assert file.stat().st_size == len(file.read_bytes())


@pytest.mark.clause("S22")
def test_a_write_that_no_daemon_saw_makes_the_file_dirty(tmp_path: Path) -> None:
    """In passthrough the kernel writes to the tier file; when everything dies before the daemon
    looks, size and row are as they were.
    """
    with Stand(tmp_path / "s", "overwrite", "native-passthrough", 1) as stand:
        file = stand.mount.path / "f"
        file.write_bytes(b"x" * 5000)
        stand.mount.flush()
        with open(file, "r+b", buffering=0):
            pass  # another lane, nothing written
        fd = os.open(file, os.O_WRONLY)
        os.pwrite(fd, b"y" * 700, 100)
        stand.kill_all()
        with contextlib.suppress(OSError):
            os.close(fd)
        stand.mount.detach()
        stand.mount.start()
        assert file.read_bytes() == b"x" * 100 + b"y" * 700 + b"x" * 4200
        assert stand.mount.status()["interrupted"] == 1
        stand.mount.ask("retry", paths=[""])
        stand.mount.flush()
        assert file.read_bytes() == (stand.shown / "f").read_bytes()


@pytest.mark.clause("S22")
def test_a_file_that_was_open_and_not_written_to_is_not_dirty(tmp_path: Path) -> None:
    with Stand(tmp_path / "s", "overwrite", "native-passthrough", 1) as stand:
        file = stand.mount.path / "f"
        file.write_bytes(b"x" * 5000)
        stand.mount.flush()
        fd = os.open(file, os.O_WRONLY)
        stand.kill_all()
        with contextlib.suppress(OSError):
            os.close(fd)
        stand.mount.detach()
        stand.mount.start()
        assert stand.mount.status()["interrupted"] == 0
        assert stand.mount.status()["ram"]["dirty_bytes"] == 0


def test_what_a_killed_process_asked_for_is_not_carried_out_after_its_death(tmp_path: Path) -> None:
    """The kernel takes back a request that nobody has read: so the checker may look at the mount as
    soon as the application is dead.
    """
    with Stand(tmp_path / "s", "rename", "native", 1) as stand:
        (stand.mount.path / "old").mkdir()
        with stand.standing_still():
            words = [
                sys.executable,
                "-c",
                (
                    f"import os; print(flush=True); os.rename('{stand.mount.path}/old', "
                    f"'{stand.mount.path}/new')"
                ),
            ]
            asking = subprocess.Popen(words, stdout=subprocess.PIPE)
            assert asking.stdout is not None
            asking.stdout.readline()
            while (
                not Path(f"/proc/{asking.pid}/wchan")
                .read_text()
                .startswith(("request_wait", "fuse_", "__fuse"))
            ):
                assert asking.poll() is None
                select.select([], [], [], 0.01)
            asking.kill()
            asking.wait(20)
            asking.stdout.close()
        assert [entry.name for entry in stand.mount.path.iterdir()] == ["old"]


class TwoFileSystems(Stand):
    """Below the backing directory lies another file system, and little fits into RAM."""

    def __init__(self, base: Path, transport: str) -> None:
        super().__init__(base, "overwrite", transport, 1, ram="8M", prefault="0")

    def make_backing(self) -> Path:
        backing = super().make_backing()
        (backing / "ckpts").mkdir()
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=128M", "none", backing / "ckpts"], check=True
        )
        return backing

    def __exit__(self, *error: object) -> None:
        self.mount.abort()
        subprocess.run(["umount", "-l", self.backing / "ckpts"], check=True)
        super().__exit__(*error)


@pytest.mark.long
@pytest.mark.clause("S238", "S53", "S6")
@pytest.mark.parametrize("all_of_them", [False, True], ids=["the worker", "all"])
@pytest.mark.parametrize(
    "point",
    points.AREA_POINTS,
    ids=[points.label(number)[3:].replace(" ", "-") for number in points.AREA_POINTS],
)
def test_a_death_while_a_large_file_is_staged_once_more_on_its_own_file_system(
    tmp_path: Path, point: int, all_of_them: bool
) -> None:
    """The copy is there and becomes the version's staging file; its source goes last."""
    with TwoFileSystems(tmp_path / "s", "native-direct") as stand:
        file = stand.mount.path / "ckpts/big"
        behind = stand.mount.path / "latest"
        stand.charge(point, 1)
        file.write_bytes(data := os.urandom(24 << 20))
        behind.write_bytes(b"big")
        stand.wait_fired()
        if all_of_them:
            stand.kill_all()
            stand.mount.detach()
            stand.mount.start()
        stand.wait_served()
        assert file.read_bytes() == data
        stand.mount.flush()
        assert [(stand.backing / name).read_bytes() for name in ("ckpts/big", "latest")] == [
            data,
            b"big",
        ]
        with open(file, "r+b") as again:
            again.write(b"again")
        stand.mount.flush()
        assert (stand.backing / "ckpts/big").read_bytes() == b"again" + data[5:]
        assert stand.left_over(stand.mount.status()) == []
        assert stand.mount.ask("doctor")["items"] == []

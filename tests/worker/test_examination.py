"""`acpfs-ctl doctor` on a mount: sound ones are told to be, and what somebody or a fault has
spoiled is named.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.errors import ExitCode
from tests.rig.mounts import AcpfsMount

pytestmark = [
    pytest.mark.mount,
    pytest.mark.clause("S234"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]


@pytest.fixture
def mount(tmp_path: Path, transport: str) -> Iterator[AcpfsMount]:
    """One that drains nothing, so that its RAM tier outlives it."""
    (tmp_path / "backing").mkdir()
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, bandwidth=1) as made:
        yield made
        made.kill()


def doctor(mount: AcpfsMount) -> tuple[int, str]:
    """Exit code, and what it says."""
    done = mount.run("acpfs-ctl", str(mount.path), "doctor", check=False)
    return done.returncode, done.stdout


def tier_directory(mount: AcpfsMount) -> Path:
    return Path(mount.status()["ram"]["directory"])


def change(state: Path, statement: str) -> None:
    """Through a process that does not close the database: its write-ahead log would be gone."""
    program = (
        f"import os, sqlite3; db = sqlite3.connect({str(state)!r}); db.execute({statement!r}); "
        "db.commit(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_mount_in_use_is_sound(mount: AcpfsMount) -> None:
    (mount.path / "d").mkdir()
    (mount.path / "d/f").write_bytes(os.urandom(100_000))
    os.link(mount.path / "d/f", mount.path / "g")
    with open(mount.path / "deleted", "wb") as file:
        file.write(b"bytes")
        os.unlink(mount.path / "deleted")
        assert doctor(mount) == (ExitCode.OK, "all is as it must be\n")
    assert mount.ctl("doctor") == []


def test_bytes_that_somebody_removed_from_the_tier_are_named(mount: AcpfsMount) -> None:
    (mount.path / "d").mkdir()
    (mount.path / "d/f").write_bytes(os.urandom(100_000))
    (file,) = (tier_directory(mount) / "data").iterdir()
    away = file.with_name(file.name + ".away")
    file.rename(away)
    code, said = doctor(mount)
    away.rename(file)
    assert code == ExitCode.FAILED
    assert "d/f" in said
    assert "its bytes are not in RAM any more" in said
    assert "this must never be so" in "".join(
        path.read_text() for path in (mount.runtime_dir / "logs").iterdir()
    )
    assert doctor(mount)[0] == ExitCode.OK


def test_a_state_that_was_made_wrong_between_two_mounts_is_named(mount: AcpfsMount) -> None:
    """A directory with two names: no worker makes one, and paths through it would never end."""
    (mount.path / "d").mkdir()
    (mount.path / "d/f").write_bytes(os.urandom(100_000))
    state = tier_directory(mount) / "state.sqlite"
    mount.kill()
    change(
        state,
        "INSERT INTO child SELECT parent, CAST('again' AS BLOB), ino FROM child WHERE name = "
        "CAST('d' AS BLOB)",
    )
    mount.start()
    faults = mount.run("acpfs-ctl", str(mount.path), "doctor", "--json", check=False)
    assert faults.returncode == ExitCode.FAILED
    assert "a directory has 2 names" in faults.stdout

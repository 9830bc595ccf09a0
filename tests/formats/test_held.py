"""A RAM tier that may hold something for other members: what an acpfs says to it that knows nothing
of that. The code of before is in the history of this checkout.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from acpfs.errors import ExitCode
from acpfs.ram.state import HELD_VERSION, STATE_VERSION, StateDatabase
from acpfs.ram.tier import HELD
from tests.rig.history import before, checkout
from tests.rig.mounts import REPOSITORY, AcpfsMount, wait_gone
from tests.rig.runtime import REAL
from tests.supervisor.test_handover import WATCHDOG_S, take_over, until

SAVED = b"kept" * 100_000
EXCHANGES = {"exchange": "127.0.0.1"}
REFUSED = f"has version {HELD_VERSION}, this acpfs knows {STATE_VERSION}: "
clause = pytest.mark.clause
needs_mount = pytest.mark.skipif(
    os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
)


def version(state: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{state}?mode=ro", uri=True)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


@clause("S526", "S592")
def test_the_state_says_so_from_when_the_worker_serves_until_it_is_over(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    for holds, found in ((False, STATE_VERSION), (True, HELD_VERSION), (False, STATE_VERSION)):
        before_it_serves = version(path) if path.exists() else STATE_VERSION
        state = StateDatabase(path, REAL)
        state.create("CREATE TABLE IF NOT EXISTS one (number INTEGER)")
        state.change("INSERT INTO one VALUES (1)")
        state.commit()
        assert version(path) == before_it_serves
        state.accept(holds=holds)
        assert version(path) == found
        state.close()
        assert version(path) == found


def tier_of(mount: AcpfsMount) -> Path:
    (found,) = (path for path in (mount.runtime_dir / "tiers").iterdir() if path.is_dir())
    return found


def mounts(mount: AcpfsMount, code: Path, *, check: bool = True) -> Any:
    mount._environment["PYTHONPATH"] = str(code)
    words = ["--node-id", "left", "--ram", "64M"]
    places = (str(mount.backing), str(mount.path))
    return mount.run("acpfs", "mount", *places, *words, check=check)


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last code that knows nothing of copies, nor of shares of users."""
    commit = before('HELD = "held"', "acpfs/ram/tier.py")
    return checkout(commit, tmp_path_factory.mktemp("older"), "acpfs")


@needs_mount
@pytest.mark.long
@pytest.mark.mount
@pytest.mark.transports("native")
@clause("S526", "S592")
def test_an_acpfs_without_copies_is_refused_and_takes_it_when_nothing_is_held(
    tmp_path: Path, transport: str, older: Path
) -> None:
    (tmp_path / "backing").mkdir()
    settings: dict[str, Any] = {"ram": "64M", "node_id": "left", "bandwidth": "1", **EXCHANGES}
    mount = AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, **settings)
    with mount:
        (mount.path / "file").write_bytes(SAVED)
        mount.kill()
        held = tier_of(mount) / "data" / HELD / "other"
        (held / "session").mkdir(parents=True)
        (held / "session/about.json").write_text("{}")
        refused = mounts(mount, older, check=False)
        assert refused.returncode == ExitCode.REFUSED, refused.stderr
        assert REFUSED in refused.stderr
        assert (held / "session/about.json").exists()
        mounts(mount, REPOSITORY)
        mount.kill()
        assert version(tier_of(mount) / "state.sqlite") == HELD_VERSION, "it is held still"
        shutil.rmtree(held)
        mounts(mount, REPOSITORY)
        (mount.path / "more").write_bytes(SAVED)
        mount.kill()
        mounts(mount, older)
        mount.flush()
        for name in ("file", "more"):
            assert (mount.backing / name).read_bytes() == SAVED
        mount.umount()


@pytest.fixture
def saving(tmp_path: Path, transport: str, older: Path) -> Iterator[AcpfsMount]:
    """A mount of the older code."""
    (tmp_path / "backing").mkdir()
    words: dict[str, Any] = {"watchdog_s": WATCHDOG_S, "environment": {"PYTHONPATH": str(older)}}
    with AcpfsMount(tmp_path / "backing", tmp_path / "mnt", transport, **words) as mount:
        yield mount


@needs_mount
@pytest.mark.long
@pytest.mark.mount
@pytest.mark.transports("native-direct", "native-passthrough")
@clause("S300", "S526")
def test_a_save_goes_on_over_both_versions_and_what_one_does_not_know_is_named(
    saving: AcpfsMount, older: Path
) -> None:
    mount = saving
    stop = threading.Event()
    written = [0]
    with open(mount.path / "log", "wb", buffering=0) as file:

        def write() -> None:
            while not stop.is_set():
                written[0] += file.write(b"p" * 4096)
                stop.wait(0.001)

        writer = threading.Thread(target=write, name="writer", daemon=True)
        writer.start()
        try:
            for code in (REPOSITORY, older, REPOSITORY):
                supervisor = mount.supervisor
                take_over(mount, code)
                wait_gone(supervisor)
                seen = written[0]
                until(lambda: written[0] > seen)  # noqa: B023 - asked before the next turn
            supervisor = mount.supervisor
            take_over(mount, REPOSITORY, "--ram-per-user", "50%")
            wait_gone(supervisor)
            refused = take_over(mount, older, check=False)
            assert refused.returncode != 0
            assert "ram_per_user" in refused.stderr
            assert "Traceback" not in refused.stderr
            seen = written[0]
            until(lambda: written[0] > seen)
        finally:
            stop.set()
            writer.join(60)
        assert not writer.is_alive()
    mount._environment["PYTHONPATH"] = str(REPOSITORY)
    mount.flush()
    assert (mount.backing / "log").read_bytes() == b"p" * written[0]
    assert mount.ask("doctor") == {"items": []}
    mount.umount()
    assert mount.leaks() == []

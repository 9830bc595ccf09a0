"""A mount of an older acpfs, with an older format of the state, is taken over by this one; that
code is in the history of this checkout.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from acpfs.ram.state import STATE_VERSION
from tests.rig.history import installation_before_state_version
from tests.rig.mounts import REPOSITORY, AcpfsMount, CommandError, wait_gone
from tests.supervisor.test_handover import WATCHDOG_S, take_over, until

pytestmark = [
    pytest.mark.long,
    pytest.mark.mount,
    pytest.mark.skipif(
        os.getuid() != 0 or not os.path.exists("/dev/fuse"), reason="needs root and /dev/fuse"
    ),
]
NAMES = [f"name-{number}" for number in range(50)]


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last code with the state version before this one's."""
    return installation_before_state_version(STATE_VERSION, tmp_path_factory.mktemp("older"))


@pytest.fixture
def mount(tmp_path: Path, transport: str, older: Path) -> Iterator[AcpfsMount]:
    """Made by the older code, over a directory with names."""
    (tmp_path / "backing/known").mkdir(parents=True)
    for name in NAMES:
        (tmp_path / "backing/known" / name).write_text(name)
    environment = {"PYTHONPATH": str(older)}
    with AcpfsMount(
        tmp_path / "backing",
        tmp_path / "mnt",
        transport,
        watchdog_s=WATCHDOG_S,
        environment=environment,
    ) as made:
        yield made


def state_version(mount: AcpfsMount) -> int:
    (path,) = mount.runtime_dir.glob("tiers/*/state.sqlite")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        return int(db.execute("PRAGMA user_version").fetchone()[0])


@pytest.mark.clause("S300", "S301")
@pytest.mark.transports("native-direct", "native-passthrough")
def test_files_go_on_over_a_change_of_the_state_and_the_older_code_is_refused_afterwards(
    mount: AcpfsMount, older: Path
) -> None:
    assert sorted(os.listdir(mount.path / "known")) == sorted(NAMES)
    assert state_version(mount) == STATE_VERSION - 1
    stop = threading.Event()
    written = [0]
    (mount.path / "half").mkdir()
    (mount.path / "half/closed").write_bytes(b"closed")
    with (
        open(mount.path / "log", "wb", buffering=0) as file,
        open(mount.path / "gone", "w+b", buffering=0) as gone,
    ):
        gone.write(b"nameless")
        os.unlink(mount.path / "gone")

        def write() -> None:
            while not stop.is_set():
                written[0] += file.write(b"p" * 4096)
                stop.wait(0.001)

        writer = threading.Thread(target=write, name="writer", daemon=True)
        writer.start()
        try:
            supervisor = mount.supervisor
            before = written[0]
            take_over(mount, REPOSITORY)
            wait_gone(supervisor)
            until(lambda: written[0] > before)
            assert state_version(mount) == STATE_VERSION
            assert sorted(os.listdir(mount.path / "known")) == sorted(NAMES)
            assert (mount.path / "known" / NAMES[0]).read_text() == NAMES[0]
            with pytest.raises(CommandError) as refused:
                take_over(mount, older)
            assert "Traceback" not in refused.value.stderr
            before = written[0]
            until(lambda: written[0] > before)
            assert state_version(mount) == STATE_VERSION
        finally:
            stop.set()
            writer.join(60)
        assert not writer.is_alive()
        assert os.pread(gone.fileno(), 100, 0) == b"nameless"
    mount._environment["PYTHONPATH"] = str(REPOSITORY)
    mount.flush()
    assert (mount.backing / "log").read_bytes() == b"p" * written[0]
    assert (mount.backing / "half/closed").read_bytes() == b"closed"
    assert mount.ask("doctor") == {"items": []}
    mount.umount()
    assert mount.leaks() == []

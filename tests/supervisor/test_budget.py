"""The budget on a mount: writers with several times of it, one that is lowered below what is used,
and what the next worker knows of that.

Nothing here is timed: fairness is how far the slowest was when the fastest was done. `python -m
bench.budget` is the large form.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from acpfs.ram.place import slack_bytes
from bench import budget
from tests.rig.files import checksum, write_blocks
from tests.rig.mounts import AcpfsMount
from tests.rig.processes import Child

pytestmark = [
    pytest.mark.mount,
    pytest.mark.skipif(
        os.geteuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
    ),
]

MIB = 1 << 20
BUDGET = 48 * MIB
BLOCK = os.urandom(MIB) * 4


@contextmanager
def mounted(base: Path, transport: str, **options: Any) -> Iterator[AcpfsMount]:
    (base / "backing").mkdir()
    with AcpfsMount(
        base / "backing", base / "mnt", transport, **{"ram": BUDGET, **options}
    ) as mount:
        yield mount


def write(path: Path, blocks: int) -> str:
    return write_blocks(path, BLOCK, blocks)


@pytest.mark.clause("S53", "S60")
@pytest.mark.parametrize(
    ("lane", "files"),
    [("libfuse", 1), ("native-direct", 5), ("native-passthrough", 5), ("native-passthrough", 1)],
)
def test_four_writers_with_five_times_the_budget(tmp_path: Path, lane: str, files: int) -> None:
    """Each with many files, and each with one that is larger than the budget."""
    outcome = budget.run(
        tmp_path, lane, files, budget.TIMES * BUDGET // budget.WRITERS // files, BUDGET
    )
    assert outcome.wrong == []
    assert outcome.samples.peak() <= outcome.allowed


@pytest.mark.clause("S130")
@pytest.mark.transports("libfuse", "native-passthrough")
def test_a_budget_below_what_is_used(tmp_path: Path, transport: str) -> None:
    """Clean files leave at once, dirty ones when they are persisted; the tmpfs follows; whoever
    writes meanwhile waits, and is whole.
    """
    with mounted(tmp_path, transport, ram=64 * MIB) as mount:
        write(mount.path / "clean", 5)
        mount.flush()
        mount.wait_status(lambda status: status["ram"]["clean_bytes"] == 20 * MIB)
        mount.ask("set", key="bandwidth", value="1")
        dirty = write(mount.path / "dirty", 8)
        mount.ask("set", key="ram", value=str(16 * MIB))
        ram = mount.status()["ram"]
        assert (ram["budget_bytes"], ram["clean_bytes"]) == (16 * MIB, 0)
        assert ram["used_bytes"] == 32 * MIB
        assert ram["tmpfs_size_bytes"] == 32 * MIB + slack_bytes(16 * MIB)
        child = Child(lambda: write(mount.path / "late", 6))
        (waiting,) = mount.wait_status(lambda status: status["waiting"])["waiting"]
        assert (waiting["path"], waiting["reason"]) == (
            "late",
            "RAM holds more than its budget, which was lowered",
        )
        mount.ask("set", key="bandwidth", value="0")
        late = child.result()
        mount.flush()
        mount.wait_status(
            lambda status: status["ram"]["tmpfs_size_bytes"] == 16 * MIB + slack_bytes(16 * MIB)
        )
        assert mount.status()["ram"]["used_bytes"] <= 16 * MIB
        assert (checksum(mount.backing / "dirty"), checksum(mount.backing / "late")) == (
            dirty,
            late,
        )


@pytest.mark.clause("S130", "S133")
@pytest.mark.transports("native-passthrough")
def test_the_next_worker_knows_the_budget_and_the_policy_and_writers_wait_on(
    tmp_path: Path, transport: str
) -> None:
    with mounted(tmp_path, transport, bandwidth=1) as mount:
        mount.ask("set", key="ram", value=str(32 * MIB))
        before = write(mount.path / "before", 7)
        child = Child(lambda: write(mount.path / "waits", 4))
        (waiting,) = mount.wait_status(lambda status: status["waiting"])["waiting"]
        assert (waiting["path"], waiting["pid"]) == ("waits", child.pid)
        assert waiting["command"] == Path(f"/proc/{child.pid}/comm").read_text().strip()
        mount.kill_worker()
        status = mount.wait_status(
            lambda status: status["worker"]["number"] == 2 and status["waiting"]
        )
        assert (status["ram"]["budget_bytes"], status["waiting"][0]["path"]) == (32 * MIB, "waits")
        assert status["ram"]["used_bytes"] == status["ram"]["tmpfs_used_bytes"]
        mount.ask("set", key="when_full", value="native")
        after = (
            child.result()
        )  # at the backing directory's speed, while what was before waits for the drain
        mount.kill_worker()
        assert (
            mount.wait_status(lambda status: status["worker"]["number"] == 3)["when_full"]
            == "native"
        )
        mount.ask("set", key="bandwidth", value="0")
        mount.flush()
        assert (checksum(mount.backing / "before"), checksum(mount.backing / "waits")) == (
            before,
            after,
        )


@pytest.mark.clause("S133", "S53")
@pytest.mark.transports("libfuse", "native-passthrough")
def test_the_policy_error_ends_waiting_and_the_file_is_not_published(
    tmp_path: Path, transport: str
) -> None:
    def fails() -> str:
        try:
            write(mount.path / "waits", 6)
        except OSError as error:
            return os.strerror(error.errno or 0)
        return ""

    with mounted(tmp_path, transport, bandwidth=1) as mount:
        write(mount.path / "before", 10)
        child = Child(fails)
        mount.wait_status(lambda status: status["waiting"])
        mount.ask("set", key="when_full", value="error")
        assert child.result() == "No space left on device"
        assert mount.status()["waiting"] == []
        mount.ask("set", key="bandwidth", value="0")
        mount.flush()
        assert not (mount.backing / "waits").exists()
        assert mount.status()["interrupted"] == 1
        mount.ask("discard", paths=["waits"])
        assert (mount.backing / "before").stat().st_size == 40 * MIB

"""A holder that cannot be reached, while the origin and the storage go on: what was told to be
copied is there for whoever adopts it, whatever dies next.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.exchange.test_adopting import NOTICES, adopt, missed, on_storage
from tests.exchange.test_copies import (
    MIB,
    held,
    lose,
    member,
    mounted,
    save,
    wait_copied,
)
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount
from tests.rig.processes import stop_processes

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
SMALL = {"s0": b"0" * 100}
LARGE = {f"l{number}": os.urandom(MIB + number) for number in range(2)}


def stop(mount: AcpfsMount) -> None:
    """It is out of reach, with its RAM."""
    stop_processes(mount.living())


def resume(mount: AcpfsMount) -> None:
    for process in mount.living():
        os.kill(process, signal.SIGCONT)


def copied_and_cut_off(saves: AcpfsMount, holds: AcpfsMount, fault_fs: FaultFs) -> None:
    """Some files are copied; then the holder is out of reach, and the first of them comes to the
    storage, which refuses the others.
    """
    first = fault_fs.fail("ETIMEDOUT", ["fsync"], glob=".acpfs/staging/saves/1-*")
    fault_fs.fail("ETIMEDOUT", ["fsync"], glob=".acpfs/staging/saves/[2-9]-*")
    save(saves, {**SMALL, **LARGE})
    wait_copied(saves, len(SMALL) + len(LARGE))
    stop(holds)
    fault_fs.clear(first)
    saves.wait_status(lambda now: now["queue_length"] == len(LARGE))


def is_whole(fault_fs: FaultFs) -> None:
    found = on_storage(fault_fs)
    assert {name: found.get(name) == data for name, data in {**SMALL, **LARGE}.items()} == (
        dict.fromkeys({**SMALL, **LARGE}, True)
    )


@clause("S601")
@pytest.mark.parametrize("what_dies", ["nothing", "worker", "holder's worker"])
def test_what_was_copied_is_adopted_though_the_holder_was_out_of_reach(
    tmp_path: Path, fault_fs: FaultFs, what_dies: str
) -> None:
    """Until the origin was lost, and what it had committed meanwhile is known."""
    saves = member(fault_fs, tmp_path, "saves")
    holds = member(fault_fs, tmp_path, "holds", **NOTICES)
    with mounted(saves, holds):
        copied_and_cut_off(saves, holds, fault_fs)
        status = saves.wait_status(lambda now: now["copies"]["state"] == "away")
        assert status["copies"]["holder"] == "holds"
        if what_dies == "worker":
            saves.kill_worker()
            saves.wait_status(lambda now: now["copies"]["state"] in ("away", "off"))
        (saves.path / "later").mkdir()
        lose(saves)
        fault_fs.clear()
        resume(holds)
        if what_dies == "holder's worker":
            holds.kill_worker()
        missed(holds, "saves")
        adopt(holds, "saves")
        is_whole(fault_fs)
        assert list((fault_fs.path / ".acpfs" / "journals").iterdir()) == []


@clause("S601")
def test_a_holder_that_is_back_goes_on(tmp_path: Path, fault_fs: FaultFs) -> None:
    """With what it has: nothing is copied twice, and the journal is there again."""
    saves = member(fault_fs, tmp_path, "saves")
    holds = member(fault_fs, tmp_path, "holds", **NOTICES)
    with mounted(saves, holds):
        copied_and_cut_off(saves, holds, fault_fs)
        saves.wait_status(lambda now: now["copies"]["state"] == "away")
        text = saves.run("acpfs-ctl", str(saves.path), "status").stdout
        assert "out of reach" in text
        resume(holds)
        wait_copied(saves, len(LARGE))
        assert saves.status()["copies"]["copied_files"] == len(SMALL) + len(LARGE)
        save(saves, {"more": b"1" * MIB})
        wait_copied(saves, len(LARGE) + 1)
        lose(saves)
        fault_fs.clear()
        missed(holds, "saves")
        adopt(holds, "saves")
        is_whole(fault_fs)
        assert on_storage(fault_fs)["more"] == b"1" * MIB


@clause("S601")
def test_another_holder_counts_when_it_has_all(tmp_path: Path, fault_fs: FaultFs) -> None:
    """Until then the first one does."""
    saves = member(fault_fs, tmp_path, "saves")
    holds = member(fault_fs, tmp_path, "holds", **NOTICES)
    with mounted(saves, holds):
        copied_and_cut_off(saves, holds, fault_fs)
        saves.wait_status(lambda now: now["copies"]["state"] == "away")
        assert saves.status()["copies"]["holder"] == "holds"
        with member(fault_fs, tmp_path, "other", **NOTICES) as other:
            save(saves, {"last": b"1"})
            status = wait_copied(saves, len(LARGE) + 1)
            assert status["copies"]["holder"] == "other"
            assert held(other) == {"saves": sorted([*LARGE.values(), b"1"])}
            lose(saves)
            fault_fs.clear()
            missed(other, "saves")
            adopt(other, "saves")
            is_whole(fault_fs)
            assert on_storage(fault_fs)["last"] == b"1"
            resume(holds)


@clause("S601")
def test_the_first_holder_counts_while_another_one_lacks_something(
    tmp_path: Path, fault_fs: FaultFs
) -> None:
    """Where the copies were is known, though there are others at another place."""
    saves = member(fault_fs, tmp_path, "saves")
    holds = member(fault_fs, tmp_path, "holds", **NOTICES)
    with mounted(saves, holds):
        copied_and_cut_off(saves, holds, fault_fs)
        saves.wait_status(lambda now: now["copies"]["state"] == "away")
        with member(fault_fs, tmp_path, "other", copies_ram="1500K", **NOTICES) as other:
            other.wait_status(lambda now: now["held"] and now["held"][0]["bytes"] >= MIB)
            status = saves.wait_status(lambda now: now["copies"]["state"] == "away")
            assert status["copies"]["holder"] == "holds"
            lose(saves)
            fault_fs.clear()
            resume(holds)
            missed(holds, "saves")
            adopt(holds, "saves")
            is_whole(fault_fs)

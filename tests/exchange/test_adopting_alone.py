"""A node that is silent, adopted without anybody being asked: real mounts, over a storage that
refuses late calls, as doctor has noted there.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from acpfs.backing.late_calls import LateCalls, note, storage_at
from acpfs.control.registry import adopting_lock
from acpfs.errors import ExitCode, NotMountedError
from acpfs.mounting import doctor
from acpfs.ram.mounts import kind_at
from acpfs.runtime.file_locks import locked
from tests.exchange.test_adopting import NOTICES, SLOW, adopt, missed, on_storage, record_of
from tests.exchange.test_copies import lose, member, mounted, save, wait_copied
from tests.rig.faultfs import FaultFs
from tests.rig.mounts import AcpfsMount, CommandError
from tests.rig.processes import stop_processes
from tests.rig.storage.servers import until
from tests.training.ranks.networks import Networks

clause = pytest.mark.clause
pytestmark = [pytest.mark.mount, pytest.mark.transports("native")]
MIB = 1 << 20
ALONE: dict[str, Any] = {**NOTICES, "adopt": "auto"}


def noted(fault_fs: FaultFs, *, refused: bool = True) -> None:
    """As doctor does through two clients of one kind; the storage below does refuse late calls."""
    (found,) = (
        one
        for one in doctor.examine(fault_fs.path, second=fault_fs.source)
        if one.subject == "late calls"
    )
    assert found.verdict == "ok", found.text
    (fault_fs.path / ".acpfs").mkdir(exist_ok=True)
    unclear = () if refused else ("a store",)
    fd = os.open(fault_fs.path, os.O_RDONLY | os.O_DIRECTORY)
    note(fault_fs.path, storage_at(fd, kind_at(fd)), LateCalls((), unclear), 1.0)
    os.close(fd)


def stopped(mount: AcpfsMount) -> list[int]:
    """All its processes stand still."""
    found = mount.living()
    stop_processes(found)
    return found


def wait_all_copied(mount: AcpfsMount) -> None:
    """Whatever it has closed, and what it has begun."""
    mount.wait_status(
        lambda now: (
            now["copies"]["state"] == "on"
            and not (now["copies"]["behind_files"] or now["copies"]["pending"])
        )
    )


def go_on(processes: list[int]) -> None:
    for process in processes:
        os.kill(process, signal.SIGCONT)


def told(mount: AcpfsMount) -> str:
    """Of the only node of which something is held."""
    held = mount.status()["held"]
    return str(held[0]["adoption"]) if held else ""


def is_registered(mount: AcpfsMount) -> bool:
    """Whether it can be asked."""
    try:
        return bool(mount.supervisor and mount.pid)
    except NotMountedError:
        return False


def wait_adopted(mount: AcpfsMount, fault_fs: FaultFs, node: str) -> None:
    """The node's holder has drained it, and has nothing of it any more."""
    mount.wait_status(lambda now: all(one["node"] != node for one in now["held"]))
    assert record_of(fault_fs, node)["state"] == "left"


@clause("S613")
def test_a_node_that_is_lost_is_adopted_by_its_holder(tmp_path: Path, fault_fs: FaultFs) -> None:
    noted(fault_fs)
    saves = member(fault_fs, tmp_path, "saves", **SLOW)
    holds = member(fault_fs, tmp_path, "holds", **ALONE)
    with mounted(saves, holds):
        files = {f"f{number}": os.urandom(MIB + number) for number in range(3)}
        save(saves, files)
        (saves.path / "f1").rename(saves.path / "renamed")
        wait_copied(saves, len(files))
        lose(saves)
        wait_adopted(holds, fault_fs, "saves")
        assert on_storage(fault_fs) == {
            "f0": files["f0"],
            "renamed": files["f1"],
            "f2": files["f2"],
        }
        holds.wait_status(lambda now: now["ram"]["held_bytes"] == 0)  # deleted behind that
        (holds.path / "latest").write_bytes(b"f2")
        holds.flush()  # nobody is withheld for it


@clause("S611", "S613")
def test_a_node_that_stood_still_finds_itself_adopted_and_stores_nothing_more(
    tmp_path: Path, fault_fs: FaultFs
) -> None:
    """In the middle of its files, and it goes on as fast as it can."""
    noted(fault_fs)
    saves = member(fault_fs, tmp_path, "saves", **SLOW)
    holds = member(fault_fs, tmp_path, "holds", **ALONE)
    with mounted(saves, holds):
        files = {f"f{number}": os.urandom(MIB + number) for number in range(3)}
        save(saves, files)
        wait_copied(saves, 3)
        processes = stopped(saves)
        wait_adopted(holds, fault_fs, "saves")
        assert on_storage(fault_fs) == files
        (holds.path / "f1").write_bytes(b"newer")
        (holds.path / "f2").unlink()
        holds.flush()
        now = {"f0": files["f0"], "f1": b"newer"}
        assert on_storage(fault_fs) == now
        go_on(processes)
        saves.run("acpfs-ctl", str(saves.path), "set", "bandwidth=1G")
        status = saves.wait_status(lambda now: now["copies"]["taken_over_by"])
        assert status["copies"]["taken_over_by"] == "holds"
        assert "holds has adopted" in saves.run("acpfs-ctl", str(saves.path), "status").stdout
        later = holds.status()["counters"]["node_records_written"] + 5
        holds.wait_status(lambda now: now["counters"]["node_records_written"] > later)
        assert on_storage(fault_fs) == now
        assert record_of(fault_fs, "saves")["state"] == "left"
        # what is closed now is here only, and can be had
        save(saves, {"later": b"later"})
        saves.run("acpfs", "umount", str(saves.path), "--leave", "--timeout", "1")
        (tier,) = (saves.runtime_dir / "tiers").glob("*-saves")
        saves.run("acpfs", "salvage", str(tier), str(tmp_path / "salvaged"))
        assert (tmp_path / "salvaged" / "files" / "later").read_bytes() == b"later"
        assert on_storage(fault_fs) == now
        lose(saves)


@clause("S613")
@pytest.mark.parametrize("why", ["nothing noted", "not refused", "asked"])
def test_what_may_come_late_is_adopted_when_a_person_says_so(
    tmp_path: Path, fault_fs: FaultFs, why: str
) -> None:
    if why != "nothing noted":
        noted(fault_fs, refused=why == "asked")
    saves = member(fault_fs, tmp_path, "saves", **SLOW)
    holds = member(fault_fs, tmp_path, "holds", **(NOTICES if why == "asked" else ALONE))
    with mounted(saves, holds):
        save(saves, {"f": b"1" * MIB})
        wait_copied(saves, 1)
        lose(saves)
        holds.wait_status(lambda now: "acpfs-ctl adopt" in (now["held"][0]["adoption"] or ""))
        assert not holds.status()["held"][0]["claimed"]
        assert on_storage(fault_fs) == {}
        assert record_of(fault_fs, "saves")["state"] == "live"
        adopt(holds, "saves")
        assert on_storage(fault_fs) == {"f": b"1" * MIB}


@clause("S612", "S613")
def test_a_removal_that_may_be_under_way_is_not_adopted_without_being_asked(
    tmp_path: Path, fault_fs: FaultFs
) -> None:
    """No fence stops it: it would take away what the adopter, or somebody else, puts there."""
    noted(fault_fs)
    saves = member(fault_fs, tmp_path, "saves")
    holds = member(fault_fs, tmp_path, "holds", **ALONE)
    with mounted(saves, holds):
        save(saves, {"old": b"old"})
        saves.flush()
        fault_fs.freeze(["unlink"], glob="old")
        (saves.path / "old").unlink()
        save(saves, {"new": b"new" * MIB})
        fault_fs.wait_frozen()
        wait_all_copied(saves)
        processes = stopped(saves)
        holds.wait_status(
            lambda now: (
                "unlink old" in (now["held"][0]["adoption"] or "") and not now["held"][0]["claimed"]
            )
        )
        assert record_of(fault_fs, "saves")["state"] == "live"
        fault_fs.clear()
        go_on(processes)  # it lives, and was not shut out
        saves.flush()
        assert on_storage(fault_fs) == {"new": b"new" * MIB}
        wait_copied(saves, 0)
        assert saves.status()["copies"]["taken_over_by"] is None


@clause("S613", "S615")
def test_who_adopts_looks_at_the_journal_once_more_after_the_fence(
    tmp_path: Path, fault_fs: FaultFs
) -> None:
    """The holder's worker is not asked: as where the journal is on the storage, or has changed."""
    saves = member(fault_fs, tmp_path, "saves")
    holds = member(fault_fs, tmp_path, "holds", **NOTICES)
    with mounted(saves, holds):
        save(saves, {"old": b"old"})
        saves.flush()
        rule = fault_fs.fail("EIO", ["unlink"], glob="old")
        (saves.path / "old").unlink()
        save(saves, {"new": b"new" * MIB})
        fault_fs.wait_hits(rule)
        wait_all_copied(saves)
        lose(saves)
        fault_fs.clear()
        missed(holds, "saves")
        with (
            locked(adopting_lock(holds.runtime_dir, "saves"), may_wait=False),
            pytest.raises(CommandError, match="is being adopted here by process"),
        ):  # by a person, who is not asked to make room
            holds.run("acpfs-ctl", str(holds.path), "adopt", "saves", "--alone")
        with pytest.raises(CommandError) as caught:
            holds.run("acpfs-ctl", str(holds.path), "adopt", "saves", "--alone")
        assert caught.value.code == ExitCode.REFUSED
        assert "unlink old" in caught.value.stderr
        assert on_storage(fault_fs)["old"] == b"old"
        adopt(holds, "saves")
        assert on_storage(fault_fs) == {"new": b"new" * MIB}


def host(tmp_path: Path, networks: Networks, number: int) -> str:
    """A Python whose processes are on that host."""
    script = tmp_path / f"python{number}"
    name = networks.names[number]
    script.write_text(f'#!/bin/sh\nexec nsenter --net=/run/netns/{name} {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


@clause("S610", "S611", "S613")
@pytest.mark.skipif(bool(Networks.missing()), reason="needs root and ip(8)")
def test_a_partition_heals_and_nothing_is_twice_nor_older_over_newer(
    tmp_path: Path, fault_fs: FaultFs
) -> None:
    """The node lives; neither its members nor the storage hear of it, and the file that it was
    storing goes on when all is adopted and others have stored what is newer.
    """
    noted(fault_fs)
    with Networks(2) as networks:
        saves, holds = (
            member(
                fault_fs,
                tmp_path,
                name,
                exchange=networks.address(number),
                python=host(tmp_path, networks, number),
                **(SLOW if name == "saves" else ALONE),
            )
            for number, name in enumerate(("saves", "holds"))
        )
        with mounted(saves, holds):
            files = {f"f{number}": os.urandom(MIB + number) for number in range(3)}
            save(saves, files)
            wait_copied(saves, 3)
            networks.cut(0)
            # its records; an adopter writes them through another directory
            fault_fs.fail("EIO", ["rename"], glob=".acpfs/staging/saves/.saves.*")
            wait_adopted(holds, fault_fs, "saves")
            assert on_storage(fault_fs) == files
            (holds.path / "f1").write_bytes(b"newer")
            (holds.path / "f2").unlink()
            holds.flush()
            now = {"f0": files["f0"], "f1": b"newer"}
            assert on_storage(fault_fs) == now
            save(saves, {"later": b"later"})  # it still serves
            networks.join(0)
            fault_fs.clear()
            saves.run("acpfs-ctl", str(saves.path), "set", "bandwidth=1G")
            status = saves.wait_status(lambda now: now["copies"]["taken_over_by"])
            assert status["copies"]["taken_over_by"] == "holds"
            # it has tried again what it had begun, all of it
            later = holds.status()["counters"]["node_records_written"] + 5
            holds.wait_status(lambda now: now["counters"]["node_records_written"] > later)
            assert on_storage(fault_fs) == now
            assert record_of(fault_fs, "saves")["state"] == "left"
            assert (saves.path / "later").read_bytes() == b"later"
            lose(saves)


@clause("S613")
def test_of_two_holders_the_one_whose_copy_counts_adopts(tmp_path: Path, fault_fs: FaultFs) -> None:
    """The other one stood still while the node went on with another holder; and goes on then."""
    noted(fault_fs)
    saves = member(fault_fs, tmp_path, "saves", **SLOW)
    first, second = (member(fault_fs, tmp_path, name, **ALONE) for name in ("first", "second"))
    files = {f"f{number}": os.urandom(MIB + number) for number in range(3)}
    with mounted(saves, first):
        save(saves, {"f0": files["f0"]})
        wait_copied(saves, 1)
        assert saves.status()["copies"]["holder"] == "first"
        with mounted(second):
            processes = stopped(first)
            try:
                saves.wait_status(lambda now: now["copies"]["holder"] == "second")
                save(saves, {"f1": files["f1"], "f2": files["f2"]})
                wait_copied(saves, 3)
                lose(saves)
            finally:
                go_on(processes)
            first.wait_status(lambda now: "nothing that is held" in told_of(now, "saves"))
            wait_adopted(second, fault_fs, "saves")
            assert on_storage(fault_fs) == files
            assert not any(one["claimed"] for one in first.status()["held"])


def told_of(status: dict[str, Any], node: str) -> str:
    """Why a node's log is not adopted there."""
    return "".join(one["adoption"] or "" for one in status["held"] if one["node"] == node)


@clause("S613")
@pytest.mark.parametrize("dies", ["worker", "all of it"])
def test_an_adoption_goes_on_that_was_cut_off_as_it_claimed_the_log(
    tmp_path: Path, fault_fs: FaultFs, dies: str
) -> None:
    """The claim is with the storage yet, and is there when all is forgotten at the holder."""
    noted(fault_fs)
    saves = member(fault_fs, tmp_path, "saves", **SLOW)
    holds = member(fault_fs, tmp_path, "holds", **ALONE)
    files = {f"f{number}": os.urandom(MIB + number) for number in range(3)}
    with mounted(saves, holds):
        save(saves, files)
        wait_copied(saves, 3)
        fault_fs.freeze(["link"], glob=".acpfs/claims/*")
        lose(saves)
        fault_fs.wait_frozen()
        assert holds.status()["held"][0]["claimed"]
        if dies == "worker":
            holds.kill_worker()
        else:
            holds.kill()
        fault_fs.clear()
        if dies == "all of it":  # a kernel lists no directory in which a name is being made
            holds.start()
        wait_adopted(holds, fault_fs, "saves")
        assert on_storage(fault_fs) == files


@clause("S613")
@pytest.mark.parametrize("dies", ["worker", "all of it", "adopter"])
def test_an_adoption_goes_on_whoever_dies_in_the_middle(
    tmp_path: Path, fault_fs: FaultFs, dies: str
) -> None:
    """The holder's worker, all its processes, or those of the mount that drains."""
    noted(fault_fs)
    saves = member(fault_fs, tmp_path, "saves", **SLOW)
    holds = member(fault_fs, tmp_path, "holds", **ALONE)
    files = {f"f{number}": os.urandom(MIB + number) for number in range(3)}
    with mounted(saves, holds):
        save(saves, files)
        wait_copied(saves, 3)
        fault_fs.freeze(["fsync"], glob=".acpfs/staging/saves+1/1-*")
        lose(saves)
        fault_fs.wait_frozen()  # it drains, and does not get further
        if dies == "worker":
            holds.kill_worker()
        elif dies == "all of it":
            holds.kill()
            holds.start()
        else:
            drains = AcpfsMount(
                fault_fs.path,
                holds.runtime_dir / "adopting" / "saves",
                "native",
                runtime_dir=holds.runtime_dir,
            )
            # it drains before it is registered
            until(lambda: is_registered(drains), "the mount that drains is registered")
            for process in (drains.supervisor, drains.pid):
                os.kill(process, signal.SIGKILL)
        fault_fs.clear()
        wait_adopted(holds, fault_fs, "saves")
        assert on_storage(fault_fs) == files
